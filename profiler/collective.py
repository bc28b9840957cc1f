"""How long collectives take among the groups of a pattern, and whether their results are right.

In: a `World`, a `Pattern`, a collective, bytes as nccl-tests counts them (the whole buffer). Out: a `Case`,
which runs in all groups at once. Its results are checked before and after the timed batches; a wrong one is
a `ProfileError` naming rank, host, collective and size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..planner.errors import ProfileError
from ..planner.layout import Collective
from .settings import Sample, Settings
from .timing import Run, sample
from .world import World

ELEMENT_BYTES = 4
"""float32: sums of small whole numbers are exact, so that results can be compared for equality."""
GROUPED = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    Collective.BROADCAST,
)
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 renames them and warns about the old names."""
MEMORY_SHARE = 0.05
"""Of the free memory that a message may take: a collective needs up to three buffers, and all sizes of one
curve are there at once, together twice the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One collective on this rank: fill the input, run once, compare the output with what is right."""

    fill: Callable[[], object]
    once: Callable[[], object]
    right: Callable[[], bool]


def sizes(settings: Settings, *, free_bytes: int) -> Iterator[int]:
    """Message sizes, growing; whoever measures stops when they take too long."""
    nbytes = settings.smallest_bytes
    while nbytes <= min(settings.largest_bytes, MEMORY_SHARE * free_bytes):
        yield nbytes
        nbytes *= settings.growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective of one size among the groups of a pattern."""

    run: Run
    check: Callable[[], None]
    """Run once with known input; raises `ProfileError` on all ranks where one got a wrong result."""


def prepare(
    world: World, collective: Collective, group: dist.ProcessGroup | None, ranks: Sequence[int], nbytes: int
) -> Case:
    """A rank without a group only takes part in the agreement."""
    operation = _operation(collective, group, ranks, _elements(nbytes, ranks), world) if group else None

    def run(count: int) -> float:
        if operation is None:
            return 0.0
        world.settle()
        start = time.perf_counter()
        for _ in range(count):
            operation.once()
        world.settle()
        return time.perf_counter() - start

    return Case(run=run, check=lambda: _check(world, operation, f"{collective} of {nbytes} bytes"))


def measure(
    world: World,
    collective: Collective,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    nbytes: int,
    settings: Settings,
) -> Sample:
    """Time one collective by itself in all groups; the slowest rank's time counts."""
    case = prepare(world, collective, group, ranks, nbytes)
    case.check()
    found = sample(lambda count: world.slowest(case.run(count)), settings, agree=world.slowest)
    case.check()
    return found


def exact_bytes(nbytes: int, size: int) -> int:
    """The bytes that are really sent: a whole number of elements for each of `size` ranks."""
    return _elements(nbytes, range(size)) * ELEMENT_BYTES


def _elements(nbytes: int, ranks: Sequence[int]) -> int:
    return max(nbytes // ELEMENT_BYTES // max(len(ranks), 1), 1) * max(len(ranks), 1)


def _check(world: World, operation: Operation | None, where: str) -> None:
    """Run once with known input. A wrong result ends the measurement on all ranks."""
    wrong = 0.0
    if operation is not None:
        operation.fill()
        operation.once()
        world.settle()
        wrong = 0.0 if operation.right() else float(world.rank + 1)
    first_wrong = int(world.slowest(wrong)) - 1
    if first_wrong >= 0:
        host = world.hosts[first_wrong]
        raise ProfileError(
            f"rank {first_wrong} ({host}) got a wrong result from {where}: "
            f"links, driver or library corrupt data"
        )


# --------------------------------------------------------------------------- the collectives


def _operation(
    collective: Collective, group: dist.ProcessGroup, ranks: Sequence[int], count: int, world: World
) -> Operation:
    make = {
        Collective.ALL_REDUCE: _all_reduce,
        Collective.ALL_GATHER: _all_gather,
        Collective.REDUCE_SCATTER: _reduce_scatter,
        Collective.ALL_TO_ALL: _all_to_all,
        Collective.BROADCAST: _broadcast,
        Collective.SEND_RECV: _send_recv,
    }[collective]
    return make(group, list(ranks), list(ranks).index(world.rank), count, world.device)


def _all_reduce(
    group: dist.ProcessGroup, ranks: list[int], me: int, count: int, device: torch.device
) -> Operation:
    buffer = torch.zeros(count, device=device)
    total = len(ranks) * (len(ranks) + 1) / 2

    def right() -> bool:
        good = bool((buffer == total).all())
        buffer.zero_()  # repeated sums of zero stay zero
        return good

    return Operation(
        fill=lambda: buffer.fill_(me + 1.0),
        once=lambda: dist.all_reduce(buffer, group=group),
        right=right,
    )


def _all_gather(
    group: dist.ProcessGroup, ranks: list[int], me: int, count: int, device: torch.device
) -> Operation:
    part = torch.empty(count // len(ranks), device=device)
    whole = torch.empty(count, device=device)
    expected = torch.arange(1.0, len(ranks) + 1, device=device).repeat_interleave(part.numel())

    def fill() -> None:
        part.fill_(me + 1.0)
        whole.zero_()

    return Operation(
        fill=fill,
        once=lambda: ALL_GATHER(whole, part, group=group),
        right=lambda: torch.equal(whole, expected),
    )


def _reduce_scatter(
    group: dist.ProcessGroup, ranks: list[int], me: int, count: int, device: torch.device
) -> Operation:
    size = len(ranks)
    whole = torch.arange(1.0, size + 1, device=device).repeat_interleave(count // size)
    part = torch.empty(count // size, device=device)
    return Operation(
        fill=lambda: part.zero_(),
        once=lambda: REDUCE_SCATTER(part, whole, group=group),
        right=lambda: bool((part == size * (me + 1.0)).all()),
    )


def _all_to_all(
    group: dist.ProcessGroup, ranks: list[int], me: int, count: int, device: torch.device
) -> Operation:
    size, part = len(ranks), count // len(ranks)
    places = torch.arange(float(size), device=device)
    sent = (places + me * size).repeat_interleave(part)
    received = torch.empty_like(sent)
    expected = (places * size + me).repeat_interleave(part)
    return Operation(
        fill=lambda: received.fill_(-1.0),
        once=lambda: dist.all_to_all_single(received, sent, group=group),
        right=lambda: torch.equal(received, expected),
    )


def _broadcast(
    group: dist.ProcessGroup, ranks: list[int], me: int, count: int, device: torch.device
) -> Operation:
    buffer = torch.zeros(count, device=device)
    return Operation(
        fill=lambda: buffer.fill_(7.0 if me == 0 else 0.0),
        once=lambda: dist.broadcast(buffer, src=ranks[0], group=group),
        right=lambda: bool((buffer == 7.0).all()),
    )


def _send_recv(
    group: dist.ProcessGroup, ranks: list[int], me: int, count: int, device: torch.device
) -> Operation:
    """Both ranks send and receive at once, so that every link carries traffic in both directions."""
    sent, received = torch.empty(count, device=device), torch.empty(count, device=device)
    peer = ranks[1 - me]
    ops = [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]

    def fill() -> None:
        sent.fill_(me + 1.0)
        received.zero_()

    def once() -> None:
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    return Operation(fill=fill, once=once, right=lambda: bool((received == 2.0 - me).all()))
