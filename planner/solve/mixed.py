"""The search over plans that put nodes of several kinds to work together.

In: for each kind of nodes its cost models (`Kind`), the cluster, pins, and the best step found so far (of
plans on one kind alone). Out: a `MixedOutcome`: the best plan on all kinds, if one is better, and a bound.

Every kind is priced as if the whole cluster were of it: the mesh is one and the same, a pipeline rank takes
the costs of the kind that it lies on. Best first, as in `search`, with three bounds that tighten:

    1. FLOPs alone: work by fractions, to each rank by its speed at best
    2. the costs of the splits, still by fractions (`kinds.bound_s`)
    3. exact stages and modes (`kinds.fastest`), or shares and modes of replicas (`_price_replicas`)

All ranks have the same splits: each kind's frontier is tried, priced again on the other kinds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import product

from ..cost import IntraSolution, Recompute
from ..estimate.step import Setting, send_recv, spans
from ..mesh import Mesh
from ..problem import Pins, Priced, Pricing, SearchProblem
from ..topology import MixedTopology
from .brackets import StagePlan
from .costed import Costed, memoised
from .ideal import BACKWARD_OVER_FORWARD, best_flops_per_s
from .intervals import Modes, rank_bytes, simplest
from .kinds import bound_s, fastest
from .mixed_space import Placed, placed
from .price import price_ranks
from .solver import Status

TIE = 1e-6
"""As in `search`: closer than this share, plans are equals and the simpler one wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of nodes as the search sees it."""

    problem: SearchProblem
    """Its topology is as if the whole cluster were of this kind."""
    devices: int
    """How many there really are."""
    pricing: Pricing
    joined: Pricing
    """The same with the link between kinds for the outermost level."""
    again: Callable[[Mesh, IntraSolution], IntraSolution]
    """Another kind's splits at this kind's prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlan:
    """A plan on several kinds."""

    placed: Placed
    priced: Priced


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOutcome:
    """The best plan that uses all kinds (None: none is better than what was known), and the certificate."""

    best: MixedPlan | None
    considered: int
    solved: int
    lower_bound_s: float
    """No plan that uses all kinds is faster."""
    complete: bool
    """False when the time limit or the user (Ctrl-C) stopped the search."""


def search_mixed(
    kinds: Sequence[Kind],
    cluster: MixedTopology,
    pins: Pins,
    *,
    known_s: float = math.inf,
    time_limit_s: float | None = None,
) -> MixedOutcome:
    """The best plan on all kinds together that takes less than `known_s` a step.

    With `time_limit_s`, or when interrupted (Ctrl-C), the best so far with an honest bound.
    """
    search = _Search(kinds, cluster, pins, known_s, time_limit_s)
    try:
        search.run()
    except KeyboardInterrupt:
        search.stop()
    return search.outcome()


@dataclass(order=True, slots=True)
class _Entry:
    bound_s: float
    key: tuple
    placed: Placed = field(compare=False)
    ranks: tuple[Costed, ...] = field(compare=False, default=())
    """Costs of every pipeline rank, or of every kind of replicas; empty before bound 2."""


class _Search:
    def __init__(
        self,
        kinds: Sequence[Kind],
        cluster: MixedTopology,
        pins: Pins,
        known_s: float,
        time_limit_s: float | None,
    ) -> None:
        self.deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        self.complete, self.proven_s = True, math.inf
        self.kinds, self.cluster, self.known_s = kinds, cluster, known_s
        self.recompute = Recompute(pins["recompute"]) if "recompute" in pins else None
        self.pricings = [memoised(kind.pricing, kind.problem.topology.device) for kind in kinds]
        self.joined = [memoised(kind.joined, kind.problem.topology.device) for kind in kinds]
        self.spans = [spans(kind.problem.topology) for kind in kinds]
        self.splits: dict[tuple, list[tuple[IntraSolution, ...]]] = {}
        self.costs: dict[tuple, Costed] = {}
        self.work = [_flops_seconds(kind.problem) for kind in kinds]
        found = placed([kind.problem for kind in kinds], [kind.devices for kind in kinds], pins)
        self.queue = [_Entry(self._flops_bound_s(place), place.key, place) for place in found]
        heapify(self.queue)
        self.best: MixedPlan | None = None

        self.considered, self.solved = len(self.queue), 0
        self.reached_s = self.queue[0].bound_s if self.queue else math.inf

    def run(self) -> None:
        """Take up the most promising candidate until nothing left can win."""
        while self.queue:
            entry = heappop(self.queue)
            self.reached_s = entry.bound_s
            if entry.bound_s >= self._to_beat_s():
                self.proven_s = min(self.proven_s, entry.bound_s)
                return
            if time.monotonic() > self.deadline:
                self.stop()
                return
            if entry.ranks:
                self.solved += 1
                self.proven_s = min(self.proven_s, self._price(entry))
            else:
                for number, ranks in enumerate(self._costed(entry.placed)):
                    bound = max(entry.bound_s, self._bound_s(entry.placed, ranks))
                    heappush(self.queue, _Entry(bound, (*entry.key, number), entry.placed, ranks))

    def stop(self) -> None:
        """End here: what has not been priced is not below the candidate taken up last."""
        self.complete = False
        self.proven_s = min(self.proven_s, self.reached_s)

    def outcome(self) -> MixedOutcome:
        """What was found, and what is proven of the rest."""
        return MixedOutcome(
            best=self.best,
            considered=self.considered,
            solved=self.solved,
            lower_bound_s=min(self.proven_s, self._to_beat_s()),
            complete=self.complete,
        )

    def _to_beat_s(self) -> float:
        return self.best.priced.step_time_s if self.best else self.known_s

    # ------------------------------------------------------------------ bounds

    def _flops_bound_s(self, place: Placed) -> float:
        candidate, mesh = place.candidate, place.candidate.mesh
        seconds = [w * candidate.micro_batch / (mesh.tp * mesh.cp) for w in self.work]
        if place.microbatches:
            return max(m * s for m, s in zip(place.microbatches, seconds, strict=True))
        speed = sum(1 / seconds[kind] for kind in place.kinds)
        return (candidate.microbatches - 1) / speed + min(seconds[kind] for kind in place.kinds)

    def _bound_s(self, place: Placed, ranks: tuple[Costed, ...]) -> float:
        if not place.microbatches:
            return bound_s(ranks)
        least = [sum(n * min(c.classes[name].seconds.values()) for name, n in c.problem.counts.items())
                 for c in ranks]  # fmt: skip
        return max(m * s for m, s in zip(place.microbatches, least, strict=True))

    # ------------------------------------------------------------------ costs

    def _costed(self, place: Placed) -> Iterator[tuple[Costed, ...]]:
        """For every choice of splits, the costs of every rank (of every kind of replicas)."""
        for number, solutions in enumerate(self._solutions(place)):
            made = [self._cost(place, kind, number, solutions[kind]) for kind in range(len(self.kinds))]
            if place.microbatches:
                yield tuple(made)
            else:
                yield tuple(self._at(place, rank, number, made) for rank in range(len(place.kinds)))

    def _solutions(self, place: Placed) -> list[tuple[IntraSolution, ...]]:
        """Splits that any kind would choose, priced on every kind."""
        mesh, b = place.candidate.mesh, place.candidate.micro_batch
        key = (mesh.tp, mesh.ep, mesh.pp > 1, b)
        if key not in self.splits:
            self.splits[key] = [
                tuple(s if other is kind else other.again(mesh, s) for other in self.kinds)
                for kind in self.kinds
                for s in kind.pricing.intra(mesh, b)
            ]
        return self.splits[key]

    def _cost(self, place: Placed, kind: int, number: int, solution: IntraSolution) -> Costed:
        candidate, joined = place.candidate, bool(place.microbatches)
        key = (kind, number, candidate, joined)
        if key not in self.costs:
            problem = self.kinds[kind].problem
            setting = Setting(
                candidate=candidate,
                topology=problem.topology,
                framework=problem.framework,
                optimizer=problem.optimizer,
                pricing=(self.joined if joined else self.pricings)[kind],
                span=self.spans[kind],
            )
            self.costs[key] = Costed(
                problem=problem, setting=setting, intra=solution, recompute=self.recompute
            )
        return self.costs[key]

    def _at(self, place: Placed, rank: int, number: int, made: Sequence[Costed]) -> Costed:
        """The costs of a pipeline rank; one that hands over to another kind waits for the slower link."""
        kinds, kind = place.kinds, place.kinds[rank]
        others = {kinds[r] for r in (rank - 1, rank + 1) if 0 <= r < len(kinds)} - {kind}
        if not others:
            return made[kind]
        key = (kind, number, place.candidate, frozenset(others), "border")
        if key not in self.costs:
            sides = [self._handover(made[k], k) for k in (kind, *sorted(others))]
            self.costs[key] = replace(made[kind], handed=max(sides, key=lambda c: c.exposed_s))
        return self.costs[key]

    def _handover(self, costed: Costed, kind: int):
        """A hand-over at the link between kinds, as this kind sends it."""
        names = costed.problem.layer_classes or set(costed.problem.chain)
        largest = max(costed.intra.blocks[name].output_bytes for name in names)
        setting = replace(costed.setting, pricing=self.joined[kind])
        sent = send_recv(setting, largest, whole_on_tp=not costed.intra.sequence_parallel)
        assert sent is not None, "two kinds make at least two stages"
        return replace(sent, level=self.cluster.link.name)

    # ------------------------------------------------------------------ prices

    def _price(self, entry: _Entry) -> float:
        """Price an entry exactly, keep it when it is the best, and return the bound it leaves behind."""
        priced = self._replicas(entry) if entry.placed.microbatches else self._stages(entry)
        if priced is None:
            return math.inf
        if priced.step_time_s < self._to_beat_s() * (1 - TIE):
            self.best = MixedPlan(placed=entry.placed, priced=priced)
        return priced.bound_s

    def _stages(self, entry: _Entry) -> Priced | None:
        plan = fastest(entry.ranks)
        if plan.status is Status.INFEASIBLE:
            return None
        return price_ranks(entry.ranks, plan, bound=plan.bound_s, cluster=self.cluster)

    def _replicas(self, entry: _Entry) -> Priced | None:
        found = replica_modes(entry.ranks, entry.placed.microbatches)
        if found is None:
            return None
        step_s, slowest, modes = found
        costed = entry.ranks[slowest]
        candidate = replace(costed.candidate, microbatches=entry.placed.microbatches[slowest])
        others = [c for c in entry.ranks if c is not costed]
        plan = StagePlan(status=Status.OPTIMAL, ranks=(modes,), bound_s=step_s, solver="enumeration")
        return price_ranks(
            (costed.under(candidate),), plan, bound=step_s, cluster=self.cluster, replicas=others
        )


def replica_modes(kinds: Sequence[Costed], microbatches: Sequence[int]) -> tuple[float, int, Modes] | None:
    """(step, the kind that the others wait for, modes) of the modes, alike on all kinds, with the fastest
    step; None when no modes fit every kind."""
    best: tuple[float, int, Modes] | None = None
    for modes in _every_mode(kinds):
        if any(rank_bytes(c.stage_problem, 0, modes) > c.stage_problem.capacity_bytes for c in kinds):
            continue
        busy = [
            m * sum(n * c.classes[name].seconds[mode] for name, n, mode in modes)
            for c, m in zip(kinds, microbatches, strict=True)
        ]
        if best is not None and max(busy) >= best[0]:
            continue
        once_s = max(c.once_s(modes) for c in kinds) + kinds[0].problem.framework.step_overhead_s
        step_s = max(busy) + once_s
        if best is None or step_s < best[0]:
            best = (step_s, busy.index(max(busy)), modes)
    if best is None:
        return None
    tightest = min(kinds, key=lambda c: c.stage_problem.capacity_bytes).stage_problem
    return best[0], best[1], simplest(tightest, 0, best[2])


def _every_mode(kinds: Sequence[Costed]) -> Iterator[Modes]:
    """All ways to recompute a number of blocks of every class; blocks of a class are alike."""
    classes, counts = kinds[0].classes, kinds[0].problem.counts
    runs = [list(_mixes(name, n, list(classes[name].seconds))) for name, n in counts.items()]
    for picked in product(*runs):
        yield tuple(run for part in picked for run in part)


def _mixes(name: str, n: int, modes: list[Recompute]) -> Iterator[Modes]:
    mode, *others = modes
    if not others:
        yield ((name, n, mode),) if n else ()
        return
    for held in range(n, -1, -1):
        for rest in _mixes(name, n - held, others):
            yield (((name, held, mode),) if held else ()) + rest


def _flops_seconds(problem: SearchProblem) -> float:
    """Seconds of one sample's forward and backward on one device, at the best rate of any kernel."""
    rate = best_flops_per_s(problem.topology.device, problem.job.dtype)
    return sum(
        n * facts.forward_flops_per_sample * (1 + BACKWARD_OVER_FORWARD * facts.trainable_share) / rate
        for facts, n in ((problem.blocks[name], n) for name, n in problem.counts.items())
    )
