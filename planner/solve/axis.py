"""One mesh axis as a choice graph: which dim every op of the model splits along it.

In: a `Graph`, the extents each op has before this axis, the axis and where its groups lie. Out:
one `Choice` per op. The objective is seconds per microbatch over the whole model, folded: op costs
times block counts, and for every tensor the reshards that its consumers need, each paid once per
layout, forward, and backward by duality. A weight on saved bytes sweeps the time/memory frontier.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ..cost import Estimate, Work
from ..estimate.op_work import Sizes, backward_work, extent, forward_work, operand_bytes, saved_bytes
from ..graph import Edge, Graph, Op
from ..layout import Collective, Placement, Replicate, conversion, gradient_needed
from ..rules.choices import BATCH, SEQUENCE, Choice, choices, matrix_labels
from .choice_graph import Assignment, ChoiceGraph, solve

REPEATED = ("whole", "partial")
"""Choices under which every rank does all of an op's work."""
MAX_LAYOUTS = 3
"""In how many layouts one tensor is kept at a time. No known block wants more than two."""
STORED_SECONDS_PER_BYTE = 1e-21
"""Breaks ties between layouts by what they store: a ten-billionth of what reading a byte takes."""

RESIDUAL = (BATCH, SEQUENCE, "hidden")
"""Names of the dims that the stream between layers has."""

OpKey = tuple[str, int]
"""(block class, op index)."""
KernelTime = Callable[[Work], Estimate]
CollectiveTime = Callable[[Collective, float], Estimate]
"""Seconds of a collective of so many bytes over a group of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The axis to be solved, with its prices."""

    name: str
    degree: int
    kernel_time: KernelTime
    collective_time: CollectiveTime
    overlap: float
    """Share of collectives that computation hides."""
    fused: bool
    keeps_shards: bool = False
    """Whether a gathered input is kept for backward as the shard it came from."""
    seconds_per_byte: float = 0.0
    """Weight of saved bytes in the objective."""
    networks: int = 1
    """Units of the outermost level (nodes) over which the axis spreads."""
    splits_residual: bool = True
    """Whether ops without a matrix parameter may be split along the residual's dims (on tp: sequence
    parallelism)."""
    repeats_products: bool = True
    """Whether a product with a weight may run whole on every rank; else it is split wherever it can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSolution:
    """The choice of every op along one axis, and where parameters are kept."""

    axis: str
    degree: int
    choices: dict[OpKey, Choice]
    parameters: dict[str, Placement]
    """Storage of each parameter, by tensor name."""
    assignment: Assignment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One conversion of a tensor, forward or of its gradient."""

    collective: Collective
    bytes: float
    backward: bool


def repeated_share(graph: Graph, solution: AxisSolution) -> float:
    """Share of the arithmetic of products with weights that every rank of the axis repeats."""
    total = repeated = 0.0
    for (block, i), choice in solution.choices.items():
        op = graph.blocks[block].ops[i]
        if op.gemm is None or not matrix_labels(op):
            continue
        flops = graph.blocks[block].count * sum(
            factor * math.prod(op.size(label) for label in labels) for factor, labels in op.flops
        )
        total += flops
        repeated += flops if choice.kind in REPEATED else 0.0
    return repeated / total if total else 0.0


def local_sizes(op: Op, choice: Choice, sizes: Sizes, degree: int) -> Sizes:
    """Extents on one device after the choice is made."""
    if degree == 1 or choice.kind in ("whole", "partial"):
        return sizes
    result = dict(sizes)
    if choice.label is not None:
        result[choice.label] /= degree
    if choice.kind == "experts":
        row = next((o.axes[0][0] for o in (*op.reads, *op.writes) if o.sorted_by_expert and o.axes[0]), None)
        if row is not None:
            result[row] /= degree
    if choice.kind == "table":
        batch = next((dim.label for dim in op.dims if dim.name == "batch"), None)
        if batch is not None:
            result[batch] /= degree
    return result


def imbalance(op: Op, choice: Choice, degree: int) -> float:
    """Work of the busiest rank over the mean: the last rows of a causal mask see all keys."""
    return 2.0 - 1.0 / degree if choice.kind == "split" and choice.label in op.causal else 1.0


def moves(
    source: Placement, target: Placement, gradient: Placement | None, nbytes: float, degree: int
) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """Forward and backward conversions of a tensor of `nbytes` between producer and consumer.

    Raises `ValueError` when the consumer's layout cannot be reached.
    """
    forward = _move(conversion(source, target), nbytes, degree, False)
    if gradient is None:
        return forward, ()
    needed = gradient_needed(source)
    return forward, _move(conversion(gradient, needed), nbytes, degree, True)


def _move(collective: Collective | None, nbytes: float, degree: int, backward: bool) -> tuple[Move, ...]:
    if collective is None:
        return ()
    buffer = nbytes / degree if collective is Collective.ALL_TO_ALL else nbytes
    return (Move(collective=collective, bytes=buffer, backward=backward),)


def _storage_price(op: Op, local: Sizes) -> float:
    """Next to nothing for each byte of a parameter: of layouts that cost the same the smallest is stored."""
    return STORED_SECONDS_PER_BYTE * sum(operand_bytes(r, local) for r in op.reads if r.kind == "parameter")


class AxisProblem:
    """Builds the choice graph of one axis and reads the solution back."""

    def __init__(self, graph: Graph, sizes: dict[OpKey, Sizes], axis: Axis) -> None:
        """`sizes[op]` are the extents before this axis splits anything."""
        self.graph, self.sizes, self.axis = graph, sizes, axis
        self.ops: dict[OpKey, Op] = {
            (block.name, i): op for block in graph.blocks.values() for i, op in enumerate(block.ops)
        }
        self.choices = {
            key: self._allowed(
                op, choices(op, axis=axis.name, degree=axis.degree, sizes=sizes[key], tables=graph.table_fqns)
            )
            for key, op in self.ops.items()
        }
        self.problem = ChoiceGraph()
        self.nodes: dict[OpKey, int] = {}
        self.parameter_nodes: dict[str, tuple[int, tuple[Placement, ...]]] = {}

    def _allowed(self, op: Op, found: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """Drop choices that the axis rules out: repeated products, and splits of the residual between
        products where the framework has no sequence parallelism."""
        if not self.axis.repeats_products and op.gemm and matrix_labels(op):
            found = tuple(c for c in found if c.kind not in REPEATED) or found
        if self.axis.splits_residual:
            return found
        along = {dim.label for dim in op.dims if dim.name in RESIDUAL}
        return tuple(c for c in found if c.kind != "split" or c.label not in along or matrix_labels(op))

    def possible(self) -> bool:
        """Whether every op has a choice at all on this axis."""
        return all(self.choices.values())

    def solve(self, *, reduce: bool = True) -> AxisSolution:
        """The best choices. Raises `SolverError` when none is possible."""
        self._build()
        assignment = solve(self.problem, reduce=reduce)
        chosen = {key: self.choices[key][assignment.states[node]] for key, node in self.nodes.items()}
        return AxisSolution(
            axis=self.axis.name,
            degree=self.axis.degree,
            choices=chosen,
            parameters=self._storage(chosen, assignment),
            assignment=assignment,
        )

    def only(self) -> AxisSolution:
        """The single choice of every op on an axis of one rank."""
        chosen = {key: options[0] for key, options in self.choices.items()}
        stored = {t: chosen[readers[0][0]].reads[readers[0][1]] for t, readers in self._readers().items()}
        return AxisSolution(axis=self.axis.name, degree=1, choices=chosen, parameters=stored, assignment=None)

    def _build(self) -> None:
        for key, op in self.ops.items():
            count = self.graph.blocks[key[0]].count
            self.nodes[key] = self.problem.node(
                count * self._op_cost(op, self.sizes[key], choice) for choice in self.choices[key]
            )
        for edge in self.graph.edges:
            self._add_edge(edge)
        self._add_shared_parameters()

    # ------------------------------------------------------------------ costs

    def _op_cost(self, op: Op, sizes: Sizes, choice: Choice) -> float:
        local = local_sizes(op, choice, sizes, self.axis.degree)
        skew = imbalance(op, choice, self.axis.degree)
        kernels = (
            *forward_work(op, local, imbalance=skew, fused=self.axis.fused),
            *backward_work(op, local, imbalance=skew, fused=self.axis.fused),
        )
        compute_s = sum(self.axis.kernel_time(work).seconds for work in kernels)
        inner_s = sum(
            count * self._exposed(collective, nbytes)
            for collective, nbytes, count, backward in inner_exchanges(op, choice, sizes, self.axis.degree)
        )
        return compute_s + inner_s + self._memory_price(op, local, choice) + _storage_price(op, local)

    def _memory_price(self, op: Op, local: Sizes, choice: Choice) -> float:
        """Weighted bytes kept for backward."""
        if not self.axis.seconds_per_byte:
            return 0.0
        shrunk = self.axis.keeps_shards and choice.kind == "split"
        kept = sum(
            nbytes / self.axis.degree if shrunk and self._whole_read(choice, saved.operand) else nbytes
            for saved, nbytes in zip(op.saved, saved_bytes(op, local), strict=True)
        )
        return self.axis.seconds_per_byte * kept

    @staticmethod
    def _whole_read(choice: Choice, operand: int | None) -> bool:
        return operand is not None and operand >= 0 and isinstance(choice.reads[operand], Replicate)

    def _exposed(self, collective: Collective, nbytes: float) -> float:
        return self.axis.collective_time(collective, nbytes).seconds * (1.0 - self.axis.overlap)

    def _moved_s(self, moved: tuple[Move, ...]) -> float:
        return sum(self._exposed(move.collective, move.bytes) for move in moved)

    # ------------------------------------------------------------------ edges

    def _add_edge(self, edge: Edge) -> None:
        producer = edge.producer[:2]
        write = edge.producer[2]
        sources = [choice.writes[write] for choice in self.choices[producer]]
        first = edge.consumers[0]
        nbytes = self._bytes(first[:2], first[2])
        self._connect(
            self.nodes[producer], sources, [(c[:2], c[2]) for c in edge.consumers], nbytes, edge.count
        )

    def _bytes(self, key: OpKey, read: int) -> float:
        return operand_bytes(self.ops[key].reads[read], self.sizes[key])

    def _connect(
        self,
        node: int,
        sources: list[Placement],
        consumers: list[tuple[OpKey, int]],
        nbytes: float,
        count: float,
    ) -> None:
        """Tie a producer to its consumers; several share each reshard through a node of their own."""
        if len(consumers) == 1:
            key, read = consumers[0]
            wants = [(c.reads[read], c.read_gradients[read]) for c in self.choices[key]]
            costs = [[self._pair(s, w, nbytes, count) for w in wants] for s in sources]
            self.problem.edge(node, self.nodes[key], np.array(costs))
            return
        self._connect_shared(node, sources, consumers, nbytes, count)

    def _pair(
        self, source: Placement, want: tuple[Placement, Placement | None], nbytes: float, count: float
    ) -> float:
        try:
            forward, backward = moves(source, *want, nbytes, self.axis.degree)
        except ValueError:
            return np.inf
        return count * (self._moved_s(forward) + self._moved_s(backward))

    def _connect_shared(
        self,
        node: int,
        sources: list[Placement],
        consumers: list[tuple[OpKey, int]],
        nbytes: float,
        count: float,
    ) -> None:
        wants = {
            key_read: [
                (c.reads[key_read[1]], c.read_gradients[key_read[1]]) for c in self.choices[key_read[0]]
            ]
            for key_read in consumers
        }
        distinct = list(dict.fromkeys(want for options in wants.values() for want in options))
        produced = list(dict.fromkeys(sources))
        states = [
            (source, frozenset(kept))
            for source in produced
            for size in range(1, min(MAX_LAYOUTS, len(consumers)) + 1)
            for kept in combinations(range(len(distinct)), size)
        ]
        price = _Shared(self, distinct, nbytes, count)
        costs = [price(source, kept) for source, kept in states]
        keep = _undominated(states, costs)
        shared = self.problem.node(costs[i] for i in keep)
        position = {want: i for i, want in enumerate(distinct)}
        from_producer = np.array(
            [[0.0 if states[i][0] == source else np.inf for i in keep] for source in sources]
        )
        self.problem.edge(node, shared, from_producer)
        for (key, _), options in wants.items():
            allowed = np.array(
                [[0.0 if position[want] in states[i][1] else np.inf for want in options] for i in keep]
            )
            self.problem.edge(shared, self.nodes[key], allowed)

    # ------------------------------------------------------------------ shared parameters

    def _readers(self) -> dict[str, list[tuple[OpKey, int]]]:
        readers: dict[str, list[tuple[OpKey, int]]] = defaultdict(list)
        for key, op in self.ops.items():
            for i, read in enumerate(op.reads):
                if read.kind == "parameter" and read.fqn is not None:
                    readers[read.tensor].append((key, i))
        return readers

    def _add_shared_parameters(self) -> None:
        """A parameter read in several places is stored in one layout and converted where it differs."""
        for tensor, readers in self._readers().items():
            if len(readers) < 2:
                continue
            layouts = tuple(dict.fromkeys(c.reads[read] for key, read in readers for c in self.choices[key]))
            node = self.problem.node(0.0 for _ in layouts)
            self.parameter_nodes[tensor] = (node, layouts)
            key, read = readers[0]
            self._connect(node, list(layouts), readers, self._bytes(key, read), 1.0)

    def _storage(self, chosen: dict[OpKey, Choice], assignment: Assignment) -> dict[str, Placement]:
        stored = {
            tensor: chosen[readers[0][0]].reads[readers[0][1]] for tensor, readers in self._readers().items()
        }
        for tensor, (node, layouts) in self.parameter_nodes.items():
            stored[tensor] = layouts[assignment.states[node]]
        return stored


def _undominated(states: list[tuple[Placement, frozenset[int]]], costs: list[float]) -> list[int]:
    """States for which no other of the same source keeps more layouts at no more cost."""
    by_source: dict[Placement, list[int]] = defaultdict(list)
    for i, (source, _) in enumerate(states):
        if np.isfinite(costs[i]):
            by_source[source].append(i)
    return [
        i
        for group in by_source.values()
        for i in group
        if not any(states[i][1] < states[j][1] and costs[j] <= costs[i] for j in group)
    ]


class _Shared:
    """Price of keeping one tensor in a set of layouts: each reshard once, in both directions."""

    def __init__(
        self,
        problem: AxisProblem,
        wants: list[tuple[Placement, Placement | None]],
        nbytes: float,
        count: float,
    ) -> None:
        self._problem, self._wants, self._nbytes, self._count = problem, wants, nbytes, count
        self._prices: dict[tuple[Placement, Placement, bool], float] = {}

    def __call__(self, source: Placement, kept: frozenset[int]) -> float:
        forward = {self._wants[i][0] for i in kept}
        gradients = {g for i in kept if (g := self._wants[i][1]) is not None}
        needed = gradient_needed(source)
        seconds = sum(self._price(source, target, False) for target in forward)
        seconds += sum(self._price(gradient, needed, True) for gradient in gradients)
        return self._count * seconds

    def _price(self, source: Placement, target: Placement, backward: bool) -> float:
        key = (source, target, backward)
        if key not in self._prices:
            try:
                collective = conversion(source, target)
                moved = _move(collective, self._nbytes, self._problem.axis.degree, backward)
                self._prices[key] = self._problem._moved_s(moved)
            except ValueError:
                self._prices[key] = np.inf
        return self._prices[key]


def inner_exchanges(
    op: Op, choice: Choice, sizes: Sizes, degree: int
) -> list[tuple[Collective, float, int, bool]]:
    """Collectives inside the op: (collective, bytes, count, in backward)."""
    result = []
    for inner in choice.inner:
        nbytes = extent(inner.forward_labels, sizes) * inner.element_bytes
        if inner.collective is Collective.ALL_TO_ALL:
            nbytes /= degree
        if inner.count:
            result.append((inner.collective, nbytes, inner.count, False))
        if inner.backward_count:
            result.append((inner.collective, nbytes, inner.backward_count, True))
    return result
