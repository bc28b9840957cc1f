"""Data parallelism: FSDP2 for every ZeRO stage.

In: a stage's module with its layers, the device mesh, the ZeRO stage. Out: the same, in place.

| ZeRO | parameters between steps | during a step | gradients reduced |
|---|---|---|---|
| 0 | whole (`replicate`) | whole | once: all-reduce |
| 1 | sharded | gathered once, kept | once: reduce-scatter |
| 2 | sharded | gathered once, kept | every microbatch: reduce-scatter |
| 3 | sharded | gathered in forward and in backward | every microbatch: reduce-scatter |

Under HSDP all this happens among neighbours along dp; groups of them hold copies, whose shards of
gradients are all-reduced once a step.

In a pipeline, where a stage's microbatches are interleaved, ZeRO-2 and 3 too gather once a step, keep
what was gathered and reduce once.

ZeRO-1 keeps what an optimizer needs sharded and updates it there; that the parameters between steps
are those same shards is what makes the update need no other communication than the next gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Placement, Shard

from .context import names_of
from .experts import COMPUTE_DTYPE, is_sparse
from .labels import labelled
from .layouts import is_strided, shard_dim
from .mesh import REPLICA, Meshes

SPARSE_LABEL = "gradients of sparse parameters"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
"""In which dtype parameters compute; they are kept and updated in their own."""


def shard_data(
    model: nn.Module,
    layers: Sequence[nn.Module],
    mesh: Meshes,
    *,
    zero_stage: int,
    dtype: str,
    pipelined: bool,
) -> None:
    """Wrap every layer, then what is left of the model.

    Dense parameters lie on all data ranks, experts and tables on those along `dp` and `cp` alone;
    without ZeRO the latter are left to `sum_replicas`.
    """
    if mesh.data.size() == 1 and DTYPES[dtype] is None:
        return
    policy = MixedPrecisionPolicy()
    if DTYPES[dtype] is not None:
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    sparse = {p for p in model.parameters() if is_sparse(p)}
    replicas = FSDPMeshInfo(mesh.replica, shard_mesh_dim=0)

    def placed(parameter: nn.Parameter) -> Shard | ShardPlacementResult | None:
        if parameter in sparse:
            dim = _shard_dim(parameter, mesh.replica.size()) or Shard(0)
            return ShardPlacementResult(placement=dim, mesh_info=replicas)
        return _shard_dim(parameter, mesh.shards.size(-1))

    unmanaged = sparse if zero_stage == 0 or mesh.replica.size() == 1 else set()
    for parameter in unmanaged:
        setattr(parameter, COMPUTE_DTYPE, DTYPES[dtype] or parameter.dtype)
    for module in (*layers, model):
        if zero_stage == 0:
            replicate(module, mesh=mesh.data, mp_policy=policy, ignored_params=unmanaged)
        else:
            fully_shard(
                module,
                mesh=mesh.shards,
                mp_policy=policy,
                reshard_after_forward=zero_stage == 3 and not pipelined,
                shard_placement_fn=placed,
                ignored_params=unmanaged,
            )


def is_unmanaged(parameter: torch.Tensor) -> bool:
    """Whether it is a sparse parameter that FSDP does not shard over its replicas."""
    return (
        isinstance(parameter, DTensor)
        and is_sparse(parameter)
        and REPLICA not in names_of(parameter.device_mesh)
    )


def sum_replicas(parameters: Iterable[nn.Parameter], mesh: Meshes) -> None:
    """Average, over the ranks that hold the same ones, the gradients of experts that FSDP does not manage."""
    grads = [p.grad.to_local() for p in parameters if is_unmanaged(p) and isinstance(p.grad, DTensor)]
    if not grads or mesh.replica.size() == 1:
        return
    flat = _flatten_dense_tensors(grads)
    with labelled(SPARSE_LABEL):
        dist.all_reduce(flat, group=mesh.replica.get_group())
    for grad, total in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(total / mesh.replica.size())


def _shard_dim(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """The first dim that divides, for no padding; not one that tensor parallelism cuts in pieces.

    torch cannot join two cuts of a dim of which one is in pieces. None, which is dim 0, where none divides.
    """
    placed: Sequence[Placement] = parameter.placements if isinstance(parameter, DTensor) else ()
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    in_pieces = {shard_dim(p) for p in placed if is_strided(p)}
    good = (dim for dim, size in enumerate(local.shape) if size % ranks == 0 and dim not in in_pieces)
    return next((Shard(dim) for dim in good), None)


def set_last_microbatch(model: nn.Module, *, zero_stage: int, last: bool) -> None:
    """Before a microbatch's forward: whether gradients are reduced and parameters given up after it."""
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(last or zero_stage >= 2)
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)
    if zero_stage in (1, 2):
        model.set_reshard_after_backward(last)
