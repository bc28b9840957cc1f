"""Best-first search over meshes, microbatches, ZeRO stages and schedules, with a certificate.

In: a `SearchProblem`, the cost models (`Pricing`), the user's pins. Out: an `Outcome`, or
`Infeasible` with the nearest change that would fit.

Every candidate waits in a queue under a lower bound of its step time that tightens in three steps:

    1. idealised costs (`price.idealised`): no intra-op solution is needed
    2. the costs of an intra-op solution, whose bound ignores how layers divide (`stages.bound_s`)
    3. exact stages and modes (`stages.shortest`); the winner's are solved again as an ILP

The candidate with the least bound is taken up first. When the least bound left is no better than
the best plan found, nothing unexplored can win: the certificate's lower bound is the least of what
is left and of what the priced candidates could still have been. Closed forms and the intra-op
solver's own bound enter as they are, so the gap covers every decision.

One thing is assumed rather than proven, to spare intra-op calls: a microbatch of b samples takes at
least b/B of the time of B > b samples, up to `MICROBATCH_SLACK` (larger kernels are not slower).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from ..cost import IntraSolution, Recompute
from ..estimate.step import Setting, spans
from ..plan import Alternative, SearchSummary
from ..problem import Candidate, Outcome, Pins, Priced, Pricing, SearchProblem, SearchProgress, SearchResult
from .explain import infeasible, needed_bytes, reasons, why_it_does_not_fit, why_it_lost
from .price import Costed, idealised, memoised, price
from .solver import Status
from .space import EXPERTS, Expert, candidates
from .stages import StagePlan, shortest, solve_stages

TOP = 5
"""Runners-up of distinct meshes that are reported, expert plans aside."""
EXPERT_TRIES = 4
"""Members of an expert plan's family that are priced, the most promising first, until one fits."""
ILP_GAP = 1e-4
"""The winner's stages are proven to 0.01%: far below any model error, and it ends ties between equals."""
MICROBATCH_SLACK = 0.05
"""How much slower per sample a larger microbatch may be before the assumption above would mislead."""

RUNNER_UP_TRIES = 3
"""Candidates tried for every runner-up wanted."""

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

    `solver`: `highs` or `cbc` for the stage ILP (default: what is there). With `time_limit_s` the
    best plan so far is returned with its honest gap. Deterministic unless a limit is given.
    """
    run = _Run(problem, pricing, pins or {}, time_limit_s=time_limit_s, progress=progress)
    run.seed_experts()
    run.explore()
    if run.best is None:
        return infeasible(problem, run.pricing, run.pins, run.memory_short)
    experts = run.compare_experts()
    run.price_runners_up(top)
    run.prove_best(solver)
    return run.outcome(top, experts)


@dataclass(order=True, slots=True)
class _Entry:
    bound_s: float
    key: tuple
    candidate: Candidate = field(compare=False)
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
        self.pruned: Counter[str] = Counter()
        self.complete = True
        self.proven_s = math.inf
        self.queue: list[_Entry] = []
        self.memory_short: list[Candidate] = []
        for candidate in candidates(problem, pins):
            self._push_ideal(candidate)
        self.considered = len(self.queue) + len(self.memory_short)
        self.ideal = sorted(self.queue)

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

    def _push_ideal(self, candidate: Candidate) -> None:
        bound = self._costed(candidate, idealised(self.problem, candidate)).bound_s
        if math.isinf(bound):
            self.pruned["memory: parameters, states and checkpoints alone do not fit"] += 1
            self.memory_short.append(candidate)
            return
        heappush(self.queue, _Entry(bound, _queue_key(candidate), candidate))

    def solutions(self, candidate: Candidate) -> tuple[IntraSolution, ...]:
        """The intra-op frontier, asked once per tp, ep, cp, where their groups lie, and microbatch."""
        mesh = candidate.mesh
        spans_of = tuple(self.span(mesh, (axis,)) for axis in ("tp", "ep", "cp"))
        key = (mesh.tp, mesh.ep, mesh.cp, spans_of, candidate.micro_batch)
        if key not in self.intra:
            self.intra[key] = self.pricing.intra(mesh, candidate.micro_batch)
            self._note_floor(candidate, key)
        return self.intra[key]

    def _note_floor(self, candidate: Candidate, key: tuple) -> None:
        """Remember the least seconds per sample that this microbatch takes, for smaller ones."""
        if solutions := self.intra[key]:
            seconds = min(_samples_s(self.problem, s) for s in solutions) / candidate.micro_batch
            self.floors.setdefault(key[:-1], []).append((candidate.micro_batch, seconds))

    def floor_s(self, candidate: Candidate) -> float:
        """A bound from larger microbatches of the same splits (see the module docstring), or 0."""
        mesh = candidate.mesh
        key = (mesh.tp, mesh.ep, mesh.cp, tuple(self.span(mesh, (axis,)) for axis in ("tp", "ep", "cp")))
        known = [seconds for b, seconds in self.floors.get(key, []) if b > candidate.micro_batch]
        total = candidate.micro_batch * max(known, default=0.0) * (1 - MICROBATCH_SLACK)
        share = 1 / candidate.virtual_stages
        return (candidate.microbatches - share) * total / mesh.pp + share * total

    # ----------------------------------------------------------------- the loop

    def explore(self) -> None:
        """Take up the most promising candidate until nothing left can win."""
        while self.queue:
            entry = heappop(self.queue)
            if self.best is not None and entry.bound_s >= self.best.step_time_s:
                self.pruned["time: its lower bound is above the best plan"] += len(self.queue) + 1
                self.proven_s = min(self.proven_s, entry.bound_s)
                heappush(self.queue, entry)
                return
            if time.monotonic() > self.deadline:
                self.complete = False
                self.proven_s = min(self.proven_s, entry.bound_s)
                heappush(self.queue, entry)
                return
            self._advance(entry)
            self._report(entry)

    def _advance(self, entry: _Entry) -> None:
        if entry.costed is None:
            if entry.candidate in self.priced:  # as an expert plan
                return
            floor = self.floor_s(entry.candidate)
            if floor > entry.bound_s:
                heappush(self.queue, replace(entry, bound_s=floor))
                return
            self._push_costed(entry.candidate)
            return
        self.price(entry.costed)

    def _push_costed(self, candidate: Candidate) -> None:
        solutions = self.solutions(candidate)
        if not solutions:
            self.pruned["divisibility: the model cannot be split this way"] += 1
        for index, solution in enumerate(solutions):
            costed = self._costed(candidate, solution)
            if math.isinf(costed.bound_s):
                self.pruned["memory: does not fit even with full recomputation"] += 1
                self.memory_short.append(candidate)
            else:
                heappush(
                    self.queue, _Entry(costed.bound_s, (*_queue_key(candidate), index), candidate, costed)
                )

    def price(self, costed: Costed) -> Priced | None:
        """Exact stages and modes; the incumbent changes when they are faster."""
        plan = shortest(costed.stage_problem)
        if plan.status is Status.INFEASIBLE:
            self.pruned["memory: no stages and recompute modes fit"] += 1
            self.memory_short.append(costed.candidate)
            self.priced.setdefault(costed.candidate, None)
            return None
        priced = price(costed, plan, bound=_step_bound_s(costed, plan))
        self.proven_s = min(self.proven_s, priced.bound_s)
        old = self.priced.get(costed.candidate)
        if old is None or _rank(priced) < _rank(old):
            self.priced[costed.candidate] = priced
        if self.best is None or _rank(priced) < _rank(self.best):
            self.best, self.best_costed = priced, costed
        return priced

    def price_candidate(self, candidate: Candidate) -> Priced | None:
        """Price a candidate under every intra-op solution; None when it does not fit."""
        if candidate not in self.priced:
            self.priced[candidate] = None
            for solution in self.solutions(candidate):
                costed = self._costed(candidate, solution)
                if not math.isinf(costed.bound_s):
                    self.price(costed)
        return self.priced[candidate]

    def _report(self, entry: _Entry) -> None:
        if self.progress is not None:
            self.progress(
                SearchProgress(
                    considered=self.considered,
                    pruned=sum(self.pruned.values()),
                    priced=len(self.priced),
                    incumbent_s=self.best.step_time_s if self.best else None,
                    bound_s=entry.bound_s,
                    candidate=entry.candidate,
                )
            )

    # ----------------------------------------------------------------- expert plans and runners-up

    def _family(self, expert: Expert) -> list[_Entry]:
        """An expert plan's members, the most promising first."""
        return [entry for entry in self.ideal if expert.holds(entry.candidate, self.problem)]

    def seed_experts(self) -> None:
        """Price the most promising member of every family, for an early incumbent."""
        for expert in EXPERTS:
            for entry in self._family(expert)[:1]:
                if time.monotonic() < self.deadline:
                    self.price_candidate(entry.candidate)

    def compare_experts(self) -> dict[str, Candidate]:
        """By name, the best member found of every family, or its most promising one if none fits."""
        chosen = {}
        for expert in EXPERTS:
            family = self._family(expert)
            best: Priced | None = None
            for entry in family[:EXPERT_TRIES]:
                if time.monotonic() > self.deadline or (best and entry.bound_s >= best.step_time_s):
                    break
                found = self.price_candidate(entry.candidate)
                if found and (best is None or _rank(found) < _rank(best)):
                    best = found
            known = [p for e in family if (p := self.priced.get(e.candidate))]
            if known:
                chosen[expert.name] = min(known, key=_rank).candidate
            elif family:
                chosen[expert.name] = family[0].candidate
        return chosen

    def price_runners_up(self, top: int) -> None:
        """Go on in the order of bounds until `top` meshes besides the best have a price."""
        assert self.best is not None
        tries = RUNNER_UP_TRIES * top
        while self.queue and tries and time.monotonic() < self.deadline:
            if len({_sizes(p) for p in self.priced.values() if p}) > top:
                return
            entry = heappop(self.queue)
            seen = {_sizes(p) for p in self.priced.values() if p}
            if _mesh_key(entry.candidate) not in seen:
                tries -= 1
                self.price_candidate(entry.candidate)

    # ----------------------------------------------------------------- the answer

    def prove_best(self, solver: str | None) -> None:
        """Solve the winner's stages again as an ILP: its answer and its bound are what is reported."""
        assert self.best is not None
        left_s = None if math.isinf(self.deadline) else max(0.1, self.deadline - time.monotonic())
        plan = solve_stages(self.best_costed.stage_problem, gap=ILP_GAP, time_limit_s=left_s, solver=solver)
        self.best = price(self.best_costed, plan, bound=_step_bound_s(self.best_costed, plan))
        self.priced[self.best.candidate] = self.best
        self.proven_s = min(self.proven_s, self.best.bound_s)

    def outcome(self, top: int, experts: dict[str, Candidate]) -> Outcome:
        """Everything a plan is written from."""
        best = self.best
        assert best is not None
        lower = min(self.proven_s, best.step_time_s)
        summary = SearchSummary(
            meshes_considered=self.considered,
            meshes_pruned=sum(self.pruned.values()),
            pruned_by=tuple(sorted(self.pruned.items())),
            lower_bound_s=lower,
            gap=(best.step_time_s - lower) / best.step_time_s,
            solver=best.solver,
            complete=self.complete,
        )
        return Outcome(
            best=best,
            alternatives=tuple(self._alternatives(best, top, experts)),
            summary=summary,
            reasons=reasons(self.problem, best),
        )

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
            else:
                yield self._misfit(candidate, called)

    def _alternative(self, best: Priced, other: Priced, names: list[str] | None) -> Alternative:
        return Alternative(
            mesh=other.candidate.mesh,
            zero_stage=other.candidate.zero_stage,
            micro_batch=other.candidate.micro_batch,
            num_microbatches=other.candidate.microbatches,
            recompute=other.recompute,
            step_time_s=other.step_time_s,
            peak_memory_bytes=other.prediction.peak_memory_bytes,
            reason=why_it_lost(best, other),
            seeded_as=", ".join(names) if names else None,
        )

    def _misfit(self, candidate: Candidate, names: list[str]) -> Alternative:
        """An expert plan that does not fit: how much it lacks at the least."""
        solutions = self.solutions(candidate) or (idealised(self.problem, candidate),)
        costed = self._costed(candidate, solutions[0])
        needed = needed_bytes(costed)
        return Alternative(
            mesh=candidate.mesh,
            zero_stage=candidate.zero_stage,
            micro_batch=candidate.micro_batch,
            num_microbatches=candidate.microbatches,
            recompute=str(Recompute.FULL),
            step_time_s=math.inf,
            peak_memory_bytes=needed,
            reason=why_it_does_not_fit(needed, self.problem.topology.device.memory_bytes),
            seeded_as=", ".join(names),
        )


def _samples_s(problem: SearchProblem, solution: IntraSolution) -> float:
    """Least seconds of one microbatch through the whole chain: compute alone."""
    return sum(solution.blocks[name].forward_s + solution.blocks[name].backward_s for name in problem.chain)


def _step_bound_s(costed: Costed, plan: StagePlan) -> float:
    """Lower bound of a step: the stages' and the intra-op solver's bounds, and what no stage avoids."""
    intra = costed.intra
    ratio = min(1.0, intra.bound_s / intra.objective_s) if intra.objective_s > 0 else 1.0
    return plan.bound_s * ratio + costed.once_bound_s


def _queue_key(candidate: Candidate) -> tuple:
    """Order among equal bounds: large microbatches first, for what they tell about smaller ones."""
    return (-candidate.micro_batch, candidate.key)


def _rank(priced: Priced) -> tuple:
    return (priced.step_time_s, priced.candidate.key)


def _mesh_key(candidate: Candidate) -> tuple[int, ...]:
    return tuple(candidate.mesh.sizes.values())


def _sizes(priced: Priced) -> tuple[int, ...]:
    return _mesh_key(priced.candidate)
