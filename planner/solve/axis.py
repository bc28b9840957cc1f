"""One mesh axis as a choice graph: which dim every op of the model splits along it.

In: a `Graph`, the extents each op has before this axis, the axis and where its groups lie. Out:
one `Choice` per op. The objective is seconds per microbatch over the whole model, folded: op costs
times block counts, and for every tensor the reshards that its consumers need, each paid once per
layout, forward, and backward by duality. A weight on saved bytes sweeps the time/memory frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..borders import Borders, OpKey
from ..cost import Estimate
from ..estimate.op_work import Sizes, extent, operand_bytes, saved_bytes
from ..graph import Block, Graph, Op
from ..layout import Collective, Placement, Replicate
from ..problem import NOTHING_KNOWN, Floor
from ..routed import routed_ops
from ..rules.choices import (
    BATCH,
    PARTS_OF_EXPERTS,
    SEQUENCE,
    WHOLE_EXPERTS,
    Choice,
    choices,
    matrix_labels,
    unsummed,
)
from .choice_graph import Assignment, Matrix
from .conversions import COLLECTIVES
from .frame import Frame, Known, Read, parameter_readers
from .op_times import KernelTime

REPEATED = ("whole", "partial")
"""Choices under which every rank does all of an op's work."""
STORED_SECONDS_PER_BYTE = 1e-21
"""Breaks ties between layouts by what they store: a ten-billionth of what reading a byte takes."""

RESIDUAL = (BATCH, SEQUENCE, "hidden")
"""Names of the dims that the stream between layers has."""

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
    networks: int = 1
    """Units of the outermost level (nodes) over which the axis spreads."""
    splits_residual: bool = True
    """Whether ops without a matrix parameter may be split along the residual's dims (on tp: sequence
    parallelism)."""
    converts_parameters: bool = True
    """Whether a parameter that is read in several places may be converted from the layout it is stored in."""
    repeats_products: bool = True
    """Whether a product with a weight may run whole on every rank; else it is split wherever it can be."""
    routes_own_tokens: bool = False
    """Whether modules that route tokens to experts run on each rank's own part of the sequences."""
    experts_in_parts: bool = False
    """Whether such a rank holds a part of every expert, even where their number divides by the ranks."""
    borders: Borders | None = None
    """Where modules begin and end, if layouts change only there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSolution:
    """The choice of every op along one axis, and where parameters are kept."""

    axis: str
    degree: int
    choices: dict[OpKey, Choice]
    parameters: dict[str, Placement]
    """Storage of each parameter, by tensor name."""
    assignment: Assignment | None
    floor: Floor = NOTHING_KNOWN
    """What any choices take, for each microbatch."""


def most_repeated(graph: Graph) -> Block:
    """The class that there are most blocks of."""
    return max(graph.blocks.values(), key=lambda block: block.count)


def repeated_share(graph: Graph, solution: AxisSolution) -> float:
    """Share of the arithmetic of products with weights that every rank of the axis repeats."""
    total = repeated = 0.0
    for (block, i), choice in solution.choices.items():
        op = graph.blocks[block].ops[i]
        if op.gemm is None or not matrix_labels(op):
            continue
        flops = graph.blocks[block].count * op.forward_flops
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


def _cut_along_sequence(op: Op, sizes: Sizes) -> frozenset[str]:
    """Labels of the sequence that another axis has cut."""
    return frozenset(d.label for d in op.dims if d.name == SEQUENCE and sizes[d.label] < d.size)


def _shares_a_dim(op: Op, choice: Choice, cut: frozenset[str]) -> bool:
    """Whether it cuts a dim of several factors, as rows of batch and sequence, that is cut already."""
    return any(
        len(axis) > 1 and choice.label in axis and cut.intersection(axis)
        for operand in (*op.reads, *op.writes)
        for axis in operand.axes
    )


def _storage_price(op: Op, local: Sizes) -> float:
    """Next to nothing for each byte of a parameter: of layouts that cost the same the smallest is stored."""
    return STORED_SECONDS_PER_BYTE * sum(operand_bytes(r, local) for r in op.reads if r.kind == "parameter")


class AxisProblem:
    """Prices the choices of one axis, and reads the solution back."""

    def __init__(
        self, graph: Graph, sizes: dict[OpKey, Sizes], axis: Axis, known: Known | None = None
    ) -> None:
        """`sizes[op]` are the extents before this axis splits anything; `known` what other problems of the
        same graph and cluster have found out."""
        self.graph, self.sizes, self.axis = graph, sizes, axis
        self._known = known or Known()
        self._times = self._known.times(axis.kernel_time, fused=axis.fused)
        self._known_even: dict[tuple[float, ...], tuple[bool, ...]] = {}
        self._known_conversions: dict[float, list[float]] = {}
        self.ops: dict[OpKey, Op] = {
            (block.name, i): op for block in graph.blocks.values() for i, op in enumerate(block.ops)
        }
        self._routed = routed_ops(graph) if axis.routes_own_tokens else frozenset()
        self._experts = self._held_experts()
        borders, degree = axis.borders, axis.degree
        self._terms = self._known.hand_on_terms(borders, degree) if borders else frozenset()
        self.choices = {key: self._choices_of(key, op) for key, op in self.ops.items()}

    def _choices_of(self, key: OpKey, op: Op) -> tuple[Choice, ...]:
        """The choices of an op; of sizes only those matter that the axis cuts evenly."""
        axis, sizes = self.axis, self.sizes[key]
        even = self._even(tuple(sizes.values()))
        routed = self._experts if key in self._routed else ""
        cut = _cut_along_sequence(op, sizes) if axis.borders else frozenset()
        hands_on = key in self._terms
        policy = (axis.name, axis.degree == 1, axis.splits_residual, axis.repeats_products, routed, cut)

        def make() -> tuple[Choice, ...]:
            tables = self.graph.table_fqns
            found = choices(op, axis=axis.name, degree=axis.degree, sizes=sizes, tables=tables, routed=routed)
            apart = tuple(c for c in found if not _shares_a_dim(op, c, cut))
            terms = (unsummed(op),) if hands_on else ()
            return found if routed else (*self._allowed(op, apart), *terms)

        return self._known.choices((key, policy, even, hands_on), make)

    def _even(self, extents: tuple[float, ...]) -> tuple[bool, ...]:
        """Which extents the axis cuts evenly."""
        if extents not in self._known_even:
            degree = self.axis.degree
            self._known_even[extents] = tuple(n >= degree and n % degree == 0 for n in extents)
        return self._known_even[extents]

    def _held_experts(self) -> str:
        """What a rank of the axis holds of the experts: some of them, if they divide, else a part of each."""
        counts = [self.sizes[key][op.experts] for key, op in self.ops.items() if op.experts]
        whole = all(n % self.axis.degree == 0 for n in counts) and not self.axis.experts_in_parts
        return WHOLE_EXPERTS if whole else PARTS_OF_EXPERTS

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

    def solve(self, *, reduce: bool = True, seconds_per_byte: Sequence[float] = (0.0,)) -> list[AxisSolution]:
        """The best choices for each weight on bytes that are kept for backward.

        Raises `SolverError` when none is possible.
        """
        frame = self._known.frame(
            self.graph,
            self.choices,
            borders=self.axis.borders,
            converts_parameters=self.axis.converts_parameters,
            reduce=reduce,
        )
        kept = frame.presolved.kept
        seconds = np.array([s for key, node in frame.nodes.items() for s in self._seconds(key, kept[node])])
        nbytes = np.zeros_like(seconds)
        if any(seconds_per_byte):
            nbytes = np.array([n for key, node in frame.nodes.items() for n in self._bytes(key, kept[node])])
        prices = np.array([self._prices(read) for read in frame.reads]).reshape(-1, len(COLLECTIVES))
        rows = seconds + np.outer(seconds_per_byte, nbytes)
        block = most_repeated(self.graph)
        own = [block.name == key[0] for key, node in frame.nodes.items() for _ in kept[node]]
        parts = (
            (seconds, frame.every_microbatch()),
            (np.where(own, seconds, 0.0), frame.every_microbatch(block.name)),
        )
        found, (total_s, block_s) = frame.presolved.solve_and_bound(rows, prices, parts)
        floor = Floor(
            total_s=total_s - self._storage_s(self.graph.blocks.values()),
            blocks_s={block.name: (block_s - self._storage_s([block])) / block.count},
        )
        return [self._solution(frame, assignment, floor) for assignment in found]

    def _storage_s(self, blocks: Iterable[Block]) -> float:
        """The most that storing parameters adds to a solution's cost (`_storage_price`)."""
        return sum(
            block.count * _storage_price(op, self.sizes[block.name, i])
            for block in blocks
            for i, op in enumerate(block.ops)
        )

    def _solution(self, frame: Frame, assignment: Assignment, floor: Floor) -> AxisSolution:
        chosen = {key: self.choices[key][assignment.states[node]] for key, node in frame.nodes.items()}
        return AxisSolution(
            axis=self.axis.name,
            degree=self.axis.degree,
            choices=chosen,
            parameters=_stored(self.graph, chosen, frame, assignment),
            assignment=assignment,
            floor=floor,
        )

    def only(self) -> AxisSolution:
        """The single choice of every op on an axis of one rank."""
        chosen = {key: options[0] for key, options in self.choices.items()}
        return AxisSolution(
            axis=self.axis.name,
            degree=1,
            choices=chosen,
            parameters=_stored(self.graph, chosen),
            assignment=None,
        )

    # ------------------------------------------------------------------ costs

    def _seconds(self, key: OpKey, states: Matrix) -> list[float]:
        """Of an op in the whole model, under some of its choices."""
        op, count, options = self.ops[key], self.graph.blocks[key[0]].count, self.choices[key]
        return [count * self._op_cost(op, self.sizes[key], options[i]) for i in states]

    def _bytes(self, key: OpKey, states: Matrix) -> list[float]:
        """What one device keeps of an op in the whole model for backward, under some of its choices."""
        count, options = self.graph.blocks[key[0]].count, self.choices[key]
        return [count * self._saved_bytes(key, options[i]) for i in states]

    def _op_cost(self, op: Op, sizes: Sizes, choice: Choice) -> float:
        local = local_sizes(op, choice, sizes, self.axis.degree)
        forward, backward = self._times(op, local, imbalance(op, choice, self.axis.degree))
        seconds = forward.seconds + backward.seconds + _storage_price(op, local)
        if not choice.inner:
            return seconds
        return seconds + sum(
            count * self._exposed(collective, nbytes)
            for collective, nbytes, count, _ in inner_exchanges(op, choice, sizes, self.axis.degree)
        )

    def _saved_bytes(self, key: OpKey, choice: Choice) -> float:
        op = self.ops[key]
        local = local_sizes(op, choice, self.sizes[key], self.axis.degree)
        shrunk = self.axis.keeps_shards and choice.kind == "split"
        return sum(
            nbytes / self.axis.degree if shrunk and self._whole_read(choice, saved.operand) else nbytes
            for saved, nbytes in zip(op.saved, saved_bytes(op, local), strict=True)
        )

    @staticmethod
    def _whole_read(choice: Choice, operand: int | None) -> bool:
        return operand is not None and operand >= 0 and isinstance(choice.reads[operand], Replicate)

    def _exposed(self, collective: Collective, nbytes: float) -> float:
        return self.axis.collective_time(collective, nbytes).seconds * (1.0 - self.axis.overlap)

    def _prices(self, read: Read) -> list[float]:
        """Seconds of each conversion of a tensor in the whole model."""
        nbytes = operand_bytes(self.ops[read.op].reads[read.operand], self.sizes[read.op])
        return [read.count * seconds for seconds in self._conversions_s(nbytes)]

    def _conversions_s(self, nbytes: float) -> list[float]:
        if nbytes not in self._known_conversions:
            shares = {Collective.ALL_TO_ALL: 1 / self.axis.degree}
            self._known_conversions[nbytes] = [
                self._exposed(c, nbytes * shares.get(c, 1.0)) for c in COLLECTIVES
            ]
        return self._known_conversions[nbytes]


def _stored(
    graph: Graph,
    chosen: dict[OpKey, Choice],
    frame: Frame | None = None,
    assignment: Assignment | None = None,
) -> dict[str, Placement]:
    """The layout of every parameter: its reader's, or what was chosen for those with several."""
    stored = {
        t: chosen[readers[0][0]].reads[readers[0][1]] for t, readers in parameter_readers(graph).items()
    }
    if frame and assignment:
        for tensor, (node, layouts) in frame.parameter_nodes.items():
            stored[tensor] = layouts[assignment.states[node]]
    return stored


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
