"""Contiguous blocks to pipeline stages, with a recompute mode for every block: an exact ILP.

In: a `StageProblem` (seconds and bytes per block class and mode). Out: a `StagePlan`.

A rank that holds blocks i .. j-1 of the chain takes g_s(i, j) seconds per microbatch: the fastest
choice of modes whose memory

    static + in_flight_s * saved + largest transient  <=  capacity

holds (`Intervals.best`: exact; computed once for intervals with the same block counts).
Cutting the chain is then a path through positions 0 .. N with one arc per rank. `solve_stages`
writes it as an ILP over the arcs that could still be part of a best answer:

    x[s, i, j]   1 when rank s holds blocks i .. j-1; flow is conserved at every (s, position)
    T            at least every rank's time
    minimise     (m - 1/v) T + sum of g / v        the pipeline's time (`estimate.step.pipeline_s`)

The same optimum comes faster from a dynamic programme over T (`shortest`), which the search uses
to compare candidates; the ILP has the last word on the winner. `bracket` gives a bound and a
feasible plan without either: the smallest T for which filling ranks one after the other reaches
the end (filling as far as possible is optimal, because part of an interval that fits also fits),
and the least recomputation that memory forces in total.

With v > 1 virtual stages a rank holds v pieces of the chain; the caller then gives the chain in the
order that ranks hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

from ..cost import Recompute
from ..estimate.step import pipeline_s
from .solver import Status, solve

if TYPE_CHECKING:
    import pulp

Modes = tuple[tuple[str, int, Recompute], ...]
"""(block class, how many, mode), in execution order."""
Counts = tuple[tuple[str, int], ...]
"""(block class, how many), in order of first appearance."""

PRECISION = 1e-6
"""Of T in the bracket, as a share of it: far below any model error."""
BISECTIONS = 40
"""Most halvings of the interval for T."""
CAPACITY_STEP = 1e-3
"""Precision of `least_capacity_bytes`, as a share of it."""
MAX_ARCS = 6_000
"""Beyond this the ILP is not written, and the bracket's bound stands (it happens only where the
slowest rank hardly matters, i.e. with very few microbatches)."""


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
    microbatches: int
    in_flight: tuple[float, ...]
    """Per rank, microbatches whose activations are held at once (in units of the rank's blocks)."""
    capacity_bytes: float
    stage_s: float = 0.0
    """Added to every rank: what it hands to its neighbours."""
    cuts: frozenset[int] | None = None
    """Positions where the chain may be cut; None: anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Blocks and modes of every rank, and what is proven about them."""

    status: Status
    cuts: tuple[int, ...] = ()
    """Position where each rank begins, and the chain's length."""
    ranks: tuple[Modes, ...] = ()
    objective_s: float = math.inf
    bound_s: float = 0.0
    solver: str = ""


NOTHING_FITS = StagePlan(status=Status.INFEASIBLE, bound_s=math.inf, solver="closed form")


# --------------------------------------------------------------------------- modes of one rank


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
    """The fastest of these modes for n equal blocks that save at most `room` bytes in all.

    With a of the blocks in the slowest mode, the fewest b in the middle one that fit: every a is
    tried from the least that could fit to the first that needs no b.
    """
    if not modes or n * block.saved_bytes[modes[-1]] > room:
        return None
    seconds, saved = block.seconds, block.saved_bytes
    fast, slow = modes[0], modes[-1]
    middle = modes[1] if len(modes) == 3 else slow
    excess = n * saved[fast] - room
    if excess <= 0:
        return Option(n * seconds[fast], ((name, fast, n),))
    frees, frees_middle = saved[fast] - saved[slow], saved[fast] - saved[middle]
    best: tuple[float, int, int] | None = None
    for a in range(n + 1):
        if a * frees + (n - a) * frees_middle < excess:
            continue
        b = max(0, math.ceil((excess - a * frees) / frees_middle)) if len(modes) == 3 else 0
        while a * saved[slow] + b * saved[middle] + (n - a - b) * saved[fast] > room and a + b < n:
            b += 1
        if a * saved[slow] + b * saved[middle] + (n - a - b) * saved[fast] > room:
            continue
        cost = a * seconds[slow] + b * seconds[middle] + (n - a - b) * seconds[fast]
        if best is None or cost < best[0]:
            best = (cost, a, b)
        if b == 0:
            break
    if best is None:  # only by rounding: all in the slowest mode is known to fit
        best = (n * seconds[slow], n, 0)
    cost, a, b = best
    split = ((fast, n - a - b), (middle, b), (slow, a))
    return Option(cost, tuple((name, mode, k) for mode, k in split if k))


# --------------------------------------------------------------------------- bracket: no solver


def cheapest_s(problem: StageProblem) -> float:
    """A lower bound on the seconds of all blocks: recompute what memory forces, block by fraction.

    Dividing each rank's memory row by its microbatches in flight and adding them up leaves one
    knapsack: sum of saved bytes <= sum_s capacity / in_flight_s - static / max in_flight.
    Infinite when even full recomputation cannot fit.
    """
    counts = {name: problem.chain.count(name) for name in dict.fromkeys(problem.chain)}
    static = sum(n * problem.classes[name].static_bytes for name, n in counts.items())
    floor = min(min(problem.classes[name].transient_bytes.values()) for name in counts)
    if static + problem.stages * floor > problem.stages * problem.capacity_bytes:
        return math.inf
    room = sum((problem.capacity_bytes - floor) / k for k in problem.in_flight)
    room -= static / max(problem.in_flight)
    seconds, steps = 0.0, []
    for name, n in counts.items():
        block = problem.classes[name]
        hull = _hull(block)
        seconds += n * block.seconds[hull[0]]
        room -= n * block.saved_bytes[hull[0]]
        for fast, slow in pairwise(hull):
            freed = n * (block.saved_bytes[fast] - block.saved_bytes[slow])
            steps.append((n * (block.seconds[slow] - block.seconds[fast]) / freed, freed))
    for price, freed in sorted(steps):
        if room >= 0:
            return seconds
        take = min(freed, -room)
        room, seconds = room + take, seconds + price * take
    return seconds if room >= -1e-9 * problem.capacity_bytes else math.inf


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


def bound_s(problem: StageProblem) -> float:
    """A quick lower bound on the pipeline's time; infinite when it is plain that nothing fits."""
    total = cheapest_s(problem)
    if math.isinf(total):
        return math.inf
    slowest = max(total / problem.stages, _crowded_s(problem)) + problem.stage_s
    return _objective(problem, slowest, total + problem.stages * problem.stage_s)


def _crowded_s(problem: StageProblem) -> float:
    """Some rank holds at least its share of the most repeated class, rounded up."""
    return max(
        -(-problem.chain.count(name) // problem.stages) * min(problem.classes[name].seconds.values())
        for name in set(problem.chain)
    )


def _objective(problem: StageProblem, slowest: float, total: float) -> float:
    share = 1 / problem.virtual_stages
    return (problem.microbatches - share) * slowest + share * total


def bracket(problem: StageProblem, intervals: Intervals | None = None) -> StagePlan:
    """A feasible plan and a lower bound: status optimal when they meet, infeasible when nothing fits."""
    intervals = intervals or Intervals(problem)
    total = cheapest_s(problem)
    if math.isinf(total):
        return NOTHING_FITS
    low = max(total / problem.stages, _crowded_s(problem))
    found = _smallest_limit(intervals, low)
    if found is None:
        return NOTHING_FITS
    low, cuts = found
    plan = _read(intervals, cuts)
    bound = _objective(problem, low + problem.stage_s, total + problem.stages * problem.stage_s)
    status = Status.OPTIMAL if bound >= plan.objective_s * (1 - 1e-9) else Status.STOPPED
    return replace(plan, status=status, bound_s=min(bound, plan.objective_s), solver="closed form")


def _smallest_limit(intervals: Intervals, low: float) -> tuple[float, tuple[int, ...]] | None:
    """(a limit below which no partition stays, cuts of a partition just above it)."""
    if _fill(intervals, intervals.problem.capacity_bytes, by_bytes=True) is None:
        return None
    below, high = low * (1 - 1e-12), low * (1 + 1e-12)
    cuts = _fill(intervals, high)
    while cuts is None:
        below, high = high, high * 1.0625
        cuts = _fill(intervals, high)
    high = _slowest(intervals, cuts)
    for _ in range(BISECTIONS):
        if high - below <= PRECISION * high:
            break
        tried = _fill(intervals, (below + high) / 2)
        if tried is None:
            below = (below + high) / 2
        else:
            cuts, high = tried, _slowest(intervals, tried)
    return max(below, low), cuts


def _fill(intervals: Intervals, limit: float, *, by_bytes: bool = False) -> tuple[int, ...] | None:
    """Cuts when every rank takes all it can within `limit`; None when that misses the end.

    The limit is on a rank's seconds, with memory as it is, or (`by_bytes`) on its least memory.
    """
    problem, end, cuts = intervals.problem, len(intervals.problem.chain), [0]
    for rank in range(problem.stages):
        later = problem.stages - rank - 1
        furthest = None
        for stop in _stops(intervals, cuts[-1], later):
            if by_bytes and intervals.least_bytes(rank, cuts[-1], stop) > limit:
                break
            if not by_bytes and intervals.best(rank, cuts[-1], stop, limit_s=limit) is None:
                break
            furthest = stop
        if furthest is None:
            return None
        cuts.append(furthest)
    return tuple(cuts) if cuts[-1] == end else None


def _stops(intervals: Intervals, start: int, later: int) -> Iterator[int]:
    """Where a rank that begins at `start` may end so that `later` ranks still get their layers."""
    problem, end = intervals.problem, len(intervals.problem.chain)
    least = problem.virtual_stages
    for stop in range(start + 1, end + 1):
        if (stop == end) != (later == 0) and stop == end:
            return
        if intervals.layers(stop, end) < later * least:
            return
        if intervals.layers(start, stop) >= least and (problem.cuts is None or stop in problem.cuts):
            yield stop


def _slowest(intervals: Intervals, cuts: Sequence[int]) -> float:
    return max(option.seconds for option in _chosen(intervals, cuts))


def _chosen(intervals: Intervals, cuts: Sequence[int]) -> list[Option]:
    chosen = []
    for rank, (start, stop) in enumerate(pairwise(cuts)):
        option = intervals.best(rank, start, stop)
        assert option is not None
        chosen.append(option)
    return chosen


def _read(intervals: Intervals, cuts: Sequence[int]) -> StagePlan:
    """The plan of given cuts, with its objective."""
    problem, options = intervals.problem, _chosen(intervals, cuts)
    seconds = [option.seconds + problem.stage_s for option in options]
    objective = pipeline_s(seconds, microbatches=problem.microbatches, virtual_stages=problem.virtual_stages)
    ranks = tuple(
        _deal(problem.chain[start:stop], option)
        for start, stop, option in zip(cuts, cuts[1:], options, strict=False)
    )
    return StagePlan(status=Status.STOPPED, cuts=tuple(cuts), ranks=ranks, objective_s=objective)


def rank_seconds(problem: StageProblem, modes: Modes) -> float:
    """Seconds of one microbatch on a rank."""
    return problem.stage_s + sum(n * problem.classes[name].seconds[mode] for name, n, mode in modes)


def rank_bytes(problem: StageProblem, rank: int, modes: Modes) -> float:
    """Bytes at the fullest moment of a rank."""
    in_flight, classes = problem.in_flight[rank], problem.classes
    stay = sum(n * (classes[c].static_bytes + in_flight * classes[c].saved_bytes[q]) for c, n, q in modes)
    return stay + max(classes[c].transient_bytes[q] for c, _, q in modes)


def _deal(blocks: Sequence[str], option: Option) -> Modes:
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


# --------------------------------------------------------------------------- exact, by thresholds

Arc = tuple[int, int, int]
"""(rank, first block, one past the last block)."""


def shortest(problem: StageProblem, intervals: Intervals | None = None) -> StagePlan:
    """The same optimum as `solve_stages`, by dynamic programming: for each T, the least total.

    Only as many values of T are tried as could still win. Falls back to `bracket` when there are
    more than `MAX_ARCS` arcs.
    """
    intervals = intervals or Intervals(problem)
    best = bracket(problem, intervals)
    if best.status is not Status.STOPPED:
        return best
    arcs = _useful_arcs(intervals, best, cheapest_s(problem) + problem.stages * problem.stage_s)
    if arcs is None:
        return best
    least, _ = _least_total(problem, arcs, math.inf) or (0.0, ())
    for limit in sorted(set(arcs.values())):
        if _objective(problem, limit + problem.stage_s, least) >= best.objective_s * (1 - 1e-12):
            break
        found = _least_total(problem, arcs, limit)
        if found is None:
            continue
        plan = _read(intervals, found[1])
        if plan.objective_s < best.objective_s:
            best = plan
    return replace(best, status=Status.OPTIMAL, bound_s=best.objective_s, solver="dynamic programme")


def _least_total(
    problem: StageProblem, arcs: Mapping[Arc, float], limit_s: float
) -> tuple[float, tuple[int, ...]] | None:
    """Least sum of the ranks' seconds over paths whose arcs all stay within `limit_s`, and its cuts."""
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    rank, following = 0, {}
    for at, first, stop in sorted(arcs):
        if at != rank:
            rank, reached, following = at, following, {}
        seconds = arcs[at, first, stop]
        if first not in reached or seconds > limit_s:
            continue
        total, cuts = reached[first]
        if stop not in following or total + seconds < following[stop][0]:
            following[stop] = (total + seconds, (*cuts, stop))
    end = following.get(len(problem.chain))
    return (end[0] + problem.stages * problem.stage_s, end[1]) if end else None


# --------------------------------------------------------------------------- the ILP


def solve_stages(
    problem: StageProblem,
    *,
    intervals: Intervals | None = None,
    time_limit_s: float | None = None,
    gap: float = 0.0,
    solver: str | None = None,
) -> StagePlan:
    """The fastest partition that fits, proven within `gap` unless a limit stops it (see the status)."""
    intervals = intervals or Intervals(problem)
    start = shortest(problem, intervals)
    if start.status is Status.INFEASIBLE:
        return start
    total = cheapest_s(problem) + problem.stages * problem.stage_s
    arcs = _useful_arcs(intervals, start, total)
    if arcs is None:
        return start
    least = _least_total(problem, arcs, math.inf)
    assert least is not None, "the arcs contain the plan they were limited by"
    total = max(total, least[0])
    arcs = _useful_arcs(intervals, start, total) or arcs
    slowest = next(s for s in sorted(set(arcs.values())) if _least_total(problem, arcs, s) is not None)
    model, chosen = _model(problem, arcs, slowest_s=slowest + problem.stage_s, total_s=total)
    outcome = solve(model, time_limit_s=time_limit_s, gap=gap, solver=solver)
    if not outcome.has_values:
        return replace(start, solver=outcome.solver)
    picked = sorted(arc for arc, variable in chosen.items() if (variable.value() or 0) > 0.5)
    plan = _read(intervals, (0, *(stop for _, _, stop in picked)))
    if plan.objective_s >= start.objective_s * (1 - 1e-9):
        plan = start  # equals: the dynamic programme's choice does not depend on the solver
    bound = min(max(outcome.bound, start.bound_s), plan.objective_s)
    return replace(plan, status=outcome.status, bound_s=bound, solver=outcome.solver)


def _useful_arcs(intervals: Intervals, start: StagePlan, total_s: float) -> dict[Arc, float] | None:
    """Arcs on some path from 0 to the end, no slower than the slowest rank of a better answer can be.

    `total_s` is a lower bound on the sum of the ranks' seconds. None when there are too many arcs.
    """
    problem, end = intervals.problem, len(intervals.problem.chain)
    share = 1 / problem.virtual_stages
    weight = problem.microbatches - share
    limit = (start.objective_s - share * total_s) / weight - problem.stage_s if weight > 0 else math.inf
    limit *= 1 + 1e-9
    earliest = _earliest_starts(intervals, limit)
    forward: dict[Arc, float] = {}
    reached = {0}
    for rank in range(problem.stages):
        following = set()
        for first in sorted(reached):
            for stop in _stops(intervals, first, problem.stages - rank - 1):
                option = intervals.best(rank, first, stop, limit_s=limit)
                if option is None:
                    break
                if stop >= earliest[rank + 1]:
                    forward[rank, first, stop] = option.seconds
                    following.add(stop)
            if len(forward) > MAX_ARCS:
                return None
        reached = following
    needed, kept = {end}, {}
    for rank in reversed(range(problem.stages)):
        here = {arc: s for arc, s in forward.items() if arc[0] == rank and arc[2] in needed}
        kept |= here
        needed = {first for _, first, _ in here}
    return kept


def _earliest_starts(intervals: Intervals, limit_s: float) -> list[int]:
    """Per rank, the first position from which it and the later ranks can still reach the end."""
    problem = intervals.problem
    starts = [len(problem.chain)]
    for rank in reversed(range(problem.stages)):
        start = starts[0]
        while start > 0 and intervals.best(rank, start - 1, starts[0], limit_s=limit_s) is not None:
            start -= 1
        starts.insert(0, start)
    return starts


def _model(
    problem: StageProblem, arcs: dict[Arc, float], *, slowest_s: float, total_s: float
) -> tuple[pulp.LpProblem, dict[Arc, pulp.LpVariable]]:
    """The ILP of the module docstring; the two bounds are implied and spare the solver their proof."""
    import pulp

    model = pulp.LpProblem("stages", pulp.LpMinimize)
    x = {arc: model.add_variable(f"x_{arc[0]}_{arc[1]}_{arc[2]}", cat="Binary") for arc in sorted(arcs)}
    slowest = model.add_variable("T", slowest_s)
    flow: dict[tuple[int, int], list] = {}
    by_rank: list[list[Arc]] = [[] for _ in range(problem.stages)]
    for rank, first, stop in x:
        by_rank[rank].append((rank, first, stop))
        flow.setdefault((rank, first), []).append(-x[rank, first, stop])
        flow.setdefault((rank + 1, stop), []).append(+x[rank, first, stop])
    flow[0, 0].append(1)
    flow[problem.stages, len(problem.chain)].append(-1)
    for terms in flow.values():
        model += pulp.lpSum(terms) == 0
    for rank_arcs in by_rank:
        model += slowest >= pulp.lpSum(arcs[arc] * x[arc] for arc in rank_arcs) + problem.stage_s
    share = 1 / problem.virtual_stages
    total = pulp.lpSum(seconds * x[arc] for arc, seconds in arcs.items()) + problem.stages * problem.stage_s
    model += total >= total_s
    model += (problem.microbatches - share) * slowest + share * total
    return model, x


def least_capacity_bytes(problem: StageProblem) -> float:
    """The capacity with which some partition just fits, to `CAPACITY_STEP`, from above."""
    intervals = Intervals(problem)
    low, high = 0.0, max(problem.capacity_bytes, 1.0)
    while _fill(intervals, high, by_bytes=True) is None:
        low, high = high, 2 * high
    while high - low > CAPACITY_STEP * high:
        middle = (low + high) / 2
        fits = _fill(intervals, middle, by_bytes=True) is not None
        low, high = (low, middle) if fits else (middle, high)
    return high
