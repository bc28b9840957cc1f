"""A link graph to nested levels: which devices form pairs, quads, sockets and the node.

In: the graph of `smi.read_topo`. Out: a `Nest`: the device order that makes groups neighbours, the tiers
innermost first, the NICs that carry traffic, and notes on what did not fit.

Devices are partitioned by ever looser links: those that are fully joined by NVLink, those that NVLink
joins through others (a cube mesh), then one switch, one host bridge, one socket, the node. A partition
becomes a tier if all its groups are equally large. Where a few devices stand apart (at most
`SPARE_FRACTION` of them), they are left out if the rest then nests better; a note says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .smi import NV, PCIE_CLASSES, link_of, natural, nodes_of

if TYPE_CHECKING:
    import networkx as nx

SPARE_FRACTION = 0.25
"""Most devices that may be left out for the sake of even groups. Judgement: one of five, two of eight."""

MAX_NVLINKS = 18
"""Links of the largest device (NVIDIA H100 and B200 data sheets). A device whose links to all peers add up
to more shares them through a switch."""

NVLINK = "NV"
RANK = {NVLINK: 0} | {name: i for i, name in enumerate(PCIE_CLASSES, start=1)}
"""Closeness of a link class, 0 the closest."""

Partition = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Groups of `devices` devices, each made of `size` groups of the tier below."""

    size: int
    devices: int
    link: str
    """The loosest class that joins its children: `NV` or a PCIe class."""
    nvlinks: float = 0.0
    """NVLinks that one device has into this tier (beyond the tier below), on average."""
    switched: bool = False
    """Whether NVLinks go through a switch, so that any one peer can use them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    """One node's devices in nested order."""

    order: tuple[str, ...]
    tiers: tuple[Tier, ...]
    nics: tuple[str, ...]
    """The NICs that some device is nearest to."""
    nearest_nics: dict[str, tuple[str, ...]]
    """For each device of `order`, its closest NICs."""
    nic_link: str | None
    """The loosest class between a device and its nearest NIC; None without NICs."""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def nest(graph: nx.Graph) -> Nest:
    """The levels inside one node, its rank order and its NICs."""
    gpus = nodes_of(graph, "gpu")
    whole = _levels(graph, gpus)
    kept = min(_without_spares(graph, gpus), key=lambda rest: -len(_levels(graph, rest)), default=gpus)
    partitions = _levels(graph, kept)
    if len(partitions) <= len(whole):
        kept, partitions = gpus, whole
    order = _order(kept, partitions)
    left_out = tuple(gpu for gpu in gpus if gpu not in kept)
    nearest = {gpu: nearest_nics(graph, gpu) for gpu in order}
    used = tuple(sorted({nic for nics in nearest.values() for nic in nics}, key=natural))
    links = [link_of(graph, gpu, nics[0]) for gpu, nics in nearest.items() if nics]
    return Nest(
        order=order,
        tiers=_tiers(graph, partitions),
        nics=used,
        nearest_nics=nearest,
        nic_link=max(links, key=closeness, default=None),
        left_out=left_out,
        notes=_notes(order, left_out, nodes_of(graph, "nic"), used),
    )


def nearest_nics(graph: nx.Graph, gpu: str) -> tuple[str, ...]:
    """The NICs closest to `gpu`: storage and management ports farther away are not among them."""
    nics = nodes_of(graph, "nic")
    closest = min((closeness(link_of(graph, gpu, nic)) for nic in nics), default=0)
    return tuple(nic for nic in nics if closeness(link_of(graph, gpu, nic)) == closest)


def closeness(link: str) -> int:
    """0 for NVLink, then PIX, PXB, PHB, NODE, SYS."""
    return RANK[NVLINK if NV.fullmatch(link) else link]


def nvlinks(graph: nx.Graph, a: str, b: str) -> int:
    """Bonded NVLinks between two devices, 0 over PCIe."""
    link = link_of(graph, a, b)
    return int(link[2:]) if NV.fullmatch(link) else 0


# --------------------------------------------------------------------------- partitions


def _levels(graph: nx.Graph, gpus: tuple[str, ...]) -> list[Partition]:
    """The even partitions of `gpus`, finest first; the last is the whole."""
    whole = (tuple(gpus),)
    found: list[Partition] = []
    for partition in _partitions(graph, gpus):
        sizes = {len(group) for group in partition}
        fresh = partition not in found and min(sizes) > 1 and len(partition) > 1
        if len(sizes) == 1 and fresh and all(_inside(finer, partition) for finer in found):
            found.append(partition)
    return [*found, whole]


def _partitions(graph: nx.Graph, gpus: tuple[str, ...]) -> Iterable[Partition]:
    cliques = _cliques(graph, gpus)
    if cliques:
        yield cliques
    for bound in range(len(RANK)):
        yield _components(graph, gpus, lambda link, bound=bound: closeness(link) <= bound)


def _components(graph: nx.Graph, gpus: tuple[str, ...], joins: Callable[[str], bool]) -> Partition:
    import networkx as nx

    kept = nx.Graph()
    kept.add_nodes_from(gpus)
    kept.add_edges_from((a, b) for a, b, d in graph.subgraph(gpus).edges(data=True) if joins(d["link"]))
    return _sorted(nx.connected_components(kept))


def _cliques(graph: nx.Graph, gpus: tuple[str, ...]) -> Partition | None:
    """A split of `gpus` into groups that are fully joined by NVLink, the largest first; None if uneven."""
    import networkx as nx

    kept = nx.Graph()
    kept.add_nodes_from(gpus)
    kept.add_edges_from((a, b) for a, b in graph.subgraph(gpus).edges if nvlinks(graph, a, b))
    groups: list[set[str]] = []
    while kept:
        best = min(nx.find_cliques(kept), key=lambda c: (-len(c), -_bonds(graph, c), sorted(map(natural, c))))
        groups.append(set(best))
        kept.remove_nodes_from(best)
    return _sorted(groups) if len({len(group) for group in groups}) == 1 else None


def _bonds(graph: nx.Graph, group: list[str]) -> int:
    return sum(nvlinks(graph, a, b) for a in group for b in group if a < b)


def _sorted(groups: Iterable[set[str]]) -> Partition:
    ordered = (tuple(sorted(group, key=natural)) for group in groups)
    return tuple(sorted(ordered, key=lambda group: natural(group[0])))


def _inside(finer: Partition, coarser: Partition) -> bool:
    return all(any(set(group) <= set(around) for around in coarser) for group in finer)


def _without_spares(graph: nx.Graph, gpus: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """What is left when the groups smaller than the commonest size are dropped, for each partition."""
    for partition in _partitions(graph, gpus):
        sizes = [len(group) for group in partition]
        common = max(sizes, key=lambda size: (sizes.count(size) * size, size))
        odd = {gpu for group in partition if len(group) != common for gpu in group}
        if odd and len(odd) <= SPARE_FRACTION * len(gpus):
            yield tuple(gpu for gpu in gpus if gpu not in odd)


def _order(gpus: tuple[str, ...], partitions: list[Partition]) -> tuple[str, ...]:
    """Devices so that every group of every partition is contiguous."""

    def place(gpu: str) -> list[int]:
        return [
            next(i for i, group in enumerate(partition) if gpu in group) for partition in reversed(partitions)
        ]

    return tuple(sorted(gpus, key=lambda gpu: (place(gpu), natural(gpu))))


# --------------------------------------------------------------------------- tiers


def _tiers(graph: nx.Graph, partitions: list[Partition]) -> tuple[Tier, ...]:
    tiers: list[Tier] = []
    below: Partition = tuple((gpu,) for group in partitions[0] for gpu in group)
    for partition in partitions:
        tiers.append(_tier(graph, partition, below))
        below = partition
    return tuple(tiers)


def _tier(graph: nx.Graph, partition: Partition, below: Partition) -> Tier:
    home = {gpu: i for i, group in enumerate(below) for gpu in group}
    pairs = [(a, b) for group in partition for a in group for b in group if home[a] < home[b]]
    size, devices = len(below) // len(partition), len(partition[0])
    bonded = [nvlinks(graph, a, b) for a, b in pairs]
    if not any(bonded):
        link = max((link_of(graph, a, b) for a, b in pairs), key=closeness, default="SYS")
        return Tier(size=size, devices=devices, link=link)
    per_device = 2 * sum(bonded) / (len(partition) * devices)
    if not _joined(partition, {pair for pair, n in zip(pairs, bonded, strict=True) if n}, below):
        loosest = max((link_of(graph, a, b) for a, b in pairs), key=closeness)
        return Tier(size=size, devices=devices, link=loosest)
    switched = per_device > MAX_NVLINKS
    return Tier(
        size=size,
        devices=devices,
        link=NVLINK,
        nvlinks=max(bonded) if switched else per_device,
        switched=switched,
    )


def _joined(partition: Partition, bonded: set[tuple[str, str]], below: Partition) -> bool:
    """Whether NVLink alone joins the groups of `below` within each group of `partition`."""
    import networkx as nx

    for group in partition:
        links = nx.Graph()
        links.add_nodes_from(group)
        links.add_edges_from((a, b) for a, b in bonded if a in group)
        for unit in below:
            links.add_edges_from((unit[0], other) for other in unit[1:] if unit[0] in group)
        if not nx.is_connected(links):
            return False
    return True


def _notes(
    order: tuple[str, ...], left_out: tuple[str, ...], nics: tuple[str, ...], used: tuple[str, ...]
) -> tuple[str, ...]:
    notes = []
    if left_out:
        notes.append(f"left out {', '.join(left_out)}: without, the others nest evenly")
    if list(order) != sorted(order, key=natural) or left_out:
        visible = ",".join(name.removeprefix("GPU") for name in order)
        notes.append(f"set CUDA_VISIBLE_DEVICES={visible} so that groups lie on their links")
    if spare := [nic for nic in nics if nic not in used]:
        notes.append(f"not counted: {', '.join(spare)} (every GPU has a nearer NIC: storage or management)")
    return tuple(notes)
