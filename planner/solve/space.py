"""The space that the search explores: meshes, microbatches, ZeRO stages, schedules.

In: a `SearchProblem` and the user's pins. Out: every `Candidate` that divides evenly:

    pp x dp x cp x ep x tp = devices,  pp <= layers,  global batch = dp x ep x microbatch x m

Sizes are all divisors, not only powers of two. Expert plans are named subsets of the same space.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate

from ..estimate.frameworks import OWN_FRAMEWORK
from ..mesh import Mesh
from ..problem import SCHEDULE_NONE, Candidate, Pins, SearchProblem
from ..schedule import V_SHAPED, Schedule, illegality
from .pieces import can_deal

ZERO_STAGES = (0, 1, 2, 3)
STAGES_OF = {"megatron": (0, 1)}
"""Frameworks with fewer: Megatron's distributed optimizer shards optimizer state alone. Another stage can be
pinned."""
MAX_VIRTUAL_STAGES = 12
"""More pieces per device have not been published to pay; Megatron's largest runs use 4 to 12."""
DEFAULT_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
HSDP_FRAMEWORKS = ("torch", OWN_FRAMEWORK)
"""Frameworks whose sharding groups may be smaller than the data-parallel ranks (FSDP2's HYBRID_SHARD)."""
SPARSE_ALONE = (OWN_FRAMEWORK,)
"""Frameworks under which tp beside experts or tables is searched only when either is pinned: in full that
takes ten times as long. Else it is tried near the best plan without (`tensor_beside_experts`)."""
FULL_PIPELINES = ("torch",)
"""Frameworks whose schedules with one stage a rank refuse fewer microbatches than stages (Schedule1F1B)."""
PIPELINE_OR_TENSOR = ("deepspeed",)
"""Frameworks without a pipeline of tensor groups; both can be pinned, for models that bring their own."""
STAGES_IN_PIPELINE = {"deepspeed": (0, 1)}
"""ZeRO stages that run in a pipeline, where not all do (DeepSpeed's PipelineEngine)."""
STAGES_BESIDE_TENSOR = {"deepspeed": (0, 1, 2)}
"""ZeRO stages that run beside tensor parallelism, where not all do (DeepSpeed's AutoTP)."""
SMALL_FACTORS = (1, 3, 5, 7)
"""Microbatches are a power of two times one of these, or all samples at once."""


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def meshes(problem: SearchProblem, pins: Pins) -> Iterator[Mesh]:
    """Every mesh whose sizes multiply to the cluster and divide the global batch."""
    devices, layers = problem.topology.devices, max(problem.layers, 1)
    for tp in tensor_sizes(problem, pins):
        for ep in allowed("ep", problem.ep_sizes, pins):
            for cp in allowed("cp", problem.cp_sizes, pins):
                inner = tp * ep * cp
                if devices % inner:
                    continue
                for pp in allowed("pp", divisors(devices // inner), pins):
                    if devices % (inner * pp) or pp > (layers if problem.pipelines else 1):
                        continue
                    if pp > 1 and tp > 1 and not pipelines_tensor_groups(problem, pins):
                        continue
                    mesh = Mesh(pp=pp, dp=devices // (inner * pp), cp=cp, ep=ep, tp=tp, order=problem.order)
                    if pins.get("dp", mesh.dp) == mesh.dp and problem.job.global_batch % mesh.batch_ways == 0:
                        yield mesh


def pipelines_tensor_groups(problem: SearchProblem, pins: Pins) -> bool:
    """Whether the framework runs tensor groups in a pipeline."""
    return problem.framework.name not in PIPELINE_OR_TENSOR or {"pp", "tp"} <= pins.keys()


def tensor_sizes(problem: SearchProblem, pins: Pins) -> list[int]:
    """Tensor sizes to search."""
    return allowed("tp", (1,) if experts_alone(problem, pins) else problem.tp_sizes, pins)


def experts_alone(problem: SearchProblem, pins: Pins) -> bool:
    """Whether experts and tables are searched without tp beside them (`SPARSE_ALONE`)."""
    sparse = any(facts.sparse_numel for facts in problem.blocks.values())
    return sparse and problem.framework.name in SPARSE_ALONE and not {"ep", "tp"} & pins.keys()


def tensor_beside_experts(problem: SearchProblem, pins: Pins, best: Mesh) -> Iterator[Mesh]:
    """What `experts_alone` leaves out near the best plan: as many stages, ep x tp of its ep or twice that.

    Only for models of layers: between tables there is little that tp could split.
    """
    for tp in problem.tp_sizes if problem.layer_classes else ():
        for ep in problem.ep_sizes:
            inner = best.pp * best.cp * ep * tp
            if tp == 1 or ep * tp not in (best.ep, 2 * best.ep) or best.devices % inner:
                continue
            mesh = Mesh(pp=best.pp, dp=best.devices // inner, cp=best.cp, ep=ep, tp=tp, order=problem.order)
            if pins.get("dp", mesh.dp) == mesh.dp and problem.job.global_batch % mesh.batch_ways == 0:
                yield mesh


def allowed(name: str, sizes: Sequence[int], pins: Pins) -> list[int]:
    """Sizes to try: the pinned one alone, whether or not it is among the sensible ones."""
    return [int(pins[name])] if name in pins else sorted(set(sizes))


def candidates(
    problem: SearchProblem, pins: Pins, among: Iterable[Mesh] | None = None
) -> Iterator[Candidate]:
    """Every candidate of the space, or of some meshes."""
    can_be_dealt = cache(partial(can_deal, problem))
    for mesh in meshes(problem, pins) if among is None else among:
        samples = problem.job.global_batch // mesh.batch_ways
        sharded = [
            (zero, group)
            for zero in _zero_stages(problem, mesh, pins)
            for group in _groups(problem, mesh, zero, pins)
        ]
        for micro_batch in micro_batches(samples, pins):
            microbatches = samples // micro_batch
            for schedule, virtual_stages in _schedules(problem, mesh, microbatches, pins, can_be_dealt):
                for zero, group in sharded:
                    yield Candidate(
                        mesh=mesh,
                        micro_batch=micro_batch,
                        microbatches=microbatches,
                        zero_stage=zero,
                        shard_group=group,
                        schedule=schedule,
                        virtual_stages=virtual_stages,
                    )


def micro_batches(samples: int, pins: Pins) -> list[int]:
    """Microbatch sizes to try for so many samples of a replica."""
    if "micro_batch" in pins:
        pinned = int(pins["micro_batch"])
        return [pinned] if samples % pinned == 0 else []
    return [b for b in divisors(samples) if b == samples or _odd_part(b) in SMALL_FACTORS]


def _odd_part(n: int) -> int:
    return n // (n & -n)


def _zero_stages(problem: SearchProblem, mesh: Mesh, pins: Pins) -> list[int]:
    """Without replicas of anything there is nothing to shard."""
    framework = problem.framework.name
    known = STAGES_OF.get(framework, ZERO_STAGES)
    if mesh.pp > 1:
        known = STAGES_IN_PIPELINE.get(framework, known)
    elif mesh.tp > 1:
        known = STAGES_BESIDE_TENSOR.get(framework, known)
    if mesh.pp > 1 and problem.framework.keeps_gathered_in_pipeline:
        known = tuple(stage for stage in known if stage != 2)  # whole gradients are kept: it is ZeRO-1
    stages = allowed("zero", known, pins)
    return stages if mesh.dp * mesh.cp * mesh.ep > 1 or "zero" in pins else [0]


def _groups(problem: SearchProblem, mesh: Mesh, zero: int, pins: Pins) -> list[int | None]:
    """Sharding groups: all replicas, and (HSDP) neighbours along dp that fill a unit of some level.

    HSDP is tried for ZeRO-3 with frameworks that have it; ZeRO-1 has too little traffic to gain. Choices
    that name a ZeRO stage and no group mean all replicas.
    """
    if "shard_group" in pins:
        pinned = int(pins["shard_group"])
        whole = pinned >= mesh.dp * mesh.cp * mesh.ep
        if whole or zero == 0:
            return [None] if whole else []
        return [pinned] if mesh.cp == mesh.ep == 1 and mesh.dp % pinned == 0 else []
    if zero < 3 or "zero" in pins or mesh.cp * mesh.ep > 1 or problem.framework.name not in HSDP_FRAMEWORKS:
        return [None]
    return [None, *_filling(problem, mesh)]


def _filling(problem: SearchProblem, mesh: Mesh) -> list[int]:
    """Sizes of groups along dp that fill the devices below some level."""
    stride = mesh.stride("dp")
    units = accumulate((level.size for level in problem.topology.levels), operator.mul)
    sizes = {unit // stride for unit in units if unit % stride == 0}
    return sorted(size for size in sizes if 1 < size < mesh.dp and mesh.dp % size == 0)


def _schedules(
    problem: SearchProblem,
    mesh: Mesh,
    microbatches: int,
    pins: Pins,
    can_be_dealt: Callable[[int, int, str], bool],
) -> Iterator[tuple[str, int]]:
    """(schedule, virtual stages) pairs that are legal here and not excluded by a pin."""
    for name, v in _schedule_options(problem, mesh, pins):
        if pins.get("virtual_stages", v) != v:
            continue
        if v > 1 and not can_be_dealt(mesh.pp, v, name):
            continue
        if v == 1 and microbatches < mesh.pp and problem.framework.name in FULL_PIPELINES:
            continue
        if mesh.pp == 1 or not illegality(name, pp=mesh.pp, virtual_stages=v, microbatches=microbatches):
            yield name, v


def _schedule_options(problem: SearchProblem, mesh: Mesh, pins: Pins) -> list[tuple[str, int]]:
    """1F1B and interleaved, or what is pinned.

    The schedules that run weight gradients apart are tried on demand only: what torch loses by cutting
    backward in two is not priced, so that they would win by what is left out. So is GPipe, which never wins.
    """
    pinned = pins.get("schedule", SCHEDULE_NONE)
    if mesh.pp == 1:
        return [(SCHEDULE_NONE, 1)] if pinned == SCHEDULE_NONE else []
    most = min(problem.layers // mesh.pp, MAX_VIRTUAL_STAGES)
    names = DEFAULT_SCHEDULES if pinned == SCHEDULE_NONE else (pinned,)
    pieces = {Schedule.INTERLEAVED: range(2, most + 1), **dict.fromkeys(V_SHAPED, range(2, 3))}
    return [(str(name), v) for name in names for v in pieces.get(Schedule(str(name)), range(1, 2))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A plan that practitioners would try first, as a subset of the space."""

    name: str
    holds: Callable[[Candidate, SearchProblem], bool]


def _node_tp(problem: SearchProblem) -> int:
    """The largest tensor-parallel size that stays inside a node."""
    inside = [tp for tp in problem.tp_sizes if tp <= problem.topology.devices_per_node]
    return max(inside, default=1)


EXPERTS = (
    Expert(
        name="DDP",
        holds=lambda c, p: c.mesh.dp == c.mesh.devices and c.zero_stage == 0,
    ),
    Expert(
        name="ZeRO-1",
        holds=lambda c, p: c.mesh.dp == c.mesh.devices and c.zero_stage == 1,
    ),
    Expert(
        name="FSDP",
        holds=lambda c, p: c.mesh.dp == c.mesh.devices and c.zero_stage == 3 and c.shard_group is None,
    ),
    Expert(
        name="HSDP",
        holds=lambda c, p: (
            c.mesh.dp == c.mesh.devices and c.shard_group == p.topology.devices_per_node
        ),
    ),
    Expert(
        name="FSDP+TP",
        holds=lambda c, p: (
            c.zero_stage == 3
            and c.shard_group is None
            and c.mesh.pp == c.mesh.ep == c.mesh.cp == 1
            and c.mesh.tp == _node_tp(p) > 1
        ),
    ),
    Expert(
        name="Megatron 3D",
        holds=lambda c, p: (
            c.zero_stage <= 1
            and c.mesh.pp > 1 == c.mesh.ep == c.mesh.cp
            and c.mesh.tp == _node_tp(p) > 1
        ),
    ),
    Expert(
        name="DP+EP",
        holds=lambda c, p: c.zero_stage <= 1 and c.mesh.pp == c.mesh.tp == c.mesh.cp == 1 and c.mesh.ep > 1,
    ),
)  # fmt: skip
