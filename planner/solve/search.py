"""Best-first search over meshes, microbatches, ZeRO stages and schedules, with a certificate.

In: a `SearchProblem`, the cost models (`Pricing`), the user's pins. Out: an `Outcome`, or
`Infeasible` with the nearest change that would fit.

Every candidate waits in a queue under a lower bound of its step time that tightens in four steps:

    1. computation alone, bubble included (`ideal.Roofline`)
    2. idealised costs and memory (`ideal.idealised`), and floors of what any splits take (`problem.Floor`):
       still without the costs of an intra-op solution
    3. the costs of an intra-op solution, with fractions of blocks for stages (`brackets.bound_s`)
    4. exact stages and modes (`stages.shortest`, `balance.balanced`); the winner's are solved again as an ILP

Step 4 begins with the question whether any stages could beat the best plan (`brackets.can_beat`), which is
answered by filling the ranks once; most candidates end there.

A price counts the pipeline by the closed form and, where that alone would make a plan the best, by the
event simulator as well; the greater of the two is the price. So the winner's time is the simulated one
where the closed form is too low, bounds of the closed form stay bounds of all prices, and what loses by
the closed form already needs no simulation.

The candidate with the least bound is taken up first. When the least bound left is no better than
the best plan found, nothing unexplored can win: the certificate's lower bound is the least of what
is left and of what the priced candidates could still have been. Closed forms and the intra-op
solver's own bound enter as they are, so the gap covers every decision.

A microbatch of b samples takes at least b/B of the time of B > b samples, but for a share that is read off
the cost models' curves (`batch_slack`): larger kernels and messages are not slower by more. So a slice (tp,
ep, cp, and where they lie) is asked about a microbatch first that offers what all smaller ones do, and what
that takes at least (`intra_op.IntraOp.floor`) bounds them.
"""

from __future__ import annotations

from ..problem import Pins, Pricing, SearchProblem, SearchResult
from .exploration import Exploration, Progress
from .infeasible import infeasible
from .outcome import outcome, prove_best
from .rivals import compare_experts, price_runners_up, seed_experts

TOP = 5
"""Runners-up of distinct meshes that are reported, expert plans aside."""


def search(
    problem: SearchProblem,
    pricing: Pricing,
    *,
    pins: Pins | None = None,
    top: int = TOP,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    solver: str | None = None,
) -> SearchResult:
    """The fastest plan, why it is, and what came second.

    `solver`: `highs` or `cbc` for the stage ILP (default: what is there). With `time_limit_s`, or when the
    user interrupts (Ctrl-C), the best plan so far is returned with its honest gap; an interruption before
    there is one ends the search. Deterministic unless it is stopped.
    """
    run = Exploration(problem, pricing, pins or {}, time_limit_s=time_limit_s, progress=progress)
    try:
        seed_experts(run)
        run.explore()
        run.explore_tensor_groups()
        run.explore_parts()
    except KeyboardInterrupt:
        if run.best is None:
            raise
        run.stop()
    if run.best is None:
        return infeasible(problem, run.pricing, run.pins)
    experts = compare_experts(run)
    price_runners_up(run, top)
    prove_best(run, solver)
    return outcome(run, top, experts)
