"""The bound of idealised costs for all schedules of one mesh, microbatch and ZeRO stage, in closed form.

In: the idealised costs of one such candidate (`ideal.idealised`, `Costed`). Out: `QuickBound.bound_s`, for a
candidate that differs from it by its schedule alone: the same number as `Costed.bound_s`, without posing a
stage problem, and with what is known besides of the seconds of the whole chain:

    kept <= sum over ranks (capacity - transient) / in flight - static / most in flight
    chain = seconds of all blocks when recomputation leaves no more than that
    bound = (m - 1/w) (max(chain / ranks, crowd) + hand-over) + (chain + ranks x hand-over) / w + once
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from ..problem import NOTHING_KNOWN, Candidate, Floor
from .costed import Costed, microbatches_in_flight
from .pieces import lacking
from .relaxed import ROUNDING, Class, Spared, alone, crowded_s, spared


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickBound:
    """What does not depend on the schedule."""

    chain: Spared
    """All blocks for one microbatch."""
    classes: dict[str, Class]
    counts: dict[str, int]
    layer: str | None
    """The one kind of layer; None where there are several."""
    layers: int
    static_bytes: float
    transient_bytes: float
    """The least of any block's."""
    capacity_bytes: float
    handover_s: float
    once_s: float

    def bound_s(self, candidate: Candidate, floor: Floor = NOTHING_KNOWN) -> float:
        """No stages and modes make the step faster; infinite when it is plain that nothing fits.

        `floor`: what blocks are known to take without recomputation, where that is more.
        """
        pp, v, m = candidate.mesh.pp, candidate.virtual_stages, candidate.microbatches
        room = self.capacity_bytes - self.transient_bytes
        if self.static_bytes > pp * room:
            return math.inf
        shares, most = _in_flight(candidate.schedule, pp, v, m)
        kept = room * shares - self.static_bytes / most
        seconds = self.chain.seconds_within(kept, ROUNDING * self.capacity_bytes)
        if math.isinf(seconds):
            return math.inf
        seconds += max(0.0, floor.total_s - self.chain.seconds)
        share, stage_s = 1 / candidate.fill_ways, 2 * self.handover_s * v
        slowest = max(seconds / pp, self._crowded_s(candidate, floor)) + stage_s
        return (m - share) * slowest + share * (seconds + pp * stage_s) + self.once_s

    def _crowded_s(self, candidate: Candidate, floor: Floor) -> float:
        """What the fullest rank takes for blocks of one class, in equal pieces where these are."""
        pp, v, schedule = candidate.mesh.pp, candidate.virtual_stages, candidate.schedule
        in_flight = microbatches_in_flight(schedule, pp, v, candidate.microbatches)
        lacks = lacking(self.layers, pp, v, schedule) if self.layer is not None and v > 1 else None
        return max(
            crowded_s(
                n,
                self.classes[name],
                capacity_bytes=self.capacity_bytes,
                in_flight=in_flight,
                pieces=v,
                lacks=lacks if name == self.layer else None,
                least_s=floor.blocks_s.get(name, 0.0),
            )
            for name, n in self.counts.items()
        )


def quick_bound(costed: Costed) -> QuickBound:
    """The closed form of one mesh, microbatch and ZeRO stage, from idealised costs under any schedule."""
    problem, classes = costed.problem, costed.classes
    kinds = problem.layer_classes or frozenset(problem.chain)
    counts = problem.counts
    return QuickBound(
        chain=spared(counts, classes),
        classes={name: alone(name, classes) for name in counts},
        counts=counts,
        layer=next(iter(kinds)) if len(kinds) == 1 else None,
        layers=problem.layers,
        static_bytes=sum(n * classes[name].static_bytes for name, n in counts.items()),
        transient_bytes=min(min(classes[name].transient_bytes.values()) for name in counts),
        capacity_bytes=costed.stage_problem.capacity_bytes,
        handover_s=costed.handover.exposed_s if costed.handover else 0.0,
        once_s=costed.once_bound_s,
    )


@cache
def _in_flight(schedule: str, pp: int, v: int, m: int) -> tuple[float, float]:
    """(sum over ranks of one over the microbatches in flight, the most of any rank)."""
    flying = microbatches_in_flight(schedule, pp, v, m)
    return sum(1 / k for k in flying), max(flying)
