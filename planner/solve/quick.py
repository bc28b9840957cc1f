"""The bound of idealised costs for all schedules of one mesh, microbatch and ZeRO stage, in closed form.

In: the idealised costs of one such candidate (`ideal.idealised`, `Costed`). Out: `QuickBound.bound_s`, for a
candidate that differs from it by its schedule alone: the same number as `Costed.bound_s`, without posing a
stage problem. Idealised blocks have one recompute mode, so that only memory has to be looked at:

    sum over ranks (capacity - transient) / in flight  >=  saved + static / most in flight
    bound = (m - 1/w) (max(chain / ranks, crowd) + hand-over) + (chain + ranks x hand-over) / w + once
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from ..problem import Candidate
from .brackets import ROUNDING
from .costed import Costed, microbatches_in_flight
from .pieces import lacking


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickBound:
    """What does not depend on the schedule."""

    chain_s: float
    """Seconds of all blocks for one microbatch."""
    block_s: dict[str, float]
    counts: dict[str, int]
    layer: str | None
    """The one kind of layer; None where there are several."""
    layers: int
    static_bytes: float
    saved_bytes: float
    transient_bytes: float
    """The least of any block's."""
    capacity_bytes: float
    handover_s: float
    once_s: float

    def bound_s(self, candidate: Candidate) -> float:
        """No stages and modes make the step faster; infinite when it is plain that nothing fits."""
        pp, v, m = candidate.mesh.pp, candidate.virtual_stages, candidate.microbatches
        room = self.capacity_bytes - self.transient_bytes
        shares, most = _in_flight(candidate.schedule, pp, v, m)
        short = self.saved_bytes + self.static_bytes / most - room * shares
        if self.static_bytes > pp * room or short > ROUNDING * self.capacity_bytes:
            return math.inf
        share, stage_s = 1 / candidate.fill_ways, 2 * self.handover_s * v
        slowest = max(self.chain_s / pp, self._crowded_s(candidate)) + stage_s
        return (m - share) * slowest + share * (self.chain_s + pp * stage_s) + self.once_s

    def _crowded_s(self, candidate: Candidate) -> float:
        """Some rank holds at least its share of the most repeated class, rounded up (to equal pieces)."""
        pp, v = candidate.mesh.pp, candidate.virtual_stages
        crowds = {name: -(-n // pp) for name, n in self.counts.items()}
        if self.layer is not None and v > 1:
            lacks = lacking(self.layers, pp, v, candidate.schedule)
            n = crowds[self.layer]
            crowds[self.layer] = min(-(-(n + lack) // v) * v - lack for lack in set(lacks or (0,)))
        return max(n * self.block_s[name] for name, n in crowds.items())


def quick_bound(costed: Costed) -> QuickBound:
    """The closed form of one mesh, microbatch and ZeRO stage, from idealised costs under any schedule."""
    problem, classes = costed.problem, costed.classes
    seconds = {name: min(classes[name].seconds.values()) for name in problem.counts}
    kinds = problem.layer_classes or frozenset(problem.chain)
    counts = problem.counts.items()
    return QuickBound(
        chain_s=sum(n * seconds[name] for name, n in counts),
        block_s=seconds,
        counts=problem.counts,
        layer=next(iter(kinds)) if len(kinds) == 1 else None,
        layers=problem.layers,
        static_bytes=sum(n * classes[name].static_bytes for name, n in counts),
        saved_bytes=sum(n * min(classes[name].saved_bytes.values()) for name, n in counts),
        transient_bytes=min(min(classes[name].transient_bytes.values()) for name in problem.counts),
        capacity_bytes=costed.stage_problem.capacity_bytes,
        handover_s=costed.handover.exposed_s if costed.handover else 0.0,
        once_s=costed.once_bound_s,
    )


@cache
def _in_flight(schedule: str, pp: int, v: int, m: int) -> tuple[float, float]:
    """(sum over ranks of one over the microbatches in flight, the most of any rank)."""
    flying = microbatches_in_flight(schedule, pp, v, m)
    return sum(1 / k for k in flying), max(flying)
