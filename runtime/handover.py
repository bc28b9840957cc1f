"""What pipeline stages hand over: held no longer than it is needed.

In: what `PipelineStage` takes. Out: a stage that receives into a buffer of its own for each microbatch in
flight and lets go of what it sent. torch keeps a buffer for every microbatch of a step, in flight or not,
from one step to the next, and everything that was sent until the step's end.

    received activation    from its receive to the end of the microbatch's backward, which reads it
    sent activation        until the microbatch's backward, to which it is the output that gradients enter
    received gradient      from its receive to the end of that backward
    sent gradient          until the next one is sent

Where a stage's layers are run again for backward, backward is run in one part, whatever the schedule: torch
would run each of them again for every parameter.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.schedules import _batch_p2p
from torch.distributed.pipelining.stage import _RecvInfo

Works = list[dist.Work]


class HandoverStage(PipelineStage):
    """A stage without standing buffers."""

    def __init__(self, *args: Any, recomputes: bool, **kwargs: Any) -> None:
        """As `PipelineStage`; `recomputes`: whether a layer of it is run again for backward."""
        super().__init__(*args, **kwargs)
        self._in_one_part = recomputes and not self.is_first  # the first stage always does
        self._sent_forward: dict[int, Works] = {}
        self._sent_backward: Works = []

    def settle(self) -> None:
        """Wait for what is still being sent."""
        for works in (*self._sent_forward.values(), self._sent_backward):
            _wait(works)
        self._sent_forward.clear()
        self._sent_backward = []

    # ------------------------------------------------------------------ receiving

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            _drop(infos)

    def _create_grad_recv_info(self, act_send_info: dict) -> tuple[_RecvInfo, ...]:
        return _drop(super()._create_grad_recv_info(act_send_info))

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        for info in recv_infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)
        return super()._get_recv_ops(recv_infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _drop(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _drop(self.grad_recv_info[bwd_chunk_id])
        return received

    # ------------------------------------------------------------------ sending

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send an activation; nothing is left to do for the schedule."""
        self._sent_forward[fwd_chunk_id] = _batch_p2p(super().get_fwd_send_ops(fwd_chunk_id))
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a gradient once the last one has gone; nothing is left to do for the schedule."""
        _wait(self._sent_backward)
        self._sent_backward = _batch_p2p(super().get_bwd_send_ops(bwd_chunk_id))
        return []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward; the gradient is here, so the activation has gone."""
        _wait(self._sent_forward.pop(bwd_chunk_id, []))
        full = full_backward or self._in_one_part
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward=full, last_backward=last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the weights' part, unless it has been."""
        if not self._in_one_part:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            _accumulate(self.submod)


def _accumulate(module: nn.Module) -> None:
    """Add gradients to earlier microbatches' in the dtype that they are reduced in.

    FSDP does so after a backward in one part; those of a weights' part it leaves in the dtype of computation.
    """
    for wrapped in module.modules():
        if isinstance(wrapped, FSDPModule) and (group := wrapped._get_fsdp_state()._fsdp_param_group):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def _drop(infos: tuple[_RecvInfo, ...]) -> tuple[_RecvInfo, ...]:
    for info in infos:
        info.buffer = None
    return infos


def _wait(works: Works) -> None:
    for work in works:
        work.wait()
