"""Measured times of one collective on one level, and what lies between and beyond the measurements.

In: a `Level` and its `CollectiveCurve`s. Out: for a number of ranks, a function from bytes to `Estimate`.

Between two measured sizes, and between two measured rank counts, time is interpolated linearly in
log-log; smaller messages than measured cost the smallest measurement, larger ones keep its bandwidth.
Beyond the measured rank counts the nearest count is scaled by the traffic each rank sends, and every
further step adds one hop's latency. Times never fall as the message grows: a dip in the measurement
is replaced by its running maximum. Where only all-reduce was measured, an all-gather or reduce-scatter
costs half of it, and no less than the link allows (a switch that reduces does not help them).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ...cost import ORIGIN_RANK, Estimate, Origin, worst
from ...layout import Collective
from ...topology import Level
from .traffic import bus_factor, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One measured curve, ready to look up: bytes and seconds, and their logarithms."""

    ranks: int
    nbytes: tuple[float, ...]
    seconds: tuple[float, ...]
    log_bytes: tuple[float, ...]
    log_seconds: tuple[float, ...]
    derived: bool = False
    """Made from another collective's measurement."""

    def at(self, nbytes: float) -> tuple[float, Origin]:
        """Seconds for a message of `nbytes`, exact where that size was measured."""
        i = bisect_left(self.nbytes, nbytes)
        if i == len(self.nbytes):
            return self.seconds[-1] * nbytes / self.nbytes[-1], Origin.MODELLED
        if self.nbytes[i] == nbytes:
            return self.seconds[i], Origin.MODELLED if self.derived else Origin.MEASURED
        if i == 0:
            return self.seconds[0], Origin.MODELLED
        x0, x1 = self.log_bytes[i - 1], self.log_bytes[i]
        y0, y1 = self.log_seconds[i - 1], self.log_seconds[i]
        seconds = math.exp(y0 + (y1 - y0) * (math.log(nbytes) - x0) / (x1 - x0))
        return seconds, Origin.MODELLED if self.derived else Origin.INTERPOLATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A collective among `ranks` devices, read off one curve or between two.

    seconds = below ^ (1 - weight) * above ^ weight * scale + extra_s
    """

    ranks: int
    below: Curve
    above: Curve | None = None
    weight: float = 0.0
    scale: float = 1.0
    extra_s: float = 0.0
    floor: Origin = Origin.MEASURED
    """The best origin an answer can have: worse than measured if `ranks` itself was not."""

    def at(self, nbytes: float) -> Estimate:
        """Seconds for a message of `nbytes` and where they come from."""
        seconds, origin = self.below.at(nbytes)
        if self.above is not None:
            other, other_origin = self.above.at(nbytes)
            seconds = seconds ** (1.0 - self.weight) * other**self.weight
            origin = worst(origin, other_origin)
        if ORIGIN_RANK[self.floor] > ORIGIN_RANK[origin]:
            origin = self.floor
        return Estimate(seconds * self.scale + self.extra_s, origin)


Inside = tuple[int, ...] | None
"""Members in one unit of each level below; None: all of them."""
Table = Mapping[Collective, tuple[Curve, ...]]


def tables(level: Level) -> dict[Inside, Table]:
    """The curves of one level by how its groups fill the levels below; errors as `read`."""
    kinds = dict.fromkeys((None, *(curve.inside for curve in level.curves)))
    return {inside: read(level, inside) for inside in kinds}


def read(level: Level, inside: Inside = None) -> dict[Collective, tuple[Curve, ...]]:
    """The curves of one level by collective, sorted by rank count, missing halves derived.

    Raises `ValueError` for an unknown collective, an empty curve or two curves of the same ranks.
    """
    found: dict[Collective, list[Curve]] = {}
    for curve in (curve for curve in level.curves if curve.inside == inside):
        found.setdefault(Collective(curve.collective), []).append(_prepare(curve.ranks, curve.points))
    for collective, group in found.items():
        group.sort(key=lambda curve: curve.ranks)
        if len({curve.ranks for curve in group}) < len(group):
            raise ValueError(f"two {collective} curves for the same number of ranks")
    if Collective.ALL_REDUCE in found:
        for half in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
            found.setdefault(half, [_halve(curve, level) for curve in found[Collective.ALL_REDUCE]])
    return {collective: tuple(group) for collective, group in found.items()}


def for_ranks(collective: Collective, curves: tuple[Curve, ...], *, ranks: int, latency_s: float) -> Measured:
    """The measured curve for `ranks` devices, interpolated or extended from its neighbours."""
    i = bisect_left([curve.ranks for curve in curves], ranks)
    if i < len(curves) and curves[i].ranks == ranks:
        return Measured(ranks=ranks, below=curves[i])
    if 0 < i < len(curves):
        below, above = curves[i - 1], curves[i]
        weight = math.log(ranks / below.ranks) / math.log(above.ranks / below.ranks)
        return Measured(ranks=ranks, below=below, above=above, weight=weight, floor=Origin.INTERPOLATED)
    nearest = curves[0] if i == 0 else curves[-1]
    return Measured(
        ranks=ranks,
        below=nearest,
        scale=bus_factor(collective, ranks) / bus_factor(collective, nearest.ranks),
        extra_s=max(0.0, steps(collective, ranks) - steps(collective, nearest.ranks)) * latency_s,
        floor=Origin.MODELLED,
    )


def _prepare(ranks: int, points: Sequence[tuple[float, float]], *, derived: bool = False) -> Curve:
    if not points or ranks < 2:
        raise ValueError(f"a curve over {ranks} ranks with {len(points)} points: needs points and two ranks")
    nbytes = tuple(size for size, _ in points)
    seconds = tuple(accumulate((time for _, time in points), max))
    if any(a >= b for a, b in pairwise(nbytes)) or min(*nbytes, *seconds) <= 0.0:
        raise ValueError(f"a curve over {ranks} ranks: sizes must grow, sizes and times be positive")
    return Curve(
        ranks=ranks,
        nbytes=nbytes,
        seconds=seconds,
        log_bytes=tuple(map(math.log, nbytes)),
        log_seconds=tuple(map(math.log, seconds)),
        derived=derived,
    )


def _halve(whole: Curve, level: Level) -> Curve:
    per_byte_s = (whole.ranks - 1) / whole.ranks / (level.bytes_per_s * level.efficiency)
    both = zip(whole.nbytes, whole.seconds, strict=True)
    points = [(size, max(seconds / 2.0, size * per_byte_s)) for size, seconds in both]
    return _prepare(whole.ranks, points, derived=True)
