"""Measurements to a topology file that plans rest on.

In: a `Layout`, the journal's measurements, what is known of the device's kind. Out: the data of a cluster
file: levels with measured curves, a measured device, and how it all was measured. A number that nobody
measured (a level with one member) keeps its modelled source.

Per level, from groups of one device in each unit below, all groups at once:

    gb_per_s    the larger of send/recv's and a ring collective's bus bandwidth at the largest size
    efficiency  the ring collective's share of it (all-gather or all-reduce, the better)
    latency_us  the smallest send/recv

The device's peaks are its data sheet's if it has one, else the best matrix product's
flops / (time * u), u = s(m) s(n) s(k) being the planner's charge for short sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..planner.estimate.collectives.traffic import bus_factor
from ..planner.estimate.compute import SIDE_LOSS, TRAFFIC_FAMILIES
from ..planner.layout import Collective
from .discovery import Layout, Ring
from .settings import GIB, Measurement

GB = 1e9
TERA = 1e12
MICRO = 1e-6
FAMILIES = ("gemm", "attention", "attention_backward", "grouped_gemm", *TRAFFIC_FAMILIES)
RINGED = (Collective.ALL_GATHER, Collective.ALL_REDUCE)
"""Collectives that send most of a message over each link, once or twice round."""

Points = list[tuple[int, float, float]]
"""(bytes, seconds, spread), by size."""


def levels(
    layout: Layout, collectives: Iterable[Measurement], *, default: Sequence[Mapping[str, Any]], source: str
) -> list[dict[str, Any]]:
    """The `levels` of the file; `default` holds an inner and an outer level for what was not measured."""
    curves = list(_curves(collectives))
    result = []
    for i, ring in enumerate(layout.rings):
        here = [curve for curve in curves if curve["level"] == i]
        base = default[-1] if i == len(layout.rings) - 1 else default[0]
        result.append(_level(ring, i, here, base, source, full=layout.sizes[:i]))
    return result


def _curves(found: Iterable[Measurement]) -> Iterator[dict[str, Any]]:
    """One entry for each collective and kind of group."""
    groups: dict[tuple[str, tuple[int, ...]], Points] = {}
    for one in found:
        name, members = one.facts["collective"], tuple(one.facts["members"])
        point = (int(one.facts["bytes"]), one.sample.seconds, one.sample.spread)
        groups.setdefault((name, members), []).append(point)
    for (name, members), points in sorted(groups.items()):
        level = max(i for i, count in enumerate(members) if count > 1)
        ranks = 1
        for count in members:
            ranks *= count
        yield {
            "level": level,
            "collective": name,
            "ranks": ranks,
            "inside": members[:level],
            "points": sorted(points),
        }


def _level(
    ring: Ring,
    index: int,
    curves: Sequence[Mapping[str, Any]],
    base: Mapping[str, Any],
    source: str,
    *,
    full: Sequence[int],
) -> dict[str, Any]:
    level: dict[str, Any] = {"name": ring.name, "size": ring.size, "kind": ring.kind}
    apart = [curve for curve in curves if set(curve["inside"]) <= {1}]
    pair = next((curve for curve in apart if curve["collective"] == Collective.SEND_RECV), None)
    ringed = [curve for curve in apart if curve["collective"] in RINGED]
    if pair and ringed:
        level |= _link(pair, max(ringed, key=_bus_bytes_per_s), source)
    else:
        level |= {key: base[key] for key in ("gb_per_s", "latency_us", "efficiency")}
        given = base.get("sources", {})
        level["sources"] = {
            key: f"not measured: {given.get(key, 'as the bundled cluster')}"
            for key in ("gb_per_s", "latency_us", "efficiency")
        }
    if curves:
        level["measured"] = [_entry(curve, index, source, full=full) for curve in curves]
    return level


def _bus_bytes_per_s(curve: Mapping[str, Any]) -> float:
    """What each rank sends per second at the largest size."""
    nbytes, seconds, _ = curve["points"][-1]
    return bus_factor(Collective(curve["collective"]), curve["ranks"]) * nbytes / seconds


def _link(pair: Mapping[str, Any], ringed: Mapping[str, Any], source: str) -> dict[str, Any]:
    nbytes, whole = (int(curve["points"][-1][0]) for curve in (pair, ringed))
    direct, bus = _bus_bytes_per_s(pair), _bus_bytes_per_s(ringed)
    name = ringed["collective"]
    fastest = max(direct, bus)
    return {
        "gb_per_s": _rounded(fastest / GB),
        "latency_us": _rounded(pair["points"][0][1] / MICRO),
        "efficiency": _rounded(bus / fastest),
        "sources": {
            "gb_per_s": f"{source}: {direct / GB:.3g} by send/recv of {nbytes} bytes, {bus / GB:.3g} by "
            f"{name} of {whole} bytes",
            "latency_us": f"{source}: send/recv of {pair['points'][0][0]} bytes",
            "efficiency": f"{source}: {name} over {ringed['ranks']} ranks",
        },
    }


def _entry(curve: Mapping[str, Any], index: int, source: str, *, full: Sequence[int]) -> dict[str, Any]:
    points: Points = curve["points"]
    times = rising([seconds for _, seconds, _ in points])
    entry: dict[str, Any] = {"collective": str(curve["collective"]), "ranks": curve["ranks"]}
    if tuple(curve["inside"]) != tuple(full):
        entry["inside"] = list(curve["inside"])
    entry["bytes_us"] = [[size, _rounded(t / MICRO)] for (size, _, _), t in zip(points, times, strict=True)]
    entry["spread"] = [round(spread, 4) for _, _, spread in points]
    entry["source"] = source
    return entry


def rising(times: Sequence[float]) -> list[float]:
    """The nearest times (geometrically) that never fall: neighbours that fall share their geometric mean."""
    pools: list[tuple[float, int]] = []
    for seconds in times:
        mean, count = math.log(seconds), 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean, count = (before * members + mean * count) / (members + count), members + count
        pools.append((mean, count))
    return [math.exp(mean) for mean, count in pools for _ in range(count)]


# --------------------------------------------------------------------------- the device


def device(
    layout: Layout, found: Iterable[Measurement], *, sheet: Mapping[str, Any] | None, dtype: str, source: str
) -> dict[str, Any]:
    """The `measured_device` of the file. `sheet`: the data-sheet file of its kind, if one is bundled.

    `dtype` is the one whose kernels make the curves of their families; other dtypes have curves of their own.
    """
    kernels = [one for one in found if one.kind == "kernel"]
    known = None if sheet is None or sheet["architecture"] == "cpu" else sheet
    if known is None:
        peaks, bandwidth = dict(_best_peaks(kernels)), _best_bandwidth(kernels)
    else:
        peaks = {name: tflops * TERA for name, tflops in known["peak_tflops"].items()}
        bandwidth = known["memory_bandwidth_gb_per_s"] * GB
    result: dict[str, Any] = {
        "name": sheet["name"] if sheet else _slug(layout.device_name),
        "description": f"{(sheet or {}).get('description') or layout.device_name}, as measured",
        "vendor": sheet["vendor"] if sheet else "unknown",
        "architecture": sheet["architecture"] if sheet else "other",
        "memory_gib": _rounded(layout.memory_bytes / GIB),
        "memory_bandwidth_gb_per_s": _rounded(bandwidth / GB),
        "peak_tflops": {name: _rounded(flops / TERA) for name, flops in peaks.items()},
        "kernel_latency_us": _rounded(_launch_gap(kernels) / MICRO),
    }
    told = known.get("sources", {}) if known else {}
    result["sources"] = {
        "memory_gib": f"{source}: total memory over the ranks that share it",
        "memory_bandwidth_gb_per_s": told.get("memory_bandwidth_gb_per_s", f"{source}: best addition"),
        "peak_tflops": told.get("peak_tflops", f"{source}: best matrix product"),
        "kernel_latency_us": f"{source}: additions to one number, one after another",
    }
    result["efficiency"] = dict(_efficiencies(kernels, peaks, bandwidth, dtype, source))
    return result


def _best_peaks(kernels: Iterable[Measurement]) -> Iterator[tuple[str, float]]:
    gemms = [one for one in kernels if one.facts["family"] == "gemm"]
    for dtype in dict.fromkeys(one.facts["dtype"] for one in gemms):
        same = [one for one in gemms if one.facts["dtype"] == dtype]
        yield dtype, max(one.facts["flops"] / one.sample.seconds / useful(one.facts) for one in same)


def _best_bandwidth(kernels: Iterable[Measurement]) -> float:
    memory = [one for one in kernels if one.facts["family"] == "memory"]
    return max(one.facts["bytes"] / one.sample.seconds for one in memory)


def _launch_gap(kernels: Iterable[Measurement]) -> float:
    return next(one.sample.seconds for one in kernels if one.facts["family"] == "latency")


def _efficiencies(
    kernels: Sequence[Measurement], peaks: Mapping[str, float], bandwidth: float, dtype: str, source: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    families: dict[str, list[Measurement]] = {}
    for one in kernels:
        family, own = one.facts["family"], one.facts["dtype"]
        traffic = family in TRAFFIC_FAMILIES
        if family in FAMILIES and (traffic or own in peaks):
            named = family if traffic or own == dtype else f"{family}/{own}"
            families.setdefault(named, []).append(one)
    for name, members in families.items():
        points = sorted(_point(one, peaks, bandwidth) for one in members)
        yield name, {"origin": "measured", "source": source, "curve": monotone(points)}


def _point(one: Measurement, peaks: Mapping[str, float], bandwidth: float) -> tuple[float, float]:
    """(size, fraction of peak) as the planner's compute model reads them."""
    if one.facts["family"] in TRAFFIC_FAMILIES:
        nbytes = one.facts["bytes"]
        return nbytes, nbytes / one.sample.seconds / bandwidth
    u = useful(one.facts)
    flops = one.facts["flops"] / u
    return flops, flops / one.sample.seconds / peaks[one.facts["dtype"]]


def useful(facts: Mapping[str, Any]) -> float:
    """The planner's charge for short sides of a (grouped) matrix product, 1 for anything else."""
    if facts["family"] not in ("gemm", "grouped_gemm"):
        return 1.0
    shape = facts["shape"]
    share = 1.0
    for side in (shape["m"] / shape.get("experts", 1), shape["n"], shape["k"]):
        share *= side / (side + SIDE_LOSS)
    return share


def monotone(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Fractions held down where they would make a larger kernel faster than a smaller one."""
    kept = [list(points[0])]
    for (before, _), (size, fraction) in pairwise(points):
        if size > before:
            kept.append([size, min(fraction, kept[-1][1] * size / before)])
    return [[size, _rounded(fraction)] for size, fraction in kept]


def kernel_records(found: Iterable[Measurement]) -> list[dict[str, Any]]:
    """All kernels as measured, for whoever wants to look or to calibrate."""
    return [
        {
            "name": one.facts["name"],
            "dtype": one.facts["dtype"],
            "shape": one.facts["shape"],
            "flops": one.facts["flops"],
            "bytes": one.facts["bytes"],
            "time_us": _rounded(one.sample.seconds / MICRO),
            "spread": round(one.sample.spread, 4),
        }
        for one in found
        if one.kind == "kernel"
    ]


def _rounded(value: float) -> float:
    """Five digits: more would be noise."""
    return float(f"{value:.5g}")


def _slug(name: str) -> str:
    return "-".join(name.lower().split())
