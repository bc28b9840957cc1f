"""Planned conversions of activations on module borders, forward and backward.

In: a `PlannedReshard` per border. Out: hooks on the module. Each is one autograd function, `Move`,
that brings a tensor into the layout its consumers read and, in backward, the gradient into the
layout its producer needs, so that DTensor's own choice of a backward layout never decides what is
communicated. Between two different shards it exchanges parts by all-to-all (DTensor's own way on
CPU gathers the whole tensor).
"""

from __future__ import annotations

import math
import weakref
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..planner.plan import PlannedReshard
from .context import names_of
from .labels import labelled
from .layouts import placement, shard_dim


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
    """A new tensor with the values of `x`, in layout `target` along tp; other axes stay as they are."""
    at = names_of(x.device_mesh).index("tp")
    source = x.placements[at]
    if source == target:
        return cast("DTensor", x.view_as(x))
    if type(source) is Shard and type(target) is Shard and all(_divides(x, p, at) for p in (source, target)):
        return exchanged(x, target.dim, at)
    return x.redistribute(placements=[target if i == at else p for i, p in enumerate(x.placements)])


def _divides(x: DTensor, shard: Shard, at: int) -> bool:
    """Whether mesh axis `at` may cut evenly a dim that other axes cut too."""
    sizes, placed = x.device_mesh.shape, x.placements
    others = (n for i, n in enumerate(sizes) if i != at and shard_dim(placed[i]) == shard.dim)
    return x.shape[shard.dim] % (math.prod(others) * sizes[at]) == 0


def exchanged(x: DTensor, target: int, at: int) -> DTensor:
    """Sharded along dim `target` instead of another on mesh axis `at`, by one all-to-all."""
    mesh, source = x.device_mesh, shard_dim(x.placements[at])
    assert source is not None
    pieces = torch.stack(x.to_local().chunk(mesh.size(at), target))
    received = funcol.all_to_all_single(pieces, None, None, mesh.get_group(at))
    local = torch.cat(received.unbind(0), source)
    placed = [Shard(target) if i == at else p for i, p in enumerate(x.placements)]
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=x.shape, stride=x.stride())


class Shared:
    """Conversions of one tensor that several modules read: made once while the tensor lives."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Placement], tuple[weakref.ref, DTensor]] = {}

    def move(self, x: DTensor, target: Placement, gradient: Placement, label: str) -> DTensor:
        """`move`, or what it gave the last time for the same tensor, label and layout."""
        key = (label, target)
        known = self._made.get(key)
        if known is not None and known[0]() is x:
            return known[1]
        made = move(x, target, gradient, label)
        self._made[key] = (weakref.ref(x, lambda _: self._made.pop(key, None)), made)
        return made


SHARED = Shared()


def install(module: nn.Module, reshard: PlannedReshard, mesh: DeviceMesh) -> None:
    """Put a planned conversion on the border of `module`; `mesh` is the axis' own."""
    target, gradient = placement(reshard.target), placement(reshard.gradient)
    several = reshard.side == "input" and "," in reshard.label.rpartition("->")[2]

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        made = SHARED.move if several else move
        return made(x, target, gradient, reshard.label)

    if reshard.side == "output":
        module.register_forward_hook(lambda _module, _args, output: moved(output))
    else:
        module.register_forward_pre_hook(lambda _module, args: (moved(args[0]), *args[1:]))


def says_something(reshard: PlannedReshard) -> bool:
    """Whether it moves the tensor, or its gradient may need to be."""
    return reshard.source != reshard.target or reshard.gradient == "R"
