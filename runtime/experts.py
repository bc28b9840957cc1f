"""Experts and embedding tables split over `ep`, and over `tp` beside it: rows travel to their weights.

In: grouped products and lookups whose weight is a DTensor on the `ep` axis, or on `ep` and `tp`, while every
rank has its own samples (along tp, its own part of the sequences: see `routed`). Out: the same results:

    rows sorted by owner -> counts exchanged -> rows exchanged -> local product or lookup -> back

first along ep, then along tp, in the ways of `exchange`. The rows that `F.grouped_mm` has sent out stay with
their experts (`Dispatched`) through pointwise operations and further grouped products; the first other
operation brings them back. So an expert of several matrices costs one exchange out and one back, and the
module's own code stays as it is.

A rank's expert gradients already add up the samples of all ranks of ep; as losses are means, they are
divided by its size, where a dense parameter's would be averaged. Over cp, which data parallelism averages
over too, they are sums: they are multiplied by its size (see `context`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves

from ..planner.errors import PlanError
from .context import AXIS as CONTEXT
from .context import names_of
from .exchange import IDS_LABEL, Way, exchanged_counts, route_of, sent_by_expert, shared_by_all
from .layouts import shard_dim

AXIS = "ep"
COMPUTE_DTYPE = "compute_dtype"
"""Attribute of a weight that FSDP does not manage, and so does not cast: the planned dtype."""


def is_sparse(weight: Any) -> bool:
    """Whether it is an expert's weight or a table that is split over `ep`."""
    return isinstance(weight, DTensor) and AXIS in names_of(weight.device_mesh)


def local_weight(weight: DTensor, activations: DeviceMesh) -> Tensor:
    """This rank's experts or rows, with a gradient that data parallelism may average."""
    factor = _ranks(activations, CONTEXT) / _ranks(weight.device_mesh, AXIS)
    scaled = _ScaledGradient.apply(weight.to_local(), factor)
    assert isinstance(scaled, Tensor)
    return scaled.to(getattr(weight, COMPUTE_DTYPE, weight.dtype))


def _ranks(mesh: DeviceMesh, axis: str) -> int:
    return mesh.size(names_of(mesh).index(axis)) if axis in names_of(mesh) else 1


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


# --------------------------------------------------------------------------- experts


class Dispatched(Tensor):
    """The rows that this rank's experts work on, sorted by expert.

    Operations on single elements, and cuts of the last dim, keep it; any other, and any that reads rows
    of this rank's own as well, gets the rows of its own samples, back in the order in which they were sent.
    """

    ways: tuple[Way, ...]
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
    return _with(value, like.ways, like.ends)


def _with(rows: Tensor, ways: tuple[Way, ...], ends: Tensor) -> Dispatched:
    result = rows.as_subclass(Dispatched)
    result.ways, result.ends = ways, ends
    return result


def grouped_product(
    x: Any, weight: Any, *, offs: Any = None, bias: Any = None, out_dtype: Any = None, activations: DeviceMesh
) -> Any:
    """`F.grouped_mm` of rows with experts of other ranks; `offs` are the ends of each expert's rows.

    Raises `PlanError` for forms without offsets.
    """
    if offs is None or bias is not None or weight.ndim != 3:
        raise PlanError("experts over ep or tp run as grouped_mm(rows, weights, offs=...), without a bias")
    local = local_weight(weight, activations)
    sent_out = x if isinstance(x, Dispatched) else dispatched(x, offs, weight, local.dtype)
    product = F.grouped_mm(_rows(sent_out).to(local.dtype), local, offs=sent_out.ends, out_dtype=out_dtype)
    return _like(product, sent_out)


def dispatched(x: Tensor, ends: Tensor, weight: DTensor, dtype: torch.dtype) -> Dispatched:
    """Rows sorted by expert, with their experts, in the dtype of their product. The same are sent once."""
    remembered = _LAST.get("rows")
    if remembered is not None and remembered[0] is x and remembered[1] is ends:
        return remembered[2]
    rows, local_ends, ways = x.to(dtype), ends, []
    for axis, placed in zip(names_of(weight.device_mesh), weight.placements, strict=True):
        if weight.device_mesh[axis].size() > 1:
            way = sent_by_expert if shard_dim(placed) == 0 else shared_by_all
            rows, local_ends, back = way(rows, local_ends, weight.device_mesh[axis])
            ways.append(back)
    result = _with(rows, tuple(ways), local_ends)
    _LAST["rows"] = (x, ends, result)
    return result


_LAST: dict[str, tuple[Tensor, Tensor, Dispatched]] = {}
"""The last rows sent, so that a gate and an up projection of the same rows share them."""


def combined(value: Any) -> Any:
    """This rank's own rows of a `Dispatched`; anything else as it is."""
    if not isinstance(value, Dispatched):
        return value
    _LAST.clear()
    rows = _rows(value)
    for way in reversed(value.ways):
        rows = way.back(rows)
    return rows


# --------------------------------------------------------------------------- tables


def lookup(
    ids: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False, *, activations: DeviceMesh,
) -> Any:  # fmt: skip
    """`F.embedding` in a table whose rows lie on other ranks of ep; of each, tp may cut rows or columns.

    Raises `PlanError` for the options that change the table or its gradient.
    """
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        raise PlanError(
            "a table over ep is looked up without padding_idx, max_norm, frequency scaling or sparse"
        )
    along = dict(zip(names_of(weight.device_mesh), weight.placements, strict=True))
    mesh, table = weight.device_mesh[AXIS], local_weight(weight, activations)
    own = ids.to_local() if isinstance(ids, DTensor) else ids
    cut, split_rows = along.get("tp", Replicate()), 1
    if shard_dim(cut) == 0:
        split_rows = weight.device_mesh["tp"].size()
    rows = table.shape[0] * split_rows
    flat = own.flatten()
    owner = flat // rows
    order = owner.argsort(stable=True)
    sent = torch.bincount(owner, minlength=mesh.size()).unsqueeze(1)
    route = route_of(sent, exchanged_counts(sent, mesh), mesh)
    wanted = route.there(flat[order], IDS_LABEL) - mesh.get_local_rank() * rows
    if split_rows > 1:
        vectors = _own_rows(wanted - weight.device_mesh.get_local_rank("tp") * table.shape[0], table)
    else:
        vectors = F.embedding(wanted, table)
    found = route.back(vectors)[order.argsort()].unflatten(0, own.shape)
    if activations.size() == 1:
        return found
    placed = [_looked_up(name, ids, cut, found.ndim) for name in names_of(activations)]
    return DTensor.from_local(found, activations, placed, run_check=False)


def _own_rows(ids: Tensor, table: Tensor) -> Tensor:
    """Vectors of the ids that lie in this part of the table, zeros for others."""
    here = (ids >= 0) & (ids < table.shape[0])
    return F.embedding(ids.where(here, 0), table) * here.unsqueeze(-1)


def _looked_up(axis: str, ids: Any, cut: Placement, ndim: int) -> Placement:
    """How the vectors lie along an axis of activations."""
    if axis == CONTEXT:
        placements = dict(zip(names_of(ids.device_mesh), ids.placements, strict=True))
        return placements[axis]
    if shard_dim(cut) == 0:
        return Partial()
    return Replicate() if cut.is_replicate() else Shard(ndim - 1)
