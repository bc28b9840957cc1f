"""A fused axis taken apart on every rank, with nothing communicated in either direction.

In: DTensors whose last product made several things at once (query, key and value; gate and up), cut
along an inner factor of that axis. Out: the pieces. DTensor's own rules gather, in backward if not
in forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .layouts import shard_dim


def _fused_axis(x: Any, dim: int) -> int | None:
    """The mesh axis along which an inner factor of tensor dim `dim`, and nothing else of it, is cut."""
    if not isinstance(x, DTensor):
        return None
    cuts = [i for i, placed in enumerate(x.placements) if shard_dim(placed) == dim % x.ndim]
    return cuts[0] if len(cuts) == 1 and isinstance(x.placements[cuts[0]], _StridedShard) else None


def _shifted(placed: Placement, after: int, by: int) -> Placement:
    """A placement once `by` dims have come in behind dim `after`."""
    dim = shard_dim(placed)
    if dim is None or dim <= after:
        return placed
    if isinstance(placed, _StridedShard):
        return _StridedShard(dim + by, split_factor=placed.split_factor)
    return Shard(dim + by)


def _on(x: DTensor, local: Tensor, placements: Sequence[Placement]) -> DTensor:
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False)


# --------------------------------------------------------------------------- pieces


def split_pieces(x: Any, size: Any, dim: int = 0) -> Any:
    """`split` along a fused axis into exactly its pieces."""
    if not isinstance(x, DTensor) or not isinstance(size, int):
        return NotImplemented
    return chunk_pieces(x, -(-x.shape[dim] // size), dim)


def chunk_pieces(x: Any, chunks: int, dim: int = 0) -> Any:
    """`chunk` along a fused axis whose pieces are what is asked for: every rank cuts its own part."""
    at = _fused_axis(x, dim)
    if at is None:
        return NotImplemented
    placed = x.placements[at]
    assert isinstance(placed, _StridedShard)
    if placed.split_factor != chunks:
        return NotImplemented
    after = [Shard(placed.dim) if i == at else p for i, p in enumerate(x.placements)]
    return tuple(_on(x, piece, after) for piece in _Pieces.apply(x, chunks, placed.dim))  # pyright: ignore


class _Pieces(torch.autograd.Function):
    """A fused DTensor's local part cut into its pieces; backward joins the gradients."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, chunks: int, dim: int) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.placements, ctx.shape, ctx.dim = x.device_mesh, x.placements, x.shape, dim
        return tuple(piece.clone() for piece in x.to_local().chunk(chunks, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[DTensor, None, None]:
        return _contiguous(torch.cat(grads, ctx.dim), ctx), None, None


# --------------------------------------------------------------------------- unflatten


def unflatten_fused(x: Any, dim: int, sizes: Any) -> Any:
    """`unflatten` of a fused axis cut along one of its inner factors, local in both directions."""
    at = _fused_axis(x, dim)
    if at is None:
        return NotImplemented
    placed, dim = x.placements[at], dim % x.ndim
    assert isinstance(placed, _StridedShard)
    sizes = [n if n != -1 else x.shape[dim] // -math.prod(sizes) for n in sizes]
    outer = next((k for k in range(len(sizes)) if math.prod(sizes[:k]) == placed.split_factor), None)
    ranks = x.device_mesh.size(at)
    if outer is None or sizes[outer] % ranks:
        return NotImplemented
    sizes[outer] //= ranks
    local = _Unflattened.apply(x, dim, tuple(sizes))
    assert isinstance(local, Tensor)
    more = len(sizes) - 1
    return _on(
        x,
        local,
        [Shard(dim + outer) if i == at else _shifted(p, dim, more) for i, p in enumerate(x.placements)],
    )


def view_fused(x: Any, *shape: Any) -> Any:
    """`view` or `reshape` that does nothing but unflatten the last, fused axis."""
    if _fused_axis(x, -1) is None:
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
        ctx.mesh, ctx.placements, ctx.shape = x.device_mesh, x.placements, x.shape
        ctx.first, ctx.last = dim, dim + len(sizes) - 1
        return x.to_local().unflatten(dim, sizes).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[DTensor, None, None]:
        return _contiguous(grads[0].contiguous().flatten(ctx.first, ctx.last), ctx), None, None


# --------------------------------------------------------------------------- unbind


def unbind_whole_dim(x: Any, dim: int = 0) -> Any:
    """`unbind` along a dim that is not cut, local in both directions (DTensor's backward gathers)."""
    if not isinstance(x, DTensor) or any(p.is_partial() for p in x.placements):
        return NotImplemented
    cuts, dim = {shard_dim(placed) for placed in x.placements}, dim % x.ndim
    if cuts == {None} or dim in cuts:
        return NotImplemented
    after = [_shifted(placed, dim, -1) for placed in x.placements]
    return tuple(_on(x, piece, after) for piece in _Unbound.apply(x, dim))  # pyright: ignore


class _Unbound(torch.autograd.Function):
    """A DTensor's local part unbound; backward stacks the gradients."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dim: int) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.placements, ctx.shape, ctx.dim = x.device_mesh, x.placements, x.shape, dim
        return tuple(piece.clone() for piece in x.to_local().unbind(dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[DTensor, None]:
        return _contiguous(torch.stack(grads, ctx.dim), ctx), None


def _contiguous(local: Tensor, ctx: Any) -> DTensor:
    stride = torch.empty(ctx.shape, device="meta").stride()
    return DTensor.from_local(
        local, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=stride
    )
