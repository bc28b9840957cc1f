"""Attention of each rank's own samples, heads or positions.

In: queries, keys, values as DTensors or plain tensors. Out: the result, laid out as the queries
are. torch has no rule for attention on the CPU, and none for keys that lie on other ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .context import AXIS as CONTEXT
from .context import ROWS_DIM, attend, names_of
from .labels import labelled
from .layouts import is_strided, local_part, shard_dim
from .operands import gradient_laid_out, whole_on

LABEL = "operands of attention"
"""Of conversions that no module's border states."""
BATCH_DIM, HEADS_DIM = 0, 1
"""Of attention's operands, (batch, heads, length, head_dim)."""


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention of each rank's own samples or heads; the layout is the query's."""
    if not isinstance(query, DTensor):
        return NotImplemented
    with labelled(LABEL):
        query = _splittable(query)
        key, value = (_like_query(x, query, enable_gqa) for x in (key, value))
    if attn_mask is not None:
        attn_mask = _mask_part(attn_mask, query)
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    operands = (query.to_local(), _local(key, query), _local(value, query), attn_mask)
    if _in_context(query):
        local = attend(*operands, is_causal=is_causal, mesh=query.device_mesh[CONTEXT], **options)
    else:
        local = F.scaled_dot_product_attention(*operands, is_causal=is_causal, **options)
    return DTensor.from_local(local, query.device_mesh, query.placements, run_check=False)


def _in_context(query: DTensor) -> bool:
    """Whether the ranks of cp have different queries of a sequence."""
    names = names_of(query.device_mesh)
    return any(
        n == CONTEXT and shard_dim(p) == ROWS_DIM for n, p in zip(names, query.placements, strict=True)
    )


def _splittable(query: DTensor) -> DTensor:
    """Attention stays within a sample and a head, but for cp: any other cut is made whole first."""

    def allowed(name: str, placed: Placement) -> Placement:
        dims = (BATCH_DIM, HEADS_DIM, ROWS_DIM) if name == CONTEXT else (BATCH_DIM, HEADS_DIM)
        return placed if shard_dim(placed) in dims else Replicate()

    names = names_of(query.device_mesh)
    placed = tuple(allowed(name, p) for name, p in zip(names, query.placements, strict=True))
    return query if placed == query.placements else query.redistribute(placements=placed)


def _like_query(x: Any, query: DTensor, enable_gqa: bool) -> DTensor:
    """Keys or values cut as the query is.

    Query heads cut as an inner factor (groups within a key head) read every key head; cut in order
    they read their own, of which each rank needs a copy where there are fewer than ranks. An only key head
    is read by all.
    """
    x = whole_on(x, query.device_mesh)
    heads, wanted = x.shape[HEADS_DIM], []
    for size, placed, own in zip(query.device_mesh.shape, query.placements, x.placements, strict=True):
        only = enable_gqa and heads == 1 and shard_dim(placed) == HEADS_DIM
        grouped = (is_strided(placed) or only) and own.is_replicate()
        wanted.append(own if grouped else placed)
        if not grouped and enable_gqa and shard_dim(placed) == HEADS_DIM and heads % size:
            x = x.repeat_interleave(query.shape[HEADS_DIM] // heads, HEADS_DIM)
    if any(own != to and not own.is_replicate() for own, to in zip(x.placements, wanted, strict=True)):
        return x.redistribute(placements=wanted)
    return _OwnPart.apply(x, wanted)  # pyright: ignore[reportReturnType]


class _OwnPart(torch.autograd.Function):
    """Each rank's heads of what all hold. Their gradient stays theirs: a sum over heads makes terms of it."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: list[Placement]) -> DTensor:
        same = x.placements == tuple(placements)
        return cast("DTensor", x.view_as(x)) if same else x.redistribute(placements=placements)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor, None]:
        return grads[0], None


def _local(x: DTensor, query: DTensor) -> Tensor:
    """The local part; a whole operand of a split query gets its gradient in parts."""
    local = x.to_local(
        grad_placements=[
            Partial() if own.is_replicate() and not placed.is_replicate() else own
            for own, placed in zip(x.placements, query.placements, strict=True)
        ]
    )
    return gradient_laid_out(local) if local.requires_grad else local


def _mask_part(mask: Tensor, query: DTensor) -> Tensor:
    """The rows of a mask that belong to the query's samples, heads or positions.

    Where it is cut as the query is, it stays so: a bias of each rank's own heads goes nowhere.
    """
    mesh = query.device_mesh
    cuts = [_mask_cut(mask, placed, query.ndim) for placed in query.placements]
    if isinstance(mask, DTensor):
        kept = [cut == own for cut, own in zip(cuts, mask.placements, strict=True)]
        placed = [own if keep else Replicate() for own, keep in zip(mask.placements, kept, strict=True)]
        mask = _local(mask.redistribute(placements=placed), query)
        cuts = [None if keep else cut for cut, keep in zip(cuts, kept, strict=True)]
    for axis, cut in enumerate(cuts):
        if cut is not None:
            mask = local_part(mask, cut, ranks=mesh.size(axis), rank=mesh.get_local_rank(axis))
    return mask


def _mask_cut(mask: Tensor, placed: Placement, ndim: int) -> Placement | None:
    """How the query's cut, of `ndim` dims, cuts a mask; None where it has nothing to cut."""
    dim = shard_dim(placed)
    if dim is None or ndim - dim > mask.ndim or mask.shape[dim - ndim] == 1:
        return None
    return _from_end(placed, mask.ndim - ndim)


def _from_end(placed: Placement, shift: int) -> Placement:
    """A cut of the same dim, counted from the end, of a tensor with `shift` more dims."""
    dim = shard_dim(placed)
    assert dim is not None
    if isinstance(placed, _StridedShard):
        return _StridedShard(dim + shift, split_factor=placed.split_factor)
    return Shard(dim + shift)
