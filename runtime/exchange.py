"""Rows sent to the ranks that work on them, and back: what experts and split tables share.

In: rows sorted by who works on them, and how many go where. Out: rows sorted by expert, and a way back.
Along one mesh axis there are two ways: each rank holds some of the experts, and gets their rows by
all-to-all (`sent_by_expert`); or each holds a part of every expert, and gets all rows by all-gather, of which
it returns terms that a reduce-scatter adds (`shared_by_all`; the rows of ranks with few are padded to the
most). Everything is differentiable: each collective's backward is the one that undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .labels import labelled

ROWS_LABEL = "rows to experts or tables, and back"
IDS_LABEL = "ids to tables"
COUNTS_LABEL = "rows for each rank"


class Way(Protocol):
    """How rows came."""

    def back(self, rows: Tensor) -> Tensor:
        """The results of the rows that came, to where they came from and in their order there."""
        ...


# --------------------------------------------------------------------------- some experts on each rank


@dataclass(frozen=True, slots=True)
class Route:
    """How many rows go to and come from each rank."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    mesh: DeviceMesh

    def there(self, rows: Tensor, label: str = ROWS_LABEL) -> Tensor:
        """Rows sorted by rank, to their owners."""
        return _exchange(rows, self.received, self.sent, self.mesh, label)

    def back(self, rows: Tensor) -> Tensor:
        """The way back."""
        return _exchange(rows, self.sent, self.received, self.mesh)


def route_of(sent: Tensor, received: Tensor, mesh: DeviceMesh) -> Route:
    """The route of (ranks, kinds) counts."""
    return Route(tuple(sent.sum(1).tolist()), tuple(received.sum(1).tolist()), mesh)


def exchanged_counts(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    """From (ranks, kinds) rows to send, the same for rows to receive."""
    with labelled(COUNTS_LABEL):
        return _waited(funcol.all_to_all_single(counts.contiguous(), None, None, mesh.get_group()))


@dataclass(frozen=True, slots=True)
class _Sent:
    route: Route
    order: Tensor
    """Of the rows that came, sorted by expert."""

    def back(self, rows: Tensor) -> Tensor:
        return self.route.back(rows[self.order.argsort()])


def sent_by_expert(rows: Tensor, ends: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Way]:
    """Rows of this rank's experts, where each expert's end, and the way back.

    In: rows sorted by expert and the ends of each, of all experts that the ranks of `mesh` share evenly.
    """
    counts = _counts(ends).view(mesh.size(), -1)
    received = exchanged_counts(counts, mesh)
    route, order = route_of(counts, received, mesh), _by_kind(received)
    return route.there(rows)[order], _ends(received.sum(0)), _Sent(route, order)


def _counts(ends: Tensor) -> Tensor:
    return torch.diff(ends.long(), prepend=ends.new_zeros(1).long())


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def _by_kind(counts: Tensor) -> Tensor:
    """The order that sorts rows by kind, given (ranks, kinds) rows that lie rank by rank."""
    kinds = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return kinds.repeat_interleave(counts.flatten()).argsort(stable=True)


def _exchange(
    rows: Tensor, out: tuple[int, ...], into: tuple[int, ...], mesh: DeviceMesh, label: str = ROWS_LABEL
) -> Tensor:
    return _Exchanged.apply(rows, out, into, mesh, label)  # pyright: ignore[reportReturnType]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, out: tuple[int, ...], into: tuple[int, ...], mesh: DeviceMesh, label: str
    ) -> Tensor:
        ctx.back = (into, out, mesh)
        with labelled(label):
            return _waited(
                funcol.all_to_all_single(rows.contiguous(), list(out), list(into), mesh.get_group())
            )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchange(grads[0], *ctx.back), None, None, None, None


def _waited(found: Any) -> Tensor:
    return found.wait() if hasattr(found, "wait") else found


# --------------------------------------------------------------------------- a part of each expert


@dataclass(frozen=True, slots=True)
class _Shared:
    order: Tensor
    """Of all ranks' padded rows, sorted by expert, without padding."""
    own: int
    longest: int
    mesh: DeviceMesh

    def back(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(self.longest * self.mesh.size(), *rows.shape[1:])
        return _reduce_scattered(padded.index_copy(0, self.order, rows), self.mesh)[: self.own]


def shared_by_all(rows: Tensor, ends: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Way]:
    """All ranks' rows sorted by expert, where each expert's end, and the way back, which adds up terms."""
    counts = _gathered_counts(_counts(ends), mesh)
    totals = counts.sum(1).tolist()
    longest = max(totals)
    padding = rows.new_zeros(longest - rows.shape[0], *rows.shape[1:])
    padded = _Gathered.apply(torch.cat([rows, padding]), mesh)
    filled = torch.cat([torch.arange(n, device=rows.device) + i * longest for i, n in enumerate(totals)])
    order = filled[_by_kind(counts)]
    assert isinstance(padded, Tensor)
    return padded[order], _ends(counts.sum(0)), _Shared(order, rows.shape[0], longest, mesh)


def _gathered_counts(counts: Tensor, mesh: DeviceMesh) -> Tensor:
    """(ranks, kinds) rows of all ranks."""
    with labelled(COUNTS_LABEL):
        return _waited(funcol.all_gather_single(counts.unsqueeze(0), 0, mesh.get_group()))


def _reduce_scattered(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    return _ReduceScattered.apply(rows, mesh)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        with labelled(ROWS_LABEL):
            return _waited(funcol.all_gather_single(rows.contiguous(), 0, mesh.get_group()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scattered(grads[0], ctx.mesh), None


class _ReduceScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        with labelled(ROWS_LABEL):
            return _waited(funcol.reduce_scatter_single(rows.contiguous(), "sum", 0, mesh.get_group()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Gathered.apply(grads[0], ctx.mesh), None  # pyright: ignore[reportReturnType]
