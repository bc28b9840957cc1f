"""Tensors made to be written into, next to one that is split.

In: `x.new_empty(...)` of a DTensor. Out: a DTensor split as `x` is along every dim that both have at the same
place and of the same size: what each rank then writes is its own part. DTensor's own rule makes it whole, and
would gather all that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def new_empty(x: Any, *size: Any, **options: Any) -> Any:
    """`Tensor.new_empty`; NotImplemented where nothing of `x` that is split is in it."""
    if not isinstance(x, DTensor):
        return NotImplemented
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    placed = [_kept(p, x.shape, shape) for p in x.placements]
    if all(p.is_replicate() for p in placed):
        return NotImplemented
    local = list(shape)
    for p in placed:
        if isinstance(p, Shard):
            local[p.dim] = x.to_local().shape[p.dim]
    return DTensor.from_local(
        x.to_local().new_empty(local, **options), x.device_mesh, placed, run_check=False
    )


def _kept(placed: Placement, before: Sequence[int], after: Sequence[int]) -> Placement:
    """How a dim that is cut in a tensor is cut in another of the same rank; whole if it has another size."""
    same = type(placed) is Shard and len(before) == len(after) and before[placed.dim] == after[placed.dim]
    return placed if same else Replicate()
