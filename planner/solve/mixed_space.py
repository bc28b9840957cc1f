"""The plans that put nodes of several kinds to work together.

In: a `SearchProblem` for each kind, the kinds' device counts, pins. Out: every `Placed` candidate:

    stages     a pipeline whose ranks lie on one kind after the other; dp, ep, cp and tp stay inside a stage,
               so that every collective but the hand-over runs among equal devices
    replicas   no pipeline: data-parallel ranks on all kinds, each kind with as many microbatches as suits
               its speed; gradients cross the link once per step

In a pipeline a kind holds as many stages as fit on it, or a divisor of that many, or fewer where the model
has not as many layers: devices may be left idle. Replicas with unequal numbers of microbatches cannot gather
parameters for every microbatch (the kinds would wait for each other), so that ZeRO ends at stage 1 there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from ..estimate.frameworks import OWN_FRAMEWORK
from ..mesh import Mesh
from ..problem import SCHEDULE_NONE, Candidate, Pins, SearchProblem
from ..schedule import Schedule
from .space import STAGES_OF, ZERO_STAGES, allowed, divisors, micro_batches

EQUAL_MICROBATCHES = (OWN_FRAMEWORK,)
"""Frameworks whose data-parallel ranks all run the same number of microbatches."""
REPLICA_ZERO_STAGES = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A candidate and where it lies."""

    candidate: Candidate
    kinds: tuple[int, ...]
    """Stages: the kind of every pipeline rank. Replicas: the kinds, in the order of data-parallel ranks."""
    ranks: tuple[int, ...] = ()
    """Replicas: data-parallel ranks on each kind."""
    microbatches: tuple[int, ...] = ()
    """Replicas: microbatches of each rank of that kind; empty for stages."""

    @property
    def key(self) -> tuple:
        """Ties go to the simpler candidate, then to the kinds in their given order."""
        return (*self.candidate.key, self.kinds, self.microbatches)


def placed(problems: Sequence[SearchProblem], devices: Sequence[int], pins: Pins) -> Iterator[Placed]:
    """Every candidate that uses all the kinds."""
    if pins.get("schedule", Schedule.ONE_F_ONE_B) != Schedule.ONE_F_ONE_B or "shard_group" in pins:
        return
    if pins.get("virtual_stages", 1) == 1:
        yield from _stages(problems, devices, pins)
    if pins.get("pp", 1) == 1 and "schedule" not in pins:
        yield from _replicas(problems, devices, pins)


def _stages(problems: Sequence[SearchProblem], devices: Sequence[int], pins: Pins) -> Iterator[Placed]:
    problem = problems[0]
    for tp, ep, dp in _slices(problems, min(devices), pins):
        holds = [n // (tp * ep * dp) for n in devices]
        for counts in product(*(_stage_counts(n, problem.layers) for n in holds)):
            pp = sum(counts)
            if pp > problem.layers or pins.get("pp", pp) != pp:
                continue
            mesh = Mesh(pp=pp, dp=dp, ep=ep, tp=tp)
            kinds = [
                tuple(kind for kind in order for _ in range(counts[kind]))
                for order in permutations(range(len(devices)))
            ]
            for candidate in _candidates(problem, mesh, pins):
                yield from (Placed(candidate=candidate, kinds=order) for order in kinds)


def _slices(problems: Sequence[SearchProblem], most: int, pins: Pins) -> Iterator[tuple[int, int, int]]:
    """(tp, ep, dp) whose product is at most the devices of the smallest kind."""
    tensor = sorted(set.intersection(*({*p.tp_sizes} for p in problems)) | {1})
    expert = sorted(set.intersection(*({*p.ep_sizes} for p in problems)) | {1})
    samples = problems[0].job.global_batch
    if pins.get("cp", 1) != 1:
        return
    for tp, ep in product(allowed("tp", tensor, pins), allowed("ep", expert, pins)):
        if samples % ep == 0:
            for dp in allowed("dp", divisors(samples // ep), pins):
                if tp * ep * dp <= most and samples % (ep * dp) == 0:
                    yield tp, ep, dp


def _stage_counts(holds: int, layers: int) -> list[int]:
    """Stages that a kind may hold: all that fit, a divisor of them, or all but one of the layers."""
    return sorted(
        {*(n for n in divisors(holds) if n < layers), *([layers - 1] if holds >= layers > 1 else [])}
    )


def _candidates(problem: SearchProblem, mesh: Mesh, pins: Pins) -> Iterator[Candidate]:
    samples = problem.job.global_batch // mesh.batch_ways
    stages = allowed("zero", STAGES_OF.get(problem.framework.name, ZERO_STAGES), pins)
    for b in micro_batches(samples, pins):
        for zero in stages if mesh.dp * mesh.ep > 1 or "zero" in pins else (0,):
            yield Candidate(
                mesh=mesh,
                micro_batch=b,
                microbatches=samples // b,
                zero_stage=zero,
                schedule=str(Schedule.ONE_F_ONE_B),
                virtual_stages=1,
            )


# --------------------------------------------------------------------------- replicas


def _replicas(problems: Sequence[SearchProblem], devices: Sequence[int], pins: Pins) -> Iterator[Placed]:
    problem = problems[0]
    nodes = [p.topology.devices_per_node for p in problems]
    tensor = sorted(set.intersection(*({*p.tp_sizes} for p in problems)) | {1})
    if pins.get("cp", 1) != 1 or pins.get("ep", 1) != 1:
        return
    for tp in allowed("tp", tensor, pins):
        if any(n % tp or size % tp for n, size in zip(devices, nodes, strict=True)):
            continue
        ranks = tuple(n // tp for n in devices)
        mesh = Mesh(dp=sum(ranks), tp=tp)
        if pins.get("dp", mesh.dp) == mesh.dp:
            yield from _shared(problem, mesh, ranks, pins)


def _shared(problem: SearchProblem, mesh: Mesh, ranks: tuple[int, ...], pins: Pins) -> Iterator[Placed]:
    """All ways to give the global batch to the kinds; equal shares where the framework knows no other."""
    batch, equal = problem.job.global_batch, problem.framework.name in EQUAL_MICROBATCHES
    for b in micro_batches(batch, pins):
        for shares in _shares(batch // b, ranks):
            if equal and len(set(shares)) > 1:
                continue
            for zero in allowed("zero", REPLICA_ZERO_STAGES, pins):
                candidate = Candidate(
                    mesh=mesh,
                    micro_batch=b,
                    microbatches=max(shares),
                    zero_stage=zero,
                    schedule=SCHEDULE_NONE,
                    virtual_stages=1,
                )
                if zero in REPLICA_ZERO_STAGES:
                    kinds = tuple(range(len(ranks)))
                    yield Placed(candidate=candidate, kinds=kinds, ranks=ranks, microbatches=shares)


def _shares(total: int, ranks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Microbatches for a rank of each kind, at least one, so that all ranks together run `total`."""
    first, *rest = ranks
    if not rest:
        if total >= first and total % first == 0:
            yield (total // first,)
        return
    for share in range(1, (total - sum(rest)) // first + 1):
        yield from ((share, *others) for others in _shares(total - first * share, tuple(rest)))
