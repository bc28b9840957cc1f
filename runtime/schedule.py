"""The plan's pipeline schedule, run by torch.distributed.pipelining.

In: this rank's stages and the plan. Out: one step's losses, gradients in the parameters. The order of
actions is the planner's own (`planner.schedule.actions`): torch adds the sends and receives to it.
Only a microbatch's index travels through torch's arguments; each stage takes the microbatch itself
from its own list.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from ..planner.plan import Plan
from ..planner.schedule import ActionKind, actions
from .batch import Call
from .forward import StageForward
from .handover import HandoverStage

KINDS = {
    ActionKind.FORWARD: _ComputationType.FORWARD,
    ActionKind.BACKWARD: _ComputationType.FULL_BACKWARD,
    ActionKind.BACKWARD_INPUT: _ComputationType.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT: _ComputationType.BACKWARD_WEIGHT,
}


class Pipeline:
    """This rank's stages under the plan's schedule."""

    def __init__(
        self,
        stages: Sequence[tuple[nn.Module, StageForward, int]],
        plan: Plan,
        mesh: DeviceMesh,
        *,
        hidden: Tensor,
        device: torch.device,
    ) -> None:
        """`stages`: (model, its forward, stage index). `hidden`: one rank's activation, on meta."""
        self._plan, self._forwards = plan, [forward for _, forward, _ in stages]
        count = plan.mesh.pp * plan.virtual_stages
        self._holds_last = any(index == count - 1 for *_, index in stages)
        loss = torch.empty((), device="meta", dtype=torch.float32)
        self._stages = [
            HandoverStage(
                model,
                index,
                count,
                device,
                input_args=(hidden.clone().requires_grad_(),) if index else (),
                output_args=(hidden.clone().requires_grad_() if index < count - 1 else loss,),
                group=mesh.get_group("pp"),
                recomputes=forward.recomputes,
            )
            for model, forward, index in stages
        ]
        self._runtime = _PipelineScheduleRuntime(
            self._stages,
            plan.num_microbatches,
            loss_fn=lambda loss, _target: loss,
        )
        self._runtime._prepare_schedule_with_comms(planned_order(plan))

    def step(self, calls: list[Call], device: torch.device) -> Tensor:
        """Forward and backward of all microbatches; the mean loss on the last stage's rank, else 0."""
        for forward in self._forwards:
            forward.calls = calls
        index = torch.arange(len(calls))
        losses: list[Tensor] = []
        if self._holds_last:
            self._runtime.step(target=index, losses=losses, return_outputs=False, index=index)
        else:
            self._runtime.step(index=index, return_outputs=False)
        for stage in self._stages:
            stage.settle()
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)


def planned_order(plan: Plan) -> dict[int, list[_Action | None]]:
    """Each rank's actions in torch's terms."""
    order = actions(
        plan.schedule, pp=plan.mesh.pp, virtual_stages=plan.virtual_stages, microbatches=plan.num_microbatches
    )
    return {
        rank: [_Action(action.stage, KINDS[action.kind], action.microbatch) for action in run]
        for rank, run in enumerate(order)
    }
