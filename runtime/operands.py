"""Operands of one operation brought onto one mesh.

In: arguments of a torch function, of which some are DTensors. Out: all of them on the same mesh. A
plain tensor that meets a DTensor counts as whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .context import has_context, lifted


def mesh_of(values: Any) -> DeviceMesh | None:
    """The mesh of the DTensors among some arguments: the largest, where parameters lie on one axis of it."""
    found: DeviceMesh | None = None
    for value in values:
        mesh = value.device_mesh if isinstance(value, DTensor) else None
        if isinstance(value, list | tuple):
            mesh = mesh_of(value)
        if mesh is not None and (found is None or mesh.ndim > found.ndim or has_context(mesh)):
            found = mesh
    return found


def whole_on(value: Any, mesh: DeviceMesh) -> Any:
    """Plain tensors as DTensors that every rank holds whole; what lies on `tp` alone on the whole mesh."""
    if type(value) in (list, tuple):
        return type(value)(whole_on(item, mesh) for item in value)
    if has_context(mesh):
        elsewhere = isinstance(value, DTensor) and value.device_mesh != mesh
        return lifted(value, mesh) if elsewhere or type(value) in (Tensor, torch.nn.Parameter) else value
    if type(value) in (Tensor, torch.nn.Parameter):
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value


def gradient_laid_out(local: Tensor) -> Tensor:
    """The same tensor; its gradient comes with its dims in the same order in memory.

    A DTensor of a gradient says that of the forward's, and operations on it choose views by what it says.
    """
    return _LaidOut.apply(local)  # pyright: ignore[reportReturnType]


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.order = sorted(range(x.ndim), key=x.stride, reverse=True)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        inverse = sorted(range(len(ctx.order)), key=ctx.order.__getitem__)
        return grads[0].permute(ctx.order).contiguous().permute(inverse)


def plain(value: Any) -> Any:
    """A DTensor made whole and handed out as an ordinary tensor; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    whole = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
    return whole.clone()  # no view: FSDP and pipelines hang their hooks on it
