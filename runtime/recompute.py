"""Planned recomputation, layer by layer.

In: a layer and its mode (none, selective, full). Out: the layer with its forward wrapped. `full`
keeps a layer's inputs and runs it again in backward; `selective` keeps the results of matrix products
and attention and of collectives, and runs everything else again, without communicating.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..planner.cost import Recompute
from ..planner.errors import PlanError

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
KEPT = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _c10d.all_reduce.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_to_all_single.default,
    _c10d.wait_tensor.default,
)
"""What selective recomputation never runs again."""


def recompute(layer: nn.Module, mode: str) -> None:
    """Make `layer` recompute as `mode` says. Raises `PlanError` for an unknown mode."""
    if mode not in list(Recompute):
        raise PlanError(f"recompute mode {mode!r} of a layer; expected one of {', '.join(Recompute)}")
    if mode == Recompute.NONE:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == Recompute.SELECTIVE:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    layer.forward = functools.partial(checkpoint, layer.forward, **options)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
