"""The forward of a model or of one of its stages, as it is called once the plan is applied.

In: the user's bound `forward`. Out: callables that take its place on the module, inside whatever
FSDP wraps around it. They turn on `ShardedOps` where something is split, compute the loss where the
step wants it, and on a pipeline stage take a received activation in and hand the last layer's output on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_leaves, tree_map

from ..planner.cost import Recompute
from ..planner.errors import ModelError, OptionError, PlanError
from .batch import Call, Inputs
from .layouts import shard_dim
from .operands import plain
from .ops import Mode
from .stages import StageCut, StageLayers

LossFunction = Callable[[Any, Inputs], Tensor]
"""(outputs, inputs) -> a scalar."""


def own_loss(outputs: Any, _inputs: Inputs) -> Tensor:
    """The loss that a model returns: its only output, or the one called `loss`.

    Raises `OptionError` when there is none.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", outputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise OptionError("the model's output is no loss: give loss_fn=, a function of (outputs, inputs)")
    return loss


class WholeForward:
    """Forward of a model that is not cut into stages."""

    def __init__(self, forward: Callable, loss: LossFunction, *, mode: Mode) -> None:
        """`forward`: the user's; `mode`: what it runs in."""
        self._forward, self._loss, self._mode = forward, loss, mode
        self.ends_in_loss = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs as ordinary tensors, or the loss."""
        with self._mode():
            outputs = self._forward(*args, **kwargs)
            if self.ends_in_loss:
                return plain(self._loss(outputs, Call(args, kwargs).inputs))
            return tree_map(plain, outputs)


class _Left(Exception):
    """The last layer of a stage has run."""

    def __init__(self, output: Any) -> None:
        self.output = output


class StageForward:
    """Forward of one stage: of the microbatch with a given index, from a received activation on."""

    def __init__(
        self,
        forward: Callable,
        loss: LossFunction,
        cut: StageCut,
        *,
        mode: Mode,
        mesh: DeviceMesh,
        border: Sequence[Placement],
    ) -> None:
        """`mode`: what it runs in; `mesh`: on which activations lie; `border`: how they do between stages."""
        self._forward, self._loss, self._cut = forward, loss, cut
        self._mode, self._mesh, self._border = mode, mesh, border
        self._received: Any = None
        self.calls: list[Call] = []

    @property
    def recomputes(self) -> bool:
        """Whether a layer of the stage is run again for backward."""
        return any(mode != Recompute.NONE for mode in self._cut.modes)

    def install(self, layers: StageLayers) -> None:
        """Hooks on the first and the last layer. To be called last, so that they run after all others."""
        if not self._cut.is_first:
            layers[self._cut.layers[0]].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self._cut.is_last:
            layers[self._cut.layers[-1]].register_forward_hook(self._leave)

    def __call__(self, *received: Tensor, index: Tensor) -> Tensor:
        """The activation for the next stage, or the loss on the last one."""
        call = self.calls[int(index)]
        self._received = self._from_border(received[0]) if received else None
        with self._mode():
            try:
                outputs = self._forward(*call.args, **call.kwargs)
            except _Left as left:
                return self._to_border(left.output)
            finally:
                self._received = None
            return plain(self._loss(outputs, call.inputs))

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args[1:], kwargs))):
            raise ModelError(
                f"{type(layer).__name__} reads more than one tensor that gradients flow through: "
                "a pipeline hands over one"
            )
        return (self._received, *args[1:]), kwargs

    def _leave(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        raise _Left(output[0] if isinstance(output, tuple) else output)

    def _from_border(self, x: Tensor) -> Tensor:
        if self._mesh.size() == 1:
            return x
        return DTensor.from_local(x, self._mesh, self._border, run_check=False)

    def _to_border(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        return x.redistribute(placements=self._border).to_local().clone()  # torch detaches it: no view


def local_shape(hidden: Tensor, border: Sequence[Placement], mesh: DeviceMesh) -> torch.Size:
    """Shape of a rank's part of the activation between stages. Raises `PlanError` if it does not divide."""
    shape = list(hidden.shape)
    for ranks, placed in zip(mesh.shape, border, strict=True):
        dim = shard_dim(placed)
        if dim is None:
            continue
        if shape[dim] % ranks:
            raise PlanError(
                f"activations {tuple(hidden.shape)} between stages are split by dim {dim} over {ranks} ranks"
            )
        shape[dim] //= ranks
    return torch.Size(shape)
