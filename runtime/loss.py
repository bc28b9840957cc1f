"""Cross-entropy of logits that are split over ranks, by vocabulary or by row.

In: logits (rows, classes) as a DTensor, whole targets. Out: the loss, whole on every
rank. With classes split, three numbers a row are all-reduced (greatest logit, sum of exponentials,
the target's logit) instead of gathering the logits; backward is local:
d loss / d logit = softmax - one-hot (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .labels import LOSS_LABEL, labelled
from .layouts import local_part, shard_dim

LABEL = "inside cross_entropy_loss"


def cross_entropy(logits: DTensor, target: Tensor, *, ignore_index: int, reduction: str) -> DTensor:
    """The loss of 2-D logits sharded along rows or classes; `reduction` is mean or sum.

    `target` is whole. Rows may be cut along one mesh axis (more are made whole first), classes along another.
    """
    logits = _one_row_axis(logits)
    mesh, rows, classes = logits.device_mesh, target, None
    placed: list[Placement] = [Replicate()] * mesh.ndim
    for axis, cut in enumerate(logits.placements):
        if shard_dim(cut) == 0:
            rows = local_part(rows, cut, ranks=mesh.size(axis), rank=mesh.get_local_rank(axis))
            placed[axis] = Partial()
        elif shard_dim(cut) is not None:
            classes = axis
    if classes is None:
        local = F.cross_entropy(logits.to_local(), rows, ignore_index=ignore_index, reduction="sum")
    else:
        local = _by_class(logits.to_local(), rows, ignore_index, mesh, classes)
    total = DTensor.from_local(local, mesh, placed, run_check=False)
    with labelled(LOSS_LABEL):
        total = total.redistribute(placements=[Replicate()] * mesh.ndim)
    if reduction == "sum":
        return total
    count = target.ne(ignore_index).sum()
    mean = total / DTensor.from_local(count, mesh, [Replicate()] * mesh.ndim, run_check=False)
    assert isinstance(mean, DTensor)
    return mean


def _one_row_axis(logits: DTensor) -> DTensor:
    """Rows cut along the first axis that cuts them alone; sums made whole."""
    cut = [i for i, p in enumerate(logits.placements) if shard_dim(p) == 0]
    placed = tuple(
        Replicate() if p.is_partial() or i in cut[1:] else p for i, p in enumerate(logits.placements)
    )
    return logits if placed == logits.placements else logits.redistribute(placements=placed)


def _by_class(logits: Tensor, target: Tensor, ignore_index: int, mesh: DeviceMesh, axis: int) -> Tensor:
    first = logits.shape[1] * mesh.get_local_rank(axis)
    losses = _VocabularyParallel.apply(logits, target, first, ignore_index, mesh.get_group(axis))
    assert isinstance(losses, Tensor)
    return losses.sum()


class _VocabularyParallel(torch.autograd.Function):
    """Loss of each row; ignored rows have none."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, first: int, ignore_index: int, group: Any
    ) -> Tensor:
        kept = target.ne(ignore_index)
        here = kept & (target >= first) & (target < first + logits.shape[1])
        column = torch.where(here, target - first, 0)
        with labelled(LABEL):
            greatest = funcol.all_reduce(logits.amax(1), "max", group)
            shifted = logits - greatest.unsqueeze(1)
            chosen = torch.where(here, shifted.gather(1, column.unsqueeze(1)).squeeze(1), 0.0)
            exponentials = shifted.exp()
            total = funcol.all_reduce(exponentials.sum(1), "sum", group)
            chosen = funcol.all_reduce(chosen, "sum", group)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(1)), column, here, kept)
        return torch.where(kept, total.log() - chosen, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, column, here, kept = ctx.saved_tensors
        one_hot = here.to(softmax.dtype).unsqueeze(1)
        gradient = softmax.scatter_add(1, column.unsqueeze(1), -one_hot)
        return gradient * (grads[0] * kept).unsqueeze(1), None, None, None, None
