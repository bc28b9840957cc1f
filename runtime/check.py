"""What of a plan cannot be executed, and what is executed otherwise than priced.

In: a plan and the model's parameters. `check` raises `PlanError` for the first thing that has no
mechanism here. `differences` lists in words where the results are the plan's but the communication is
not: conversions between operations that lie on no module's border are left to DTensor, which may
choose another collective than the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..planner.errors import PlanError
from ..planner.plan import ParameterPlacement, Plan
from ..planner.schedule import check as check_schedule


def check(plan: Plan, model: nn.Module, planned: Mapping[str, ParameterPlacement]) -> None:
    """Raise `PlanError` naming what cannot be executed."""
    mesh = plan.mesh
    if plan.job.mode != "train":
        raise PlanError(f"the plan is for mode {plan.job.mode!r}; only train can be run")
    if mesh.cp > 1:
        raise PlanError(f"the plan has cp={mesh.cp}: context parallelism cannot be executed yet")
    if mesh.pp > 1 and not plan.layer_lists:
        raise PlanError(f"the plan has pp={mesh.pp} but names no list of layers to cut; plan again")
    if mesh.pp > 1:
        check_schedule(
            plan.schedule,
            pp=mesh.pp,
            virtual_stages=plan.virtual_stages,
            microbatches=plan.num_microbatches,
        )
    split = sorted({p.fqn for p in planned.values() if dict(p.placements).get("ep", "R") != "R"})
    if split:
        raise PlanError(f"the plan splits {split[0]} over ep={mesh.ep}: this cannot be executed yet")


def differences(plan: Plan) -> tuple[str, ...]:
    """One sentence for each planned collective that DTensor, FSDP or torch pipelining decides on."""
    stated = {(r.axis, r.label) for r in plan.reshards}
    found = [
        f"{c.label}: planned {c.collective} over tp lies between operations, where DTensor chooses"
        for c in plan.communications
        if c.axis == "tp" and "->" in c.label and ("tp", c.label.removesuffix(" (gradient)")) not in stated
    ]
    if plan.mesh.pp > 1 and plan.zero_stage >= 2:
        found.append(
            f"ZeRO-{plan.zero_stage} in a pipeline: parameters are gathered and gradients reduced once a step"
        )
    return tuple(found)
