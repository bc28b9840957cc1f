"""The queue of candidates under lower bounds, and the incumbent (see `search`).

In: a `SearchProblem`, the cost models, pins. Out: an `Exploration`, which bounds, prices and remembers.

Bounds and prices are compared as weighted seconds: a step's seconds, and for unusual layouts (`placement`)
so many more that they win only by what they have to gain. A candidate stands for its mesh in every order
(`placement`); the orders part when the costs of an intra-op solution are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from heapq import heapify, heappop, heappush

from ..cost import IntraSolution, Recompute
from ..estimate.step import Setting, spans
from ..mesh import Mesh
from ..problem import (
    NOTHING_KNOWN,
    Candidate,
    Floor,
    Pins,
    Priced,
    Pricing,
    SearchProblem,
    SearchProgress,
)
from ..schedule import SPLIT_BACKWARD
from ..topology import GroupSpan, Topology
from .balance import balanced
from .brackets import StagePlan, can_beat
from .costed import REDUCES_EVERY_MICROBATCH, Costed, Shared, memoised
from .ideal import Roofline, Unsplit, idealised, states_fit
from .intervals import Intervals
from .placement import WORTH, Placements, is_unusual, part_meshes, part_sizes
from .price import price
from .quick import QuickBound, quick_bound
from .simulated import simulated_s
from .solver import Status
from .space import candidates, experts_alone, meshes, tensor_beside_experts
from .stages import shortest

ROUNDING = 1e-9
"""Floating-point differences between two ways of adding the same costs."""
TIE = 1e-6
"""Plans whose times differ by less than this share are equals: the simpler one wins (`Candidate.key`)."""
SLICE = ("tp", "ep", "cp")
"""Axes that splits run along."""
TOO_SLOW = "time: its lower bound is above the best plan"
STATES_TOO_LARGE = "memory: parameters, states and checkpoints alone do not fit"

Progress = Callable[[SearchProgress], None]
Spans = Callable[[Mesh, tuple[str, ...]], GroupSpan]


@dataclass(order=True, slots=True)
class Entry:
    """A candidate in the queue."""

    bound_s: float
    """Weighted."""
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
        self.recompute = Recompute(pins["recompute"]) if "recompute" in pins else None
        self.deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        self.priced: dict[Candidate, Priced] = {}
        self.best: Priced | None = None
        self.best_costed: Costed
        self.pruned: dict[Candidate, str] = {}
        self.complete = True
        self.tried_tensor_groups = False
        """Whether tp beside experts was tried near the best plan only."""
        self.proven_s = math.inf
        """No candidate taken up so far is faster, weighted."""
        self.queue: list[Entry] = []
        self.entries: list[Entry] = []
        """All that were ever in the queue, under their first bounds."""
        self.members: dict[tuple[int, ...], list[Entry]] = {}
        """Entries by the mesh's sizes."""
        self._laid: dict[Mesh, tuple[Mesh, ...]] = {}
        self._weights: dict[Mesh, float] = {}
        self._slices: dict[Mesh, tuple] = {}
        self._found: dict[Candidate, Priced] = {}
        self._holding: dict[tuple, bool] = {}
        self._splittable: dict[tuple[int, int, int], bool] = {}
        self._intra: dict[tuple, tuple[IntraSolution, ...]] = {}
        self._floors: dict[tuple, dict[int, Floor]] = {}
        self._alike: dict[tuple[int, int, int], Floor] = {}
        self._ideal: dict[tuple, tuple[tuple[Mesh, QuickBound], ...]] = {}
        self._real: dict[tuple, Costed] = {}
        self._ideals: dict[tuple[int, ...], IntraSolution] = {}
        self._shared = Shared()
        self._clusters: dict[int, tuple[Topology, Spans]] = {}
        self._unsplit = Unsplit(self.pricing)
        self._roofline, self._placements = Roofline(problem, self._unsplit), Placements(problem)
        self.enter(meshes(problem, pins))
        self.reached_s = self.queue[0].bound_s if self.queue else 0.0

    def enter(self, found: Iterable[Mesh]) -> None:
        """Put the candidates of these meshes into the queue, in every order of their axes."""
        limit = self.weighted_s(self.best) if self.best else math.inf
        hopeful = (m for m in found if self._mesh_s(m) * self._weight(m) < limit)
        laid = {mesh: self._placements.of(mesh) for mesh in hopeful}
        self._laid |= laid
        for candidate in candidates(self.problem, self.pins, among=laid):
            bound = self._roofline.candidate_s(candidate) * self._weight(candidate.mesh)
            if bound >= limit or self.floor_s(candidate) >= limit:
                continue
            entry = Entry(bound, _queue_key(candidate), candidate)
            self.entries.append(entry)
            self.members.setdefault(mesh_sizes(candidate), []).append(entry)
            if not self._holds(candidate):
                self._prune(STATES_TOO_LARGE, candidate)
                continue
            self.queue.append(entry)
        heapify(self.queue)

    def _mesh_s(self, mesh: Mesh) -> float:
        """No microbatch and no schedule makes the mesh faster."""
        samples, ways = self.problem.job.global_batch // mesh.batch_ways, mesh.tp * mesh.ep * mesh.cp
        floors = self._floors.get(self._slice_of(mesh), {}) if self._floors else {}
        alike = [floor.total_s for n, floor in floors.items() if offers_splits_of(n, samples, ways)]
        return max(self._roofline.mesh_s(mesh), samples * max(alike, default=0.0) / mesh.pp)

    def _holds(self, candidate: Candidate) -> bool:
        mesh = candidate.mesh
        key = (mesh, candidate.zero_stage, candidate.shard_group, candidate.virtual_stages)
        if key not in self._holding:
            self._holding[key] = states_fit(self.problem, candidate)
        return self._holding[key]

    def _weight(self, mesh: Mesh) -> float:
        if mesh not in self._weights:
            self._weights[mesh] = 1 / (1 - WORTH) if is_unusual(mesh, self.problem) else 1.0
        return self._weights[mesh]

    def weighted_s(self, priced: Priced) -> float:
        """The step's seconds as they are compared with others."""
        return priced.step_time_s * self._weight(priced.candidate.mesh)

    def rank(self, priced: Priced) -> tuple:
        """Order of prices: the faster first, and of equals the simpler."""
        return (round(math.log(self.weighted_s(priced)) / TIE), priced.candidate.key)

    def cluster(self, mesh: Mesh) -> tuple[Topology, Spans]:
        """The devices that a mesh uses, and where its groups lie on them."""
        if mesh.devices not in self._clusters:
            topology = self.problem.topology
            used = topology if mesh.devices == topology.devices else topology.part(mesh.devices)
            self._clusters[mesh.devices] = (used, spans(used))
        return self._clusters[mesh.devices]

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    # ----------------------------------------------------------------- bounds

    def costed(self, candidate: Candidate, intra: IntraSolution) -> Costed:
        """The candidate under an intra-op solution, real or ideal."""
        topology, span = self.cluster(candidate.mesh)
        setting = Setting(
            candidate=candidate,
            topology=topology,
            framework=self.problem.framework,
            optimizer=self.problem.optimizer,
            pricing=self.pricing,
            span=span,
        )
        return Costed(
            problem=self.problem,
            setting=setting,
            intra=intra,
            recompute=self.recompute,
            shared=self._shared,
        )

    def _in_every_order(self, costed: Costed) -> list[Costed]:
        """The same splits in every order, those apart that cannot beat the first."""
        found = [costed]
        for mesh in self._laid[costed.candidate.mesh][1:]:
            other = costed.on(mesh)
            slower = other.handover_s >= costed.handover_s and other.once_bound_s >= costed.once_bound_s
            if not slower or other.candidate.zero_stage >= REDUCES_EVERY_MICROBATCH:
                found.append(other)
        return found

    def ideal_bound_s(self, candidate: Candidate, floor: Floor = NOTHING_KNOWN) -> float:
        """Step 2 of the bounds, over all orders; infinite when not even an ideal split fits.

        `floor`: what is known besides of a microbatch.
        """
        sharded = (candidate.zero_stage, candidate.shard_group, candidate.schedule in SPLIT_BACKWARD)
        key = (candidate.mesh, candidate.micro_batch, *sharded)
        if key not in self._ideal:
            costed = self._costed_ideally(candidate)
            self._ideal[key] = tuple((c.candidate.mesh, quick_bound(c)) for c in self._in_every_order(costed))
        quick = self._ideal[key]
        return min(each.bound_s(candidate, floor) * self._weight(mesh) for mesh, each in quick)

    def ideal_s(self, candidate: Candidate) -> float:
        """What no splits of this very candidate undercut, not weighted."""
        return quick_bound(self._costed_ideally(candidate)).bound_s(candidate)

    def _costed_ideally(self, candidate: Candidate) -> Costed:
        mesh = candidate.mesh
        key = (mesh.tp, mesh.ep, mesh.cp, candidate.micro_batch)
        if key not in self._ideals:
            self._ideals[key] = idealised(self.problem, mesh, candidate.micro_batch, self._unsplit)
        return self.costed(candidate, self._ideals[key])

    def solutions(self, candidate: Candidate) -> tuple[IntraSolution, ...]:
        """The intra-op frontier, asked once per slice (`_slice_key`) and microbatch."""
        key = self._intra_key(candidate)
        if key not in self._intra:
            self._intra[key] = self.pricing.intra(candidate.mesh, candidate.micro_batch)
            self._note_floor(candidate, candidate.micro_batch)
        return self._intra[key]

    def knows(self, candidate: Candidate) -> bool:
        """Whether its intra-op frontier is at hand."""
        return self._intra_key(candidate) in self._intra

    def _intra_key(self, candidate: Candidate) -> tuple:
        """Tied parameters are read otherwise where blocks may lie on different stages."""
        return (*self._slice_key(candidate), candidate.micro_batch, candidate.mesh.pp > 1)

    def _slice_key(self, candidate: Candidate) -> tuple:
        return self._slice_of(candidate.mesh)

    def _slice_of(self, mesh: Mesh) -> tuple:
        if mesh not in self._slices:
            _, span = self.cluster(mesh)
            where = tuple(span(mesh, (axis,)) for axis in SLICE)
            self._slices[mesh] = (mesh.tp, mesh.ep, mesh.cp, where)
        return self._slices[mesh]

    def _note_floor(self, candidate: Candidate, b: int) -> None:
        """Remember what so large a microbatch takes at least per sample, for smaller ones."""
        floors = self._floors.setdefault(self._slice_key(candidate), {})
        if b not in floors and self.pricing.batch_slack < 1:
            share = (1 - ROUNDING) * (1 - self.pricing.batch_slack) / b
            floors[b] = self.pricing.floor(candidate.mesh, b).times(share)

    def floor_s(self, candidate: Candidate) -> float:
        """A quick bound from larger microbatches of the same splits, weighted; or 0."""
        chain_s, share = self._floor(candidate).total_s, 1 / candidate.fill_ways
        seconds = (candidate.microbatches - share) * chain_s / candidate.mesh.pp + share * chain_s
        return seconds * min(self._weight(m) for m in self._laid[candidate.mesh])

    def _floor(self, candidate: Candidate) -> Floor:
        """What larger microbatches of the same splits tell (see `search`)."""
        floors, mesh = self._floors.get(self._slice_key(candidate)), candidate.mesh
        if not floors:
            return NOTHING_KNOWN
        b, ways = candidate.micro_batch, mesh.tp * mesh.ep * mesh.cp
        key = (id(floors), len(floors), b)
        if key not in self._alike:
            alike = (floor for n, floor in floors.items() if offers_splits_of(n, b, ways))
            self._alike[key] = reduce(Floor.raised, alike, NOTHING_KNOWN).times(b)
        return self._alike[key]

    def _probed_floor_s(self, candidate: Candidate) -> float:
        """The quick bound; a new slice is asked about a microbatch that stands for all smaller ones."""
        if self._slice_key(candidate) not in self._floors:
            mesh = candidate.mesh
            samples, ways = self.problem.job.global_batch // mesh.ep, mesh.tp * mesh.ep * mesh.cp
            self._note_floor(candidate, offering_all(samples, ways))
        return self.floor_s(candidate)

    def _splits_bound_s(self, candidate: Candidate) -> float:
        """A bound from the candidate's own splits, where it is not known yet what they cost."""
        if self.knows(candidate):
            return 0.0
        floor = self.pricing.splits_floor(candidate.mesh, candidate.micro_batch)
        return self.ideal_bound_s(candidate, floor.times(1 - ROUNDING))

    def by_bound(self, members: Iterable[Entry]) -> Iterator[tuple[float, Candidate]]:
        """(bound, candidate), the most promising first; a bound is tightened when its turn comes."""
        tighten = (self.ideal_bound_s, self._costed_bound_s)
        heap = [(e.bound_s, e.key, e.candidate, 0) for e in members]
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
        return min((self._bound_s(costed) for costed in self._all_costed(candidate)), default=math.inf)

    def _bound_s(self, costed: Costed) -> float:
        return costed.bound_s * self._weight(costed.candidate.mesh)

    # ----------------------------------------------------------------- the loop

    def stop(self) -> None:
        """End here: no candidate that has not been priced is below the one taken up last."""
        self.complete = False
        self.deadline = -math.inf
        self.proven_s = min(self.proven_s, self.reached_s)

    def explore(self) -> None:
        """Take up the most promising candidate until nothing left can win."""
        while self.queue:
            entry = self.queue[0]
            self.reached_s = entry.bound_s
            if self.best is not None and entry.bound_s >= self.weighted_s(self.best) * (1 + TIE):
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

    def explore_parts(self) -> None:
        """The same for meshes that leave devices idle, as far as their FLOPs alone let them win."""
        sizes = part_sizes(self.problem.topology, every=self.best is None)
        if self.best is not None:
            hopeless = self._roofline.device_s / (self.best.step_time_s * (1 - WORTH))
            sizes = {devices for devices in sizes if devices >= hopeless}
        parts = part_meshes(self.problem, self.pins, sizes=sizes)
        self.enter(parts if self.best else filter(self._can_be_split, parts))
        self.explore()

    def _can_be_split(self, mesh: Mesh) -> bool:
        """Whether splits are possible at a microbatch that all axes divide: else they are at none."""
        key = (mesh.tp, mesh.ep, mesh.cp)
        if key not in self._splittable:
            self._splittable[key] = bool(self.pricing.intra(mesh, mesh.tp * mesh.ep * mesh.cp))
        return self._splittable[key]

    def explore_tensor_groups(self) -> None:
        """The same for tp beside experts, where that is not searched already."""
        if self.best is not None and experts_alone(self.problem, self.pins):
            best = self.best.candidate.mesh
            found = list(tensor_beside_experts(self.problem, self.pins, best))
            self.tried_tensor_groups = bool(found)
            self.enter(found)
            self.explore()

    def _prune(self, bound: str, candidate: Candidate) -> None:
        """Note which bound ruled a candidate out, the first one if there are several."""
        self.pruned.setdefault(candidate, bound)

    def _advance(self, entry: Entry) -> None:
        """Tighten one entry's bound, or price it."""
        candidate = entry.candidate
        if entry.costed is not None:
            self.price(entry.costed, below_s=self.weighted_s(self.best) if self.best else math.inf)
        elif self.found(candidate):  # as an expert plan
            return
        elif entry.ideal:
            floor = self.ideal_bound_s(candidate, self._floor(candidate))
            if floor <= entry.bound_s:
                floor = self._splits_bound_s(candidate)
            if floor > entry.bound_s:
                heappush(self.queue, replace(entry, bound_s=floor))
            else:
                self._push_costed(candidate)
        elif (floor := self._probed_floor_s(candidate)) > entry.bound_s:
            heappush(self.queue, replace(entry, bound_s=floor))
        else:
            bound = max(entry.bound_s, self.ideal_bound_s(candidate, self._floor(candidate)))
            if math.isinf(bound):
                self._prune(STATES_TOO_LARGE, candidate)
            else:
                heappush(self.queue, replace(entry, bound_s=bound, ideal=True))

    def _push_costed(self, candidate: Candidate) -> None:
        if not self.solutions(candidate):
            self._prune("divisibility: the model cannot be split this way", candidate)
        for index, costed in enumerate(self._all_costed(candidate)):
            if math.isinf(costed.bound_s):
                self._prune("memory: does not fit even with full recomputation", costed.candidate)
            else:
                key = (*_queue_key(costed.candidate), index)
                heappush(self.queue, Entry(self._bound_s(costed), key, costed.candidate, costed=costed))

    def _all_costed(self, candidate: Candidate) -> list[Costed]:
        """The candidate under every intra-op solution, in every order."""
        solutions = self.solutions(candidate)
        return [c for s in solutions for c in self._in_every_order(self._costed_like(candidate, s))]

    def _costed_like(self, candidate: Candidate, solution: IntraSolution) -> Costed:
        """Costs under a solution, shared by the schedules of one mesh, microbatch and ZeRO stage."""
        sharded = (candidate.zero_stage, candidate.shard_group)
        key = (candidate.mesh, candidate.micro_batch, *sharded, id(solution))
        if key not in self._real:
            self._real[key] = self.costed(candidate, solution)
        return self._real[key].under(candidate)

    def price(self, costed: Costed, *, below_s: float = math.inf) -> Priced | None:
        """Exact stages and modes; the incumbent changes when they are faster.

        None when nothing fits, and when no stages and modes take less than `below_s`, weighted.
        """
        candidate, intervals = costed.candidate, Intervals(costed.stage_problem)
        below_s *= (1 + 2 * TIE) / self._weight(candidate.mesh)  # an equal may still be the simpler plan
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
        self.proven_s = min(self.proven_s, priced.bound_s * self._weight(candidate.mesh))
        usual = replace(candidate.mesh, order=self.problem.order)
        for known, key in ((self.priced, candidate), (self._found, replace(candidate, mesh=usual))):
            if key not in known or self.rank(priced) < self.rank(known[key]):
                known[key] = priced
        if self.best is None or self.rank(priced) < self.rank(self.best):
            self.best, self.best_costed = priced, costed
        return priced

    def _too_slow(self, costed: Costed, bound_s: float) -> None:
        """Note that the splits found for a candidate take at least `bound_s`, and others perhaps less."""
        self._prune(TOO_SLOW, costed.candidate)
        proven_s = bound_s * costed.intra.proven_share * self._weight(costed.candidate.mesh)
        self.proven_s = min(self.proven_s, proven_s)

    def _priced(self, costed: Costed, plan: StagePlan, *, bound: float) -> Priced:
        """The price; by the event simulator too when the closed form alone would make it the best."""
        priced = price(costed, plan, bound=bound)
        if costed.candidate.mesh.pp == 1 or (self.best and self.rank(priced) > self.rank(self.best)):
            return priced
        return price(costed, plan, bound=bound, simulated_s=simulated_s(costed, plan))

    def price_candidate(self, candidate: Candidate, *, below_s: float = math.inf) -> Priced | None:
        """Price a candidate under every intra-op solution, in every order; None if it does not fit, or
        is not faster."""
        if not self.found(candidate):
            for costed in self._all_costed(candidate):
                if math.isinf(costed.bound_s):
                    self._prune("memory: does not fit even with full recomputation", costed.candidate)
                else:
                    self.price(costed, below_s=below_s)
        return self.found(candidate)

    def found(self, candidate: Candidate) -> Priced | None:
        """The best price of a candidate over its orders, if it has one."""
        return self._found.get(candidate)

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


def offers_splits_of(larger: int, micro_batch: int, ways: int) -> bool:
    """Whether whatever divides by factors of `ways` at a microbatch does so at a larger one too."""
    factor = math.gcd(micro_batch, ways ** micro_batch.bit_length())
    return larger >= micro_batch and larger % factor == 0


def offering_all(samples: int, ways: int) -> int:
    """A microbatch of at least so many samples that offers the splits of every smaller one."""
    primes = [p for p in range(2, ways + 1) if ways % p == 0 and all(p % q for q in range(2, p))]
    powers = (p ** math.ceil(math.log(samples, p) - ROUNDING) for p in primes)
    return math.prod(powers) if primes else samples


def _queue_key(candidate: Candidate) -> tuple:
    """Order among equal bounds: large microbatches first, for what they tell about smaller ones."""
    return (-candidate.micro_batch, candidate.key)


def mesh_sizes(candidate: Candidate) -> tuple[int, ...]:
    """Sizes of the mesh's axes."""
    m = candidate.mesh
    return (m.pp, m.dp, m.cp, m.ep, m.tp)
