"""Modules that route tokens to experts run on each rank's own part of the sequences.

In: the planned modules (`Plan.routing_modules`), which work token by token, on a mesh where `tp` or `cp` has
several ranks. Out: the same modules. What enters is cut along the sequence and handed in as ordinary tensors
of this rank's own tokens, so that routing, sorting and counting need no rule; what leaves is a DTensor again.

A weight inside that every rank holds whole (the router's) gets this rank's term of its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..planner.errors import PlanError
from ..planner.plan import Plan
from .context import SEQUENCE_DIM, has_context, lifted
from .experts import combined, is_sparse
from .names import matches
from .operands import gradient_laid_out, whole_on


def is_routing(plan: Plan, name: str) -> bool:
    """Whether a module of that name is one."""
    return any(matches(path, name) for path in plan.routing_modules)


def inside_routing(plan: Plan, name: str) -> bool:
    """Whether a module lies inside of one."""
    parents = name.split(".")
    return any(is_routing(plan, ".".join(parents[:i])) for i in range(1, len(parents)))


def install_routing(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Give the planned modules their new forward; `mesh`: on which activations lie."""
    if mesh.size() == 1:
        return
    for name, module in model.named_modules():
        if is_routing(plan, name):
            module.forward = on_own_tokens(module.forward, name, mesh)


def on_own_tokens(forward: Callable, name: str, mesh: DeviceMesh) -> Callable:
    """`forward` of a module called `name`, run on ordinary tensors of this rank's own tokens.

    Raises `PlanError` when it returns a tensor that is not (batch, sequence, ...).
    """
    placed = [Shard(SEQUENCE_DIM)] * mesh.ndim

    @functools.wraps(forward)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = x.shape[: SEQUENCE_DIM + 1]

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.shape[: SEQUENCE_DIM + 1] != tokens:
                return value
            whole = whole_on(value, mesh)
            return whole.redistribute(placements=placed).to_local().contiguous()

        part = own(x)

        def joined(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.shape[: SEQUENCE_DIM + 1] != part.shape[: SEQUENCE_DIM + 1]:
                raise PlanError(
                    f"{name} returns a tensor {tuple(value.shape)}: beside split sequences it may return "
                    "(batch, sequence, ...) only"
                )
            local = gradient_laid_out(combined(value))
            return DTensor.from_local(local, mesh, placed, run_check=False)

        rest, named = tree_map(own, (args, kwargs))
        with _OwnWeights(mesh):
            outputs = forward(part, *rest, **named)
        return tree_map(joined, outputs)

    return run


class _OwnWeights(TorchFunctionMode):
    """Weights that all ranks hold whole, as ordinary tensors with this rank's term of their gradient."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        named = {key: tree_map(self._local, value) for key, value in (kwargs or {}).items()}
        return func(*tree_map(self._local, args), **named)

    def _local(self, value: Any) -> Any:
        if is_sparse(value) or not isinstance(value, DTensor | nn.Parameter):
            return value
        if isinstance(value, DTensor) and value.placements != (Replicate(),) * value.device_mesh.ndim:
            raise PlanError("beside split sequences only experts may be split in a module that routes")
        whole = lifted(value, self._mesh) if has_context(self._mesh) else value
        assert isinstance(whole, torch.Tensor)
        if not isinstance(whole, DTensor):
            return whole
        return whole.to_local(grad_placements=[Partial()] * whole.device_mesh.ndim)
