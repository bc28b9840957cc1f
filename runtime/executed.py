"""Which collectives really run: kind, bytes, group, label.

In: code run inside `record`. Out: one `Executed` per collective, in order. Bytes follow the plan's
convention (nccl-tests'): the whole buffer of an all-reduce, the gathered output of an all-gather, the
input of a reduce-scatter, one rank's buffer of an all-to-all, the message of a send or a receive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..planner.layout import Collective
from ..planner.mesh import AXES, Mesh
from .exchange import COUNTS_LABEL, IDS_LABEL, ROWS_LABEL
from .labels import current_label


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """One collective on one rank."""

    collective: Collective
    bytes: int
    ranks: tuple[int, ...]
    """Global ranks of its group."""
    label: str
    """The plan's, where one applies."""
    backward: bool = False
    """Whether autograd ran it."""
    row_bytes: int = 0
    """Bytes of one row, of rows sent to experts or tables."""
    rows: tuple[int, ...] = ()
    """Of exchanged counts: rows that this rank sends, then those that each rank sends it (or has)."""


KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_reduce_": Collective.ALL_REDUCE,
    "allreduce_": Collective.ALL_REDUCE,
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "all_gather_into_tensor_out": Collective.ALL_GATHER,
    "allgather_": Collective.ALL_GATHER,
    "_allgather_base_": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "alltoall_base_": Collective.ALL_TO_ALL,
    "shard_dim_alltoall": Collective.ALL_TO_ALL,
    "broadcast_": Collective.BROADCAST,
    "broadcast": Collective.BROADCAST,
    "send": Collective.SEND_RECV,
    "recv_": Collective.SEND_RECV,
}
"""By operator name in `NAMESPACES`."""
NO_GRAPH_TASK = -1
"""What torch calls the task of a thread that runs no backward."""
NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


class _Recorder(TorchDispatchMode):
    def __init__(self, found: list[Executed]) -> None:
        super().__init__()
        self._found = found
        self._counted: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Where in `found`, the counts sent, and those received."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: its own collectives are what counts
        result = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            self._note(func._schema.name.split("::")[1], args, result)
        return result

    def _note(self, name: str, args: Any, result: Any) -> None:
        kind = KINDS.get(name)
        if kind is None:
            return
        before, after = _bytes(args), _bytes(result)
        size = {Collective.ALL_GATHER: max(before, after), Collective.SEND_RECV: before}.get(kind, before)
        if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"):
            output, given = _bytes(args[0]), _bytes(args[1])
            size = max(output, given) if kind is not Collective.ALL_TO_ALL else given
        label = current_label()
        buffers = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if label == COUNTS_LABEL:
            self._counted.append((len(self._found), buffers[0], result))
        self._found.append(
            Executed(
                collective=kind,
                bytes=size,
                ranks=_group_of(args),
                label=label,
                backward=torch._C._current_graph_task_id() != NO_GRAPH_TASK,
                row_bytes=_row_bytes(buffers[0]) if label in (ROWS_LABEL, IDS_LABEL) else 0,
            )
        )

    def count_rows(self) -> None:
        """Read the counts that were exchanged: they are there once the exchanges are over."""
        for index, sent, received in self._counted:
            each = received.view(len(self._found[index].ranks), -1).sum(1)
            rows = (int(sent.sum()), *each.tolist())
            self._found[index] = replace(self._found[index], rows=rows)


def _row_bytes(rows: torch.Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


def _bytes(values: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(values) if isinstance(x, torch.Tensor))


def _group_of(args: Any) -> tuple[int, ...]:
    for value in reversed(args):
        if isinstance(value, str):
            try:
                return tuple(dist.get_process_group_ranks(_resolve_process_group(GroupName(value))))
            except (LookupError, ValueError, RuntimeError):
                continue  # a reduce operation's name
        if isinstance(value, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
            except (RuntimeError, TypeError):
                continue  # a reduce operation
    return ()


@contextmanager
def record() -> Iterator[list[Executed]]:
    """Collect the collectives that run inside, forward and backward."""
    found: list[Executed] = []
    recorder = _Recorder(found)
    with recorder:
        yield found
    recorder.count_rows()


@cache
def axes_of(ranks: tuple[int, ...], mesh: Mesh) -> str:
    """The mesh axes that a group of ranks runs along, or that hold it, joined by `+`; `?` for no such group.

    Groups smaller than their axis are HSDP's, and those of stages that hold a tied parameter.
    """
    used = [axis for axis in AXES if mesh.size(axis) > 1]
    for count in range(len(used) + 1):
        for axes in combinations(used, count):
            if any(set(ranks) <= set(group) for group in mesh.groups(*axes)):
                return "+".join(axes)
    return "?"
