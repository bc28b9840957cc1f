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
    if mesh.cp > 1 and any("experts" in dims for p in plan.parameters for dims in p.dims):
        raise PlanError(
            f"the plan has cp={mesh.cp} and experts: context parallelism runs on dense models only"
        )
    if plan.shard_group and (mesh.dp % plan.shard_group or mesh.cp * mesh.ep > 1 or not plan.zero_stage):
        raise PlanError(
            f"the plan shards over groups of {plan.shard_group} of dp={mesh.dp} with cp={mesh.cp}, "
            f"ep={mesh.ep}, ZeRO-{plan.zero_stage}; groups must divide dp, with ZeRO, without cp and ep"
        )
    if mesh.pp > 1 and not plan.layer_lists:
        raise PlanError(f"the plan has pp={mesh.pp} but names no list of layers to cut; plan again")
    if mesh.pp > 1:
        check_schedule(
            plan.schedule,
            pp=mesh.pp,
            virtual_stages=plan.virtual_stages,
            microbatches=plan.num_microbatches,
        )
    for parameter in planned.values():
        _check_parameter(plan, parameter)


def _check_parameter(plan: Plan, parameter: ParameterPlacement) -> None:
    cuts = {axis: text for axis, text in parameter.placements if text != "R"}
    if "ep" in cuts and plan.mesh.tp > 1:
        raise PlanError(
            f"{parameter.fqn} is split over ep in a plan with tp={plan.mesh.tp}: "
            "experts and tables run with tp=1 only"
        )
    if "ep" in cuts and not cuts["ep"].endswith("@0"):
        raise PlanError(f"{parameter.fqn}: {cuts['ep']} over ep; only dim 0 (experts, rows) can be split")
    if "tp" in cuts and len(parameter.shape) > 2:
        raise PlanError(f"{parameter.fqn}: {cuts['tp']} over tp; experts cannot be split so yet")


def unstated(plan: Plan) -> tuple[str, ...]:
    """Labels of planned conversions that lie on no module's border."""
    stated = {r.label for r in plan.reshards if r.axis == "tp"}
    labels = (c.label for c in plan.communications if c.axis == "tp" and "->" in c.label)
    return tuple(dict.fromkeys(label for label in labels if label.removesuffix(" (gradient)") not in stated))


def differences(plan: Plan) -> tuple[str, ...]:
    """One sentence for each planned collective that DTensor, FSDP or torch pipelining decides on."""
    found = [
        f"{label}: planned over tp between operations, where DTensor chooses the collective"
        for label in unstated(plan)
    ]
    if plan.mesh.pp > 1 and plan.zero_stage >= 2:
        found.append(
            f"ZeRO-{plan.zero_stage} in a pipeline: parameters are gathered and gradients reduced once a step"
        )
    if plan.mesh.tp > 1 and plan.zero_stage >= 2 and plan.num_microbatches > 1:
        found.append(
            f"ZeRO-{plan.zero_stage}: gradients that are sums over tp are reduced with every microbatch"
        )
    return tuple(dict.fromkeys(found))
