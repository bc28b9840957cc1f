"""Best-first search over meshes, microbatches, ZeRO stages and schedules, with a certificate.

In: a `SearchProblem`, the cost models (`Pricing`), the user's pins. Out: an `Outcome`, or
`Infeasible` with the nearest change that would fit.

Every candidate waits in a queue under a lower bound of its step time that tightens in four steps:

    1. FLOPs alone, bubble included (`ideal.roofline`)
    2. idealised costs and memory (`ideal.idealised`): still without an intra-op solution
    3. the costs of an intra-op solution, with fractions of blocks for stages (`brackets.bound_s`)
    4. exact stages and modes (`stages.shortest`, `balance.balanced`); the winner's are solved again as an ILP

A price counts the pipeline by the closed form and, where that alone would make a plan the best, by the
event simulator as well; the greater of the two is the price. So the winner's time is the simulated one
where the closed form is too low, bounds of the closed form stay bounds of all prices, and what loses by
the closed form already needs no simulation.

The candidate with the least bound is taken up first. When the least bound left is no better than
the best plan found, nothing unexplored can win: the certificate's lower bound is the least of what
is left and of what the priced candidates could still have been. Closed forms and the intra-op
solver's own bound enter as they are, so the gap covers every decision.

A microbatch of b samples takes at least b/B of the time of B > b samples, but for a share that is read off
the cost models' curves (`batch_slack`): larger kernels and messages are not slower by more. So a slice (tp,
and where it lies) is asked about its largest microbatch first, and what that takes bounds the smaller ones.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from ..cost import IntraSolution, Recompute
from ..estimate.step import Setting, spans
from ..plan import Alternative, SearchSummary
from ..problem import Candidate, Outcome, Pins, Priced, Pricing, SearchProblem, SearchProgress, SearchResult
from .balance import balanced
from .brackets import StagePlan
from .costed import Costed, memoised
from .explain import enlarged_to_fit, reasons, seconds_in_words, why_it_does_not_fit, why_it_lost
from .ideal import idealised, roofline
from .infeasible import infeasible
from .price import price
from .quick import QuickBound, quick_bound
from .simulated import simulated_s
from .solver import Status
from .space import EXPERTS, Expert, candidates
from .stages import shortest, solve_stages

TOP = 5
"""Runners-up of distinct meshes that are reported, expert plans aside."""
FAMILY_TRIES = 3
"""New prices spent on an expert plan's family or on another mesh, the most promising members first."""
ILP_GAP = 1e-4
"""The winner's stages are proven to 0.01%: far below any model error, and it ends ties between equals."""
ROUNDING = 1e-9
"""Floating-point differences between two ways of adding the same costs."""

TIE = 1e-6
"""Plans whose times differ by less than this share are equals: the simpler one wins (`Candidate.key`)."""

Progress = Callable[[SearchProgress], None]


def search(
    problem: SearchProblem,
    pricing: Pricing,
    *,
    pins: Pins | None = None,
    top: int = TOP,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    solver: str | None = None,
) -> SearchResult:
    """The fastest plan, why it is, and what came second.

    `solver`: `highs` or `cbc` for the stage ILP (default: what is there). With `time_limit_s`, or when the
    user interrupts (Ctrl-C), the best plan so far is returned with its honest gap; an interruption before
    there is one ends the search. Deterministic unless it is stopped.
    """
    run = _Run(problem, pricing, pins or {}, time_limit_s=time_limit_s, progress=progress)
    try:
        run.seed_experts()
        run.explore()
    except KeyboardInterrupt:
        if run.best is None:
            raise
        run.stop()
    if run.best is None:
        return infeasible(problem, run.pricing, run.pins)
    experts = run.compare_experts()
    run.price_runners_up(top)
    run.prove_best(solver)
    return run.outcome(top, experts)


@dataclass(order=True, slots=True)
class _Entry:
    bound_s: float
    key: tuple
    candidate: Candidate = field(compare=False)
    ideal: bool = field(compare=False, default=False)
    """Whether the bound already comes from idealised costs."""
    costed: Costed | None = field(compare=False, default=None)


class _Run:
    """The queue and the incumbent of one search."""

    def __init__(
        self,
        problem: SearchProblem,
        pricing: Pricing,
        pins: Pins,
        *,
        time_limit_s: float | None,
        progress: Progress | None,
    ) -> None:
        self.problem, self.pins, self.progress = problem, pins, progress
        self.pricing = memoised(pricing, problem.topology.device)
        self.span = spans(problem.topology)
        self.recompute = Recompute(pins["recompute"]) if "recompute" in pins else None
        self.deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        self.intra: dict[tuple, tuple[IntraSolution, ...]] = {}
        self.floors: dict[tuple, list[tuple[int, float]]] = {}
        self.priced: dict[Candidate, Priced | None] = {}
        self.best: Priced | None = None
        self.best_costed: Costed
        self.pruned: dict[Candidate, str] = {}
        self.complete = True
        self.proven_s = math.inf
        self.reached_s = 0.0
        self.queue: list[_Entry] = []
        self.ideal: dict[tuple, QuickBound] = {}
        self.real: dict[tuple, Costed] = {}
        bound = roofline(problem)
        for candidate in candidates(problem, pins):
            self.queue.append(_Entry(bound(candidate), _queue_key(candidate), candidate))
        self.queue.sort()
        self.reached_s = self.queue[0].bound_s if self.queue else 0.0
        self.entries = tuple(self.queue)
        self.largest: dict[tuple, Candidate] = {}
        self.members: dict[tuple[int, ...], list[_Entry]] = {}
        for entry in self.entries:
            self.members.setdefault(_mesh_key(entry.candidate), []).append(entry)
            key = self._slice_key(entry.candidate)
            if key not in self.largest or self.largest[key].micro_batch < entry.candidate.micro_batch:
                self.largest[key] = entry.candidate

    # ----------------------------------------------------------------- bounds

    def _costed(self, candidate: Candidate, intra: IntraSolution) -> Costed:
        setting = Setting(
            candidate=candidate,
            topology=self.problem.topology,
            framework=self.problem.framework,
            optimizer=self.problem.optimizer,
            pricing=self.pricing,
            span=self.span,
        )
        return Costed(problem=self.problem, setting=setting, intra=intra, recompute=self.recompute)

    def ideal_bound_s(self, candidate: Candidate) -> float:
        """Step 2 of the bounds; infinite when not even an ideal split fits."""
        key = (candidate.mesh, candidate.micro_batch, candidate.zero_stage, candidate.shard_group)
        if key not in self.ideal:
            self.ideal[key] = quick_bound(self._costed(candidate, idealised(self.problem, candidate)))
        return self.ideal[key].bound_s(candidate)

    def solutions(self, candidate: Candidate) -> tuple[IntraSolution, ...]:
        """The intra-op frontier, asked once per slice (`_slice_key`) and microbatch."""
        key = (*self._slice_key(candidate), candidate.micro_batch)
        if key not in self.intra:
            self.intra[key] = self.pricing.intra(candidate.mesh, candidate.micro_batch)
            self._note_floor(candidate, key)
        return self.intra[key]

    def _knows(self, candidate: Candidate) -> bool:
        """Whether its intra-op frontier is at hand."""
        return (*self._slice_key(candidate), candidate.micro_batch) in self.intra

    def _slice_key(self, candidate: Candidate) -> tuple:
        mesh = candidate.mesh
        where = tuple(self.span(mesh, (axis,)) for axis in ("tp", "ep", "cp"))
        return (mesh.tp, mesh.ep, mesh.cp, mesh.pp > 1, where)

    def _note_floor(self, candidate: Candidate, key: tuple) -> None:
        """Remember the least seconds per sample that this microbatch takes, for smaller ones."""
        if floor_s := max((s.floor_s for s in self.intra[key]), default=0.0):
            seconds = floor_s * (1 - self.pricing.batch_slack) * (1 - ROUNDING) / candidate.micro_batch
            self.floors.setdefault(key[:-1], []).append((candidate.micro_batch, seconds))

    def floor_s(self, candidate: Candidate) -> float:
        """A bound from larger microbatches of the same splits (see the module docstring), or 0."""
        b = candidate.micro_batch
        larger = self.floors.get(self._slice_key(candidate), [])
        total = b * max((seconds for n, seconds in larger if n > b and n % b == 0), default=0.0)
        share = 1 / candidate.fill_ways
        return (candidate.microbatches - share) * total / candidate.mesh.pp + share * total

    def _probed_floor_s(self, candidate: Candidate) -> float:
        """The floor from larger microbatches; a slice that is new is asked about its largest one."""
        largest = self.largest[self._slice_key(candidate)]
        smaller = largest.micro_batch > candidate.micro_batch and not self._knows(candidate)
        if smaller and self.pricing.batch_slack < 1:
            self.solutions(largest)
        return self.floor_s(candidate)

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
            entry = heappop(self.queue)
            if self.best is not None and entry.bound_s >= self.best.step_time_s * (1 + TIE):
                self._prune("time: its lower bound is above the best plan", entry.candidate)
                for other in self.queue:
                    self._prune("time: its lower bound is above the best plan", other.candidate)
                self.proven_s = min(self.proven_s, entry.bound_s)
                heappush(self.queue, entry)
                return
            if self.best is not None and time.monotonic() > self.deadline:
                self.complete = False
                self.proven_s = min(self.proven_s, entry.bound_s)
                heappush(self.queue, entry)
                return
            self._advance(entry)
            self._report(entry)

    def _prune(self, bound: str, candidate: Candidate) -> None:
        """Note which bound ruled a candidate out, the first one if there are several."""
        self.pruned.setdefault(candidate, bound)

    def _advance(self, entry: _Entry) -> None:
        """Tighten one entry's bound, or price it."""
        candidate = entry.candidate
        if entry.costed is not None:
            self.price(entry.costed)
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
                heappush(self.queue, _Entry(costed.bound_s, key, candidate, costed=costed))

    def _costed_like(self, candidate: Candidate, solution: IntraSolution) -> Costed:
        """Costs under a solution, shared by the schedules of one mesh, microbatch and ZeRO stage."""
        sharded = (candidate.zero_stage, candidate.shard_group)
        key = (candidate.mesh, candidate.micro_batch, *sharded, id(solution))
        if key not in self.real:
            self.real[key] = self._costed(candidate, solution)
        return self.real[key].under(candidate)

    def price(self, costed: Costed) -> Priced | None:
        """Exact stages and modes; the incumbent changes when they are faster."""
        plan = shortest(costed.stage_problem)
        if plan.status is Status.INFEASIBLE:
            self._prune("memory: no stages and recompute modes fit", costed.candidate)
            self.priced.setdefault(costed.candidate, None)
            return None
        priced = self._priced(costed, balanced(costed, plan), bound=costed.step_bound_s(plan))
        self.proven_s = min(self.proven_s, priced.bound_s)
        old = self.priced.get(costed.candidate)
        if old is None or _rank(priced) < _rank(old):
            self.priced[costed.candidate] = priced
        if self.best is None or _rank(priced) < _rank(self.best):
            self.best, self.best_costed = priced, costed
        return priced

    def _priced(self, costed: Costed, plan: StagePlan, *, bound: float) -> Priced:
        """The price; by the event simulator too when the closed form alone would make it the best."""
        priced = price(costed, plan, bound=bound)
        if costed.candidate.mesh.pp == 1 or (self.best and _rank(priced) > _rank(self.best)):
            return priced
        return price(costed, plan, bound=bound, simulated_s=simulated_s(costed, plan))

    def price_candidate(self, candidate: Candidate) -> Priced | None:
        """Price a candidate under every intra-op solution; None when it does not fit."""
        if candidate not in self.priced:
            self.priced[candidate] = None
            for solution in self.solutions(candidate):
                costed = self._costed_like(candidate, solution)
                if math.isinf(costed.bound_s):
                    self._prune("memory: does not fit even with full recomputation", candidate)
                else:
                    self.price(costed)
        return self.priced[candidate]

    def _report(self, entry: _Entry) -> None:
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

    # ----------------------------------------------------------------- expert plans and runners-up

    def _family(self, expert: Expert) -> list[tuple[float, Candidate]]:
        """(bound, candidate) of an expert plan's members, the most promising first."""
        return self._bounded(e for e in self.entries if expert.holds(e.candidate, self.problem))

    def _bounded(self, members: Iterable[_Entry]) -> list[tuple[float, Candidate]]:
        """(bound, candidate), the most promising first."""
        bounds = [(max(e.bound_s, self.ideal_bound_s(e.candidate)), e.key, e.candidate) for e in members]
        return [(bound, candidate) for bound, _, candidate in sorted(bounds)]

    def seed_experts(self) -> None:
        """Price the most promising member of every family, for an early incumbent."""
        for expert in EXPERTS:
            for bound, candidate in self._family(expert)[:1]:
                if time.monotonic() < self.deadline and not math.isinf(bound):
                    self.price_candidate(candidate)

    def compare_experts(self) -> dict[str, Candidate]:
        """By name, the best member found of every family, or its most promising one if none fits."""
        chosen = {}
        for expert in EXPERTS:
            family = self._family(expert)
            best = self._best_of(family)
            if best is None and family and time.monotonic() < self.deadline:
                leanest = min((c for _, c in family), key=lambda c: (c.micro_batch, c.key))
                best = self.price_candidate(leanest)
                chosen[expert.name] = leanest
            if best is not None:
                chosen[expert.name] = best.candidate
        return chosen

    def _best_of(self, family: list[tuple[float, Candidate]], *, ask: bool = True) -> Priced | None:
        """The best member, proven unless `FAMILY_TRIES` new prices were not enough.

        Without `ask`, once a member has a price, only members whose intra-op frontier is at hand are priced.
        """
        known = [p for _, c in family if (p := self.priced.get(c))]
        best = min(known, key=_rank, default=None)
        tries = FAMILY_TRIES
        for bound, candidate in family:
            late = time.monotonic() > self.deadline
            if not tries or late or math.isinf(bound) or (best and bound >= best.step_time_s):
                break
            if candidate in self.priced or (best and self.floor_s(candidate) >= best.step_time_s):
                continue
            if best and not ask and not self._knows(candidate):
                continue
            tries -= 1
            found = self.price_candidate(candidate)
            if found and (best is None or _rank(found) < _rank(best)):
                best = found
        return best

    def price_runners_up(self, top: int) -> None:
        """Find the best plan of the meshes that come next by price or by bound, until there are `top`."""
        assert self.best is not None
        done = {_sizes(self.best)}
        order = [_sizes(p) for p in sorted((p for p in self.priced.values() if p), key=_rank)]
        order += [_mesh_key(e.candidate) for e in sorted(self.queue)]
        for sizes in dict.fromkeys(order):
            if len(done) > top or time.monotonic() > self.deadline:
                return
            if sizes in done:
                continue
            if self._best_of(self._bounded(self.members[sizes]), ask=False):
                done.add(sizes)

    # ----------------------------------------------------------------- the answer

    def prove_best(self, solver: str | None) -> None:
        """Solve the winner's stages again as an ILP: its answer and its bound are what is reported."""
        assert self.best is not None
        left_s = None if math.isinf(self.deadline) else max(0.1, self.deadline - time.monotonic())
        plan = solve_stages(self.best_costed.stage_problem, gap=ILP_GAP, time_limit_s=left_s, solver=solver)
        bound = self.best_costed.step_bound_s(plan)
        plan = balanced(self.best_costed, plan)
        simulated = simulated_s(self.best_costed, plan) if self.best.candidate.mesh.pp > 1 else 0.0
        self.best = price(self.best_costed, plan, bound=bound, simulated_s=simulated)
        self.priced[self.best.candidate] = self.best
        self.proven_s = min(self.proven_s, self.best.bound_s)

    def outcome(self, top: int, experts: dict[str, Candidate]) -> Outcome:
        """Everything a plan is written from."""
        best = self.best
        assert best is not None
        lower = min(self.proven_s, best.step_time_s)
        priced = {candidate for candidate, found in self.priced.items() if found}
        pruned = Counter(bound for candidate, bound in self.pruned.items() if candidate not in priced)
        summary = SearchSummary(
            meshes_considered=len(self.entries),
            meshes_pruned=pruned.total(),
            pruned_by=tuple(sorted(pruned.items())),
            lower_bound_s=lower,
            gap=(best.step_time_s - lower) / best.step_time_s,
            solver=best.solver,
            complete=self.complete,
        )
        return Outcome(
            best=best,
            alternatives=tuple(sorted(self._alternatives(best, top, experts), key=lambda a: a.step_time_s)),
            summary=summary,
            reasons=reasons(self.problem, best),
            warnings=tuple(self._warnings()),
            pareto=tuple(self._pareto(best)),
        )

    def _pareto(self, best: Priced) -> Iterator[Alternative]:
        """Of the priced plans, those that no faster one beats in memory."""
        least = math.inf
        for priced in sorted((p for p in self.priced.values() if p), key=_rank):
            if priced.prediction.peak_memory_bytes < least:
                least = priced.prediction.peak_memory_bytes
                found = self._alternative(best, priced, None)
                yield replace(found, reason="the plan") if priced.candidate == best.candidate else found

    def _warnings(self) -> Iterator[str]:
        """Costs below what the search takes for impossible would make its bounds, and so the gap, wrong."""
        for candidate, found in self.priced.items():
            least = self.ideal_bound_s(candidate)
            if found and found.step_time_s < least * (1 - ROUNDING):
                yield (
                    f"{candidate} is priced at {seconds_in_words(found.step_time_s)} a step, below the "
                    f"{seconds_in_words(least)} that its FLOPs take at best: bound and gap are not valid"
                )
                return

    def _alternatives(self, best: Priced, top: int, experts: dict[str, Candidate]) -> Iterator[Alternative]:
        """The best plan of each other mesh, fastest first, then expert plans not yet among them."""
        names: dict[Candidate, list[str]] = {}
        for name, candidate in experts.items():
            names.setdefault(candidate, []).append(name)
        shown = {best.candidate}
        seen = {_sizes(best)}
        for priced in sorted((p for p in self.priced.values() if p), key=_rank):
            if _sizes(priced) in seen or len(seen) > top:
                continue
            seen.add(_sizes(priced))
            shown.add(priced.candidate)
            yield self._alternative(best, priced, names.get(priced.candidate))
        for candidate, called in names.items():
            if candidate in shown:
                continue
            if priced := self.priced.get(candidate):
                yield self._alternative(best, priced, called)
            elif self.solutions(candidate):
                yield self._misfit(candidate, called)

    def _alternative(self, best: Priced, other: Priced, names: list[str] | None) -> Alternative:
        return Alternative(
            mesh=other.candidate.mesh,
            zero_stage=other.candidate.zero_stage,
            shard_group=other.candidate.shard_group,
            micro_batch=other.candidate.micro_batch,
            num_microbatches=other.candidate.microbatches,
            recompute=other.recompute,
            step_time_s=other.step_time_s,
            peak_memory_bytes=other.prediction.peak_memory_bytes,
            reason=why_it_lost(best, other),
            seeded_as=", ".join(names) if names else None,
        )

    def _misfit(self, candidate: Candidate, names: list[str]) -> Alternative:
        """An expert plan that does not fit: what it would take, were the devices just large enough."""
        memory = self.problem.topology.device.memory_bytes
        solutions = self.solutions(candidate)
        needed, enlarged = min(
            (enlarged_to_fit(self._costed(candidate, s)) for s in solutions), key=lambda pair: pair[0]
        )
        reason = why_it_does_not_fit(needed, memory)
        return replace(self._alternative(enlarged, enlarged, names), reason=reason)


def _queue_key(candidate: Candidate) -> tuple:
    """Order among equal bounds: large microbatches first, for what they tell about smaller ones."""
    return (-candidate.micro_batch, candidate.key)


def _rank(priced: Priced) -> tuple:
    return (round(math.log(priced.step_time_s) / TIE), priced.candidate.key)


def _mesh_key(candidate: Candidate) -> tuple[int, ...]:
    m = candidate.mesh
    return (m.pp, m.dp, m.cp, m.ep, m.tp)


def _sizes(priced: Priced) -> tuple[int, ...]:
    return _mesh_key(priced.candidate)
