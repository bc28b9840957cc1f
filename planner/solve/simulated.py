"""A candidate's pipeline under the event simulator, piece by piece.

In: a `Costed` candidate and its chosen stages. Out: seconds of all microbatches through the pipeline.
The closed form (`estimate.step.pipeline_s`) knows what each rank does in all; the simulator also what
its pieces take one after the other, and who waits for whom.

Beyond `ROUNDS` microbatches per rank the pipeline repeats itself at the pace of its slowest rank, so
that no more are simulated.
"""

from __future__ import annotations

from itertools import accumulate

from ..estimate.step import BlockTime
from ..schedule import actions, stages_of
from ..simulate import simulate
from .brackets import StagePlan
from .costed import Costed
from .intervals import Modes
from .pieces import piece_layers

ROUNDS = 3
"""Microbatches per rank that are simulated: filling, one steady round, draining."""


def simulated_s(costed: Costed, plan: StagePlan) -> float:
    """Seconds of the pipeline; hand-overs are part of each piece's time, as in the closed form."""
    candidate, pp = costed.candidate, costed.candidate.mesh.pp
    v, schedule = candidate.virtual_stages, candidate.schedule
    forward_s, backward_s = [0.0] * (pp * v), [0.0] * (pp * v)
    for rank, modes in enumerate(plan.ranks):
        held = stages_of(schedule, pp=pp, virtual_stages=v, rank=rank)
        for stage, seconds in zip(held, piece_seconds(costed, modes, last_rank=rank == pp - 1), strict=True):
            forward_s[stage], backward_s[stage] = seconds
    few = min(candidate.microbatches, ROUNDS * pp)
    timeline = simulate(
        actions(schedule, pp=pp, virtual_stages=v, microbatches=few),
        forward_s=forward_s,
        backward_s=backward_s,
    )
    return timeline.makespan_s + (candidate.microbatches - few) * max(timeline.busy_s) / few


def piece_seconds(costed: Costed, modes: Modes, *, last_rank: bool) -> list[tuple[float, float]]:
    """(forward, backward) of each piece of a rank; what is no layer goes with the layers next to it."""
    v, kinds = costed.candidate.virtual_stages, costed.problem.layer_classes
    blocks = [(name, mode) for name, n, mode in modes for _ in range(n)]
    layers = sum(name in kinds for name, _ in blocks)
    ends = list(accumulate(piece_layers(layers, v, last_rank=last_rank)))
    share = costed.handover_s / v
    pieces = [[share, share] for _ in range(v)]
    piece = seen = 0
    for name, mode in blocks:
        if name in kinds:
            while seen >= ends[piece]:
                piece += 1
            seen += 1
        time: BlockTime = costed.times[name]
        pieces[piece][0] += time.forward_s
        pieces[piece][1] += time.backward_s(mode)
    return [(forward, backward) for forward, backward in pieces]
