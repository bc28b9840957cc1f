"""Which hosts, devices and levels there are.

In: a `World`. Out: a `Layout`: nested levels with the ranks in order, innermost first. Hosts become nodes
(torchrun's GROUP_RANK tells two nodes on one host apart); inside a node `nvidia-smi topo -m` tells which
devices NVLink joins; between nodes, tiers show as gaps in the bandwidth between pairs of nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod
from typing import Any

import torch

from ..planner.errors import OptionError, TopologyError
from ..planner.layout import Collective
from ..topologies.importers.detect import nics, run_tool
from ..topologies.importers.hierarchy import NVLINK, Nest, nest
from ..topologies.importers.smi import read_topo
from . import collective
from .settings import KIB, Settings
from .world import World

PROBE_BYTES = 256 * KIB
"""Message between two nodes when looking for tiers: long enough for bandwidth to show on any Ethernet."""
TIER_GAP = 1.8
"""Two tiers differ by at least this factor in bandwidth. Judgement: below it, noise and NIC sharing."""
MOST_PROBED_NODES = 8
"""More nodes would need more than 28 pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """One level: its name, size and link kind."""

    name: str
    size: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The cluster as the ranks see it."""

    rings: tuple[Ring, ...]
    """Innermost first; the last is the cluster, its size the number of nodes (or of groups of nodes)."""
    device_name: str
    memory_bytes: int
    free_bytes: int
    hosts: tuple[str, ...]
    """One for each node."""
    notes: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the levels, innermost first."""
        return tuple(ring.size for ring in self.rings)


def discover(world: World, settings: Settings) -> Layout:
    """Raises `OptionError` where nodes have unequal numbers of ranks or ranks are not in node order."""
    everyone = world.gather("facts", _facts(world))
    per_node = _ranks_per_node([str(facts["node"]) for facts in everyone])
    node_count = world.size // per_node
    inner, inner_notes = _inner(world, per_node)
    outer, outer_notes = _outer(world, settings, per_node, node_count)
    hosts = tuple(str(everyone[node * per_node]["host"]) for node in range(node_count))
    names = sorted({str(facts["device"]) for facts in everyone})
    mixed = (f"mixed devices ({', '.join(names)}): the slowest sets the pace",) if len(names) > 1 else ()
    return Layout(
        rings=(*inner, *outer),
        device_name=names[0],
        memory_bytes=min(int(facts["memory_bytes"]) for facts in everyone),
        free_bytes=min(int(facts["free_bytes"]) for facts in everyone),
        hosts=hosts,
        notes=(*mixed, *inner_notes, *outer_notes),
    )


def _facts(world: World) -> dict[str, Any]:
    """What this rank knows of itself."""
    if world.device.type == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
        name, total, free = "cpu", total // here, free // here
    else:
        free, total = torch.accelerator.get_memory_info(world.device)
        name = getattr(torch, world.device.type).get_device_name(world.device)
    node = world.host if world.node is None else world.node
    return {"host": world.host, "node": node, "device": name, "memory_bytes": total, "free_bytes": free}


def _ranks_per_node(nodes: Sequence[str]) -> int:
    order = list(dict.fromkeys(nodes))
    counts = {node: nodes.count(node) for node in order}
    per_node = counts[order[0]]
    if len(set(counts.values())) > 1:
        raise OptionError(
            f"nodes have {sorted(counts.values())} ranks: start the same number on each (--nproc-per-node)"
        )
    if list(nodes) != [node for node in order for _ in range(per_node)]:
        raise OptionError("the ranks of a node are not neighbours: start them with torchrun")
    return per_node


# --------------------------------------------------------------------------- inside a node


def _inner(world: World, per_node: int) -> tuple[tuple[Ring, ...], tuple[str, ...]]:
    """Levels inside one node. Rank 0 looks; all nodes are alike."""
    facts = world.from_first("inner", _look_inside(world, per_node) if world.rank == 0 else None)
    rings = tuple(Ring(**ring) for ring in facts["rings"])
    return rings, tuple(facts["notes"])


def _look_inside(world: World, per_node: int) -> dict[str, Any]:
    flat = [{"name": "node", "size": per_node, "kind": "tcp" if world.device.type == "cpu" else "pcie"}]
    if world.device.type != "cuda" or per_node == 1:
        return {"rings": flat, "notes": []}
    text = run_tool(["nvidia-smi", "topo", "-m"])
    if text is None:
        return {"rings": flat, "notes": ["nvidia-smi topo -m gives nothing: one flat level inside a node"]}
    try:
        found = nest(read_topo(text, origin="nvidia-smi topo -m"))
    except TopologyError as error:
        return {"rings": flat, "notes": [f"nvidia-smi topo -m cannot be read: {error}"]}
    if len(found.order) != per_node or list(found.order) != [f"GPU{i}" for i in range(per_node)]:
        notes = [*found.notes, "ranks are not ordered as nvidia-smi's links: one flat level inside a node"]
        return {"rings": flat, "notes": notes}
    return {"rings": list(_rings_of(found)), "notes": list(found.notes)}


def _rings_of(found: Nest) -> Iterator[dict[str, Any]]:
    names = {2: "pair", 4: "quad"}
    for i, tier in enumerate(found.tiers):
        last = i == len(found.tiers) - 1
        yield {
            "name": "node" if last else names.get(tier.devices, f"group of {tier.devices}"),
            "size": tier.size,
            "kind": "nvlink" if tier.link == NVLINK else "pcie",
        }


# --------------------------------------------------------------------------- between nodes


def _outer(
    world: World, settings: Settings, per_node: int, node_count: int
) -> tuple[tuple[Ring, ...], tuple[str, ...]]:
    kind = world.from_first("network", _network(world))
    flat = (Ring(name="cluster", size=node_count, kind=kind),)
    if not 2 < node_count <= MOST_PROBED_NODES:
        return flat, ()
    speeds = dict(_probe(world, settings, per_node, node_count))
    sizes = tiers(speeds, node_count)
    names = [*(f"rack of {prod(sizes[: i + 1])}" for i in range(len(sizes) - 1)), "cluster"]
    rings = tuple(Ring(name=name, size=size, kind=kind) for name, size in zip(names, sizes, strict=True))
    note = f"tiers between nodes, by bandwidth: {' x '.join(map(str, sizes))}"
    return rings, (() if len(rings) == 1 else (note,))


def _network(world: World) -> str:
    if world.backend == "gloo":
        return "tcp"
    return next((nic.kind for nic in nics()), "ethernet")


def _probe(
    world: World, settings: Settings, per_node: int, node_count: int
) -> Iterator[tuple[tuple[int, int], float]]:
    """Bytes per second between the first ranks of each two nodes, one pair after another."""
    for a, b in combinations(range(node_count), 2):
        world.doing(f"probing the link between nodes {a} and {b}")
        pair = (a * per_node, b * per_node)
        group, ranks = world.groups([pair])
        sample = collective.measure(world, Collective.SEND_RECV, group, ranks or pair, PROBE_BYTES, settings)
        yield (a, b), PROBE_BYTES / sample.seconds


def tiers(speeds: dict[tuple[int, int], float], count: int) -> tuple[int, ...]:
    """Sizes of the levels between `count` nodes, innermost first, from the bandwidth of each pair.

    A threshold between two tiers splits the nodes into equal runs of neighbours, and every pair inside one
    is `TIER_GAP` times faster than any pair across. Otherwise it is noise, and there is one tier.
    """
    sizes: list[int] = []
    below = 1
    ordered = sorted(set(speeds.values()), reverse=True)
    for faster, slower in pairwise(ordered):
        if faster < TIER_GAP * slower:
            continue
        unit = _even_run(speeds, count, faster)
        if unit and unit > below and unit % below == 0:
            sizes.append(unit // below)
            below = unit
    return (*sizes, count // below)


def _even_run(speeds: dict[tuple[int, int], float], count: int, least: float) -> int | None:
    """The size of equal runs of neighbours within which exactly the pairs of at least `least` lie."""
    fast = {pair for pair, speed in speeds.items() if speed >= least}
    for unit in range(2, count):
        if count % unit == 0 and fast == {(a, b) for a, b in speeds if a // unit == b // unit}:
            return unit
    return None
