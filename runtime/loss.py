"""Cross-entropy of logits that are split over ranks, by vocabulary or by row.

In: logits (rows, classes) as a DTensor on one mesh axis, whole targets. Out: the loss, whole on every
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .labels import LOSS_LABEL, labelled

LABEL = "inside cross_entropy_loss"


def cross_entropy(logits: DTensor, target: Tensor, *, ignore_index: int, reduction: str) -> DTensor:
    """The loss of 2-D logits sharded along rows or classes; `reduction` is mean or sum."""
    target = target.to_local() if isinstance(target, DTensor) else target
    (placed,) = logits.placements
    assert isinstance(placed, Shard) and logits.ndim == 2
    total = _by_class(logits, target, ignore_index) if placed.dim else _by_row(logits, target, ignore_index)
    if reduction == "sum":
        return total
    count = target.ne(ignore_index).sum()
    mean = total / DTensor.from_local(count, logits.device_mesh, [Replicate()], run_check=False)
    assert isinstance(mean, DTensor)
    return mean


def _by_row(logits: DTensor, target: Tensor, ignore_index: int) -> DTensor:
    """Each rank sums its rows."""
    mesh = logits.device_mesh
    rows = target.chunk(mesh.size())[mesh.get_local_rank()]
    local = F.cross_entropy(logits.to_local(), rows, ignore_index=ignore_index, reduction="sum")
    partial = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    with labelled(LOSS_LABEL):
        return partial.redistribute(placements=[Replicate()])


def _by_class(logits: DTensor, target: Tensor, ignore_index: int) -> DTensor:
    mesh = logits.device_mesh
    local = logits.to_local()
    first = local.shape[1] * mesh.get_local_rank()
    losses = _VocabularyParallel.apply(local, target, first, ignore_index, mesh.get_group())
    assert isinstance(losses, Tensor)
    return DTensor.from_local(losses.sum(), mesh, [Replicate()], run_check=False)


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
