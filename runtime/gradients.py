"""Gradients after backward: sums that are still owed, the global norm, clipping.

In: parameters on one or several meshes, some gradients still partial sums over `tp`. Out: every
gradient final; the norm of all of them over the whole model, by ONE all-reduce of one number over
all ranks: each rank adds its local squares divided by the number of ranks that hold the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor, Partial, Replicate

from .labels import labelled
from .layouts import shard_dim

REPLICATED_LABEL = "gradients of parameters replicated over tp"
NORM_LABEL = "gradient norm"


def sum_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the gradients that are partial over tp, flattened into one all-reduce.

    A gradient in yet another layout than its parameter (the planned one is neither) is brought into it.
    """
    parameters = list(parameters)
    owed = [p for p in parameters if isinstance(p.grad, DTensor) and _is_owed(p.grad, p)]
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and not _is_final(grad, parameter):
            parameter.grad = grad.redistribute(placements=parameter.placements)
    if not owed:
        return
    grads = [p.grad for p in owed if isinstance(p.grad, DTensor)]
    mesh = grads[0].device_mesh
    flat = _flatten_dense_tensors([grad.to_local() for grad in grads])
    with labelled(REPLICATED_LABEL):
        dist.all_reduce(flat, group=mesh.get_group())
    for parameter, grad, total in zip(
        owed, grads, _unflatten_dense_tensors(flat, [g.to_local() for g in grads]), strict=True
    ):
        parameter.grad = DTensor.from_local(
            total, grad.device_mesh, [Replicate()], run_check=False, shape=grad.shape, stride=grad.stride()
        )


def _is_owed(grad: DTensor, parameter: Tensor) -> bool:
    """Whether it is a whole parameter's gradient, in terms to be added."""
    whole = isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)
    return whole and isinstance(grad.placements[0], Partial)


def _is_final(grad: DTensor, parameter: DTensor) -> bool:
    return grad.placements == parameter.placements or _is_owed(grad, parameter)


def holders(parameter: Tensor, ranks: int) -> int:
    """How many of `ranks` ranks hold the same part of a parameter (dims divided evenly or not)."""
    if not isinstance(parameter, DTensor):
        return ranks
    parts = 1
    for size, placed in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        parts *= size if shard_dim(placed) is not None else 1
    return ranks // parts


def global_norm(parameters: Sequence[nn.Parameter], *, stage_ranks: int, copies: dict[int, int]) -> Tensor:
    """Euclidean norm of all gradients, equal on every rank. Collective over all ranks.

    `stage_ranks`: ranks of one pipeline stage. `copies`: for a parameter (by id) that several stages
    hold, how many do.
    """
    device = parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float32, device=device)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        share = holders(parameter, stage_ranks) * copies.get(id(parameter), 1)
        total += grad.float().square().sum() / share
    if dist.get_world_size() > 1:
        with labelled(NORM_LABEL):
            dist.all_reduce(total)
    return total.sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm` (as torch's own does)."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            grad.mul_(factor.to(grad.dtype))
