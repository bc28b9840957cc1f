"""The queue of candidates under lower bounds, and the incumbent (see `search`).

In: a `SearchProblem`, the cost models, pins. Out: an `Exploration`, which bounds, prices and remembers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from ..cost import IntraSolution, Recompute
from ..estimate.step import Setting, spans
from ..problem import Candidate, Pins, Priced, Pricing, SearchProblem, SearchProgress
from .balance import balanced
from .brackets import StagePlan, can_beat
from .costed import Costed, memoised
from .ideal import idealised, roofline
from .intervals import Intervals
from .price import price
from .quick import QuickBound, quick_bound
from .simulated import simulated_s
from .solver import Status
from .space import candidates
from .stages import shortest

ROUNDING = 1e-9
"""Floating-point differences between two ways of adding the same costs."""
TIE = 1e-6
"""Plans whose times differ by less than this share are equals: the simpler one wins (`Candidate.key`)."""
TOO_SLOW = "time: its lower bound is above the best plan"

Progress = Callable[[SearchProgress], None]


@dataclass(order=True, slots=True)
class Entry:
    """A candidate in the queue."""

    bound_s: float
    key: tuple
    candidate: Candidate = field(compare=False)
    ideal: bool = field(compare=False, default=False)
    """Whether the bound already comes from idealised costs."""
    costed: Costed | None = field(compare=False, default=None)


class Exploration:
    """The queue and the incumbent of one search."""

    def __init__(
        self,
        problem: SearchProblem,
        pricing: Pricing,
        pins: Pins,
        *,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.problem, self.pins, self.progress = problem, pins, progress
        self.pricing = memoised(pricing, problem.topology.device)
        self.span = spans(problem.topology)
        self.recompute = Recompute(pins["recompute"]) if "recompute" in pins else None
        self.deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        self.priced: dict[Candidate, Priced] = {}
        self.best: Priced | None = None
        self.best_costed: Costed
        self.pruned: dict[Candidate, str] = {}
        self.complete = True
        self.proven_s = math.inf
        self._intra: dict[tuple, tuple[IntraSolution, ...]] = {}
        self._floors: dict[tuple, list[tuple[int, float]]] = {}
        self._bounds: dict[Candidate, float] = {}
        self._ideal: dict[tuple, QuickBound] = {}
        self._real: dict[tuple, Costed] = {}
        self._onces: dict[tuple, float] = {}
        bound = roofline(problem)
        self.queue = [Entry(bound(c), _queue_key(c), c) for c in candidates(problem, pins)]
        self.queue.sort()
        self.reached_s = self.queue[0].bound_s if self.queue else 0.0
        self.entries = tuple(self.queue)
        self.members: dict[tuple[int, ...], list[Entry]] = {}
        """Entries by the mesh's sizes."""
        self._largest: dict[tuple, Candidate] = {}
        for entry in self.entries:
            self.members.setdefault(mesh_sizes(entry.candidate), []).append(entry)
            key = self._slice_key(entry.candidate)
            if key not in self._largest or self._largest[key].micro_batch < entry.candidate.micro_batch:
                self._largest[key] = entry.candidate

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    # ----------------------------------------------------------------- bounds

    def costed(self, candidate: Candidate, intra: IntraSolution) -> Costed:
        """The candidate under an intra-op solution, real or ideal."""
        setting = Setting(
            candidate=candidate,
            topology=self.problem.topology,
            framework=self.problem.framework,
            optimizer=self.problem.optimizer,
            pricing=self.pricing,
            span=self.span,
        )
        return Costed(
            problem=self.problem,
            setting=setting,
            intra=intra,
            recompute=self.recompute,
            known_onces=self._onces,
        )

    def ideal_bound_s(self, candidate: Candidate) -> float:
        """Step 2 of the bounds; infinite when not even an ideal split fits."""
        key = (candidate.mesh, candidate.micro_batch, candidate.zero_stage, candidate.shard_group)
        if key not in self._ideal:
            self._ideal[key] = quick_bound(self.costed(candidate, idealised(self.problem, candidate)))
        return self._ideal[key].bound_s(candidate)

    def solutions(self, candidate: Candidate) -> tuple[IntraSolution, ...]:
        """The intra-op frontier, asked once per slice (`_slice_key`) and microbatch."""
        key = (*self._slice_key(candidate), candidate.micro_batch)
        if key not in self._intra:
            self._intra[key] = self.pricing.intra(candidate.mesh, candidate.micro_batch)
            self._note_floor(candidate, key)
        return self._intra[key]

    def knows(self, candidate: Candidate) -> bool:
        """Whether its intra-op frontier is at hand."""
        return (*self._slice_key(candidate), candidate.micro_batch) in self._intra

    def _slice_key(self, candidate: Candidate) -> tuple:
        mesh = candidate.mesh
        where = tuple(self.span(mesh, (axis,)) for axis in ("tp", "ep", "cp"))
        return (mesh.tp, mesh.ep, mesh.cp, mesh.pp > 1, where)

    def _note_floor(self, candidate: Candidate, key: tuple) -> None:
        """Remember the least seconds per sample that this microbatch takes, for smaller ones."""
        if floor_s := max((s.floor_s for s in self._intra[key]), default=0.0):
            seconds = floor_s * (1 - self.pricing.batch_slack) * (1 - ROUNDING) / candidate.micro_batch
            self._floors.setdefault(key[:-1], []).append((candidate.micro_batch, seconds))

    def floor_s(self, candidate: Candidate) -> float:
        """A bound from larger microbatches of the same splits (see `search`), or 0."""
        b = candidate.micro_batch
        larger = self._floors.get(self._slice_key(candidate), [])
        total = b * max((seconds for n, seconds in larger if n > b and n % b == 0), default=0.0)
        share = 1 / candidate.fill_ways
        return (candidate.microbatches - share) * total / candidate.mesh.pp + share * total

    def _probed_floor_s(self, candidate: Candidate) -> float:
        """The floor from larger microbatches; a slice that is new is asked about its largest one."""
        largest = self._largest[self._slice_key(candidate)]
        smaller = largest.micro_batch > candidate.micro_batch and not self.knows(candidate)
        if smaller and self.pricing.batch_slack < 1:
            self.solutions(largest)
        return self.floor_s(candidate)

    def by_bound(self, members: Iterable[Entry]) -> Iterator[tuple[float, Candidate]]:
        """(bound, candidate), the most promising first; a bound is tightened when its turn comes."""
        tighten = (self.ideal_bound_s, self._costed_bound_s)
        heap = [(max(e.bound_s, self._bounds.get(e.candidate, 0.0)), e.key, e.candidate, 0) for e in members]
        heapify(heap)
        while heap:
            bound, key, candidate, steps = heappop(heap)
            if steps == len(tighten):
                yield bound, candidate
            else:
                heappush(heap, (max(bound, tighten[steps](candidate)), key, candidate, steps + 1))

    def _costed_bound_s(self, candidate: Candidate) -> float:
        """Step 3 of the bounds, where the intra-op frontier is at hand; else 0."""
        if not self.knows(candidate):
            return 0.0
        bounds = [self._costed_like(candidate, s).bound_s for s in self.solutions(candidate)]
        return min(bounds, default=math.inf)

    # ----------------------------------------------------------------- the loop

    def stop(self) -> None:
        """End here: no candidate that has not been priced is below the one taken up last."""
        self.complete = False
        self.deadline = -math.inf
        self.proven_s = min(self.proven_s, self.reached_s)

    def explore(self) -> None:
        """Take up the most promising candidate until nothing left can win."""
        while self.queue:
            self.reached_s = self.queue[0].bound_s
            entry = self.queue[0]
            if self.best is not None and entry.bound_s >= self.best.step_time_s * (1 + TIE):
                for other in self.queue:
                    self._prune(TOO_SLOW, other.candidate)
                self.proven_s = min(self.proven_s, entry.bound_s)
                return
            if self.best is not None and self.late:
                self.complete = False
                self.proven_s = min(self.proven_s, entry.bound_s)
                return
            heappop(self.queue)
            self._advance(entry)
            self._report(entry)

    def _prune(self, bound: str, candidate: Candidate) -> None:
        """Note which bound ruled a candidate out, the first one if there are several."""
        self.pruned.setdefault(candidate, bound)

    def _advance(self, entry: Entry) -> None:
        """Tighten one entry's bound, or price it."""
        candidate = entry.candidate
        if entry.costed is not None:
            self.price(entry.costed, below_s=self.best.step_time_s if self.best else math.inf)
        elif candidate in self.priced:  # as an expert plan
            return
        elif entry.ideal:
            if (floor := self._probed_floor_s(candidate)) > entry.bound_s:
                heappush(self.queue, replace(entry, bound_s=floor))
            else:
                self._push_costed(candidate)
        else:
            bound = max(entry.bound_s, self.ideal_bound_s(candidate), self.floor_s(candidate))
            if math.isinf(bound):
                self._prune("memory: parameters, states and checkpoints alone do not fit", candidate)
            else:
                heappush(self.queue, replace(entry, bound_s=bound, ideal=True))

    def _push_costed(self, candidate: Candidate) -> None:
        solutions = self.solutions(candidate)
        if not solutions:
            self._prune("divisibility: the model cannot be split this way", candidate)
        for index, solution in enumerate(solutions):
            costed = self._costed_like(candidate, solution)
            if math.isinf(costed.bound_s):
                self._prune("memory: does not fit even with full recomputation", candidate)
            else:
                key = (*_queue_key(candidate), index)
                heappush(self.queue, Entry(costed.bound_s, key, candidate, costed=costed))

    def _costed_like(self, candidate: Candidate, solution: IntraSolution) -> Costed:
        """Costs under a solution, shared by the schedules of one mesh, microbatch and ZeRO stage."""
        sharded = (candidate.zero_stage, candidate.shard_group)
        key = (candidate.mesh, candidate.micro_batch, *sharded, id(solution))
        if key not in self._real:
            self._real[key] = self.costed(candidate, solution)
        return self._real[key].under(candidate)

    def price(self, costed: Costed, *, below_s: float = math.inf) -> Priced | None:
        """Exact stages and modes; the incumbent changes when they are faster.

        None when nothing fits, and when no stages and modes make the step faster than `below_s`.
        """
        candidate, intervals = costed.candidate, Intervals(costed.stage_problem)
        below_s *= 1 + 2 * TIE  # an equal may still be the simpler plan
        if not can_beat(intervals, below_s - costed.once_bound_s):
            self._too_slow(costed, below_s)
            return None
        plan = shortest(costed.stage_problem, intervals)
        if plan.status is Status.INFEASIBLE:
            self._prune("memory: no stages and recompute modes fit", candidate)
            return None
        bound_s = costed.step_bound_s(plan)
        if bound_s >= below_s:
            self._too_slow(costed, bound_s)
            return None
        priced = self._priced(costed, balanced(costed, plan, intervals), bound=bound_s)
        self.proven_s = min(self.proven_s, priced.bound_s)
        old = self.priced.get(candidate)
        if old is None or rank(priced) < rank(old):
            self.priced[candidate] = priced
        if self.best is None or rank(priced) < rank(self.best):
            self.best, self.best_costed = priced, costed
        return priced

    def _too_slow(self, costed: Costed, bound_s: float) -> None:
        """Note that the splits found for a candidate take at least `bound_s`, and others perhaps less."""
        self._prune(TOO_SLOW, costed.candidate)
        bound_s *= costed.intra.proven_share
        self._bounds[costed.candidate] = max(bound_s, self._bounds.get(costed.candidate, 0.0))
        self.proven_s = min(self.proven_s, bound_s)

    def _priced(self, costed: Costed, plan: StagePlan, *, bound: float) -> Priced:
        """The price; by the event simulator too when the closed form alone would make it the best."""
        priced = price(costed, plan, bound=bound)
        if costed.candidate.mesh.pp == 1 or (self.best and rank(priced) > rank(self.best)):
            return priced
        return price(costed, plan, bound=bound, simulated_s=simulated_s(costed, plan))

    def price_candidate(self, candidate: Candidate, *, below_s: float = math.inf) -> Priced | None:
        """Price a candidate under every intra-op solution; None when it does not fit, or is not faster."""
        if candidate not in self.priced:
            for solution in self.solutions(candidate):
                costed = self._costed_like(candidate, solution)
                if math.isinf(costed.bound_s):
                    self._prune("memory: does not fit even with full recomputation", candidate)
                else:
                    self.price(costed, below_s=below_s)
        return self.priced.get(candidate)

    def _report(self, entry: Entry) -> None:
        if self.progress is not None:
            self.progress(
                SearchProgress(
                    considered=len(self.entries),
                    pruned=len(self.pruned),
                    priced=len(self.priced),
                    incumbent_s=self.best.step_time_s if self.best else None,
                    bound_s=entry.bound_s,
                    candidate=entry.candidate,
                )
            )


def _queue_key(candidate: Candidate) -> tuple:
    """Order among equal bounds: large microbatches first, for what they tell about smaller ones."""
    return (-candidate.micro_batch, candidate.key)


def rank(priced: Priced) -> tuple:
    """Order of prices: the faster first, and of equals the simpler."""
    return (round(math.log(priced.step_time_s) / TIE), priced.candidate.key)


def mesh_sizes(candidate: Candidate) -> tuple[int, ...]:
    """Sizes of the mesh's axes."""
    m = candidate.mesh
    return (m.pp, m.dp, m.cp, m.ep, m.tp)
