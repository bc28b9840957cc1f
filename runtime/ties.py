"""Parameters that several pipeline stages hold: a head that shares the embedding's weight.

In: each stage's models and the whole model's aliases. Out: after a step, each copy's gradient is the
sum over all copies; with equal values and optimizer states the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..planner.mesh import Mesh
from .labels import labelled

LABEL = "gradients of parameters tied over stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """One parameter on several stages, as one rank sees it."""

    local: tuple[nn.Parameter, ...]
    """This rank's copies; empty where it has none."""
    group: Any
    """Of the pipeline ranks that have one; None when it is this rank alone, or others."""
    copies: int
    """Over all stages."""


def tied_names(aliases: Mapping[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Names of each parameter that has several."""
    return sorted({names for names in aliases.values() if len(names) > 1})


def find_ties(
    stages: Sequence[nn.Module], aliases: Mapping[str, tuple[str, ...]], mesh: Mesh, rank: int
) -> list[Tie]:
    """Every tie that crosses stages. Collective: all ranks make the same groups."""
    ties = []
    for names in tied_names(aliases):
        local = tuple(
            found[0]
            for stage in stages
            if (found := [p for name, p in stage.named_parameters(remove_duplicate=False) if name in names])
        )
        counts: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(counts, len(local))
        tie = _tie(local, counts, mesh, rank)
        if tie is not None:
            ties.append(tie)
    return ties


def _tie(local: tuple[nn.Parameter, ...], counts: list[int], mesh: Mesh, rank: int) -> Tie | None:
    mine, copies = None, 0
    for group in mesh.groups("pp"):
        holders = [r for r in group if counts[r]]
        made = dist.new_group(holders) if len(holders) > 1 else None
        if rank in group:
            mine, copies = made if rank in holders else None, sum(counts[r] for r in group)
    return Tie(local=local, group=mine, copies=copies) if copies > 1 else None


def sum_copies(ties: Sequence[Tie]) -> None:
    """Give every copy the sum of all copies' gradients."""
    for tie in ties:
        if not tie.local:
            continue
        grads = [_local(p.grad) for p in tie.local if p.grad is not None]
        total = torch.stack(grads).sum(0)
        if tie.group is not None:
            with labelled(LABEL):
                dist.all_reduce(total, group=tie.group)
        for grad in grads:
            grad.copy_(total)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
