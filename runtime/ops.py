"""How operations on split activations run where DTensor has no rule, or a costlier one.

In: calls of torch functions while the mode is on. Out: the same results on DTensors. Plain tensors
that meet a DTensor (positions, masks, rotary tables) count as whole on every rank. A short table
replaces what remains: attention runs on each rank's heads or samples (no CPU rule exists),
cross-entropy works on split logits, taking a fused projection apart is local in both directions, and
products and lookups of experts and tables go to the ranks that hold them (`experts`). Activations lie
on the mesh of `tp`, of `cp`, or of both (`context`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..planner.errors import PlanError
from .attention import attention
from .context import cut_tokens, has_context
from .embedding import split_lookup
from .experts import COMPUTE_DTYPE, grouped_product, is_sparse, lookup
from .factories import new_empty
from .fused import chunk_pieces, split_pieces, unbind_whole_dim, unflatten_fused, view_fused
from .layouts import shard_dim
from .linear import split_addmm, split_convolution, split_linear
from .loss import cross_entropy
from .operands import mesh_of, plain, whole_on


class ShardedOps(TorchFunctionMode):
    """The mode. It may be entered inside itself."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh`: on which activations lie."""
        super().__init__()
        self._mesh = mesh
        self._cuts_tokens = has_context(mesh)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # shapes, dtypes: most of all calls
            return func(*args, **kwargs)
        if self._cuts_tokens and func is F.embedding:
            args = (cut_tokens(args[0], self._mesh), *args[1:])
        if any(is_sparse(value) for value in (*args, *kwargs.values())):
            sparse = SPARSE.get(func)
            return (
                _outside(func, args, kwargs)
                if sparse is None
                else sparse(*args, **kwargs, activations=self._mesh)
            )
        mesh = mesh_of((*args, *kwargs.values()))
        if mesh is None:
            return func(*args, **kwargs)
        if has_context(mesh):
            args, kwargs = whole_on(args, mesh), {key: whole_on(value, mesh) for key, value in kwargs.items()}
        replacement = REPLACED.get(func)
        if replacement is not None and (result := replacement(*args, **kwargs)) is not NotImplemented:
            return result
        return func(*whole_on(args, mesh), **{key: whole_on(value, mesh) for key, value in kwargs.items()})


Mode = Callable[[], AbstractContextManager]
"""What a forward runs in."""


def mode_for(mesh: DeviceMesh, *, experts: bool) -> Mode:
    """The mode on `mesh`; none where neither activations nor weights (over ep: `experts`) are split."""
    return partial(ShardedOps, mesh) if experts or mesh.size() > 1 else nullcontext


def run_in(mode: Mode, forward: Callable) -> Callable:
    """`forward` in that mode."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return forward(*args, **kwargs)

    return run


def _outside(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A weight split over ep may be cast or transposed; only `REPLACED` lets it meet a rank's own rows."""
    if any(type(leaf) is Tensor for leaf in tree_leaves((args, kwargs))):
        name = getattr(func, "__name__", str(func))
        raise PlanError(
            f"{name} reads a weight that is split over ep; only grouped_mm and embedding can do so"
        )
    result = func(*args, **kwargs)
    for weight in args:
        if isinstance(result, Tensor) and hasattr(weight, COMPUTE_DTYPE):  # a view computes in the same dtype
            setattr(result, COMPUTE_DTYPE, getattr(weight, COMPUTE_DTYPE))
    return result


def split_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Cross-entropy on split logits; NotImplemented leaves rarer forms to DTensor, on whole logits."""
    if not isinstance(input, DTensor) or not any(shard_dim(p) is not None for p in input.placements):
        return NotImplemented
    unusual = weight is not None or size_average is not None or reduce is not None or label_smoothing
    class_targets = not target.dtype.is_floating_point
    if unusual or input.ndim != 2 or reduction not in ("mean", "sum") or not class_targets:
        mesh = input.device_mesh
        whole = input.redistribute(placements=[Replicate()] * mesh.ndim)
        return F.cross_entropy(
            whole, whole_on(target, mesh), whole_on(weight, mesh), size_average,
            ignore_index, reduce, reduction, label_smoothing,
        )  # fmt: skip
    return cross_entropy(input, plain(target), ignore_index=ignore_index, reduction=reduction)


REPLACED: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: attention,
    F.linear: split_linear,
    torch.addmm: split_addmm,
    F.conv2d: split_convolution,
    F.embedding: split_lookup,
    F.cross_entropy: split_cross_entropy,
    Tensor.new_empty: new_empty,
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
SPARSE: dict[Callable, Callable] = {torch._grouped_mm: grouped_product, F.embedding: lookup}
"""What may read a weight that is split over ep."""
