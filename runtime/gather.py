"""Whole tensors from the parts that ranks hold.

In: a parameter or gradient as DTensor. Out: the whole tensor on every rank. Tensor parallelism's cut of
a fused axis and FSDP's cut of the same dim are undone one after the other: torch's own `full_tensor`
joins them in the wrong order. Collective: every rank of the tensor's mesh has to call it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from .layouts import joined, shard_dim


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor; an ordinary one as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.redistribute(placements=[p if _cuts(p) else Replicate() for p in tensor.placements])
    if not _twice_in_pieces(tensor):
        return tensor.full_tensor()
    outer, inner = tensor.device_mesh.ndim - 2, tensor.placements[-1]
    assert isinstance(inner, _StridedShard)
    dim, mesh = inner.dim, tensor.device_mesh
    padded = tensor.to_local()
    rows = tensor.shape[dim] // mesh.size(outer + 1)
    share = -(-rows // mesh.size(outer))
    missing = share - padded.shape[dim]
    if missing:
        padded = torch.cat([padded, padded.new_zeros(*_with(padded.shape, dim, missing))], dim)
    mine = torch.cat(_gathered(padded, mesh.get_group(outer)), dim).narrow(dim, 0, rows)
    return joined(_gathered(mine, mesh.get_group(outer + 1)), inner)


def _cuts(placed: object) -> bool:
    return shard_dim(placed) is not None  # pyright: ignore[reportArgumentType]


def _twice_in_pieces(tensor: DTensor) -> bool:
    """Whether FSDP cuts the dim that tensor parallelism cuts in pieces of a fused axis."""
    if tensor.device_mesh.ndim < 2:
        return False
    outer, inner = tensor.placements[-2:]
    return isinstance(inner, _StridedShard) and shard_dim(outer) == inner.dim


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    return [size if i == dim else n for i, n in enumerate(shape)]


def _gathered(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
