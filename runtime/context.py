"""Context parallelism: every rank of `cp` holds a part of each sequence, in order.

In: the model's own forward on whole inputs. Token ids become DTensors cut along the sequence where
they are looked up; from there on every activation is one, on the mesh of `cp` (and `tp`), so that
positions, masks and rotary tables made from whole lengths are cut as they meet it. Attention reads
the keys and values of all ranks: gathered, kept for backward as the rank's own part, and gathered
again there; their gradients are reduce-scattered.

A parameter enters this world by `lifted`. Its gradient is this rank's term of a sum over `cp`,
times the size of the axis, since data parallelism averages over `cp` too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..planner.errors import PlanError
from .labels import labelled
from .layouts import shard_dim

AXIS = "cp"
SEQUENCE_DIM = 1
"""Of token ids (batch, sequence) and of activations (batch, sequence, ...)."""
ROWS_DIM = 2
"""The sequence in attention's operands, (batch, heads, length, head_dim)."""
LABEL = "keys and values over cp"


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of a mesh's axes."""
    return tuple(mesh.mesh_dim_names or ())


def has_context(mesh: DeviceMesh) -> bool:
    """Whether `cp` is one of the axes."""
    return AXIS in names_of(mesh)


def cut_tokens(ids: Any, mesh: DeviceMesh) -> Any:
    """Token ids (batch, sequence) or positions (sequence), whole on every rank, cut along the sequence.

    Anything else, such as a length that does not divide, as it is.
    """
    ranks = mesh.size(names_of(mesh).index(AXIS))
    if type(ids) is not Tensor or ids.ndim not in (1, SEQUENCE_DIM + 1) or ids.shape[-1] % ranks:
        return ids
    placed: list[Placement] = [Shard(ids.ndim - 1) if n == AXIS else Replicate() for n in names_of(mesh)]
    local = ids.chunk(ranks, -1)[mesh.get_local_rank(AXIS)].contiguous()
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=ids.shape, stride=ids.stride())


# --------------------------------------------------------------------------- parameters


def lifted(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that all ranks of `cp` hold alike, plain or on `tp` alone, on the mesh of activations."""
    return _Lifted.apply(x, mesh)  # pyright: ignore[reportReturnType]


class _Lifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> DTensor:
        ctx.tp_mesh = x.device_mesh if isinstance(x, DTensor) else None
        along_tp = x.placements[0] if isinstance(x, DTensor) else Replicate()
        placed = [Replicate() if name == AXIS else along_tp for name in names_of(mesh)]
        local = x.to_local() if isinstance(x, DTensor) else x
        return DTensor.from_local(
            local.view_as(local), mesh, placed, run_check=False, shape=x.shape, stride=x.stride()
        )

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[Tensor, None]:
        grad = grads[0]
        names = names_of(grad.device_mesh)
        if ctx.tp_mesh is None and len(names) > 1:
            keep = [
                p if name == AXIS else Replicate() for name, p in zip(names, grad.placements, strict=True)
            ]
            grad = grad.redistribute(placements=keep)
        local = _term(grad, names.index(AXIS))
        if ctx.tp_mesh is None:
            return local, None
        along_tp = grad.placements[names.index("tp")]
        return DTensor.from_local(
            local, ctx.tp_mesh, [along_tp], run_check=False, shape=grad.shape, stride=grad.stride()
        ), None


def _term(grad: DTensor, at: int) -> Tensor:
    """This rank's term of a gradient that is a sum over `cp`, times the size of the axis."""
    dims = [shard_dim(placed) for placed in grad.placements]
    if dims[at] is not None and dims.count(dims[at]) > 1:  # another axis cuts the same dim inside this cut
        grad = grad.redistribute(
            placements=[Replicate() if i == at else p for i, p in enumerate(grad.placements)]
        )
    local, placed, ranks = grad.to_local(), grad.placements[at], grad.device_mesh.size(at)
    if isinstance(placed, Replicate):
        return local
    if isinstance(placed, Partial):
        return local * ranks
    assert type(placed) is Shard, placed
    parts = [torch.zeros_like(local) for _ in range(ranks)]
    parts[grad.device_mesh.get_local_rank(at)] = local * ranks
    return torch.cat(parts, placed.dim)


# --------------------------------------------------------------------------- attention


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, mesh: DeviceMesh,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Attention of this rank's queries to the keys and values of all; all local, `mesh` is `cp`.

    `mask`: the rows of this rank's queries. Raises `PlanError` for causal attention between
    sequences of different lengths.
    """
    if is_causal and query.shape[ROWS_DIM] != key.shape[ROWS_DIM]:
        raise PlanError("causal attention over cp needs as many keys as queries")
    with _kept_as_parts(mesh) as gather:
        keys, values = gather(key), gather(value)
        if is_causal:
            seen = query.shape[ROWS_DIM] * (mesh.get_local_rank() + 1)
            keys, values = keys[:, :, :seen], values[:, :, :seen]
            mask = _causal(query.shape[ROWS_DIM], seen, query.device)
        return F.scaled_dot_product_attention(query, keys, values, mask, **options)


def _causal(rows: int, seen: int, device: torch.device) -> Tensor:
    """Which of `seen` keys each of the last `rows` queries reads."""
    return torch.ones(rows, seen, dtype=torch.bool, device=device).tril(seen - rows)


class _Gathered(torch.autograd.Function):
    """All ranks' parts along the sequence; the gradient is summed and cut again."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return _gather(part, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        with labelled(f"{LABEL} (gradient)"):
            part = funcol.reduce_scatter_single(grads[0].contiguous(), "sum", ROWS_DIM, ctx.mesh.get_group())
        return part, None


def _gather(part: Tensor, mesh: DeviceMesh, label: str = LABEL) -> Tensor:
    with labelled(label):
        whole = funcol.all_gather_single(part.contiguous(), ROWS_DIM, mesh.get_group())
    return whole.wait() if hasattr(whole, "wait") else whole  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _kept_as_parts(mesh: DeviceMesh) -> Iterator[Callable[[Tensor], Tensor]]:
    """A gathering function; inside, autograd keeps what it returned as the part it came from.

    Other tensors are kept as the surrounding code (recomputation) wishes.
    """
    parts: dict[int, Tensor] = {}
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    keep, restore = around or (lambda x: x, lambda x: x)

    def gather(part: Tensor) -> Tensor:
        whole = _Gathered.apply(part, mesh)
        assert isinstance(whole, Tensor)
        parts[whole.untyped_storage().data_ptr()] = part.detach()
        return whole

    def pack(x: Tensor) -> tuple[Any, Any]:
        part = parts.get(x.untyped_storage().data_ptr())
        if part is None:
            return keep(x), None
        return keep(part), (x.shape, x.stride(), x.storage_offset())

    def unpack(kept: tuple[Any, Any]) -> Tensor:
        x, view = restore(kept[0]), kept[1]
        return x if view is None else _gather(x, mesh, f"{LABEL} (gradient)").as_strided(*view)

    with saved_tensors_hooks(pack, unpack):
        yield gather
