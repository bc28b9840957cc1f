"""Products of split activations with split weights, on each rank's own parts.

In: `F.linear`, `torch.addmm` or `F.conv2d` of an activation and a weight, DTensors on one mesh. Out: the
product in the layout that follows from theirs, with nothing communicated; along one mesh axis

| activation | weight | product | gradient of activation, weight, bias |
|---|---|---|---|
| rows cut | whole | rows cut | rows cut, partial, partial |
| whole | outputs cut | outputs cut | partial, outputs cut, outputs cut |
| inputs cut | inputs cut | partial | inputs cut, inputs cut, whole |
| whole | whole | whole | whole |

DTensor's own rule flattens the rows first, and then may gather what two axes cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..planner.errors import PlanError
from .layouts import shard_dim
from .operands import whole_on


def split_linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """`F.linear`; NotImplemented leaves other layouts to DTensor."""
    return _product(input, weight, bias, features=-1, outputs_dim=0, multiply=F.linear)


def split_addmm(bias: Any, input: Any, weight: Any, **scales: Any) -> Any:
    """`torch.addmm` of a vector and two matrices."""
    if scales or not isinstance(bias, DTensor) or bias.ndim != 1:
        return NotImplemented
    return _product(
        input, weight, bias, features=-1, outputs_dim=1, multiply=lambda x, w, b: torch.addmm(b, x, w)
    )


def split_convolution(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Any:  # fmt: skip
    """`F.conv2d` of a batch of images, whole or cut by samples or channels.

    Raises `PlanError` for other layouts, for which DTensor's rule gives wrong channels.
    """
    x = whole_on(input, weight.device_mesh) if isinstance(weight, DTensor) else input
    spatial = isinstance(x, DTensor) and any(shard_dim(p) not in (None, 0, 1) for p in x.placements)
    product = NotImplemented
    if groups == 1 and x.ndim == 4 and not spatial:
        product = _product(
            x, weight, bias, features=1, outputs_dim=0,
            multiply=lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation),
        )  # fmt: skip
    if product is NotImplemented and isinstance(weight, DTensor) and not _is_whole(weight):
        raise PlanError(
            f"a convolution with weights {tuple(weight.shape)} cannot be run as {weight.placements}"
        )
    return product


def _is_whole(x: DTensor) -> bool:
    return all(placed.is_replicate() for placed in x.placements)


@dataclass(frozen=True, slots=True)
class _Along:
    """Layouts along one mesh axis."""

    product: Placement
    input_gradient: Placement
    weight_gradient: Placement
    bias: Placement
    bias_gradient: Placement
    shares: int = 1
    """Ranks that each add their part of the bias."""


def _product(
    x: Any, weight: Any, bias: Any, *, features: int, outputs_dim: int, multiply: Callable[..., Tensor]
) -> Any:
    """`features`: the dim of inputs in `x` and of outputs in the product; `outputs_dim`: that of `weight`."""
    if not isinstance(weight, DTensor) or weight.ndim < 2:
        return NotImplemented
    x = whole_on(x, weight.device_mesh)
    if x.device_mesh != weight.device_mesh:
        return NotImplemented
    features %= x.ndim
    sizes = x.device_mesh.shape
    pairs = zip(x.placements, weight.placements, sizes, strict=True)
    found = [_along(p, w, features, outputs_dim, size) for p, w, size in pairs]
    along = [a for a in found if a is not None]
    if len(along) < len(found) or (bias is not None and bias.placements != tuple(a.bias for a in along)):
        return NotImplemented
    local = multiply(
        x.to_local(grad_placements=[a.input_gradient for a in along]),
        weight.to_local(grad_placements=[a.weight_gradient for a in along]),
        None if bias is None else _bias(bias, along),
    )
    return DTensor.from_local(local, x.device_mesh, [a.product for a in along], run_check=False)


def _along(x: Placement, weight: Placement, features: int, outputs_dim: int, size: int) -> _Along | None:
    rows_or_inputs, cut = shard_dim(x), shard_dim(weight)
    if x.is_partial() or weight.is_partial():
        return None
    if cut is None:
        if rows_or_inputs == features:
            return None
        gradient = Replicate() if rows_or_inputs is None else Partial()
        return _Along(x, x, gradient, Replicate(), gradient)
    if cut == outputs_dim and rows_or_inputs is None:
        product, bias = _moved(weight, features), _moved(weight, 0)
        return _Along(product, Partial(), weight, bias, bias)
    if cut == 1 - outputs_dim and rows_or_inputs == features and x == _moved(weight, features):
        return _Along(Partial(), x, weight, Replicate(), Replicate(), shares=size)
    return None


def _moved(placed: Placement, dim: int) -> Placement:
    """The same cut of another tensor's dim."""
    if isinstance(placed, _StridedShard):
        return _StridedShard(dim, split_factor=placed.split_factor)
    return Shard(dim)


def _bias(bias: DTensor, along: list[_Along]) -> Tensor:
    local = bias.to_local(grad_placements=[a.bias_gradient for a in along])
    for a in along:
        if a.shares > 1:
            local = _Share.apply(local, a.shares)  # pyright: ignore[reportAssignmentType]
    return local


class _Share(torch.autograd.Function):
    """One rank's share of a vector that all ranks of a sum hold whole; each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: int) -> Tensor:
        return x / shares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
