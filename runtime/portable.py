"""State that one plan saves and another reads: any mesh, any split, one process too.

In: a `Parallel` and, if wanted, its optimizer. Out: a dict for torch.distributed.checkpoint, by the
original names, that saving reads and loading fills in place. What this rank holds of a tensor is told
as boxes in the whole tensor, several where a fused axis is cut in pieces (torch's own description of
a sharded tensor has one box, and refuses those); so a box says nothing of the mesh it came from, and
an ordinary `state_dict()` of the model on one process reads the same checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from .layouts import shard_dim
from .parallel import Parallel

MODEL_AXES = ("ep", "tp")
"""Mesh axes that cut a parameter before FSDP does, in this order."""


def portable_state(parallel: Parallel, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Parameters and buffers as `model.NAME`, moments as `optimizer.NAME.KEY`, for `dcp.save` and `dcp.load`.

    To load an optimizer that has not stepped yet, give it its state first (`resume.Checkpoints` does).
    """
    return {name: portable(tensor) for name, tensor in _tensors(parallel, optimizer)}


def portable_copy(parallel: Parallel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The same on the CPU, so that training may go on while it is saved."""
    return {name: _copied(tensor) for name, tensor in _tensors(parallel, optimizer)}


def _tensors(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """What is saved, as it lies in the model and the optimizer."""
    for name, parameter in parallel.named_parameters():
        yield f"model.{name}", parameter.detach()
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"optimizer.{name}.{key}", value
    for stage in parallel.stages:
        yield from ((f"model.{name}", buffer) for name, buffer in stage.named_buffers())


def portable(tensor: Tensor) -> Tensor:
    """A sharded tensor as its boxes; an ordinary one as it is."""
    return Boxes(tensor, tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def _copied(tensor: Tensor) -> Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    copy = local.detach().to("cpu", copy=True)
    return Boxes(tensor, copy) if isinstance(tensor, DTensor) else copy


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive indices of one dim: where they lie in the whole, and in this rank's part."""

    first: int
    at: int
    length: int


class Boxes(Tensor):
    """This rank's part of a tensor, as torch.distributed.checkpoint asks for it."""

    local: Tensor
    boxes: dict[tuple[int, ...], tuple[_Run, ...]]
    """By their first corner in the whole tensor."""

    @staticmethod
    def __new__(cls, tensor: DTensor, local: Tensor) -> Boxes:
        """`local`, this rank's part of `tensor` or a copy of it, is written and filled in place."""
        boxes = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, tensor.shape, dtype=tensor.dtype, device=local.device
        )
        boxes.local = local
        runs = [_runs(_held(tensor, dim)) for dim in range(tensor.ndim)]
        boxes.boxes = {tuple(run.first for run in box): box for box in itertools.product(*runs)}
        return boxes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detached it is itself; nothing else can be done with it."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a tensor that is only there to be saved or loaded")

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(first), torch.Size(run.length for run in box))
            for first, box in self.boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = self.boxes[tuple(index.offset or ())]
        part = self.local
        for dim, run in enumerate(box):
            part = part.narrow(dim, run.at, run.length)
        return part


def _held(tensor: DTensor, dim: int) -> Tensor:
    """Indices of `dim` that this rank holds, in order: FSDP cuts what ep and tp left, in pieces or not.

    That FSDP's own cut is called strided then says no more than that order.
    """
    mesh, held = tensor.device_mesh, torch.arange(tensor.shape[dim])
    names = mesh.mesh_dim_names or ()
    cutting = _cutting(tensor.placements, dim)
    for axis in sorted(cutting, key=lambda axis: names[axis] not in MODEL_AXES):
        ranks, rank, placed = mesh.size(axis), mesh.get_local_rank(axis), tensor.placements[axis]
        pieces = int(placed.split_factor) if isinstance(placed, _StridedShard) and names[axis] == "tp" else 1
        if held.numel() % (pieces * ranks) == 0:
            held = held.view(pieces, ranks, -1)[:, rank].flatten()
        else:
            share = -(-held.numel() // ranks)
            held = held[rank * share : (rank + 1) * share]
    return held


def _cutting(placements: Sequence[Placement], dim: int) -> list[int]:
    return [axis for axis, placed in enumerate(placements) if shard_dim(placed) == dim]


def _runs(held: Tensor) -> list[_Run]:
    """Consecutive stretches of some indices."""
    if not held.numel():
        return []
    breaks = [0, *(torch.nonzero(held.diff() != 1).flatten() + 1).tolist(), held.numel()]
    return [_Run(int(held[a]), a, b - a) for a, b in itertools.pairwise(breaks)]
