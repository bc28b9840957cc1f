"""Recomputation that memory forces, when blocks may be recomputed by fractions: bounds in closed form.

In: `BlockClass`es, how many blocks of each, what may be kept. Out: the least seconds of all of them
(`Spared.seconds_within`), and of the fullest rank when blocks of one class are dealt to ranks (`crowded_s`):

    a rank with k microbatches in flight takes, for n blocks,
        t(n) = their seconds when they keep no more than (room - n static) / k
    the fullest takes at least the least T with  sum over ranks of (most n with t(n) <= T)  >=  all blocks

Ranks that hold many microbatches recompute more, or hold fewer blocks: an average over ranks does not see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

from ..cost import Recompute
from .intervals import BlockClass

ROUNDING = 1e-9
"""Of what may be kept: what sums in another order may differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spared:
    """Blocks as one knapsack: what less memory costs."""

    seconds: float
    """Of all blocks in their fastest modes."""
    saved_bytes: float
    """Of one microbatch in these modes."""
    steps: tuple[tuple[float, float], ...]
    """(seconds per byte, bytes) that recomputation frees, the cheapest first."""

    def seconds_within(self, saved_bytes: float, rounding_bytes: float) -> float:
        """Seconds when no more than that is kept; infinite when even full recomputation keeps more."""
        seconds, excess = self.seconds, self.saved_bytes - saved_bytes
        for price, freed in self.steps:
            if excess <= 0:
                return seconds
            take = min(freed, excess)
            excess, seconds = excess - take, seconds + price * take
        return seconds if excess <= rounding_bytes else math.inf


def spared(counts: Mapping[str, int], classes: Mapping[str, BlockClass]) -> Spared:
    """The knapsack of so many blocks of each class."""
    seconds, saved, steps = 0.0, 0.0, []
    for name, n in counts.items():
        block = classes[name]
        hull = _hull(block)
        seconds += n * block.seconds[hull[0]]
        saved += n * block.saved_bytes[hull[0]]
        for fast, slow in pairwise(hull):
            freed = n * (block.saved_bytes[fast] - block.saved_bytes[slow])
            steps.append((n * (block.seconds[slow] - block.seconds[fast]) / freed, freed))
    return Spared(seconds=seconds, saved_bytes=saved, steps=tuple(sorted(steps)))


def _hull(block: BlockClass) -> list[Recompute]:
    """Modes on the lower convex hull of seconds over saved bytes, fastest first."""
    hull: list[Recompute] = []
    saved, seconds = block.saved_bytes, block.seconds
    for mode in sorted(seconds, key=lambda q: (seconds[q], saved[q])):
        if hull and saved[mode] >= saved[hull[-1]]:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            first = (seconds[b] - seconds[a]) * (saved[b] - saved[mode])
            second = (seconds[mode] - seconds[b]) * (saved[a] - saved[b])
            if first <= second:
                break
            hull.pop()
        hull.append(mode)
    return hull


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """One block of a class, as ranks are filled with them."""

    block: Spared
    static_bytes: float
    transient_bytes: float
    """The least of any mode."""


def alone(name: str, classes: Mapping[str, BlockClass]) -> Class:
    """A class by itself."""
    block = classes[name]
    return Class(
        block=spared({name: 1}, classes),
        static_bytes=block.static_bytes,
        transient_bytes=min(block.transient_bytes.values()),
    )


def crowded_s(
    blocks: int,
    of: Class,
    *,
    capacity_bytes: float,
    in_flight: Sequence[float],
    pieces: int = 1,
    lacks: Sequence[int] | None = None,
    least_s: float = 0.0,
) -> float:
    """Seconds of the fullest rank when so many blocks of a class are dealt to ranks; infinite: none fit.

    `in_flight`: microbatches of every rank. `lacks`: what each lacks of `pieces` equal ones (else: any
    number).
    `least_s`: what a block is known to take without recomputation, where that is more.
    """
    ranks, step = len(in_flight), pieces if lacks else 1
    lacking = lacks or (0,) * ranks
    room, even = capacity_bytes - of.transient_bytes, -(-blocks // ranks)
    fewest = min(-(-(even + lack) // step) * step - lack for lack in set(lacking))

    def seconds(n: int, k: float) -> float:
        kept = (room / n - of.static_bytes) / k
        return n * (more_s + of.block.seconds_within(kept, ROUNDING * capacity_bytes))

    more_s = max(0.0, least_s - of.block.seconds)
    block_s, enough = of.block.seconds + more_s, fewest + step - 1
    if blocks == 1:
        return block_s
    if seconds(enough, max(in_flight)) <= enough * block_s:
        return fewest * block_s
    queue = [
        (seconds(step - lack, k), rank, step - lack)
        for rank, (k, lack) in enumerate(zip(in_flight, lacking, strict=True))
    ]
    heapify(queue)
    held, slowest = 0, 0.0
    while held < blocks:
        slowest, rank, n = heappop(queue)
        if math.isinf(slowest):
            return math.inf
        held += step - lacking[rank] if n <= step else step
        heappush(queue, (seconds(n + step, in_flight[rank]), rank, n + step))
    return max(slowest, fewest * block_s)
