"""How long a collective takes on a topology.

In: a `Topology`; then a collective, bytes and a `GroupSpan`. Out: `Estimate`. Bytes follow nccl-tests'
size column: the buffer of each rank for all-reduce, the whole gathered (scattered) buffer for all-gather
(reduce-scatter), each rank's whole send buffer for all-to-all, the message for broadcast and send/recv.

A group inside a level with measured curves is read off them. Any other group costs what the best of its
collective's algorithms costs: `ALGORITHMS` lists them, each a function from `Group` and bytes to a `Stream`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...cost import Estimate, Origin
from ...layout import Collective
from ...topology import GroupSpan, Topology
from . import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, send_recv
from .curves import tables
from .group import Group, Stream, locate

Algorithm = Callable[[Group, float], Stream]
NOTHING = Estimate(0.0, Origin.MEASURED)


def registry(*entries: tuple[Collective, str, Algorithm]) -> dict[Collective, dict[str, Algorithm]]:
    """Algorithms by collective and name. Raises `ValueError` when a name is given twice."""
    table: dict[Collective, dict[str, Algorithm]] = {}
    for collective, name, algorithm in entries:
        known = table.setdefault(collective, {})
        if name in known:
            raise ValueError(f"{collective} already has an algorithm named {name!r}")
        known[name] = algorithm
    return table


ALGORITHMS = registry(
    (Collective.ALL_REDUCE, "ring", all_reduce.ring),
    (Collective.ALL_REDUCE, "tree", all_reduce.tree),
    (Collective.ALL_GATHER, "ring", all_gather.ring),
    (Collective.REDUCE_SCATTER, "ring", reduce_scatter.ring),
    (Collective.ALL_TO_ALL, "pairwise", all_to_all.pairwise),
    (Collective.BROADCAST, "ring", broadcast.ring),
    (Collective.SEND_RECV, "direct", send_recv.direct),
)


class CollectiveModel:
    """Prices of collectives on one topology. Prepared once; equal questions are answered from memory."""

    __slots__ = ("_answers", "_groups", "_tables", "topology")

    def __init__(self, topology: Topology) -> None:
        """Read the topology's measured curves."""
        self.topology = topology
        self._tables = tuple(tables(level) for level in topology.levels)
        self._groups: dict[tuple[Collective, tuple[int, ...]], Group] = {}
        self._answers: dict[tuple[Collective, float, tuple[int, ...]], Estimate] = {}

    def time(self, collective: Collective, nbytes: float, span: GroupSpan) -> Estimate:
        """Seconds of one `collective` of `nbytes` (see the module) over the group of `span`.

        Zero for a group of one or an empty message. Raises `ValueError` for a collective without an
        algorithm or a span of another topology.
        """
        key = (collective, nbytes, span.members)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._time(collective, nbytes, span)
        return answer

    def _time(self, collective: Collective, nbytes: float, span: GroupSpan) -> Estimate:
        if collective not in ALGORITHMS:
            raise ValueError(f"no algorithm for {collective!r}; known are {', '.join(ALGORITHMS)}")
        if span.size == 1 or nbytes <= 0.0:
            return NOTHING
        group = self._group(collective, span)
        if not group.hops and group.core is not None:
            return group.core.whole.at(nbytes)
        streams = (algorithm(group, nbytes) for algorithm in ALGORITHMS[collective].values())
        return Estimate(min(stream.seconds(group.launch_s) for stream in streams), Origin.MODELLED)

    def _group(self, collective: Collective, span: GroupSpan) -> Group:
        key = (collective, span.members)
        if key not in self._groups:
            if len(span.members) != len(self._tables):
                raise ValueError(f"{span} has not the {len(self._tables)} levels of {self.topology.name}")
            self._groups[key] = locate(collective, span, self.topology, self._tables)
        return self._groups[key]


def model(topology: Topology) -> CollectiveModel:
    """The prices of every collective on `topology`."""
    return CollectiveModel(topology)
