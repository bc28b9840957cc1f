"""A candidate's pipeline under the event simulator, piece by piece.

In: a `Costed` candidate and its chosen stages. Out: seconds of all microbatches through the pipeline.
The closed form (`estimate.step.pipeline_s`) knows what each rank does in all; the simulator also what
its pieces take one after the other, and who waits for whom.

Beyond `ROUNDS` microbatches per rank the pipeline repeats itself at the pace of its slowest rank, so
that no more are simulated.
"""

from __future__ import annotations

from ..cost import Recompute
from ..estimate.moments import in_one_part
from ..estimate.step import BlockTime
from ..schedule import actions, stages_of
from ..simulate import simulate
from .brackets import StagePlan
from .costed import Costed
from .fullest import Blocks, dealt, recomputes

ROUNDS = 3
"""Microbatches per rank that are simulated: filling, one steady round, draining."""


def simulated_s(costed: Costed, plan: StagePlan) -> float:
    """Seconds of the pipeline; hand-overs are part of each piece's time, as in the closed form."""
    candidate, pp = costed.candidate, costed.candidate.mesh.pp
    v, schedule = candidate.virtual_stages, candidate.schedule
    forward_s, backward_s = [0.0] * (pp * v), [0.0] * (pp * v)
    whole: set[int] = set()
    for rank, modes in enumerate(plan.ranks):
        held = stages_of(schedule, pp=pp, virtual_stages=v, rank=rank)
        for stage, blocks in zip(held, dealt(costed, modes, last_rank=rank == pp - 1), strict=True):
            forward_s[stage], backward_s[stage] = piece_seconds(costed, blocks)
            if recomputes(costed, blocks):
                whole.add(stage)
    few = min(candidate.microbatches, ROUNDS * pp)
    order = actions(schedule, pp=pp, virtual_stages=v, microbatches=few)
    timeline = simulate(
        [tuple(in_one_part(run, frozenset(whole))) for run in order],
        forward_s=forward_s,
        backward_s=backward_s,
    )
    return timeline.makespan_s + (candidate.microbatches - few) * max(timeline.busy_s) / few


def piece_seconds(costed: Costed, blocks: Blocks) -> tuple[float, float]:
    """(forward, backward) of one piece of a rank."""
    share = costed.handover_s / costed.candidate.virtual_stages
    times: list[tuple[BlockTime, Recompute]] = [(costed.times[name], mode) for name, mode in blocks]
    forward_s = share + sum(time.forward_s for time, _ in times)
    return forward_s, share + sum(time.backward_s(mode) for time, mode in times)
