"""How operations on split activations run where DTensor has no rule, or a costlier one.

In: calls of torch functions while the mode is on. Out: the same results on DTensors. Plain tensors
that meet a DTensor (positions, masks, rotary tables) count as whole on every rank. A short table
replaces what remains: attention runs on each rank's heads or samples (no CPU rule exists),
cross-entropy works on split logits, taking a fused projection apart is local in both directions, and
products and lookups of experts and tables go to the ranks that hold them (`experts`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..planner.errors import PlanError
from .experts import grouped_product, lookup, on_expert_axis
from .layouts import is_strided, local_part, shard_dim
from .loss import cross_entropy

BATCH_DIM, HEADS_DIM = 0, 1
"""Of attention's operands, (batch, heads, length, head_dim)."""


class ShardedOps(TorchFunctionMode):
    """The mode. It may be entered inside itself."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _first_dtensor((*args, *kwargs.values()))
        if found is None:
            return func(*args, **kwargs)
        replacement = REPLACED.get(func)
        if replacement is not None and (result := replacement(*args, **kwargs)) is not NotImplemented:
            return result
        mesh = found.device_mesh
        if on_expert_axis(found):
            return _outside(func, args, kwargs)
        return func(*_whole(args, mesh), **{key: _whole(value, mesh) for key, value in kwargs.items()})


def sharded_ops(forward: Callable) -> Callable:
    """`forward` with the mode on."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ShardedOps():
            return forward(*args, **kwargs)

    return run


def _outside(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A weight split over ep may be cast or transposed; only `REPLACED` lets it meet a rank's own rows."""
    if any(type(leaf) is Tensor for leaf in tree_leaves((args, kwargs))):
        name = getattr(func, "__name__", str(func))
        raise PlanError(
            f"{name} reads a weight that is split over ep; only grouped_mm and embedding can do so"
        )
    return func(*args, **kwargs)


def _first_dtensor(values: Any) -> DTensor | None:
    for value in values:
        if isinstance(value, DTensor):
            return value
        if isinstance(value, list | tuple) and (found := _first_dtensor(value)) is not None:
            return found
    return None


def _whole(value: Any, mesh: DeviceMesh) -> Any:
    """Plain tensors as DTensors that every rank holds whole."""
    if type(value) in (list, tuple):
        return type(value)(_whole(item, mesh) for item in value)
    if type(value) in (Tensor, torch.nn.Parameter):
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return value


def plain(value: Any) -> Any:
    """A DTensor made whole and handed out as an ordinary tensor; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    whole = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
    return whole.clone()  # no view: FSDP and pipelines hang their hooks on it


# --------------------------------------------------------------------------- attention


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention of each rank's own samples or heads; the layout is the query's."""
    if not isinstance(query, DTensor):
        return NotImplemented
    mesh = query.device_mesh
    query = _splittable(query)
    (placed,) = query.placements
    key, value = (_like_query(x, query, enable_gqa) for x in (key, value))
    if attn_mask is not None:
        attn_mask = _mask_part(attn_mask, query)
    local = F.scaled_dot_product_attention(
        query.to_local(), _local(key, placed), _local(value, placed), attn_mask, dropout_p, is_causal,
        scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip
    return DTensor.from_local(local, mesh, [placed], run_check=False)


def _splittable(query: DTensor) -> DTensor:
    """Attention stays within a sample and a head: any other cut is made whole first."""
    if shard_dim(query.placements[0]) in (BATCH_DIM, HEADS_DIM) or query.placements[0].is_replicate():
        return query
    return query.redistribute(placements=[Replicate()])


def _like_query(x: Any, query: DTensor, enable_gqa: bool) -> DTensor:
    """Keys or values cut as the query is.

    Query heads cut as an inner factor (groups within a key head) read every key head; cut in order
    they read their own, of which each rank needs a copy where there are fewer than ranks.
    """
    mesh, (placed,) = query.device_mesh, query.placements
    x = _whole(x, mesh)
    if is_strided(placed) and x.placements[0].is_replicate():
        return x
    heads = x.shape[HEADS_DIM]
    if enable_gqa and shard_dim(placed) == HEADS_DIM and heads % mesh.size():
        x = x.repeat_interleave(query.shape[HEADS_DIM] // heads, HEADS_DIM)
    return x.redistribute(placements=[placed])


def _local(x: DTensor, query_placed: Placement) -> Tensor:
    """The local part; a whole operand of a split query gets its gradient in parts."""
    split = x.placements[0].is_replicate() and not query_placed.is_replicate()
    return x.to_local(grad_placements=[Partial()] if split else None)


def _mask_part(mask: Tensor, query: DTensor) -> Tensor:
    """The rows of a mask that belong to the query's samples or heads."""
    (placed,) = query.placements
    dim = shard_dim(placed)
    mask = mask.redistribute(placements=[Replicate()]).to_local() if isinstance(mask, DTensor) else mask
    if dim is None or mask.ndim < query.ndim or mask.shape[dim] == 1:
        return mask
    return local_part(mask, placed, ranks=query.device_mesh.size(), rank=query.device_mesh.get_local_rank())


# --------------------------------------------------------------------------- cross-entropy


def split_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Cross-entropy on split logits; NotImplemented leaves rarer forms to DTensor, on whole logits."""
    if not isinstance(input, DTensor) or not isinstance(input.placements[0], Shard):
        return NotImplemented
    unusual = weight is not None or size_average is not None or reduce is not None or label_smoothing
    class_targets = not target.dtype.is_floating_point
    if unusual or input.ndim != 2 or reduction not in ("mean", "sum") or not class_targets:
        whole = input.redistribute(placements=[Replicate()])
        return F.cross_entropy(
            whole, _whole(target, input.device_mesh), _whole(weight, input.device_mesh), size_average,
            ignore_index, reduce, reduction, label_smoothing,
        )  # fmt: skip
    return cross_entropy(input, target, ignore_index=ignore_index, reduction=reduction)


# --------------------------------------------------------------------------- pieces of a fused axis


def split_pieces(x: Any, size: Any, dim: int = 0) -> Any:
    """`split` along a fused axis into exactly its pieces."""
    if not isinstance(x, DTensor) or not isinstance(size, int):
        return NotImplemented
    return chunk_pieces(x, -(-x.shape[dim] // size), dim)


def chunk_pieces(x: Any, chunks: int, dim: int = 0) -> Any:
    """`chunk` along a fused axis whose pieces are what is asked for: every rank cuts its own part."""
    if not isinstance(x, DTensor):
        return NotImplemented
    (placed,) = x.placements
    if not isinstance(placed, _StridedShard) or placed.dim != dim % x.ndim or placed.split_factor != chunks:
        return NotImplemented
    mesh = x.device_mesh
    pieces = _Pieces.apply(x, placed)
    assert isinstance(pieces, tuple)
    return tuple(DTensor.from_local(piece, mesh, [Shard(placed.dim)], run_check=False) for piece in pieces)


class _Pieces(torch.autograd.Function):
    """A fused DTensor's local part cut into its pieces; backward joins the gradients."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, placed: _StridedShard) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.placed, ctx.shape = x.device_mesh, placed, x.shape
        return tuple(piece.clone() for piece in x.to_local().chunk(int(placed.split_factor), placed.dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[DTensor, None]:
        return _contiguous(torch.cat(grads, ctx.placed.dim), ctx), None


def unflatten_fused(x: Any, dim: int, sizes: Any) -> Any:
    """`unflatten` of a fused axis cut along one of its inner factors, local in both directions."""
    if not isinstance(x, DTensor):
        return NotImplemented
    (placed,) = x.placements
    dim = dim % x.ndim
    if not isinstance(placed, _StridedShard) or placed.dim != dim:
        return NotImplemented
    sizes = [n if n != -1 else x.shape[dim] // -math.prod(sizes) for n in sizes]
    outer = next((k for k in range(len(sizes)) if math.prod(sizes[:k]) == placed.split_factor), None)
    ranks = x.device_mesh.size()
    if outer is None or sizes[outer] % ranks:
        return NotImplemented
    sizes[outer] //= ranks
    local = _Unflattened.apply(x, dim, tuple(sizes))
    assert isinstance(local, Tensor)
    return DTensor.from_local(local, x.device_mesh, [Shard(dim + outer)], run_check=False)


def view_fused(x: Any, *shape: Any) -> Any:
    """`view` or `reshape` that does nothing but unflatten the last, fused axis."""
    if not isinstance(x, DTensor) or not isinstance(x.placements[0], _StridedShard):
        return NotImplemented
    wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    last = x.ndim - 1
    if not all(isinstance(n, int) for n in wanted) or tuple(wanted[:last]) != tuple(x.shape[:last]):
        return NotImplemented
    return unflatten_fused(x, last, wanted[last:])


class _Unflattened(torch.autograd.Function):
    """A DTensor's local part with one axis taken apart; backward puts it together."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.mesh, ctx.placed, ctx.shape = x.device_mesh, x.placements[0], x.shape
        ctx.first, ctx.last = dim, dim + len(sizes) - 1
        return x.to_local().unflatten(dim, sizes).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[DTensor, None, None]:
        return _contiguous(grads[0].contiguous().flatten(ctx.first, ctx.last), ctx), None, None


# --------------------------------------------------------------------------- unbind


def unbind_whole_dim(x: Any, dim: int = 0) -> Any:
    """`unbind` along a dim that is not cut, local in both directions (DTensor's backward gathers)."""
    if not isinstance(x, DTensor):
        return NotImplemented
    (placed,) = x.placements
    cut, dim = shard_dim(placed), dim % x.ndim
    if cut is None or cut == dim:
        return NotImplemented
    after = Shard(cut if cut < dim else cut - 1)
    if isinstance(placed, _StridedShard):
        after = _StridedShard(after.dim, split_factor=placed.split_factor)
    pieces = _Unbound.apply(x, dim)
    assert isinstance(pieces, tuple)
    return tuple(DTensor.from_local(piece, x.device_mesh, [after], run_check=False) for piece in pieces)


class _Unbound(torch.autograd.Function):
    """A DTensor's local part unbound; backward stacks the gradients."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dim: int) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.placed, ctx.shape, ctx.dim = x.device_mesh, x.placements[0], x.shape, dim
        return tuple(piece.clone() for piece in x.to_local().unbind(dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[DTensor, None]:
        return _contiguous(torch.stack(grads, ctx.dim), ctx), None


def _contiguous(local: Tensor, ctx: Any) -> DTensor:
    stride = torch.empty(ctx.shape, device="meta").stride()
    return DTensor.from_local(local, ctx.mesh, [ctx.placed], run_check=False, shape=ctx.shape, stride=stride)


REPLACED: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: attention,
    torch._grouped_mm: grouped_product,
    F.embedding: lookup,
    F.cross_entropy: split_cross_entropy,
    torch.unflatten: unflatten_fused,
    Tensor.unflatten: unflatten_fused,
    Tensor.view: view_fused,
    Tensor.reshape: view_fused,
    torch.unbind: unbind_whole_dim,
    Tensor.unbind: unbind_whole_dim,
    torch.split: split_pieces,
    Tensor.split: split_pieces,
    torch.chunk: chunk_pieces,
    Tensor.chunk: chunk_pieces,
}
