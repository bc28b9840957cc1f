"""The price of a candidate whose stages and recompute modes are chosen.

In: a `Costed` candidate and a `StagePlan`. Out: a `Priced` one: stages with their memory, the
waterfall of the step time, every collective, and the prediction with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..cost import Communication, Origin, Recompute, worst
from ..estimate.memory import Held, followed_memory, peak_bytes, stage_memory
from ..estimate.step import BUBBLE, OVERHEAD, SEND_RECV, OncePerStep, Parts, once_per_step, pipeline_s
from ..plan import Prediction, Stage, TimePart
from ..problem import Priced, SearchProblem
from ..topology import Cluster, MixedTopology
from .brackets import StagePlan
from .costed import Costed
from .fullest import fullest_moment, pooled_bytes
from .ideal import BACKWARD_OVER_FORWARD, peak_flops_per_s
from .intervals import Modes
from .pieces import piece_layers

INTERVAL = {Origin.MEASURED: (0.05, 0.05), Origin.INTERPOLATED: (0.05, 0.15), Origin.MODELLED: (0.05, 0.29)}
"""How far below and above the prediction a measured step may lie, as shares of the prediction.

A judgement. Uncalibrated analytic models under-predict published runs by 16% on average and by up
to 29% in nine of ten cases; software releases alone move equal plans by 3-6%."""


def price(costed: Costed, plan: StagePlan, *, bound: float, simulated_s: float = 0.0) -> Priced:
    """What a candidate with chosen stages and modes costs. `bound`: lower bound of its step time.

    `simulated_s`: what the event simulator says of the pipeline. The greater of it and the closed form
    counts, so that bounds of the closed form stay bounds of the price.
    """
    ranks = (costed,) * costed.candidate.mesh.pp
    return price_ranks(ranks, plan, bound=bound, cluster=costed.setting.topology, simulated_s=simulated_s)


def price_ranks(
    ranks: Sequence[Costed],
    plan: StagePlan,
    *,
    bound: float,
    cluster: Cluster,
    simulated_s: float = 0.0,
    replicas: Sequence[Costed] = (),
) -> Priced:
    """The same with the costs of each pipeline rank of its own: `cluster` may have several kinds of nodes.

    `replicas`: data-parallel ranks of other kinds, without a pipeline; the step waits for their optimizers.
    """
    candidate, problem = ranks[0].candidate, ranks[0].problem
    mixed = isinstance(cluster, MixedTopology)
    stages = tuple(_stage(costed, plan, rank, named=mixed) for rank, costed in enumerate(ranks))
    onces = [_once(costed, plan, rank) for rank, costed in enumerate(ranks)]
    onces += [_once(costed, plan, 0) for costed in replicas]
    busy = [stage.forward_s + stage.backward_s for stage in stages]
    closed = pipeline_s(busy, microbatches=candidate.microbatches, virtual_stages=candidate.fill_ways)
    pipeline = max(closed, simulated_s)
    slowest = busy.index(max(busy))
    last = max(range(len(onces)), key=lambda rank: (onces[rank].seconds, -rank))
    parts = {
        label: candidate.microbatches * seconds
        for label, seconds in _microbatch_parts(ranks[slowest], plan.ranks[slowest]).items()
    }
    parts[BUBBLE] = pipeline - candidate.microbatches * busy[slowest]
    parts |= onces[last].parts | {OVERHEAD: problem.framework.step_overhead_s}
    distinct = {id(costed): costed for costed in ranks}.values()
    times = [time.origin for costed in distinct for time in costed.times.values()]
    origin = worst(*times, *(once.origin for once in onces))
    held = [*plan.ranks, *(plan.ranks[0] for _ in replicas)]
    communications = _communications((*ranks, *replicas), held, onces, stages=len(ranks))
    prediction = _prediction(
        problem,
        cluster,
        parts,
        stages,
        origin,
        bubble=1 - sum(busy) * candidate.microbatches / len(busy) / pipeline,
    )
    return Priced(
        candidate=candidate,
        intra=ranks[0].intra,
        stages=stages,
        prediction=prediction,
        communications=communications,
        bound_s=min(bound, prediction.step_time_s),
        solver=plan.solver,
    )


def _stage(costed: Costed, plan: StagePlan, rank: int, *, named: bool) -> Stage:
    modes, device = plan.ranks[rank], costed.problem.topology.device
    forward = sum(n * costed.times[name].forward_s for name, n, _ in modes) + costed.handover_s
    backward = sum(n * costed.times[name].backward_s(mode) for name, n, mode in modes) + costed.handover_s
    held = [
        Held(
            cost=costed.intra.blocks[name],
            states=costed.states[name],
            mode=mode,
            count=n,
            outputs_bytes=costed.outputs_bytes(name),
        )
        for name, n, mode in modes
    ]
    flying = costed.stage_problem.in_flight[rank]
    framework = costed.problem.framework
    if framework.follows_tensors:
        fullest = fullest_moment(costed, _in_order(costed.problem, modes), rank)
        memory = followed_memory(held, fullest, pooled_bytes=pooled_bytes(costed, modes), framework=framework)
    else:
        memory = stage_memory(held, in_flight=flying, buffer_bytes=costed.buffer_bytes, framework=framework)
    v, last = costed.candidate.virtual_stages, len(plan.ranks) - 1
    layers = [_layers(costed.problem, modes) for modes in plan.ranks]
    pieces = [piece_layers(n, v, last_rank=r == last) for r, n in enumerate(layers)]
    return Stage(
        index=rank,
        blocks=tuple((name, n, str(mode)) for name, n, mode in _in_order(costed.problem, modes)),
        first_layer=sum(pieces[r][0] for r in range(rank)),
        layers=layers[rank],
        forward_s=forward,
        backward_s=backward,
        in_flight=math.ceil(flying),
        memory=memory,
        peak_memory_bytes=peak_bytes(memory),
        chunk_layers=pieces[rank] if v > 1 else (),
        device=device.name if named else "",
        device_memory_bytes=device.memory_bytes if named else None,
    )


def _in_order(problem: SearchProblem, modes: Modes) -> Modes:
    """What a rank holds in execution order: in a V the head's rank is the embedding's too."""
    layers = [i for i, name in enumerate(problem.chain) if name in problem.layer_classes]
    tail = {name for name in problem.chain[layers[-1] + 1 :]} if layers else set()
    return tuple(sorted(modes, key=lambda run: run[0] in tail))


def _layers(problem: SearchProblem, modes: Modes) -> int:
    return sum(n for name, n, _ in modes if name in problem.layer_classes)


def _once(costed: Costed, plan: StagePlan, rank: int) -> OncePerStep:
    modes = plan.ranks[rank]
    counts: dict[str, int] = {}
    for name, n, _ in modes:
        counts[name] = counts.get(name, 0) + n
    return once_per_step(
        costed.parameters(counts),
        costed.setting,
        blocks=sum(n for _, n, _ in modes),
        forward_s=sum(n * costed.times[name].forward_s for name, n, _ in modes),
        backward_s=sum(n * costed.times[name].backward_s(mode) for name, n, mode in modes),
    )


def _microbatch_parts(costed: Costed, modes: Modes) -> Parts:
    parts: Parts = {}
    for name, n, mode in modes:
        time = costed.times[name]
        for label, seconds in (*time.forward.items(), *time.backward[mode].items()):
            parts[label] = parts.get(label, 0.0) + n * seconds
    if costed.handover_s:
        parts[SEND_RECV] = 2 * costed.handover_s
    return parts


def _communications(
    ranks: Sequence[Costed], held: Sequence[Modes], onces: Sequence[OncePerStep], *, stages: int
) -> tuple[Communication, ...]:
    """Every collective, with executions per step on the stage where it takes longest, largest total first.

    The first `stages` of `ranks` are the pipeline's.
    """
    each = [_on_stage(*rank, first=i == 0) for i, rank in enumerate(zip(ranks, held, onces, strict=True))]
    found = []
    for key in dict.fromkeys(key for here in each for key in here):
        most = max((here[key] for here in each if key in here), key=_total_s)
        amounts = tuple(
            (c.count, c.again, c.bytes) if (c := here.get(key)) else (0.0, 0.0, 0.0) for here in each[:stages]
        )
        found.append(replace(most, by_stage=amounts if len(set(amounts)) > 1 else ()))
    return tuple(sorted(found, key=lambda c: -_total_s(c)))


def _total_s(c: Communication) -> float:
    return c.seconds * c.count


def _on_stage(costed: Costed, modes: Modes, once: OncePerStep, *, first: bool) -> dict[tuple, Communication]:
    """Every collective of one stage, with executions per step: by block class and place among its own, or by
    what it is for."""
    m, v = costed.candidate.microbatches, costed.candidate.virtual_stages
    counts: dict[str, int] = {}
    full: dict[str, int] = {}
    for name, n, mode in modes:
        counts[name] = counts.get(name, 0) + n
        full[name] = full.get(name, 0) + (n if mode is Recompute.FULL else 0)
    found = {}
    for name, n in counts.items():
        total, again = costed.problem.counts.get(name, 1), costed.intra.blocks[name].again
        for i, c in enumerate(costed.times[name].communications):
            entering = total > 1 and math.isclose(c.count * total, 1.0)  # the first block, from outside
            reruns = c.count * full[name] * m if i in again else 0.0
            once_each = m * (float(first) if entering else c.count * n)
            found[name, i] = replace(c, count=once_each + reruns, again=reruns)
    handover = [replace(costed.handover, count=2 * v * m)] if costed.handover else []
    return found | {(c.label, c.collective, c.axis): c for c in (*handover, *once.communications)}


def _prediction(
    problem: SearchProblem,
    cluster: Cluster,
    parts: Parts,
    stages: Sequence[Stage],
    origin: Origin,
    *,
    bubble: float,
) -> Prediction:
    kinds = cluster.parts if isinstance(cluster, MixedTopology) else (cluster,)
    peak_flops = sum(kind.devices * peak_flops_per_s(kind.device, problem.job.dtype) for kind in kinds)
    step, devices = sum(parts.values()), cluster.devices
    samples, has = problem.job.global_batch, problem.topology.device.memory_bytes
    fullest = max(stages, key=lambda stage: stage.peak_memory_bytes / (stage.device_memory_bytes or has))
    below, above = INTERVAL[origin]
    flops = (1 + BACKWARD_OVER_FORWARD) * problem.forward_flops_per_sample * samples
    return Prediction(
        step_time_s=step,
        step_time_interval_s=(step * (1 - below), step * (1 + above)),
        tokens_per_s_per_device=samples * problem.tokens_per_sample / step / devices,
        model_flops_utilization=flops / (step * peak_flops),
        peak_memory_bytes=fullest.peak_memory_bytes,
        memory_by_kind_bytes={part.kind: part.bytes for part in fullest.memory},
        device_memory_bytes=fullest.device_memory_bytes or has,
        exposed_communication_s=sum(s for label, s in parts.items() if is_communication(label)),
        bubble_fraction=max(bubble, 0.0),
        waterfall=tuple(
            TimePart(label=label, seconds=seconds, origin=origin)
            for label, seconds in parts.items()
            if seconds > 0
        ),
        origin=origin,
    )


def is_communication(label: str) -> bool:
    """Whether a waterfall label names time spent waiting for the network."""
    words = ("communication", "send/recv", "gather", "reduce-scatter", "sync", "replicated gradients")
    return any(word in label for word in words)
