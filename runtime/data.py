"""Data parallelism: FSDP2 for every ZeRO stage.

In: a stage's module with its layers, the device mesh, the ZeRO stage. Out: the same, in place.

| ZeRO | parameters between steps | during a step | gradients reduced |
|---|---|---|---|
| 0 | whole (`replicate`) | whole | once: all-reduce |
| 1 | sharded | gathered once, kept | once: reduce-scatter |
| 2 | sharded | gathered once, kept | every microbatch: reduce-scatter |
| 3 | sharded | gathered in forward and in backward | every microbatch: reduce-scatter |

ZeRO-1 keeps what an optimizer needs sharded and updates it there; that the parameters between steps
are those same shards is what makes the update need no other communication than the next gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from .layouts import is_strided

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
"""In which dtype parameters compute; they are kept and updated in their own."""


def shard_data(
    model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, *, zero_stage: int, dtype: str
) -> None:
    """Wrap every layer, then what is left of the model."""
    if mesh.size() == 1 and DTYPES[dtype] is None:
        return
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    if DTYPES[dtype] is None:
        policy = MixedPrecisionPolicy()
    for module in (*layers, model):
        if zero_stage == 0:
            replicate(module, mesh=mesh, mp_policy=policy)
        else:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=zero_stage == 3,
                shard_placement_fn=lambda p: _shard_dim(p, mesh.size()),
            )


def _shard_dim(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Dim 1 for matrices whose dim 0 tensor parallelism cuts in pieces: torch cannot join both cuts."""
    placed: Sequence[Placement] = parameter.placements if isinstance(parameter, DTensor) else ()
    strided = any(is_strided(p) for p in placed)
    if strided and parameter.ndim > 1 and parameter.to_local().shape[1] % ranks == 0:  # pyright: ignore
        return Shard(1)
    return None


def set_last_microbatch(model: nn.Module, *, zero_stage: int, last: bool) -> None:
    """Before a microbatch's forward: whether gradients are reduced and parameters given up after it."""
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(last or zero_stage >= 2)
    model.set_is_last_backward(last)
    if zero_stage in (1, 2):
        model.set_reshard_after_backward(last)
