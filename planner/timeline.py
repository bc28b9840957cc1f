"""The simulated timeline of a plan's pipeline.

In: a `Plan`. Out: the `Timeline` of one step, or None without a pipeline. A rank's forward and
backward times are dealt to its virtual stages by their layers (evenly where the plan does not say),
and a hop takes what the plan's send/recv takes.
"""

from __future__ import annotations

from .layout import Collective
from .plan import Plan, Stage
from .schedule import Schedule, Timeline, actions, stages_of
from .simulate import simulate


def plan_timeline(plan: Plan) -> Timeline | None:
    """One step of the plan's pipeline. Raises OptionError for sizes its schedule cannot run with."""
    pp, virtual = plan.mesh.pp, plan.virtual_stages
    if pp == 1 or plan.schedule not in list(Schedule):
        return None
    forward_s = [0.0] * (pp * virtual)
    backward_s = [0.0] * (pp * virtual)
    for rank, stage in enumerate(plan.stages):
        held = stages_of(plan.schedule, pp=pp, virtual_stages=virtual, rank=rank)
        for index, share in zip(held, _shares(stage, virtual), strict=True):
            forward_s[index], backward_s[index] = stage.forward_s * share, stage.backward_s * share
    hops = [comm.seconds for comm in plan.communications if comm.collective == Collective.SEND_RECV]
    return simulate(
        actions(plan.schedule, pp=pp, virtual_stages=virtual, microbatches=plan.num_microbatches),
        forward_s=forward_s,
        backward_s=backward_s,
        p2p_s=max(hops, default=0.0),
    )


def _shares(stage: Stage, virtual: int) -> list[float]:
    """The part of a rank's time that each of its virtual stages takes."""
    layers = stage.chunk_layers or (1,) * virtual
    total = sum(layers)
    return [number / total if total else 1 / virtual for number in layers]
