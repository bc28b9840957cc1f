"""The intra-op frontier: split dims of every op for a mesh slice and a microbatch, and their costs.

The data axis only shrinks the batch; context, expert and tensor axes are solved one after the other,
each as a choice graph over the whole folded model (`axis`). Sweeping the weight
on saved bytes gives the frontier: usually the fastest splits and the leanest, e.g. all-reduces
with a whole residual against reduce-scatters and all-gathers with a residual split over sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce

from ..borders import Borders, OpKey
from ..cost import Estimate, IntraSolution, Origin, Work
from ..errors import SolverError
from ..estimate.op_work import Sizes
from ..graph import Graph
from ..layout import Collective, Placement, Shard
from ..mesh import Mesh
from ..problem import NOTHING_KNOWN, Floor
from ..profile import Framework, hidden_share
from ..topology import Device, GroupSpan, Topology
from .axis import Axis, AxisProblem, AxisSolution, local_sizes, repeated_share
from .block_cost import block_costs
from .frame import Known

SECONDS_PER_BYTE = (0.0, 2e-12)
"""Weights on saved bytes, swept for the frontier, in seconds per byte and microbatch: none, and about
what it takes to write a byte to 1 TB/s memory and read it again."""

POINTS_APART = 1e-3
"""A point of the frontier that is less than this share better by its own weight than one before it is none of
its own: far below any model error."""

BETWEEN_NODES_SLOWDOWN = 1.8
"""Collectives of a tensor group that spans nodes against the same ones timed alone. Every layer waits for
them while pipeline and data traffic share the links. Set so that tp=16 on nodes of 8 takes about twice tp=8
for a 3.6B GPT on 64 A100, as vTrain measured (2.13x; timed alone they would give 1.55x); one case, and a
judgement elsewhere."""
MAX_REPEATED_SHARE = 0.5
"""A tensor axis on which every rank repeats more than this share of the products is data parallelism done
badly: it is solved again with every product split, and then has to win on its merits."""

SEQUENCE = "sequence"

Degrees = tuple[int, int, int]
"""Sizes of cp, ep and tp."""
Spans = tuple[GroupSpan, GroupSpan, GroupSpan]
"""Where their groups lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The cost models that the solver asks."""

    kernel_time: Callable[[Work, Device], Estimate]
    collective_time: Callable[[Collective, float, GroupSpan], Estimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The choices behind an intra-op solution: per axis, and the extents they were made at."""

    ep: AxisSolution
    tp: AxisSolution
    before_ep: dict[OpKey, Sizes]
    before_tp: dict[OpKey, Sizes]
    local: dict[OpKey, Sizes]
    cp: AxisSolution | None = None
    """None without context parallelism."""
    before_cp: dict[OpKey, Sizes] | None = None


class IntraOp:
    """Frontiers of one graph on one cluster: a memoised function of a mesh and a microbatch."""

    def __init__(
        self,
        graph: Graph,
        topology: Topology,
        framework: Framework,
        prices: Prices,
        *,
        sequence_parallel: bool = True,
    ) -> None:
        """`sequence_parallel`: whether tp may split what lies between products (along the sequence)."""

        @cache
        def work_time(work: Work) -> Estimate:
            return prices.kernel_time(work, topology.device)

        self._solver = _Solver(graph, topology, framework, prices, work_time, sequence_parallel)
        self._topology, self._tied = topology, has_tied_parameters(graph)
        self._frontier = cache(self._solutions)

    def __call__(self, mesh: Mesh, micro_batch: int) -> tuple[IntraSolution, ...]:
        """The frontier, fastest first; empty when impossible."""
        return self._frontier(*self._slice(mesh), micro_batch, self._separates_tied(mesh))

    def again(self, mesh: Mesh, solution: IntraSolution) -> IntraSolution:
        """The splits of a solution, whatever they were found for, at this cluster's prices."""
        assert isinstance(solution.splits, Splits)
        pipelined = self._separates_tied(mesh)
        return self._solver.solution(solution.splits, *self._slice(mesh), pipelined=pipelined)

    def floor(self, mesh: Mesh, micro_batch: int) -> Floor:
        """What any splits take, as far as it is known."""
        return self._solver.floor(*self._slice(mesh), micro_batch)

    def splits_floor(self, mesh: Mesh, micro_batch: int) -> Floor:
        """The same of the frontier's own splits, before they are costed block by block."""
        return self._solver.splits_floor(*self._slice(mesh), micro_batch)

    def _separates_tied(self, mesh: Mesh) -> bool:
        return self._tied and mesh.pp > 1

    def _slice(self, mesh: Mesh) -> tuple[Degrees, Spans]:
        return (mesh.cp, mesh.ep, mesh.tp), spans_of(self._topology, mesh)

    def _solutions(
        self, degrees: Degrees, spans: Spans, micro_batch: int, pipelined: bool
    ) -> tuple[IntraSolution, ...]:
        found = self._solver.splits(degrees, spans, micro_batch)
        return tuple(self._solver.solution(s, degrees, spans, pipelined=pipelined) for s, _ in found)


def spans_of(topology: Topology, mesh: Mesh) -> Spans:
    """Where the groups of cp, ep and tp lie."""
    cp, ep, tp = (topology.span(size=mesh.size(a), stride=mesh.stride(a)) for a in ("cp", "ep", "tp"))
    return cp, ep, tp


class _Solver:
    """One graph on one cluster; beyond its inputs it remembers which conversions there may be."""

    def __init__(
        self,
        graph: Graph,
        topology: Topology,
        framework: Framework,
        prices: Prices,
        work_time: Callable[[Work], Estimate],
        sequence_parallel: bool,
    ) -> None:
        self._graph, self._topology, self._framework = graph, topology, framework
        self._prices, self._work_time = prices, work_time
        self._sequence_parallel = sequence_parallel
        self._known = Known()
        self._borders = Borders(graph) if framework.converts_on_borders else None
        self._weights = SECONDS_PER_BYTE if _keeps_anything(graph) else SECONDS_PER_BYTE[:1]
        self._unsplit: dict[str, AxisSolution] = {}
        """The only choices along an axis of one rank: the same at all extents."""
        self.splits = cache(self._splits)
        self._outer = cache(self._outside)
        self._exchanges, self._in_parts = cache(self._least_exchanges), cache(self._experts_in_parts)

    def floor(self, degrees: Degrees, spans: Spans, micro_batch: int) -> Floor:
        """The floor of `IntraOp.floor`.

        Where one axis alone splits anything its solver proves it. With ep beside tp: `ep` times as many
        samples on a tensor group alone take no longer than `ep` such groups that share them (kernels and
        messages are as large or larger; `batch_slack` says what that can cost), and what experts exchange
        comes on top, in the `tp` parts of a group at best. Such a group holds its experts as they are held
        beside ep: whole ones, or a part of each.
        """
        cp, ep, tp = degrees
        alone = (cp > 1) + (ep > 1) + (tp > 1) <= 1
        if alone:
            return self.splits_floor(degrees, spans, micro_batch)
        if cp > 1:
            return NOTHING_KNOWN
        if self._splits_experts_alike(ep, tp):
            one = GroupSpan(members=(1,) * len(spans[2].members))
            together = self.splits_floor((1, 1, tp), (one, one, spans[2]), micro_batch * ep)
        else:
            together = self._in_parts(tp, spans[2], micro_batch * ep)
        return together.times(1 / ep).plus(self._exchanges(ep, spans[1], micro_batch).times(1 / tp))

    def splits_floor(self, degrees: Degrees, spans: Spans, micro_batch: int) -> Floor:
        """Of `IntraOp.splits_floor`."""
        known = (floor for _, floor in self.splits(degrees, spans, micro_batch))
        return reduce(Floor.raised, known, NOTHING_KNOWN)

    def _splits_experts_alike(self, ep: int, tp: int) -> bool:
        """Whether tp splits experts beside ep as it does alone: by their number, or each in parts."""
        ops = (op for block in self._graph.blocks.values() for op in block.ops)
        counts = {dim.size for op in ops for dim in op.dims if dim.label == op.experts}
        return not self._framework.routes_own_tokens or all(
            (n % tp == 0) == (n % (ep * tp) == 0) for n in counts
        )

    def _least_exchanges(self, ep: int, span: GroupSpan, micro_batch: int) -> Floor:
        """What ranks of ep exchange at least, computation not counted."""
        axis = replace(self._axis("ep", ep, span), kernel_time=_no_time)
        sizes = traced_sizes(self._graph, batch=micro_batch * ep)
        return reduce(Floor.raised, (found.floor for found in self._along(axis, sizes)), NOTHING_KNOWN)

    def _experts_in_parts(self, tp: int, span: GroupSpan, batch: int) -> Floor:
        """What a tensor group alone takes at least whose ranks hold a part of every expert."""
        axis = replace(self._axis("tp", tp, span), experts_in_parts=True)
        found = self._along(axis, traced_sizes(self._graph, batch=batch))
        return reduce(Floor.raised, (solution.floor for solution in found), NOTHING_KNOWN)

    def _splits(self, degrees: Degrees, spans: Spans, micro_batch: int) -> tuple[tuple[Splits, Floor], ...]:
        """Distinct splits, for one weight on memory after the other; empty when the graph allows none.

        Beside each is a floor of what any of them take, as far as it is known.
        """
        if self._graph.seq_len % degrees[0]:
            return ()
        cp, ep, tp = degrees
        outer = self._outer(degrees[:2], spans[:2], micro_batch)
        if outer is None:
            return ()
        beside = cp == 1 and min(ep, tp) > 1
        exchanges = self._exchanges(ep, spans[1], micro_batch).times(1 / tp) if beside else None
        return self._inner(self._axis("tp", tp, spans[2]), *outer, exchanges=exchanges)

    def _outside(
        self, degrees: tuple[int, int], spans: tuple[GroupSpan, GroupSpan], micro_batch: int
    ) -> tuple[list[AxisSolution], list[dict[OpKey, Sizes]]] | None:
        """Splits over cp and ep, and the extents before each axis and after both; None if there are none."""
        solutions: list[AxisSolution] = []
        before = [traced_sizes(self._graph, batch=micro_batch * degrees[1])]
        for name, degree, span in zip(("cp", "ep"), degrees, spans, strict=True):
            found = self._along(self._axis(name, degree, span), before[-1])
            if not found:
                return None
            solutions += found
            before.append(after(self._graph, before[-1], *found))
        return solutions, before

    def _inner(
        self,
        axis: Axis,
        outer: list[AxisSolution],
        before: list[dict[OpKey, Sizes]],
        *,
        exchanges: Floor | None,
    ) -> tuple[tuple[Splits, Floor], ...]:
        """The splits over tp, under those of the axes before it; what these exchange beside tp, if known."""
        sizes, weights = before[-1], self._weights if axis.degree > 1 else self._weights[:1]
        free = self._along(axis, sizes, weights)
        strict: list[AxisSolution] = []
        if any(repeated_share(self._graph, tp) > MAX_REPEATED_SHARE for tp in free):
            strict = self._along(replace(axis, repeats_products=False), sizes, weights)
            if not strict:
                return ()
        found: list[tuple[Splits, Floor]] = []
        for place, tp in enumerate(free):
            floor = _proven(*outer, tp, exchanges=exchanges)
            if repeated_share(self._graph, tp) > MAX_REPEATED_SHARE:
                tp = strict[place]
            if not any(_nearly_as_good(splits.tp, tp, place) for splits, _ in found):
                found.append((self._chosen(outer, before, tp), floor))
        return tuple(found)

    def _along(
        self, axis: Axis, sizes: dict[OpKey, Sizes], weights: Sequence[float] = (0.0,)
    ) -> list[AxisSolution]:
        """The best choices along one axis for each weight on memory; empty when none are possible."""
        if axis.degree == 1 and axis.name in self._unsplit:
            return [self._unsplit[axis.name]]
        problem = AxisProblem(self._graph, sizes, axis, self._known)
        if not problem.possible():
            return []
        if axis.degree == 1:
            return [self._unsplit.setdefault(axis.name, problem.only())]
        try:
            return problem.solve(seconds_per_byte=weights)
        except SolverError:
            return []

    def _chosen(
        self, outer: list[AxisSolution], before: list[dict[OpKey, Sizes]], tp: AxisSolution
    ) -> Splits:
        return Splits(
            cp=outer[0],
            ep=outer[1],
            tp=tp,
            before_cp=before[0],
            before_ep=before[1],
            before_tp=before[2],
            local=after(self._graph, before[2], tp),
        )

    def _axes(self, degrees: Degrees, spans: Spans) -> tuple[Axis, ...]:
        named = zip(("cp", "ep", "tp"), degrees, spans, strict=True)
        return tuple(self._axis(name, degree, span) for name, degree, span in named)

    def _axis(self, name: str, degree: int, span: GroupSpan) -> Axis:
        return Axis(
            name=name,
            degree=degree,
            kernel_time=self._work_time,
            collective_time=self._group_time(name, span),
            overlap=hidden_share(self._framework, name),
            fused=self._framework.fuses_pointwise,
            keeps_shards=not self._framework.saves_gathered_input,
            networks=span.members[-1] if len(span.members) > 1 else 1,
            splits_residual=self._sequence_parallel or name != "tp",
            converts_parameters=self._framework.converts_parameters,
            routes_own_tokens=self._framework.routes_own_tokens and name == "tp",
            borders=self._borders if name == "tp" else None,
        )

    def _group_time(self, name: str, span: GroupSpan) -> Callable[[Collective, float], Estimate]:
        """Price of a collective over the groups of an axis, as it runs inside layers."""
        crosses = name == "tp" and len(span.members) > 1 and span.members[-1] > 1
        slowdown = BETWEEN_NODES_SLOWDOWN if crosses else 1.0

        def group_time(collective: Collective, nbytes: float) -> Estimate:
            estimate = self._prices.collective_time(collective, nbytes, span)
            return estimate if slowdown == 1.0 else replace(estimate, seconds=estimate.seconds * slowdown)

        return group_time

    def solution(self, splits: Splits, degrees: Degrees, spans: Spans, *, pipelined: bool) -> IntraSolution:
        """What these splits cost here. `pipelined`: whether blocks may lie on different stages."""
        axes, levels = self._axes(degrees, spans), [self._topology.levels[s.outermost].name for s in spans]
        times = self._known.times(self._work_time, fused=self._framework.fuses_pointwise)
        blocks = block_costs(
            self._graph, splits, axes, tuple(levels), self._framework, times, pipelined=pipelined
        )
        seconds = sum(
            self._graph.blocks[name].count * (cost.forward_s + cost.backward_s)
            for name, cost in blocks.items()
        )
        comm = sum(
            self._graph.blocks[name].count * c.seconds * c.count
            for name, cost in blocks.items()
            for c in (*cost.forward_comm, *cost.backward_comm)
        )
        assignment = splits.tp.assignment
        return IntraSolution(
            blocks=blocks,
            sequence_parallel=is_sequence_parallel(self._graph, splits.tp),
            objective_s=seconds + comm,
            bound_s=seconds + comm if assignment is None or assignment.optimal else assignment.bound,
            optimal=assignment is None or assignment.optimal,
            splits=splits,
        )


def _proven(*axes: AxisSolution, exchanges: Floor | None) -> Floor:
    """What any splits take where one axis alone splits anything: what was proven.

    Under splits of ep that exchange something, what any splits over tp take and that. Else nothing is known.
    """
    split = [solution for solution in axes if solution.degree > 1]
    if exchanges is None:
        return split[-1].floor if len(split) == 1 else NOTHING_KNOWN
    return split[-1].floor.plus(exchanges)


def _nearly_as_good(before: AxisSolution, solution: AxisSolution, row: int) -> bool:
    """Whether splits that are the best by one weight are all but the best by another (`POINTS_APART`)."""
    if before.assignment is None or solution.assignment is None:
        return before.choices == solution.choices
    return before.assignment.costs[row] <= solution.assignment.cost * (1 + POINTS_APART)


def _no_time(work: Work) -> Estimate:
    return Estimate(seconds=0.0, origin=Origin.MODELLED)


def _keeps_anything(graph: Graph) -> bool:
    """Whether memory can weigh on the splits: a pass without gradients keeps nothing."""
    return any(op.saved for block in graph.blocks.values() for op in block.ops)


def has_tied_parameters(graph: Graph) -> bool:
    """Whether two blocks read the same parameter, as an embedding and a head with one table do."""
    readers: dict[str, str] = {}
    for block in graph.blocks.values():
        for op in block.ops:
            for read in op.reads:
                if read.kind == "parameter" and readers.setdefault(read.tensor, block.name) != block.name:
                    return True
    return False


def traced_sizes(graph: Graph, *, batch: int) -> dict[OpKey, Sizes]:
    """Extent of every dim at a batch of `batch` samples."""
    result = {}
    for block in graph.blocks.values():
        for i, op in enumerate(block.ops):
            sizes: Sizes = {}
            for dim in op.dims:
                size = float(dim.size)
                if dim.name == "batch":
                    size *= batch / graph.batch
                sizes[dim.label] = size
            result[block.name, i] = sizes
    return result


def after(graph: Graph, sizes: dict[OpKey, Sizes], solution: AxisSolution) -> dict[OpKey, Sizes]:
    """Local extents after an axis is split."""
    return {
        key: local_sizes(graph.blocks[key[0]].ops[key[1]], choice, sizes[key], solution.degree)
        for key, choice in solution.choices.items()
    }


def is_sequence_parallel(graph: Graph, solution: AxisSolution) -> bool:
    """Whether what the repeated layers hand on is split over the sequence."""
    handed: list[Placement] = []
    for name, place in graph.boundary.items():
        if place is not None and graph.blocks[name].repeated:
            handed.append(solution.choices[name, place[0]].writes[place[1]])
    return bool(handed) and all(isinstance(p, Shard) and p.dim == SEQUENCE for p in handed)
