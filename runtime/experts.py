"""Experts and embedding tables split over `ep`: rows travel to the rank that holds their weights.

In: grouped products and lookups whose weight is a DTensor on the `ep` axis, while every rank of the
axis has its own samples. Out: the same results, by all-to-all:

    rows sorted by owner -> counts exchanged -> rows exchanged -> local product or lookup -> back

The rows that `F.grouped_mm` has sent out stay with their experts (`Dispatched`) through pointwise
operations and further grouped products; the first other operation brings them back. So an expert of
several matrices costs one exchange out and one back, and the module's own code stays as it is.

A rank's expert gradients already add up the samples of all ranks of the axis; as losses are means,
they are divided by its size, where a dense parameter's would be averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..planner.errors import PlanError
from .embedding import split_lookup
from .labels import labelled

AXIS = "ep"
COMPUTE_DTYPE = "compute_dtype"
"""Attribute of a weight that FSDP does not manage, and so does not cast: the planned dtype."""
COUNTS_LABEL = "rows for each rank of ep"


def on_expert_axis(mesh: DeviceMesh) -> bool:
    """Whether a mesh is the `ep` axis."""
    return mesh.mesh_dim_names == (AXIS,)


def local_weight(weight: DTensor) -> Tensor:
    """This rank's experts or rows, whose gradient is divided by the size of the axis."""
    scaled = _DividedGradient.apply(weight.to_local(), weight.device_mesh.size())
    assert isinstance(scaled, Tensor)
    return scaled.to(getattr(weight, COMPUTE_DTYPE, weight.dtype))


class _DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.divisor, None


# --------------------------------------------------------------------------- the exchange


@dataclass(frozen=True, slots=True)
class Route:
    """How many rows go to and come from each rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    mesh: DeviceMesh

    def there(self, rows: Tensor) -> Tensor:
        """Rows sorted by rank, to their owners; differentiable."""
        return _exchange(rows, self.received, self.sent, self.mesh)

    def back(self, rows: Tensor) -> Tensor:
        """The way back."""
        return _exchange(rows, self.sent, self.received, self.mesh)


def _exchange(rows: Tensor, out: tuple[int, ...], into: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    if not rows.dtype.is_floating_point:
        result = rows.new_empty(sum(out), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), list(out), list(into), group=mesh.get_group())
        return result
    moved = all_to_all_single_autograd(rows.contiguous(), list(out), list(into), mesh.get_group())
    return moved.wait() if hasattr(moved, "wait") else moved  # pyright: ignore[reportAttributeAccessIssue]


def exchanged_counts(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    """From (ranks, kinds) rows to send, the same for rows to receive."""
    received = torch.empty_like(counts)
    with labelled(COUNTS_LABEL):
        dist.all_to_all_single(received, counts.contiguous(), group=mesh.get_group())
    return received


def route_of(sent: Tensor, received: Tensor, mesh: DeviceMesh) -> Route:
    """The route of (ranks, kinds) counts."""
    return Route(tuple(sent.sum(1).tolist()), tuple(received.sum(1).tolist()), mesh)


# --------------------------------------------------------------------------- experts


class Dispatched(Tensor):
    """The rows that this rank's experts work on, sorted by expert.

    Operations on single elements, and cuts of the last dim, keep it; any other, and any that reads rows
    of this rank's own as well, gets the rows of its own samples, back in the order in which they were sent.
    """

    route: Route
    order: Tensor
    ends: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the rows where they are, or bring them back."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ATTRIBUTES:
            return func(*(_rows(a) for a in args), **kwargs)
        others = (a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor))
        stays = not any(_has_own_rows(a) for a in others)
        if (stays and name in ELEMENTWISE) or (name in LAST_DIM and _on_last_dim(func, args, kwargs)):
            like = next(a for a in args if isinstance(a, Dispatched))
            return _like(func(*(_rows(a) for a in args), **kwargs), like)
        return func(*(combined(a) for a in args), **{key: combined(value) for key, value in kwargs.items()})


ATTRIBUTES = {"__get__", "size", "dim", "is_floating_point", "requires_grad_", "numel"}
ELEMENTWISE = {
    "silu", "gelu", "relu", "sigmoid", "tanh", "softplus", "leaky_relu", "elu", "hardtanh", "hardswish",
    "dropout", "mul", "add", "sub", "div", "neg", "square", "pow", "exp", "clamp", "to", "float",
    "bfloat16", "half", "type", "type_as", "contiguous", "__mul__", "__rmul__", "__add__", "__radd__",
    "__sub__", "__rsub__", "__truediv__", "__neg__", "__pow__",
}  # fmt: skip
LAST_DIM = {"chunk", "split"}


def _on_last_dim(func: Any, args: Any, kwargs: Any) -> bool:
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    return dim in (-1, 1)


def _has_own_rows(value: Tensor) -> bool:
    """Whether it has a row for each of this rank's own, as routing weights have."""
    return not isinstance(value, Dispatched) and value.ndim > 1 and value.shape[0] > 1


def _rows(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Dispatched) else value


def _like(value: Any, like: Dispatched) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_like(item, like) for item in value)
    result = value.as_subclass(Dispatched)
    result.route, result.order, result.ends = like.route, like.order, like.ends
    return result


def grouped_product(x: Any, weight: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """`F.grouped_mm` of rows with experts of other ranks; `offs` are the ends of each expert's rows.

    Raises `PlanError` for forms without offsets.
    """
    if not isinstance(weight, DTensor) or not on_expert_axis(weight.device_mesh):
        return NotImplemented
    if offs is None or bias is not None or weight.ndim != 3:
        raise PlanError("experts over ep run as grouped_mm(rows, weights, offs=...), without a bias")
    sent_out = x if isinstance(x, Dispatched) else dispatched(x, offs, weight.device_mesh)
    product = F.grouped_mm(_rows(sent_out), local_weight(weight), offs=sent_out.ends, out_dtype=out_dtype)
    return _like(product, sent_out)


def dispatched(x: Tensor, ends: Tensor, mesh: DeviceMesh) -> Dispatched:
    """Rows sorted by expert, with their experts. The same rows and ends are sent once."""
    remembered = _LAST.get("rows")
    if remembered is not None and remembered[0] is x and remembered[1] is ends:
        return remembered[2]
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long()).view(mesh.size(), -1)
    received = exchanged_counts(counts, mesh)
    route = route_of(counts, received, mesh)
    kinds = torch.arange(counts.shape[1], device=x.device).repeat(mesh.size())
    order = kinds.repeat_interleave(received.flatten()).argsort(stable=True)
    result = route.there(x)[order].as_subclass(Dispatched)
    result.route, result.order = route, order
    result.ends = received.sum(0).cumsum(0).to(torch.int32)
    _LAST["rows"] = (x, ends, result)
    return result


_LAST: dict[str, tuple[Tensor, Tensor, Dispatched]] = {}
"""The last rows sent, so that a gate and an up projection of the same rows share them."""


def combined(value: Any) -> Any:
    """This rank's own rows of a `Dispatched`; anything else as it is."""
    if not isinstance(value, Dispatched):
        return value
    _LAST.clear()
    return value.route.back(_rows(value)[value.order.argsort()])


# --------------------------------------------------------------------------- tables


def lookup(
    ids: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *rest: Any, **named: Any
) -> Any:
    """`F.embedding` in a table whose rows lie on other ranks of ep (or of tp, see `embedding`).

    Raises `PlanError` for the options that change the table or its gradient.
    """
    if not isinstance(weight, DTensor):
        return NotImplemented
    if not on_expert_axis(weight.device_mesh):
        return split_lookup(ids, weight, padding_idx, max_norm, *rest, **named)
    if padding_idx is not None or max_norm is not None or any(named.values()) or any(rest[1:]):
        raise PlanError(
            "a table over ep is looked up without padding_idx, max_norm, frequency scaling or sparse"
        )
    mesh, table = weight.device_mesh, local_weight(weight)
    flat = ids.flatten()
    owner = flat // table.shape[0]
    order = owner.argsort(stable=True)
    sent = torch.bincount(owner, minlength=mesh.size()).unsqueeze(1)
    route = route_of(sent, exchanged_counts(sent, mesh), mesh)
    wanted = route.there(flat[order]) - mesh.get_local_rank() * table.shape[0]
    vectors = route.back(F.embedding(wanted, table))
    return vectors[order.argsort()].unflatten(0, ids.shape)
