"""What of a plan cannot be executed, and what is executed otherwise than priced.

In: a plan and the model's parameters. `check` raises `PlanError` for the first thing that has no
mechanism here. `differences` lists in words where the results are the plan's but the communication is
not: conversions between operations that lie on no module's border are left to DTensor, which may
choose another collective than the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..planner.cost import Recompute
from ..planner.errors import PlanError
from ..planner.plan import ParameterPlacement, Plan
from ..planner.schedule import SPLIT_BACKWARD
from ..planner.schedule import check as check_schedule
from .names import in_all_layers

EXPERT_WIDTH = "expert_ffn"
"""What plans call the dim between an expert's products."""


def check(plan: Plan, model: nn.Module, planned: Mapping[str, ParameterPlacement]) -> None:
    """Raise `PlanError` naming what cannot be executed."""
    mesh = plan.mesh
    if plan.job.mode != "train":
        raise PlanError(f"the plan is for mode {plan.job.mode!r}; only train can be run")
    if max(mesh.cp, mesh.tp) > 1 and any(p.is_expert for p in plan.parameters) and not plan.routing_modules:
        raise PlanError(
            f"the plan has cp={mesh.cp}, tp={mesh.tp} and experts but names no module that routes; plan again"
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
    _check_recompute(plan)
    for parameter in planned.values():
        _check_parameter(plan, parameter)


def _check_recompute(plan: Plan) -> None:
    """torch lets a selectively checkpointed layer run backward once only."""
    selective = any(mode == Recompute.SELECTIVE for stage in plan.stages for _, _, mode in stage.blocks)
    if plan.mesh.pp > 1 and selective and plan.schedule in SPLIT_BACKWARD:
        raise PlanError(
            f"{plan.schedule} runs backward in two parts, which layers recomputed selectively do not allow: "
            "plan with recompute=full or none, or with schedule=1f1b"
        )


def _check_parameter(plan: Plan, parameter: ParameterPlacement) -> None:
    cuts = {axis: text for axis, text in parameter.placements if text != "R"}
    if "ep" in cuts and not cuts["ep"].endswith("@0"):
        raise PlanError(f"{parameter.fqn}: {cuts['ep']} over ep; only dim 0 (experts, rows) can be split")
    if plan.mesh.tp > 1 and parameter.is_expert and not _is_expert_cut(cuts.get("tp", "R")):
        raise PlanError(
            f"{parameter.fqn}: {cuts.get('tp', 'R')} over tp; "
            f"experts are split by expert or along {EXPERT_WIDTH}"
        )


def _is_expert_cut(text: str) -> bool:
    """Whether tp cuts experts as `routed` runs them."""
    return text.startswith(("S(experts)@0", f"S({EXPERT_WIDTH}"))


def reduces_once(plan: Plan) -> bool:
    """Whether gradients are kept whole until the step's end though the plan shards them sooner."""
    return plan.mesh.pp > 1 and plan.zero_stage == 2


def syncs_every_microbatch(plan: Plan) -> bool:
    """Whether FSDP adds up over tp what the plan adds up once a step."""
    return plan.mesh.tp > 1 and plan.zero_stage >= 2 and plan.num_microbatches > 1


def unstated(plan: Plan) -> tuple[str, ...]:
    """Labels of planned conversions that lie on no module's border, nor where tokens are routed."""
    stated = {r.label for r in plan.reshards if r.axis == "tp"}
    labels = (
        c.label
        for c in plan.communications
        if c.axis == "tp" and "->" in c.label and not is_routed(plan, c.label)
    )
    return tuple(dict.fromkeys(label for label in labels if label.removesuffix(" (gradient)") not in stated))


def is_routed(plan: Plan, label: str) -> bool:
    """Whether a planned conversion lies between two operations of a module that routes."""
    ends = label.removesuffix(" (gradient)").replace(" -> ", ", ").split(", ")
    paths = [in_all_layers(p).removeprefix("model.") for p in plan.routing_modules]  # as labels name them
    return any(all(end == path or end.startswith(f"{path}.") for end in ends) for path in paths)


def differences(plan: Plan) -> tuple[str, ...]:
    """One sentence for each planned collective that DTensor, FSDP or torch pipelining decides on."""
    found = [
        f"{label}: planned over tp between operations, where DTensor chooses the collective"
        for label in unstated(plan)
    ]
    if reduces_once(plan):
        found.append("ZeRO-2 in a pipeline: gradients are reduced once a step, as under ZeRO-1")
    if syncs_every_microbatch(plan):
        found.append(
            f"ZeRO-{plan.zero_stage}: gradients that are sums over tp are reduced with every microbatch"
        )
    return tuple(dict.fromkeys(found))
