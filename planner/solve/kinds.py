"""Contiguous blocks to pipeline stages when the ranks are of several kinds: an exact dynamic programme.

In: one `Costed` per rank (the candidate with the costs of that rank's kind). Out: a `StagePlan`: cuts and
modes with the fastest step, or that nothing fits.

Nothing in `stages` needs ranks to be alike: a path through the chain has one arc per rank, and an arc's
seconds, modes and once-per-step part may be those of the rank's own kind. `KindIntervals` answers for each
rank with its kind's seconds (hand-over included), against its kind's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .balance import arc_modes, fastest_step
from .brackets import NOTHING_FITS, StagePlan, fill, pipeline_bound, read_cuts, smallest_limit
from .costed import Costed
from .intervals import Intervals, Option, StageProblem
from .solver import Status
from .stages import useful_arcs


class KindIntervals(Intervals):
    """What each rank takes for each interval of the chain, by the rank's kind."""

    def __init__(self, ranks: Sequence[Costed]) -> None:
        problems = {id(costed): costed.stage_problem for costed in ranks}
        super().__init__(replace(ranks[0].stage_problem, stage_s=0.0))
        made = {key: Intervals(problem) for key, problem in problems.items()}
        self._of = [made[id(costed)] for costed in ranks]

    def problem_of(self, rank: int) -> StageProblem:
        """The seconds and bytes of the rank's kind."""
        return self._of[rank].problem

    def least_bytes(self, rank: int, start: int, stop: int) -> float:
        """Memory of these blocks under the leanest modes, as a share of what the rank may use."""
        capacity = self.problem_of(rank).capacity_bytes
        if capacity <= 0:
            return math.inf
        return self._of[rank].least_bytes(rank, start, stop) * self.problem.capacity_bytes / capacity

    def best(self, rank: int, start: int, stop: int, *, limit_s: float = math.inf) -> Option | None:
        """The fastest modes on this rank, its hand-over included."""
        stage_s = self.problem_of(rank).stage_s
        option = self._of[rank].best(rank, start, stop, limit_s=limit_s - stage_s)
        return Option(option.seconds + stage_s, option.modes) if option else None


def least_sum_s(ranks: Sequence[Costed]) -> float:
    """No stages and modes let the ranks together take fewer seconds for a microbatch."""
    kinds = {id(costed): costed for costed in ranks}.values()
    blocks = sum(
        n * min(min(costed.classes[name].seconds.values()) for costed in kinds)
        for name, n in ranks[0].problem.counts.items()
    )
    return blocks + sum(costed.stage_problem.stage_s for costed in ranks)


def least_slowest_s(ranks: Sequence[Costed]) -> float:
    """Some rank takes at least this long: work divided by fractions, to each rank by its speed.

    Work is counted in one kind's seconds; a rank of another kind does at most as much of it per second as
    with the blocks that suit it best. Any kind may be the one that counts: the best bound stands.
    """
    times = {
        id(costed): {name: min(costed.classes[name].seconds.values()) for name in costed.problem.counts}
        for costed in ranks
    }
    bounds = []
    for unit in times.values():
        work = sum(n * unit[name] for name, n in ranks[0].problem.counts.items())
        speed = sum(_speed(unit, times[id(costed)]) for costed in ranks)
        bounds.append(work / speed)
    return max(bounds) + min(costed.stage_problem.stage_s for costed in ranks)


def _speed(unit: Mapping[str, float], taken: Mapping[str, float]) -> float:
    """The most work, in `unit`, that is done in a second when blocks take `taken`."""
    return max((unit[name] / taken[name] for name in unit if taken[name] > 0), default=math.inf)


def bound_s(ranks: Sequence[Costed]) -> float:
    """No stages and modes make the step faster than this."""
    once = min(costed.problem.framework.step_overhead_s for costed in ranks)
    return pipeline_bound(ranks[0].stage_problem, least_slowest_s(ranks), least_sum_s(ranks)) + once


def fastest(ranks: Sequence[Costed]) -> StagePlan:
    """The stages with the fastest step; `bound_s` of the plan bounds the whole step."""
    intervals = KindIntervals(ranks)
    problem = intervals.problem
    if problem.capacity_bytes <= 0 or fill(intervals, math.inf) is None:
        return NOTHING_FITS
    least_sum, overhead_s = least_sum_s(ranks), ranks[0].problem.framework.step_overhead_s
    low = max(least_slowest_s(ranks), least_sum / problem.stages)
    found = smallest_limit(intervals, low)
    if found is None:
        return NOTHING_FITS
    start = read_cuts(intervals, found[1])
    pipeline = pipeline_bound(problem, found[0], least_sum)
    once_s = max(costed.once_s(modes) for costed, modes in zip(ranks, start.ranks, strict=True))
    reach = replace(start, objective_s=start.objective_s + once_s)
    arcs = useful_arcs(intervals, reach, least_sum)
    if arcs is None:
        return replace(start, bound_s=pipeline + overhead_s, solver="closed form")
    onces = {arc: ranks[arc[0]].once_s(arc_modes(intervals, arc)) for arc in arcs}
    step_s = start.objective_s + once_s
    better = fastest_step(intervals, arcs, onces, step_s=step_s, pipeline_s=pipeline)
    best = better or start
    once_s = max(costed.once_s(modes) for costed, modes in zip(ranks, best.ranks, strict=True))
    bound = best.objective_s + once_s + overhead_s
    return replace(best, status=Status.OPTIMAL, bound_s=bound, solver="dynamic programme")
