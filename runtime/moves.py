"""Planned conversions of activations on module borders, forward and backward.

In: a `PlannedReshard` per border. Out: hooks on the module. Each is one autograd function, `Move`,
that brings a tensor into the layout its consumers read and, in backward, the gradient into the
layout its producer needs, so that DTensor's own choice of a backward layout never decides what is
communicated. Between two different shards it exchanges parts by all-to-all (DTensor's own way on
CPU gathers the whole tensor).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..planner.plan import PlannedReshard
from .labels import labelled
from .layouts import placement


def move(x: DTensor, target: Placement, gradient: Placement, label: str = "") -> DTensor:
    """`x` in layout `target`; its gradient is brought into layout `gradient`."""
    return _Move.apply(x, target, gradient, label)  # pyright: ignore[reportReturnType]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, target: Placement, gradient: Placement, label: str) -> DTensor:
        ctx.gradient, ctx.label = gradient, label
        with labelled(label):
            return converted(x, target)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor, None, None, None]:
        with labelled(f"{ctx.label} (gradient)"):
            return converted(grads[0], ctx.gradient), None, None, None


def converted(x: DTensor, target: Placement) -> DTensor:
    """A new tensor with the values of `x`, in layout `target`."""
    (source,) = x.placements
    if source == target:
        return cast("DTensor", x.view_as(x))
    if type(source) is Shard and type(target) is Shard and _divides(x, source) and _divides(x, target):
        return exchanged(x, source.dim, target.dim)
    return x.redistribute(placements=[target])


def _divides(x: DTensor, shard: Shard) -> bool:
    return x.shape[shard.dim] % x.device_mesh.size() == 0


def exchanged(x: DTensor, source: int, target: int) -> DTensor:
    """From sharded along dim `source` to sharded along `target`, by one all-to-all."""
    mesh = x.device_mesh
    pieces = torch.stack(x.to_local().chunk(mesh.size(), target))
    received = funcol.all_to_all_single(pieces, None, None, mesh.get_group())
    local = torch.cat(received.unbind(0), source)
    return DTensor.from_local(local, mesh, [Shard(target)], run_check=False, shape=x.shape, stride=x.stride())


def install(module: nn.Module, reshard: PlannedReshard, mesh: DeviceMesh) -> None:
    """Put a planned conversion on the border of `module`; `mesh` is the axis' own."""
    target, gradient = placement(reshard.target), placement(reshard.gradient)

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return move(x, target, gradient, reshard.label)

    if reshard.side == "output":
        module.register_forward_hook(lambda _module, _args, output: moved(output))
    else:
        module.register_forward_pre_hook(lambda _module, args: (moved(args[0]), *args[1:]))


def says_something(reshard: PlannedReshard) -> bool:
    """Whether it moves the tensor, or its gradient may need to be."""
    return reshard.source != reshard.target or reshard.gradient == "R"
