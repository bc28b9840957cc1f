"""Topologies from files: bundled ones by name, a user's own by path.

In: `dgx-h100`, `dgx-h100:128` (128 nodes), `my-cluster.yaml` or `my-cluster.yaml:16`.
Out: the nouns of `planner.topology` in SI units. A file's GB/s are decimal, its memory GiB, its
times microseconds. Every fault is a `TopologyError` naming file, line, field and nearest value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ..planner.errors import TopologyError
from ..planner.topology import (
    Cluster,
    CollectiveCurve,
    Device,
    Efficiency,
    HostTime,
    Level,
    MeasuredScale,
    Topology,
    TopologySummary,
)
from .document import Document, read
from .find import HERE, bundled, find, node_count, split

if TYPE_CHECKING:
    from .schema import (
        ClusterFile,
        CurveEntry,
        DeviceFile,
        EfficiencyEntry,
        LevelFile,
    )

GB = 1e9
GIB = 2**30
TERA = 1e12
MICRO = 1e-6
DEFAULT_ARCHITECTURE = "default"
OUTERMOST = "cluster"


def load(spec: str, *, nodes: int | None = None) -> Topology:
    """The topology that `spec` names, with `nodes` nodes if given (here or as `spec:NODES`).

    Raises `TopologyError` for an unknown name, a malformed file or an impossible node count.
    """
    name, asked = split(spec)
    if nodes is not None and asked is not None and nodes != asked:
        raise TopologyError(f"topology {spec!r} asks for {asked} nodes, but nodes={nodes} was given too")
    count = asked if nodes is None else node_count(spec, nodes)
    topology = load_file(find("topology", name, "clusters"))
    return topology if count is None else topology.with_nodes(count)


def load_file(path: Path) -> Topology:
    """The topology of one cluster file. Raises `TopologyError`."""
    return topology_of(read(path))


def topology_of(document: Document) -> Topology:
    """The topology of a cluster file that is parsed already. Raises `TopologyError`."""
    from .schema import ClusterFile, check

    if "kinds" in document.data:
        raise document.error(("kinds",), "a cluster of several kinds of nodes; only plans can be made for it")
    cluster = check(document, ClusterFile)
    _check_levels(document, cluster)
    return Topology(
        name=cluster.name,
        description=cluster.description,
        device=_device_of(document, cluster),
        levels=tuple(_level(document, i, cluster.levels) for i in range(len(cluster.levels))),
        usd_per_device_hour=cluster.usd_per_device_hour,
        sources=_cluster_sources(cluster),
        scales=_scales(document, cluster),
        overlap=_overlap(cluster),
        host=_host(cluster),
    )


def _overlap(cluster: ClusterFile) -> float | None:
    """The share of the shorter of computation and collective that ran beside the longer."""
    found = None if cluster.profile is None else cluster.profile.overlap
    if found is None:
        return None
    hidden_us = found.compute_us + found.collective_us - found.both_us
    return min(1.0, max(0.0, hidden_us / min(found.compute_us, found.collective_us)))


def _host(cluster: ClusterFile) -> HostTime | None:
    found = None if cluster.profile is None else cluster.profile.host
    if found is None:
        return None
    return HostTime(
        forward_s=found.forward_us * MICRO,
        backward_s=found.backward_us * MICRO,
        split_forward_s=found.split_forward_us * MICRO,
        split_backward_s=found.split_backward_us * MICRO,
    )


def _scales(document: Document, cluster: ClusterFile) -> tuple[MeasuredScale, ...]:
    found: dict[tuple[str, str], MeasuredScale] = {}
    for i, entry in enumerate(cluster.scales):
        if (entry.name, entry.framework) in found:
            problem = f"{entry.name} of {entry.framework} a second time"
            raise document.error(("scales", i, "name"), problem)
        found[entry.name, entry.framework] = MeasuredScale(**entry.model_dump())
    return tuple(found.values())


def _cluster_sources(cluster: ClusterFile) -> dict[str, str]:
    price = {"usd_per_device_hour": cluster.price_source} if cluster.price_source else {}
    return price | ({"notes": "; ".join(cluster.notes)} if cluster.notes else {})


def load_device(name: str) -> Device:
    """A bundled device by name, or one from a device file by path. Raises `TopologyError`."""
    return _read_device(find("device", name, "devices"))


def list_topologies() -> tuple[TopologySummary, ...]:
    """One summary for each bundled topology, sorted by name."""
    return tuple(_summary(path) for path in bundled("clusters").values())


def list_devices() -> tuple[str, ...]:
    """Names of the bundled devices, sorted."""
    return tuple(bundled("devices"))


def topology_hash(topology: Cluster) -> str:
    """SHA-256 (hex) over everything in a topology that a plan depends on.

    Prose (descriptions, sources) is left out: rewording a citation changes no plan. So are measurements
    (scales, overlap, host times) where there are none.
    """
    import hashlib
    import json
    from dataclasses import asdict

    text = json.dumps(_without_prose(asdict(topology)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_prose(value: object) -> object:
    if isinstance(value, dict):
        prose, measured = {"source", "sources", "description"}, {"scales", "overlap", "host"}
        absent = {key for key in measured & value.keys() if value[key] in (None, (), [])}
        kept = {key: item for key, item in value.items() if key not in prose | absent}
        return {key: _without_prose(item) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [_without_prose(item) for item in value]
    return value


def _check_levels(document: Document, cluster: ClusterFile) -> None:
    names = [level.name for level in cluster.levels]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise document.error(
                ("levels", i, "name"), f"found {name!r} a second time; levels need distinct names"
            )
    if names[-1] != OUTERMOST:
        problem = (
            f"found {names[-1]!r}, but the last level must be {OUTERMOST!r} (its size is the number of nodes)"
        )
        raise document.error(("levels", len(names) - 1, "name"), problem)


def _device_of(document: Document, cluster: ClusterFile) -> Device:
    if cluster.measured_device is not None:
        return _device(document.path, cluster.measured_device)
    try:
        path = find("device", cluster.device, "devices", beside=document.path.parent)
    except TopologyError as error:
        raise document.error(("device",), str(error)) from error
    return _read_device(path)


def _read_device(path: Path) -> Device:
    from .schema import DeviceFile, check

    return _device(path, check(read(path), DeviceFile))


def _device(path: Path, device: DeviceFile) -> Device:
    own = {family: _efficiency_curve(entry) for family, entry in (device.efficiency or {}).items()}
    return Device(
        name=device.name,
        description=device.description,
        vendor=device.vendor,
        architecture=device.architecture,
        memory_bytes=round(device.memory_gib * GIB),
        memory_bytes_per_s=device.memory_bandwidth_gb_per_s * GB,
        peak_flops={dtype: tflops * TERA for dtype, tflops in device.peak_tflops.items()},
        efficiency={**_efficiency(device.architecture), **own},
        kernel_latency_s=device.kernel_latency_us * MICRO,
        sources=_device_sources(path, device),
    )


def _device_sources(path: Path, device: DeviceFile) -> dict[str, str]:
    """Sources under the noun's field names; a user's file without any is its own source."""
    given = device.sources
    unknown = f"given in {path}"
    return {
        "memory_bytes": given.memory_gib if given else unknown,
        "memory_bytes_per_s": given.memory_bandwidth_gb_per_s if given else unknown,
        "peak_flops": given.peak_tflops if given else unknown,
        "kernel_latency_s": given.kernel_latency_us if given else unknown,
    }


def _efficiency(architecture: str) -> dict[str, Efficiency]:
    """The architecture's efficiencies; a family it lacks comes from `default`."""
    from .schema import check_efficiencies

    table = check_efficiencies(read(HERE / "curves" / "efficiency.yaml"))
    families = {**table.get(DEFAULT_ARCHITECTURE, {}), **table.get(architecture, {})}
    return {family: _efficiency_curve(entry) for family, entry in families.items()}


def _efficiency_curve(entry: EfficiencyEntry) -> Efficiency:
    points = sorted((size, fraction) for size, fraction in entry.curve)
    return Efficiency(curve=tuple(points), origin=entry.origin, source=entry.source)


def _level(document: Document, index: int, levels: Sequence[LevelFile]) -> Level:
    level = levels[index]
    return Level(
        name=level.name,
        size=level.size,
        kind=level.kind,
        bytes_per_s=level.gb_per_s * GB,
        latency_s=level.latency_us * MICRO,
        efficiency=level.efficiency,
        partial_efficiency=level.partial_efficiency,
        curves=(*_measured(document, index, levels), *_curves(document, index, level)),
        source=_level_source(document, level),
    )


def _level_source(document: Document, level: LevelFile) -> str:
    if level.sources is None:
        return f"given in {document.path}"
    named = {
        "bandwidth": level.sources.gb_per_s,
        "latency": level.sources.latency_us,
        "efficiency": level.sources.efficiency,
        "efficiency of partly filled units": level.sources.partial_efficiency,
    }
    return "; ".join(f"{what}: {where}" for what, where in named.items() if where)


def _curves(document: Document, index: int, level: LevelFile) -> tuple[CollectiveCurve, ...]:
    from .schema import CurveFile, check

    if level.curves is None or level.measured is not None:
        return ()
    try:
        path = find("curve file", level.curves, "curves", beside=document.path.parent)
    except TopologyError as error:
        raise document.error(("levels", index, "curves"), str(error)) from error
    file = check(read(path), CurveFile)
    return tuple(_curve(entry, file.source) for entry in file.curves if entry.ranks <= level.size)


def _measured(document: Document, index: int, levels: Sequence[LevelFile]) -> tuple[CollectiveCurve, ...]:
    """Curves given in the cluster file itself, checked against the levels they were measured on."""
    sizes = [level.size for level in levels[:index]]
    found = []
    for i, entry in enumerate(levels[index].measured or ()):
        inside = sizes if entry.inside is None else entry.inside
        place = ("levels", index, "measured", i)
        if len(inside) != len(sizes):
            problem = f"found {len(inside)} numbers, expected one for each of the {len(sizes)} levels below"
            raise document.error((*place, "inside"), problem)
        if entry.ranks % prod(inside) or entry.ranks == prod(inside):
            problem = f"found {entry.ranks}, expected a multiple of the {prod(inside)} ranks in one unit"
            raise document.error((*place, "ranks"), problem)
        full = list(inside) == sizes
        found.append(replace(_curve(entry, entry.source), inside=None if full else tuple(inside)))
    return tuple(found)


def _curve(entry: CurveEntry, source: str) -> CollectiveCurve:
    """Seconds, sorted by size, and made monotone: the running maximum removes dips of noise."""
    points = sorted((size, us * MICRO) for size, us in entry.bytes_us)
    seconds = accumulate((s for _, s in points), max)
    return CollectiveCurve(
        collective=entry.collective,
        ranks=entry.ranks,
        points=tuple(zip((size for size, _ in points), seconds, strict=True)),
        source=source,
    )


def _summary(path: Path) -> TopologySummary:
    """What `list_topologies` says of one file: no device, no curves, so that listing is quick."""
    from .schema import ClusterFile, check

    document = read(path)
    cluster = check(document, ClusterFile)
    bare = [level.model_copy(update={"curves": None, "measured": None}) for level in cluster.levels]
    levels = tuple(_level(document, i, bare) for i in range(len(bare)))
    return TopologySummary(
        name=cluster.name, device=cluster.device, levels=levels, description=cluster.description
    )
