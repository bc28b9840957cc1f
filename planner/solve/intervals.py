"""What one pipeline rank takes, and holds, for an interval of the chain.

In: a `StageProblem` (seconds and bytes per block class and recompute mode). Out: `Intervals.best`,
the fastest modes with which a rank can hold blocks i .. j-1, exactly: the fewest seconds whose memory

    static + in_flight * saved + largest transient  <=  capacity

holds. Blocks of a class are alike, so that only their number in each mode matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ..cost import Recompute

Modes = tuple[tuple[str, int, Recompute], ...]
"""(block class, how many, mode), in execution order."""
Counts = tuple[tuple[str, int], ...]
"""(block class, how many), in order of first appearance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockClass:
    """What one block costs its stage, for one microbatch."""

    seconds: Mapping[Recompute, float]
    """Forward and backward, recomputation included."""
    static_bytes: float
    """Parameters, gradients, optimizer."""
    saved_bytes: Mapping[Recompute, float]
    """Activations of one microbatch."""
    transient_bytes: Mapping[Recompute, float]
    """While the block runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """A chain to cut. All seconds are per microbatch and device, all bytes per device."""

    chain: tuple[str, ...]
    layer_classes: frozenset[str]
    """Every rank holds at least `virtual_stages` blocks of these classes."""
    classes: Mapping[str, BlockClass]
    stages: int
    """Pipeline ranks."""
    virtual_stages: int = 1
    fill_ways: int | None = None
    """Into how many parts the schedule cuts the pipeline's fill; None: as many as virtual stages."""
    microbatches: int
    in_flight: tuple[float, ...]
    """Per rank, microbatches whose activations are held at once (in units of the rank's blocks)."""
    capacity_bytes: float
    stage_s: float = 0.0
    """Added to every rank: what it hands to its neighbours."""
    cuts: frozenset[int] | None = None
    """Positions where the chain may be cut; None: anywhere."""
    lacks: tuple[int, ...] | None = None
    """Per rank, the layers it lacks of `virtual_stages` equal pieces; None: pieces may be unequal."""

    @property
    def share(self) -> float:
        """Share of a rank's time for a microbatch that filling and draining the pipeline takes."""
        return 1 / (self.fill_ways or self.virtual_stages)


@dataclass(frozen=True, slots=True)
class Option:
    """One choice of modes for a set of blocks."""

    seconds: float
    modes: tuple[tuple[str, Recompute, int], ...]


class Intervals:
    """What each rank takes for each interval of the chain, computed once (a memo, nothing more)."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self._costs: dict[tuple[Counts, float], Option | None] = {}
        self._bytes: dict[tuple[Counts, float], float] = {}
        self._under: dict[tuple[str, float], tuple[Recompute, ...]] = {}
        self._counts: dict[tuple[int, int], Counts] = {}
        self._prefix: dict[str, list[int]] = {name: [0] for name in dict.fromkeys(problem.chain)}
        for block in problem.chain:
            for name, counts in self._prefix.items():
                counts.append(counts[-1] + (name == block))
        layers = [self._prefix[name] for name in self._prefix if name in problem.layer_classes]
        self._layers = [sum(counts) for counts in zip(*layers, strict=True)]
        self._fastest = {name: self.under(name, math.inf)[0] for name in self._prefix}

    def problem_of(self, rank: int) -> StageProblem:
        """The seconds and bytes that hold on this rank."""
        return self.problem

    def layers(self, start: int, stop: int) -> int:
        """Repeated layers among blocks start .. stop-1."""
        return self._layers[stop] - self._layers[start]

    def counts(self, start: int, stop: int) -> Counts:
        """Blocks of each class among blocks start .. stop-1."""
        if (start, stop) not in self._counts:
            held = ((name, counts[stop] - counts[start]) for name, counts in self._prefix.items())
            self._counts[start, stop] = tuple((name, n) for name, n in held if n)
        return self._counts[start, stop]

    def under(self, name: str, ceiling: float) -> tuple[Recompute, ...]:
        """Modes with transients up to `ceiling`, none beaten in time and saved bytes, fastest first."""
        if (name, ceiling) not in self._under:
            self._under[name, ceiling] = _allowed(self.problem.classes[name], ceiling)
        return self._under[name, ceiling]

    def ceilings(self, counts: Counts) -> list[float]:
        """Every level at which another mode of these blocks becomes possible, lowest first."""
        return sorted({t for name, _ in counts for t in self.problem.classes[name].transient_bytes.values()})

    def least_bytes(self, rank: int, start: int, stop: int) -> float:
        """Memory of these blocks under the leanest modes."""
        counts, in_flight = self.counts(start, stop), self.problem.in_flight[rank]
        key = (counts, in_flight)
        if key not in self._bytes:
            classes = self.problem.classes
            static = sum(n * classes[name].static_bytes for name, n in counts)
            self._bytes[key] = min(
                static
                + ceiling
                + in_flight * sum(n * classes[m].saved_bytes[self.under(m, ceiling)[-1]] for m, n in counts)
                for ceiling in self.ceilings(counts)
                if all(self.under(name, ceiling) for name, _ in counts)
            )
        return self._bytes[key]

    def best(self, rank: int, start: int, stop: int, *, limit_s: float = math.inf) -> Option | None:
        """The fastest choice of modes with which `rank` holds these blocks within `limit_s`, if any."""
        counts, classes = self.counts(start, stop), self.problem.classes
        if sum(n * classes[name].seconds[self._fastest[name]] for name, n in counts) > limit_s:
            return None
        key = (counts, self.problem.in_flight[rank])
        if key not in self._costs:
            fits = self.least_bytes(rank, start, stop) <= self.problem.capacity_bytes
            self._costs[key] = self._fastest_modes(counts, key[1]) if fits else None
        option = self._costs[key]
        return option if option and option.seconds <= limit_s else None

    def _fastest_modes(self, counts: Counts, in_flight: float) -> Option | None:
        """Exactly the fastest modes of these blocks whose memory fits; None when none does.

        For every ceiling on transient memory, the modes under it and the room left by it: all ways
        to give modes to the other classes, and the best integer mix for the most numerous one.
        """
        classes = self.problem.classes
        room = self.problem.capacity_bytes - sum(n * classes[name].static_bytes for name, n in counts)
        saved = sum(n * classes[name].saved_bytes[self._fastest[name]] for name, n in counts)
        transient = max(classes[name].transient_bytes[self._fastest[name]] for name, _ in counts)
        if in_flight * saved + transient <= room:
            modes = tuple((name, self._fastest[name], n) for name, n in counts)
            return Option(sum(n * classes[name].seconds[mode] for name, mode, n in modes), modes)
        best: Option | None = None
        *others, (most, n) = sorted(counts, key=lambda run: run[1])
        for ceiling in self.ceilings(counts):
            left = (room - ceiling) / in_flight
            if left < 0:
                break
            for mix in product(*(list(_mixes(m, classes[m], k, self.under(m, ceiling))) for m, k in others)):
                seconds = sum(part[0] for part in mix)
                rest = left - sum(part[1] for part in mix)
                last = _best_mix(most, classes[most], n, self.under(most, ceiling), rest)
                if last and (best is None or seconds + last.seconds < best.seconds):
                    modes = tuple(run for part in mix for run in part[2])
                    best = Option(seconds + last.seconds, modes + last.modes)
        return best


def _allowed(block: BlockClass, ceiling: float) -> tuple[Recompute, ...]:
    """Modes under the ceiling that no other one beats in both time and saved bytes, fastest first."""
    kept: list[Recompute] = []
    for mode in sorted(block.seconds, key=lambda q: (block.seconds[q], block.saved_bytes[q])):
        if block.transient_bytes[mode] > ceiling:
            continue
        if not kept or block.saved_bytes[mode] < block.saved_bytes[kept[-1]]:
            kept.append(mode)
    return tuple(kept)


Mix = tuple[float, float, tuple[tuple[str, Recompute, int], ...]]
"""Seconds, saved bytes, modes."""


def _mixes(name: str, block: BlockClass, n: int, modes: Sequence[Recompute]) -> Iterator[Mix]:
    """Ways to give n equal blocks some of these modes, none beaten by another."""
    mixes = [
        (
            sum(k * block.seconds[mode] for mode, k in zip(modes, split, strict=True)),
            sum(k * block.saved_bytes[mode] for mode, k in zip(modes, split, strict=True)),
            tuple((name, mode, k) for mode, k in zip(modes, split, strict=True) if k),
        )
        for split in (_splits(n, len(modes)) if modes else ())
    ]
    lowest = math.inf
    for mix in sorted(mixes, key=lambda m: m[:2]):
        if mix[1] < lowest:
            lowest = mix[1]
            yield mix


def _splits(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (n,)
        return
    for first in range(n, -1, -1):
        for rest in _splits(n - first, parts - 1):
            yield (first, *rest)


def _best_mix(name: str, block: BlockClass, n: int, modes: Sequence[Recompute], room: float) -> Option | None:
    """The fastest of these modes for n equal blocks that save at most `room` bytes in all."""
    if not modes or n * block.saved_bytes[modes[-1]] > room:
        return None
    if n * block.saved_bytes[modes[0]] <= room:
        counts = (n,)
    else:
        counts = (_least_slowed if len(modes) == 2 else _best_of_three)(block, n, modes, room)
    seconds = sum(k * block.seconds[mode] for mode, k in zip(modes, counts, strict=False))
    return Option(seconds, tuple((name, mode, k) for mode, k in zip(modes, counts, strict=False) if k))


def _least_slowed(block: BlockClass, n: int, modes: Sequence[Recompute], room: float) -> tuple[int, ...]:
    """Of two modes: how many blocks run in each when as few as possible run in the second."""
    fast, slow = (block.saved_bytes[mode] for mode in modes)
    k = min(n, math.ceil((n * fast - room) / (fast - slow)))
    while k < n and k * slow + (n - k) * fast > room:  # rounding
        k += 1
    return n - k, k


def _best_of_three(block: BlockClass, n: int, modes: Sequence[Recompute], room: float) -> tuple[int, ...]:
    """Of three modes: how many blocks run in each.

    With a of the blocks in the last mode, the fewest b in the middle one that fit. But for rounding b up,
    seconds change by `gain` with every a: they are tried from the end where that is best, until no rounding
    can make up for it.
    """
    fast, middle, slow = (block.saved_bytes[mode] for mode in modes)
    fast_s, middle_s, slow_s = (block.seconds[mode] for mode in modes)
    excess, worth = n * fast - room, (middle_s - fast_s) / (fast - middle)
    gain = slow_s - fast_s - worth * (fast - slow)
    most = min(n, math.ceil(excess / (fast - slow)) + 1)
    best, found = n * slow_s, (0, 0, n)  # known to fit
    for a in range(most + 1) if gain >= 0 else range(most, -1, -1):
        if n * fast_s + worth * excess + a * gain > best:
            break
        b = max(0, math.ceil((excess - a * (fast - slow)) / (fast - middle)))
        while a + b < n and a * slow + b * middle + (n - a - b) * fast > room:  # rounding
            b += 1
        if a + b > n or a * slow + b * middle + (n - a - b) * fast > room:
            continue
        seconds = a * slow_s + b * middle_s + (n - a - b) * fast_s
        if seconds < best:
            best, found = seconds, (n - a - b, b, a)
    return found


def rank_seconds(problem: StageProblem, modes: Modes) -> float:
    """Seconds of one microbatch on a rank."""
    return problem.stage_s + sum(n * problem.classes[name].seconds[mode] for name, n, mode in modes)


def rank_bytes(problem: StageProblem, rank: int, modes: Modes) -> float:
    """Bytes at the fullest moment of a rank."""
    in_flight, classes = problem.in_flight[rank], problem.classes
    stay = sum(n * (classes[c].static_bytes + in_flight * classes[c].saved_bytes[q]) for c, n, q in modes)
    return stay + max(classes[c].transient_bytes[q] for c, _, q in modes)


def simplest(problem: StageProblem, rank: int, modes: Modes) -> Modes:
    """The same blocks with less recomputed, where that costs no time and still fits."""
    for i, (name, n, mode) in enumerate(modes):
        seconds = problem.classes[name].seconds
        for simpler in (Recompute.NONE, Recompute.SELECTIVE):
            if simpler == mode:
                break
            tried = (*modes[:i], (name, n, simpler), *modes[i + 1 :])
            free = simpler in seconds and seconds[simpler] <= seconds[mode]
            if free and rank_bytes(problem, rank, tried) <= problem.capacity_bytes:
                modes = tried
                break
    return modes


def deal(blocks: Sequence[str], option: Option) -> Modes:
    """Give modes to blocks in order, the most recomputed first."""
    order = {Recompute.FULL: 0, Recompute.SELECTIVE: 1, Recompute.NONE: 2}
    left = {name: [] for name in blocks}
    for name, mode, n in sorted(option.modes, key=lambda run: order[run[1]]):
        left[name] += [mode] * n
    dealt: list[tuple[str, int, Recompute]] = []
    for name in blocks:
        mode = left[name].pop(0)
        if dealt and dealt[-1][0] == name and dealt[-1][2] == mode:
            dealt[-1] = (name, dealt[-1][1] + 1, mode)
        else:
            dealt.append((name, 1, mode))
    return tuple(dealt)
