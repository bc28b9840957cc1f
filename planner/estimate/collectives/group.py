"""A group of ranks as the algorithms see it: a measured core, and hops between cores.

In: a `Topology`, a collective and a `GroupSpan`. Out: a `Group`.

The core is the innermost part of the group for which the level has measured curves of this collective
(the whole group, if it stays inside that level). Every further level that the group crosses is a `Hop`,
priced from its bandwidth, efficiency and latency. An algorithm streams a message through all of them at
once, so the slowest one decides:

    time = launch + min over protocols of  latency * slower + max( core, hops / share )

where everything but the outermost hop runs at FEED of its speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...layout import Collective
from ...topology import GroupSpan, Level, Topology
from .curves import Inside, Measured, Table, for_ranks
from .traffic import bus_factor

FEED = 0.92
"""Share of an inner level's speed that is left while it feeds an outer one. All-reduce over 2 and 4 nodes
of 8 H100: 430 and 320 GB/s bus bandwidth (NVIDIA/nccl#1221) where one node alone gives 480 (NVLS) and 335
to 370 (ring)."""

LAUNCH_S = 6e-6
"""Launch and synchronisation of a collective that nobody measured: what 512 B cost on two H100 or A100
beyond one hop is 4 to 9 us (aiconfigurator's NCCL tables)."""


PROTOCOLS = ((1.0, 0.11), (1.6, 0.92), (2.8, 1.0))
"""(latency, share of the bandwidth) of NCCL's LL, LL128 and Simple, relative to a level's own figures. From
NCCL's tuning constants (src/graph/tuning.cc): a network hop takes 5.0 / 8.5 / 14 us in a tree and 2.7 / 4.0 /
14 us in a ring; LL is held to 45 GB/s over two Hopper nodes (of 8 x 50), LL128 to 0.92."""


class Stream(NamedTuple):
    """What an algorithm makes a group do with one message, seconds."""

    latency_s: float
    """Dependent hops, at each level's own latency."""
    core_s: float
    """The measured core streaming it (its own latency included)."""
    hops_s: float
    """The slowest hop streaming it at full bandwidth."""

    def seconds(self, launch_s: float) -> float:
        """Time with the protocol that suits the message best."""
        latency_s, core_s, hops_s = self
        return launch_s + min(latency_s * slower + max(core_s, hops_s / share) for slower, share in PROTOCOLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The measured innermost part of a group: `ranks` devices."""

    ranks: int
    latency_s: float
    whole: Measured
    """The collective itself."""
    halves: tuple[Measured, ...] = ()
    """For an all-reduce: its reduce-scatter and all-gather."""

    def ring_s(self, nbytes: float) -> float:
        """Seconds of the collective run as a ring (an all-reduce's own curve may be a switch's)."""
        return sum(part.at(nbytes).seconds for part in self.halves or (self.whole,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One level that a group crosses, beyond its core."""

    members: int
    """Child units of this level that hold members."""
    inside: int
    """Members within one child unit: all of them share the crossing."""
    bytes_per_s: float
    """What each device's share of the link really carries (efficiency applied)."""
    latency_s: float
    outermost: bool
    """The last level that this group crosses: it feeds no other."""
    network: bool
    """The topology's last level, between nodes."""

    @property
    def speed(self) -> float:
        """Bytes per second that one device can keep up while streaming."""
        return self.bytes_per_s if self.outermost else self.bytes_per_s * FEED


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks of one collective: `size` of them, in a core (or none) and across hops."""

    collective: Collective
    size: int
    core: Core | None
    hops: tuple[Hop, ...]

    @property
    def launch_s(self) -> float:
        """Fixed time that no measured core already contains."""
        return LAUNCH_S if self.core is None else 0.0


Tables = Sequence[Mapping[Inside, Table]]
"""Measured curves by how groups fill the levels below and by collective, for each level."""


def locate(collective: Collective, span: GroupSpan, topology: Topology, tables: Tables) -> Group:
    """The group of `span`: its largest measured core and the hops around it."""
    cut, table = _core_level(collective, span, topology, tables)
    core = None if cut < 0 else _core(collective, span, topology, table, cut)
    hops = []
    inside = core.ranks if core else 1
    below = math.prod(level.size for level in topology.levels[: cut + 1])
    for i, level in enumerate(topology.levels[cut + 1 :], start=cut + 1):
        if span.members[i] > 1:
            hop = Hop(
                members=span.members[i],
                inside=inside,
                bytes_per_s=level.bytes_per_s * _efficiency(level, inside=inside, of=below),
                latency_s=level.latency_s,
                outermost=i == span.outermost,
                network=0 < i == len(topology.levels) - 1,
            )
            hops.append(hop)
            inside *= hop.members
        below *= level.size
    return Group(collective=collective, size=span.size, core=core, hops=tuple(hops))


def _efficiency(level: Level, *, inside: int, of: int) -> float:
    """What a group reaches that has `inside` of the `of` devices in each unit below."""
    if level.partial_efficiency is not None and 1 < inside < of:
        return level.partial_efficiency
    return level.efficiency


def _core_level(
    collective: Collective, span: GroupSpan, topology: Topology, tables: Tables
) -> tuple[int, Table]:
    """The outermost level whose curves describe this group, and those curves; -1 if there is none.

    A curve of an outer level was measured with every unit below it full, or filled as it says.
    """
    for i in range(span.outermost, -1, -1):
        full = all(span.members[j] == topology.levels[j].size for j in range(i))
        table = tables[i].get(None if full else span.members[:i], {})
        if collective in table and span.members[i] > 1:
            return i, table
    return -1, {}


def _core(collective: Collective, span: GroupSpan, topology: Topology, table: Table, cut: int) -> Core:
    ranks = math.prod(span.members[: cut + 1])
    latency_s = topology.levels[cut].latency_s

    def measured(which: Collective) -> Measured:
        return for_ranks(which, table[which], ranks=ranks, latency_s=latency_s)

    reduces = collective == Collective.ALL_REDUCE
    halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER) if reduces else ()
    return Core(
        ranks=ranks,
        latency_s=latency_s,
        whole=measured(collective),
        halves=tuple(measured(half) for half in halves),
    )


def ring(group: Group, nbytes: float, *, laps: int) -> Stream:
    """A flat ring over all ranks, one ring per device of a node.

    Each rank sends `bus_factor * nbytes`; the members inside a unit share the crossing out of it, each
    over its own link. `laps`: how often a message goes round (2 for all-reduce).
    """
    factor = bus_factor(group.collective, group.size)
    latency_s, core_s, hops_s = 0.0, 0.0, 0.0
    if group.core is not None:
        core = group.core
        core_s = core.ring_s(nbytes) * factor / bus_factor(group.collective, core.ranks) / FEED
        further = (core.ranks - 1) * (group.size // core.ranks - 1)
        latency_s = further * core.latency_s
    for hop in group.hops:
        hops_s = max(hops_s, factor * nbytes / (hop.inside * hop.speed))
        units = group.size // hop.inside
        latency_s += (units - units // hop.members) * hop.latency_s
    return Stream(laps * latency_s, core_s, hops_s)
