"""Contiguous blocks to pipeline stages, with a recompute mode for every block: an exact ILP.

In: a `StageProblem` (seconds and bytes per block class and mode). Out: a `StagePlan`.

A rank that holds blocks i .. j-1 of the chain takes g_s(i, j) seconds per microbatch: the fastest
choice of modes whose memory

    static + in_flight_s * saved + largest transient  <=  capacity

holds (`Intervals.best`: exact; computed once for intervals with the same block counts).
Cutting the chain is then a path through positions 0 .. N with one arc per rank. `solve_stages`
writes it as an ILP over the arcs that could still be part of a best answer:

    x[s, i, j]   1 when rank s holds blocks i .. j-1; flow is conserved at every (s, position)
    T            at least every rank's time
    minimise     (m - 1/v) T + sum of g / v        the pipeline's time (`estimate.step.pipeline_s`)

The same optimum comes faster from a dynamic programme over T (`shortest`), which the search uses
to compare candidates; the ILP has the last word on the winner. Both start from `brackets.bracket`.

With v > 1 virtual stages a rank holds v pieces of the chain; the caller then gives the chain in the
order that ranks hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .brackets import StagePlan, bracket, cheapest_s, pipeline_bound, read_cuts, stops
from .intervals import Intervals, StageProblem
from .solver import Status, solve

if TYPE_CHECKING:
    import pulp

MAX_ARCS = 6_000
"""Beyond this the ILP is not written, and the bracket's bound stands (it happens only where the
slowest rank hardly matters, i.e. with very few microbatches)."""

Arc = tuple[int, int, int]
"""(rank, first block, one past the last block)."""


def shortest(problem: StageProblem, intervals: Intervals | None = None) -> StagePlan:
    """The same optimum as `solve_stages`, by dynamic programming: for each T, the least total.

    Only as many values of T are tried as could still win. Falls back to `bracket` when there are
    more than `MAX_ARCS` arcs.
    """
    intervals = intervals or Intervals(problem)
    best = bracket(problem, intervals)
    if best.status is not Status.STOPPED:
        return best
    arcs = useful_arcs(intervals, best, cheapest_s(problem) + problem.stages * problem.stage_s)
    if arcs is None:
        return best
    least, _ = least_total(problem, arcs, math.inf) or (0.0, ())
    for limit in sorted(set(arcs.values())):
        if pipeline_bound(problem, limit + problem.stage_s, least) >= best.objective_s * (1 - 1e-12):
            break
        found = least_total(problem, arcs, limit)
        if found is None:
            continue
        plan = read_cuts(intervals, found[1])
        if plan.objective_s < best.objective_s:
            best = plan
    return replace(best, status=Status.OPTIMAL, bound_s=best.objective_s, solver="dynamic programme")


def least_total(
    problem: StageProblem, arcs: Mapping[Arc, float], limit_s: float
) -> tuple[float, tuple[int, ...]] | None:
    """Least sum of the ranks' seconds over paths whose arcs all stay within `limit_s`, and its cuts."""
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    rank, following = 0, {}
    for at, first, stop in sorted(arcs):
        if at != rank:
            reached, following = following if at == rank + 1 else {}, {}
            rank = at
        seconds = arcs[at, first, stop]
        if first not in reached or seconds > limit_s:
            continue
        total, cuts = reached[first]
        if stop not in following or total + seconds < following[stop][0]:
            following[stop] = (total + seconds, (*cuts, stop))
    end = following.get(len(problem.chain)) if rank == problem.stages - 1 else None
    return (end[0] + problem.stages * problem.stage_s, end[1]) if end else None


# --------------------------------------------------------------------------- the ILP


def solve_stages(
    problem: StageProblem,
    *,
    intervals: Intervals | None = None,
    time_limit_s: float | None = None,
    gap: float = 0.0,
    solver: str | None = None,
) -> StagePlan:
    """The fastest partition that fits, proven within `gap` unless a limit stops it (see the status)."""
    intervals = intervals or Intervals(problem)
    start = shortest(problem, intervals)
    if start.status is Status.INFEASIBLE:
        return start
    total = cheapest_s(problem) + problem.stages * problem.stage_s
    arcs = useful_arcs(intervals, start, total)
    if arcs is None:
        return start
    least = least_total(problem, arcs, math.inf)
    assert least is not None, "the arcs contain the plan they were limited by"
    total = max(total, least[0])
    arcs = useful_arcs(intervals, start, total) or arcs
    slowest = next(s for s in sorted(set(arcs.values())) if least_total(problem, arcs, s) is not None)
    model, chosen = _model(problem, arcs, slowest_s=slowest + problem.stage_s, total_s=total)
    outcome = solve(model, time_limit_s=time_limit_s, gap=gap, solver=solver)
    if not outcome.has_values:
        return replace(start, solver=outcome.solver)
    picked = sorted(arc for arc, variable in chosen.items() if (variable.value() or 0) > 0.5)
    plan = read_cuts(intervals, (0, *(stop for _, _, stop in picked)))
    if plan.objective_s >= start.objective_s * (1 - 1e-9):
        plan = start  # equals: the dynamic programme's choice does not depend on the solver
    bound = min(max(outcome.bound, start.bound_s), plan.objective_s)
    return replace(plan, status=outcome.status, bound_s=bound, solver=outcome.solver)


def useful_arcs(intervals: Intervals, start: StagePlan, total_s: float) -> dict[Arc, float] | None:
    """Arcs on some path from 0 to the end, no slower than the slowest rank of a better answer can be.

    `total_s` is a lower bound on the sum of the ranks' seconds. None when there are too many arcs.
    """
    problem, end = intervals.problem, len(intervals.problem.chain)
    share = problem.share
    weight = problem.microbatches - share
    limit = (start.objective_s - share * total_s) / weight - problem.stage_s if weight > 0 else math.inf
    limit *= 1 + 1e-9
    earliest = _earliest_starts(intervals, limit)
    forward: dict[Arc, float] = {}
    reached = {0}
    for rank in range(problem.stages):
        following = set()
        for first in sorted(reached):
            for stop in stops(intervals, first, problem.stages - rank - 1):
                option = intervals.best(rank, first, stop, limit_s=limit)
                if option is None:
                    break
                if stop >= earliest[rank + 1]:
                    forward[rank, first, stop] = option.seconds
                    following.add(stop)
            if len(forward) > MAX_ARCS:
                return None
        reached = following
    needed, kept = {end}, {}
    for rank in reversed(range(problem.stages)):
        here = {arc: s for arc, s in forward.items() if arc[0] == rank and arc[2] in needed}
        kept |= here
        needed = {first for _, first, _ in here}
    return kept


def _earliest_starts(intervals: Intervals, limit_s: float) -> list[int]:
    """Per rank, the first position from which it and the later ranks can still reach the end."""
    problem = intervals.problem
    starts = [len(problem.chain)]
    for rank in reversed(range(problem.stages)):
        start = starts[0]
        while start > 0 and intervals.best(rank, start - 1, starts[0], limit_s=limit_s) is not None:
            start -= 1
        starts.insert(0, start)
    return starts


def _model(
    problem: StageProblem, arcs: dict[Arc, float], *, slowest_s: float, total_s: float
) -> tuple[pulp.LpProblem, dict[Arc, pulp.LpVariable]]:
    """The ILP of the module docstring; the two bounds are implied and spare the solver their proof."""
    import pulp

    model = pulp.LpProblem("stages", pulp.LpMinimize)
    x = {arc: model.add_variable(f"x_{arc[0]}_{arc[1]}_{arc[2]}", cat="Binary") for arc in sorted(arcs)}
    slowest = model.add_variable("T", slowest_s)
    flow: dict[tuple[int, int], list] = {}
    by_rank: list[list[Arc]] = [[] for _ in range(problem.stages)]
    for rank, first, stop in x:
        by_rank[rank].append((rank, first, stop))
        flow.setdefault((rank, first), []).append(-x[rank, first, stop])
        flow.setdefault((rank + 1, stop), []).append(+x[rank, first, stop])
    flow[0, 0].append(1)
    flow[problem.stages, len(problem.chain)].append(-1)
    for terms in flow.values():
        model += pulp.lpSum(terms) == 0
    for rank_arcs in by_rank:
        model += slowest >= pulp.lpSum(arcs[arc] * x[arc] for arc in rank_arcs) + problem.stage_s
    share = problem.share
    total = pulp.lpSum(seconds * x[arc] for arc, seconds in arcs.items()) + problem.stages * problem.stage_s
    model += total >= total_s
    model += (problem.microbatches - share) * slowest + share * total
    return model, x
