"""The choice graph of one mesh axis before anything on it has a price.

In: the choices of every op of a `Graph`. Out: which of them go together, and for every tensor which
conversions lie between its layouts. Extents and links change only what these cost, so one frame serves
all microbatches, places and weights under which the same choices are legal (`Known.frame`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..borders import Borders, OpKey
from ..errors import SolverError
from ..graph import Edge, Graph
from ..layout import Placement
from ..rules.choices import Choice
from ..terms import hand_on_terms
from .choice_graph import IMPOSSIBLE, ChoiceGraph, Presolved
from .conversions import ANYWHERE, PARAMETER, Conversions, End, Stated, as_made, connect, pairs, wanted
from .op_times import KernelTime, OpTimes

Choices = Mapping[OpKey, tuple[Choice, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A tensor whose conversions are priced: as this operand of this op reads it."""

    op: OpKey
    operand: int
    count: float
    """How often it is converted in the whole model."""
    block: str
    """The class that pays for it; none for parameters that are read in several places."""
    once: bool
    """Whether that is done once per step, not for every microbatch."""


class Frame:
    """The graph: a node per op, in the order of `choices`, and one per parameter with several readers."""

    def __init__(
        self,
        graph: Graph,
        choices: Choices,
        known: Conversions,
        *,
        borders: Borders | None,
        converts_parameters: bool,
        reduce: bool,
    ) -> None:
        """`borders`: where layouts may change, if not anywhere. `converts_parameters`: whether a parameter
        may be converted from the layout it is stored in. `reduce`: see `choice_graph.solve`."""
        self.choices = dict(choices)
        self.nodes = {key: i for i, key in enumerate(self.choices)}
        self.reads: list[Read] = []
        """Items of the choice graph."""
        self.parameter_nodes: dict[str, tuple[int, tuple[Placement, ...]]] = {}
        self._graph, self._known, self._borders, self._reduce = graph, known, borders, reduce
        self._converts_parameters = converts_parameters
        self._choice_graph = ChoiceGraph()
        for options in self.choices.values():
            self._choice_graph.node(0.0 for _ in options)
        for edge in graph.edges:
            self._add_edge(edge)
        self._add_shared_parameters()

    @cached_property
    def _presolved(self) -> Presolved | None:
        try:
            return Presolved(self._choice_graph, reduce=self._reduce)
        except SolverError:
            return None

    @property
    def presolved(self) -> Presolved:
        """The choice graph, ready for costs. Raises `SolverError` when no choices go together."""
        if self._presolved is None:
            raise SolverError(IMPOSSIBLE)
        return self._presolved

    def _add_edge(self, edge: Edge) -> None:
        producer, write = edge.producer[:2], edge.producer[2]
        sources = [choice.writes[write] for choice in self.choices[producer]]
        made = (self.choices[producer], write)
        consumers = [(consumer[:2], consumer[2]) for consumer in edge.consumers]
        price = (*consumers[0], edge.count, edge.block)
        self._connect(self.nodes[producer], sources, made, consumers, price, self._stated(edge))

    def _stated(self, edge: Edge) -> Stated:
        """Who may convert the tensor."""
        (block, op, read), borders = edge.consumers[0], self._borders
        if self._graph.blocks[block].ops[op].reads[read].kind == "parameter":
            return PARAMETER if self._converts_parameters else as_made(len(edge.consumers))
        if borders is None:
            return ANYWHERE

        def make() -> Stated:
            return Stated(
                together=borders.stated_together(edge),
                by=borders.stated_by(edge),
                never=borders.never_stated(edge),
            )

        return self._known.stated(edge, make)

    def _connect(
        self,
        node: int,
        sources: Sequence[Placement],
        made: End | None,
        consumers: list[tuple[OpKey, int]],
        price: tuple[OpKey, int, float, str],
        stated: Stated,
    ) -> None:
        """Tie a producer to its consumers; `price` as of `Read`."""
        ends = [(self.choices[key], read) for key, read in consumers]
        found = self._known.between(sources, made, ends, stated)
        users = [self.nodes[key] for key, _ in consumers]
        once = self._item(*price, once=True) if stated.parameter else None
        connect(self._choice_graph, node, users, found, self._item(*price), once)

    def every_microbatch(self, block: str | None = None) -> frozenset[int]:
        """Items of what is done for every microbatch; those that one class pays for."""
        paid = (i for i, read in enumerate(self.reads) if not read.once and block in (None, read.block))
        return frozenset(paid)

    def _item(self, op: OpKey, operand: int, count: float, block: str, *, once: bool = False) -> int:
        self.reads.append(Read(op=op, operand=operand, count=count, block=block, once=once))
        return len(self.reads) - 1

    def _add_shared_parameters(self) -> None:
        """A parameter read in several places is stored in one layout and converted where it differs."""
        for tensor, readers in parameter_readers(self._graph).items():
            if len(readers) < 2:
                continue
            layouts = tuple(dict.fromkeys(c.reads[read] for key, read in readers for c in self.choices[key]))
            node = self._choice_graph.node(0.0 for _ in layouts)
            self.parameter_nodes[tensor] = (node, layouts)
            if self._converts_parameters:
                self._connect(node, layouts, None, readers, (*readers[0], 1.0, ""), PARAMETER)
            else:
                self._read_as_stored(node, layouts, readers)

    def _read_as_stored(
        self, node: int, layouts: tuple[Placement, ...], readers: list[tuple[OpKey, int]]
    ) -> None:
        """Every reader takes the parameter in the layout it is stored in; gradients may still be summed."""
        for key, read in readers:
            wants = wanted((self.choices[key], read))
            same = np.array([[stored == layout for layout, _ in wants] for stored in layouts])
            found = pairs(layouts, wants, PARAMETER)
            found = replace(found, barred=np.where(same, found.barred, np.inf))
            items = (self._item(key, read, 1.0, "", once=once) for once in (False, True))
            connect(self._choice_graph, node, [self.nodes[key]], found, *items)


@dataclass(slots=True)
class Known:
    """What the problems of one graph on one cluster have found out, for those that follow."""

    conversions: Conversions = field(default_factory=Conversions)
    _times: dict[tuple[KernelTime, bool], OpTimes] = field(default_factory=dict)
    _frames: dict[tuple, Frame] = field(default_factory=dict)
    _choices: dict[tuple, tuple[Choice, ...]] = field(default_factory=dict)
    _terms: dict[tuple[Borders, int], frozenset[OpKey]] = field(default_factory=dict)

    def times(self, kernel_time: KernelTime, *, fused: bool) -> OpTimes:
        """What ops take where kernels take so long."""
        return self._times.setdefault((kernel_time, fused), OpTimes(kernel_time, fused=fused))

    def hand_on_terms(self, borders: Borders, degree: int) -> frozenset[OpKey]:
        """`terms.hand_on_terms`, once for each number of ranks."""
        if (borders, degree) not in self._terms:
            self._terms[borders, degree] = hand_on_terms(borders, degree)
        return self._terms[borders, degree]

    def choices(self, known: tuple, make: Callable[[], tuple[Choice, ...]]) -> tuple[Choice, ...]:
        """The choices that `known` stands for: the same object every time."""
        if known not in self._choices:
            self._choices[known] = make()
        return self._choices[known]

    def frame(
        self,
        graph: Graph,
        choices: Choices,
        *,
        borders: Borders | None,
        converts_parameters: bool,
        reduce: bool,
    ) -> Frame:
        """The frame of these choices, made once: a frame keeps them, so that no others get their ids."""
        ids = tuple(map(id, choices.values()))
        key = (ids, borders is None, converts_parameters, reduce)
        if key not in self._frames:
            self._frames[key] = Frame(
                graph,
                choices,
                self.conversions,
                borders=borders,
                converts_parameters=converts_parameters,
                reduce=reduce,
            )
        return self._frames[key]


def parameter_readers(graph: Graph) -> dict[str, list[tuple[OpKey, int]]]:
    """Per parameter who reads it: (op, operand)."""
    readers: dict[str, list[tuple[OpKey, int]]] = defaultdict(list)
    for block in graph.blocks.values():
        for i, op in enumerate(block.ops):
            for operand, read in enumerate(op.reads):
                if read.kind == "parameter" and read.fqn is not None:
                    readers[read.tensor].append(((block.name, i), operand))
    return readers
