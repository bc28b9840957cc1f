"""Stages for the whole step: the pipeline, and what the slowest rank does once after it.

In: a `Costed` candidate and the stages that make its pipeline fastest. Out: the stages that make
pipeline and gradient sync, optimizer and the like together fastest, often the same. A layer moved to
another rank may cost the pipeline less than it spares the rank with the most parameters.

Every arc (rank, first block, stop) has its seconds and its once-per-step seconds o. For each limit on
o, least first, and each limit T on the seconds, the path with the least sum is found as in
`stages.shortest`; limits that cannot win any more end the search. Modes stay each interval's fastest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .brackets import StagePlan, cheapest_s, pipeline_bound, read_cuts
from .costed import Costed
from .intervals import Intervals, Modes
from .stages import Arc, least_total, useful_arcs

WORTH = 1e-6
"""Gains below this share of the step are not looked for."""


def balanced(costed: Costed, plan: StagePlan, intervals: Intervals | None = None) -> StagePlan:
    """The stages with the fastest step, given those with the fastest pipeline."""
    problem = costed.stage_problem
    if problem.stages == 1:
        return plan
    once_s = max(costed.once_s(modes) for modes in plan.ranks)
    slack_s = once_s + costed.problem.framework.step_overhead_s - costed.once_bound_s
    best, step_s = plan, plan.objective_s + once_s
    if slack_s <= WORTH * step_s:
        return plan
    intervals = intervals or Intervals(problem)
    total_s = cheapest_s(problem) + problem.stages * problem.stage_s
    reach = replace(plan, objective_s=plan.objective_s + slack_s)
    arcs = useful_arcs(intervals, reach, total_s)
    if arcs is None:
        return plan
    onces = {arc: costed.once_s(arc_modes(intervals, arc)) for arc in arcs}
    found = fastest_step(intervals, arcs, onces, step_s=step_s, pipeline_s=plan.bound_s)
    if found is not None:
        best = replace(found, status=plan.status, bound_s=plan.bound_s, solver=plan.solver)
    return best


def fastest_step(
    intervals: Intervals,
    arcs: Mapping[Arc, float],
    onces: Mapping[Arc, float],
    *,
    step_s: float,
    pipeline_s: float,
) -> StagePlan | None:
    """The stages whose pipeline and slowest once-per-step part together take the least, if below `step_s`.

    `arcs` and `onces`: seconds per microbatch and once per step of every arc; `pipeline_s`: a lower bound of
    the pipeline.
    """
    best = None
    for limit in sorted(set(onces.values())):
        if pipeline_s + limit >= step_s * (1 - WORTH):
            break
        allowed = {arc: seconds for arc, seconds in arcs.items() if onces[arc] <= limit}
        found = _fastest(intervals, allowed, below_s=step_s - limit)
        if found is not None:
            best, held = found, zip(range(len(found.ranks)), found.cuts, found.cuts[1:], strict=False)
            step_s = found.objective_s + max(onces[arc] for arc in held)
    return best


def arc_modes(intervals: Intervals, arc: Arc) -> Modes:
    """The fastest modes of what an arc's rank holds."""
    option = intervals.best(*arc)
    assert option is not None, "a useful arc fits"
    return tuple((name, n, mode) for name, mode, n in option.modes)


def _fastest(intervals: Intervals, arcs: Mapping[Arc, float], *, below_s: float) -> StagePlan | None:
    """The fastest pipeline over these arcs, if it takes less than `below_s`."""
    problem, best = intervals.problem, None
    whole = least_total(problem, arcs, float("inf"))
    if whole is None:
        return None
    for limit in sorted(set(arcs.values())):
        if pipeline_bound(problem, limit + problem.stage_s, whole[0]) >= below_s:
            return best
        found = least_total(problem, arcs, limit)
        if found is None:
            continue
        plan = read_cuts(intervals, found[1])
        if plan.objective_s < below_s:
            best, below_s = plan, plan.objective_s
    return best
