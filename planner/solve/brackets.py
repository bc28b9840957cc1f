"""Bounds and feasible stages without a solver.

In: a `StageProblem`. Out: lower bounds of the pipeline's time (`bound_s`, quick; `bracket`, closer,
with a feasible plan) and the memory with which something fits (`least_capacity_bytes`).

`bracket` finds the smallest T for which filling ranks one after the other, each with all it can
take within T, reaches the end of the chain. Filling as far as possible is optimal, because part of
an interval that fits also fits. The bound then adds the least recomputation that memory forces in
total (`cheapest_s`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..estimate.step import pipeline_s
from .intervals import Intervals, Modes, Option, StageProblem, deal, simplest
from .relaxed import ROUNDING, alone, crowded_s, spared
from .solver import Status

PRECISION = 1e-6
"""Of T in the bracket, as a share of it: far below any model error."""
BISECTIONS = 40
"""Most halvings of the interval for T."""
CAPACITY_STEP = 1e-3
"""Precision of `least_capacity_bytes`, as a share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Blocks and modes of every rank, and what is proven about them."""

    status: Status
    cuts: tuple[int, ...] = ()
    """Position where each rank begins, and the chain's length."""
    ranks: tuple[Modes, ...] = ()
    objective_s: float = math.inf
    bound_s: float = 0.0
    solver: str = ""


NOTHING_FITS = StagePlan(status=Status.INFEASIBLE, bound_s=math.inf, solver="closed form")


def cheapest_s(problem: StageProblem) -> float:
    """A lower bound on the seconds of all blocks: recompute what memory forces, block by fraction.

    Dividing each rank's memory row by its microbatches in flight and adding them up leaves one
    knapsack: sum of saved bytes <= sum_s capacity / in_flight_s - static / max in_flight.
    Infinite when even full recomputation cannot fit.
    """
    counts = {name: problem.chain.count(name) for name in dict.fromkeys(problem.chain)}
    static = sum(n * problem.classes[name].static_bytes for name, n in counts.items())
    floor = min(min(problem.classes[name].transient_bytes.values()) for name in counts)
    if static + problem.stages * floor > problem.stages * problem.capacity_bytes:
        return math.inf
    room = sum((problem.capacity_bytes - floor) / k for k in problem.in_flight)
    room -= static / max(problem.in_flight)
    return spared(counts, problem.classes).seconds_within(room, ROUNDING * problem.capacity_bytes)


def bound_s(problem: StageProblem) -> float:
    """A quick lower bound on the pipeline's time; infinite when it is plain that nothing fits."""
    total = cheapest_s(problem)
    if math.isinf(total):
        return math.inf
    slowest = max(total / problem.stages, _crowded_s(problem)) + problem.stage_s
    return pipeline_bound(problem, slowest, total + problem.stages * problem.stage_s)


def _crowded_s(problem: StageProblem) -> float:
    """What the fullest rank takes for blocks of one class, in equal pieces where these are."""
    lacks = problem.lacks if len(problem.layer_classes) == 1 else None
    return max(
        crowded_s(
            problem.chain.count(name),
            alone(name, problem.classes),
            capacity_bytes=problem.capacity_bytes,
            in_flight=problem.in_flight,
            pieces=problem.virtual_stages,
            lacks=lacks if name in problem.layer_classes else None,
        )
        for name in set(problem.chain)
    )


def pipeline_bound(problem: StageProblem, slowest: float, total: float) -> float:
    """The pipeline's time when its slowest rank takes `slowest` and all ranks together `total` seconds."""
    share = problem.share
    return (problem.microbatches - share) * slowest + share * total


def can_beat(intervals: Intervals, seconds: float) -> bool:
    """Whether some partition's pipeline could take less than `seconds`: False is a proof that none does."""
    problem = intervals.problem
    total, weight = cheapest_s(problem), problem.microbatches - problem.share
    if math.isinf(seconds) or math.isinf(total) or weight <= 0:
        return True
    everyone = total + problem.stages * problem.stage_s
    limit = (seconds - problem.share * everyone) / weight - problem.stage_s
    return limit >= total / problem.stages and fill(intervals, limit * (1 + ROUNDING)) is not None


def bracket(problem: StageProblem, intervals: Intervals | None = None) -> StagePlan:
    """A feasible plan and a lower bound: status optimal when they meet, infeasible when nothing fits."""
    intervals = intervals or Intervals(problem)
    total = cheapest_s(problem)
    if math.isinf(total):
        return NOTHING_FITS
    low = max(total / problem.stages, _crowded_s(problem))
    found = smallest_limit(intervals, low)
    if found is None:
        return NOTHING_FITS
    low, cuts = found
    plan = read_cuts(intervals, cuts)
    bound = pipeline_bound(problem, low + problem.stage_s, total + problem.stages * problem.stage_s)
    status = Status.OPTIMAL if bound >= plan.objective_s * (1 - 1e-9) else Status.STOPPED
    return replace(plan, status=status, bound_s=min(bound, plan.objective_s), solver="closed form")


def smallest_limit(intervals: Intervals, low: float) -> tuple[float, tuple[int, ...]] | None:
    """(a limit below which no partition stays, cuts of a partition just above it)."""
    if fill(intervals, intervals.problem.capacity_bytes, by_bytes=True) is None:
        return None
    below, high = low * (1 - 1e-12), low * (1 + 1e-12)
    cuts = fill(intervals, high)
    while cuts is None:
        below, high = high, high * 1.0625
        cuts = fill(intervals, high)
    high = _slowest(intervals, cuts)
    for _ in range(BISECTIONS):
        if high - below <= PRECISION * high:
            break
        tried = fill(intervals, (below + high) / 2)
        if tried is None:
            below = (below + high) / 2
        else:
            cuts, high = tried, _slowest(intervals, tried)
    return max(below, low), cuts


def fill(intervals: Intervals, limit: float, *, by_bytes: bool = False) -> tuple[int, ...] | None:
    """Cuts when every rank takes all it can within `limit`; None when that misses the end.

    The limit is on a rank's seconds, with memory as it is, or (`by_bytes`) on its least memory.
    """
    problem, end, cuts = intervals.problem, len(intervals.problem.chain), [0]
    for rank in range(problem.stages):
        later = problem.stages - rank - 1
        furthest = None
        for stop in stops(intervals, cuts[-1], later):
            if by_bytes and intervals.least_bytes(rank, cuts[-1], stop) > limit:
                break
            if not by_bytes and intervals.best(rank, cuts[-1], stop, limit_s=limit) is None:
                break
            furthest = stop
        if furthest is None:
            return None
        cuts.append(furthest)
    return tuple(cuts) if cuts[-1] == end else None


def stops(intervals: Intervals, start: int, later: int) -> Iterator[int]:
    """Where a rank that begins at `start` may end so that `later` ranks still get their layers."""
    problem, end = intervals.problem, len(intervals.problem.chain)
    least = problem.virtual_stages
    for stop in range(start + 1, end + 1):
        if (stop == end) != (later == 0) and stop == end:
            return
        if intervals.layers(stop, end) < later * least:
            return
        if not _pieces_equal(intervals, start, stop, problem.stages - 1 - later):
            continue
        if intervals.layers(start, stop) >= least and (problem.cuts is None or stop in problem.cuts):
            yield stop


def _pieces_equal(intervals: Intervals, start: int, stop: int, rank: int) -> bool:
    """Whether a rank's layers go into equal pieces, those apart that its ends lack."""
    lacks = intervals.problem.lacks
    held = intervals.layers(start, stop)
    return lacks is None or (held + lacks[rank]) % intervals.problem.virtual_stages == 0


def _slowest(intervals: Intervals, cuts: Sequence[int]) -> float:
    return max(option.seconds for option in _chosen(intervals, cuts))


def _chosen(intervals: Intervals, cuts: Sequence[int]) -> list[Option]:
    chosen = []
    for rank, (start, stop) in enumerate(pairwise(cuts)):
        option = intervals.best(rank, start, stop)
        assert option is not None
        chosen.append(option)
    return chosen


def read_cuts(intervals: Intervals, cuts: Sequence[int]) -> StagePlan:
    """The plan of given cuts, with its objective."""
    problem, options = intervals.problem, _chosen(intervals, cuts)
    seconds = [option.seconds + problem.stage_s for option in options]
    objective = pipeline_s(seconds, microbatches=problem.microbatches, virtual_stages=1 / problem.share)
    ranks = tuple(
        simplest(intervals.problem_of(rank), rank, deal(problem.chain[start:stop], option))
        for rank, (start, stop, option) in enumerate(zip(cuts, cuts[1:], options, strict=False))
    )
    return StagePlan(status=Status.STOPPED, cuts=tuple(cuts), ranks=ranks, objective_s=objective)


def least_capacity_bytes(problem: StageProblem) -> float:
    """The capacity with which some partition just fits, to `CAPACITY_STEP`, from above."""
    intervals = Intervals(problem)
    low, high = 0.0, max(problem.capacity_bytes, 1.0)
    while fill(intervals, high, by_bytes=True) is None:
        low, high = high, 2 * high
    while high - low > CAPACITY_STEP * high:
        middle = (low + high) / 2
        fits = fill(intervals, middle, by_bytes=True) is not None
        low, high = (low, middle) if fits else (middle, high)
    return high
