"""The answer of a search: its certificate, its runners-up, why each of them lost.

In: an `Exploration` that has ended. Out: an `Outcome`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ..plan import Alternative, SearchSummary
from ..problem import Candidate, Outcome, Priced
from .balance import balanced
from .explain import enlarged_to_fit, reasons, seconds_in_words, why_it_does_not_fit, why_it_lost
from .exploration import ROUNDING, Exploration, mesh_sizes
from .price import price
from .simulated import simulated_s
from .space import experts_alone
from .stages import solve_stages

ILP_GAP = 1e-4
"""The winner's stages are proven to 0.01%: far below any model error, and it ends ties between equals."""


def prove_best(run: Exploration, solver: str | None) -> None:
    """Solve the winner's stages again as an ILP: its answer and its bound are what is reported."""
    assert run.best is not None
    costed = run.best_costed
    left_s = None if math.isinf(run.deadline) else max(0.1, run.deadline - time.monotonic())
    plan = solve_stages(costed.stage_problem, gap=ILP_GAP, time_limit_s=left_s, solver=solver)
    bound = costed.step_bound_s(plan)
    plan = balanced(costed, plan)
    simulated = simulated_s(costed, plan) if run.best.candidate.mesh.pp > 1 else 0.0
    run.best = price(costed, plan, bound=bound, simulated_s=simulated)
    run.priced[run.best.candidate] = run.best
    run.proven_s = min(run.proven_s, run.best.bound_s * run.weighted_s(run.best) / run.best.step_time_s)


def outcome(run: Exploration, top: int, experts: dict[str, Candidate]) -> Outcome:
    """Everything a plan is written from."""
    best = run.best
    assert best is not None
    used, _ = run.cluster(best.candidate.mesh)
    weighted = run.weighted_s(best)
    lower = min(run.proven_s, weighted)
    pruned = Counter(bound for candidate, bound in run.pruned.items() if candidate not in run.priced)
    summary = SearchSummary(
        meshes_considered=len(
            {entry.candidate for entry in run.entries} | run.pruned.keys() | run.priced.keys()
        ),
        meshes_pruned=pruned.total(),
        pruned_by=tuple(sorted(pruned.items())),
        lower_bound_s=lower * best.step_time_s / weighted,
        gap=(weighted - lower) / weighted,
        solver=best.solver,
        complete=run.complete,
    )
    return Outcome(
        best=best,
        alternatives=tuple(sorted(_alternatives(run, best, top, experts), key=lambda a: a.step_time_s)),
        summary=summary,
        reasons=(
            *_idle(run, best),
            *reasons(replace(run.problem, topology=used), best),
            *_not_searched(run),
        ),
        warnings=tuple(_warnings(run)),
    )


def _idle(run: Exploration, best: Priced) -> Iterator[str]:
    """Why devices are left idle, where they are."""
    devices, used = run.problem.topology.devices, best.candidate.mesh.devices
    if used == devices:
        return
    whole = [p for p in run.priced.values() if p.candidate.mesh.devices == devices]
    if not whole:
        reason = f"no plan on all of them divides the batch of {run.problem.job.global_batch} and fits"
    else:
        fastest = min(whole, key=run.rank)
        more = fastest.step_time_s / best.step_time_s - 1
        reason = f"the best plan on all of them ({fastest.candidate}) takes {more:.1%} longer"
    yield f"{used} of {devices} devices are used: {reason}."


def _not_searched(run: Exploration) -> Iterator[str]:
    """What the gap does not cover."""
    if not experts_alone(run.problem, run.pins) or max(run.problem.tp_sizes) == 1:
        return
    tried = "was tried near the best plan without it" if run.tried_tensor_groups else "was not tried"
    yield (
        f"tp beside experts or tables {tried}; the gap does not cover all plans with both "
        "(--set tp=4, or any other size, searches them)."
    )


def _warnings(run: Exploration) -> Iterator[str]:
    """Costs below what the search takes for impossible would make its bounds, and so the gap, wrong."""
    for candidate, found in run.priced.items():
        least = run.ideal_s(candidate)
        if found.step_time_s < least * (1 - ROUNDING):
            yield (
                f"{candidate} is priced at {seconds_in_words(found.step_time_s)} a step, below the "
                f"{seconds_in_words(least)} that its FLOPs take at best: bound and gap are not valid"
            )
            return


def _alternatives(
    run: Exploration, best: Priced, top: int, experts: dict[str, Candidate]
) -> Iterator[Alternative]:
    """The best plan of each other mesh, fastest first, then expert plans not yet among them."""
    names: dict[Candidate, list[str]] = {}
    for name, candidate in experts.items():
        names.setdefault(candidate, []).append(name)
    shown = {best.candidate}
    seen = {mesh_sizes(best.candidate)}
    for priced in sorted(run.priced.values(), key=run.rank):
        sizes = mesh_sizes(priced.candidate)
        if sizes in seen or len(seen) > top:
            continue
        seen.add(sizes)
        shown.add(priced.candidate)
        yield _alternative(best, priced, names.get(priced.candidate))
    for candidate, called in names.items():
        if candidate in shown:
            continue
        if priced := run.priced.get(candidate):
            yield _alternative(best, priced, called)
        elif run.solutions(candidate):
            yield _misfit(run, candidate, called)


def _alternative(best: Priced, other: Priced, names: list[str] | None) -> Alternative:
    return Alternative(
        mesh=other.candidate.mesh,
        zero_stage=other.candidate.zero_stage,
        shard_group=other.candidate.shard_group,
        micro_batch=other.candidate.micro_batch,
        num_microbatches=other.candidate.microbatches,
        recompute=other.recompute,
        step_time_s=other.step_time_s,
        peak_memory_bytes=other.prediction.peak_memory_bytes,
        reason=why_it_lost(best, other),
        seeded_as=", ".join(names) if names else None,
    )


def _misfit(run: Exploration, candidate: Candidate, names: list[str]) -> Alternative:
    """An expert plan that does not fit: what it would take, were the devices just large enough."""
    memory = run.problem.topology.device.memory_bytes
    solutions = run.solutions(candidate)
    needed, enlarged = min(
        (enlarged_to_fit(run.costed(candidate, s)) for s in solutions), key=lambda pair: pair[0]
    )
    reason = why_it_does_not_fit(needed, memory)
    return replace(_alternative(enlarged, enlarged, names), reason=reason)
