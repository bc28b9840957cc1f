"""From a candidate to its price: the stage problem it poses, and the prediction of its answer.

In: a `SearchProblem`, a `Candidate`, one intra-op solution. Out: a `Costed` candidate (the stage
problem and a lower bound of the step), and from a `StagePlan` of it a `Priced` one. `idealised`
poses the same stage problem before any intra-op solution exists, from what no split can avoid:

    compute      forward + backward FLOPs / (devices x peak x best efficiency of any kernel family)
    parameters   split by tp (and ep) to the last element, sharded as the ZeRO stage allows
    activations  one block input per layer and microbatch in flight, split by tp and cp
    gathers      of exactly these parameters; gradient sync and optimizer of an average stage
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..cost import BlockCost, Communication, IntraSolution, Origin, ParameterGroup, Recompute, worst
from ..estimate.memory import (
    BlockStates,
    Held,
    block_states,
    peak_bytes,
    stage_memory,
    transient_bytes,
    usable_bytes,
)
from ..estimate.step import (
    BUBBLE,
    OVERHEAD,
    SEND_RECV,
    BlockTime,
    OncePerStep,
    Parts,
    Setting,
    block_time,
    once_per_step,
    pipeline_s,
    send_recv,
)
from ..layout import Collective
from ..mesh import Mesh
from ..plan import Prediction, Stage, TimePart
from ..problem import BlockFacts, Candidate, Priced, Pricing, SearchProblem
from ..schedule import in_flight
from ..topology import Device, GroupSpan
from .stages import BlockClass, Modes, StagePlan, StageProblem, bound_s, cheapest_s, rank_seconds

INTERVAL = {Origin.MEASURED: (0.05, 0.05), Origin.INTERPOLATED: (0.05, 0.15), Origin.MODELLED: (0.05, 0.29)}
"""How far below and above the prediction a measured step may lie, as shares of the prediction.

A judgement. Uncalibrated analytic models under-predict published runs by 16% on average and by up
to 29% in nine of ten cases; software releases alone move equal plans by 3-6%."""
COMPUTE_FAMILIES = ("gemm", "grouped_gemm", "attention")
BACKWARD_OVER_FORWARD = 2
"""FLOPs of backward over forward for trained matrix products: one product for each operand."""


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A candidate under one intra-op solution (real or ideal): all that its stages need."""

    problem: SearchProblem
    setting: Setting
    intra: IntraSolution
    recompute: Recompute | None = None

    @property
    def candidate(self) -> Candidate:
        """The candidate."""
        return self.setting.candidate

    @cached_property
    def times(self) -> dict[str, BlockTime]:
        """Per block class, one microbatch."""
        return {name: block_time(cost, self.setting) for name, cost in self.intra.blocks.items()}

    @cached_property
    def states(self) -> dict[str, BlockStates]:
        """Per block class, what stays for the whole step."""
        return {
            name: block_states(
                cost,
                mesh=self.candidate.mesh,
                zero=self.candidate.zero_stage,
                framework=self.problem.framework,
                optimizer=self.problem.optimizer,
            )
            for name, cost in self.intra.blocks.items()
        }

    @cached_property
    def prefetch_bytes(self) -> float:
        """The next layer, gathered while the current block runs (ZeRO-3)."""
        names = self.problem.layer_classes or set(self.problem.chain)
        return max(self.states[name].gathered for name in names)

    @cached_property
    def handover(self) -> Communication | None:
        """One hand-over of activations between neighbouring stages."""
        names = self.problem.layer_classes or set(self.problem.chain)
        return send_recv(self.setting, max(self.intra.blocks[name].output_bytes for name in names))

    @cached_property
    def handover_s(self) -> float:
        """Seconds that hand-overs add to each of a rank's forwards, and to each of its backwards."""
        return self.handover.seconds * self.candidate.virtual_stages if self.handover else 0.0

    @cached_property
    def stage_problem(self) -> StageProblem:
        """The chain to cut."""
        candidate, problem = self.candidate, self.problem
        chain, cuts = dealt_chain(problem, candidate.mesh.pp, candidate.virtual_stages)
        device = problem.topology.device
        return StageProblem(
            chain=chain,
            layer_classes=problem.layer_classes or frozenset(problem.chain),
            classes={name: self._block_class(name) for name in self.intra.blocks},
            stages=candidate.mesh.pp,
            virtual_stages=candidate.virtual_stages,
            microbatches=candidate.microbatches,
            in_flight=microbatches_in_flight(candidate),
            capacity_bytes=usable_bytes(device, problem.framework) - self.prefetch_bytes,
            stage_s=2 * self.handover_s,
            cuts=cuts,
        )

    def _block_class(self, name: str) -> BlockClass:
        cost, time, states = self.intra.blocks[name], self.times[name], self.states[name]
        modes = list(cost.saved_bytes)
        if self.recompute is not None and self.recompute in modes:
            modes = [self.recompute]
        return BlockClass(
            seconds={mode: time.forward_s + time.backward_s(mode) for mode in modes},
            static_bytes=states.total,
            saved_bytes={mode: cost.saved_bytes[mode] for mode in modes},
            transient_bytes={mode: transient_bytes(cost, states, mode) for mode in modes},
        )

    @cached_property
    def once_bound_s(self) -> float:
        """Once-per-step seconds of the stage that does most, however much computation may hide them."""
        return self.once_at_least_s(math.inf)

    def once_at_least_s(self, slowest_s: float) -> float:
        """The same when no stage takes longer than `slowest_s` for a microbatch.

        Some stage holds an average share of everything, and some stage its share, rounded up, of
        each layer class; the latter's own forward leaves the less for a backward to hide behind.
        """
        pp, counts = self.candidate.mesh.pp, self.problem.counts
        forward = {name: self.times[name].forward_s for name in counts}
        backward = {name: [t.backward_s(mode) for mode in t.backward] for name, t in self.times.items()}
        onces = []
        if pp == 1:
            forward_s = sum(n * forward[name] for name, n in counts.items())
            backward_s = sum(n * max(backward[name]) for name, n in counts.items())
            onces.append(self._once_s(counts, forward_s, backward_s))
        else:
            average = {name: n / pp for name, n in counts.items()}
            onces.append(self._once_s(average, slowest_s, slowest_s))
            for name in sorted(self.problem.layer_classes):
                crowd = -(-counts[name] // pp)
                forward_s = slowest_s - crowd * min(backward[name])
                backward_s = slowest_s - crowd * forward[name]
                onces.append(self._once_s({name: crowd}, forward_s, backward_s))
        return max(onces) + self.problem.framework.step_overhead_s

    def _once_s(self, counts: Mapping[str, float], forward_s: float, backward_s: float) -> float:
        once = once_per_step(
            self.parameters(counts),
            self.setting,
            blocks=len(self.problem.chain),
            forward_s=max(forward_s, 0.0),
            backward_s=max(backward_s, 0.0),
        )
        return once.seconds

    def step_bound_s(self, plan: StagePlan) -> float:
        """Lower bound of the step under any stages, splits and modes, given the best stages' `plan`.

        Stages slower than `most` would hide more of the gradient sync, but then cost the pipeline
        (m - 1/v) times what they can hide at best.
        """
        problem, intra = self.stage_problem, self.intra
        share = 1 / problem.virtual_stages
        weight = problem.microbatches - share
        most = math.inf
        if weight >= 1:
            busy = [rank_seconds(problem, modes) - problem.stage_s for modes in plan.ranks]
            spared = sum(busy) - cheapest_s(problem)
            most = max(busy) + share * max(spared, 0.0) / weight
        ratio = min(1.0, intra.bound_s / intra.objective_s) if intra.objective_s > 0 else 1.0
        return plan.bound_s * ratio + self.once_at_least_s(most)

    def parameters(self, counts: Mapping[str, float]) -> list[ParameterGroup]:
        """All parameter groups of `counts` blocks of each class, alike ones added up."""
        sums: dict[tuple, tuple[float, float]] = {}
        for name, n in counts.items():
            for g in self.intra.blocks[name].parameters:
                key = (g.element_bytes, g.sparse, g.trainable, g.replicated_over_tp)
                numel, tensors = sums.get(key, (0.0, 0.0))
                sums[key] = (numel + n * g.numel, tensors + n * g.tensors)
        return [
            ParameterGroup(
                numel=numel,
                element_bytes=element_bytes,
                sparse=sparse,
                trainable=trainable,
                tensors=max(1, math.floor(tensors)),
                replicated_over_tp=over_tp,
            )
            for (element_bytes, sparse, trainable, over_tp), (numel, tensors) in sums.items()
        ]

    def under(self, candidate: Candidate) -> Costed:
        """The same mesh, microbatch and ZeRO stage under another schedule: nothing is priced again."""
        other = replace(self, setting=replace(self.setting, candidate=candidate))
        for name in ("times", "states", "prefetch_bytes", "handover", "once_bound_s"):
            other.__dict__[name] = getattr(self, name)
        return other

    @cached_property
    def bound_s(self) -> float:
        """No stages and modes make the step faster; infinite when it is plain that nothing fits."""
        pipeline = bound_s(self.stage_problem)
        return pipeline if math.isinf(pipeline) else pipeline + self.once_bound_s


def microbatches_in_flight(candidate: Candidate) -> tuple[float, ...]:
    """Per pipeline rank, microbatches whose activations it holds at its peak."""
    pp, v, m = candidate.mesh.pp, candidate.virtual_stages, candidate.microbatches
    if pp == 1:
        return (1.0,)
    return tuple(in_flight(candidate.schedule, pp, v, m, rank) for rank in range(pp))


def dealt_chain(problem: SearchProblem, pp: int, v: int) -> tuple[tuple[str, ...], frozenset[int] | None]:
    """The chain in the order that ranks hold it, and where it may be cut (None: anywhere).

    With one kind of layer only the counts matter, so the order is the model's. Layers of several
    kinds come in equal pieces: rank r holds pieces r, r + pp, ...
    """
    if v == 1 or len(problem.layer_classes) == 1:
        return problem.chain, None
    layers = [name for name in problem.chain if name in problem.layer_classes]
    first = next(i for i, name in enumerate(problem.chain) if name in problem.layer_classes)
    prefix, suffix = problem.chain[:first], problem.chain[first + len(layers) :]
    each = len(layers) // (pp * v)
    pieces = [layers[k * each : (k + 1) * each] for k in range(pp * v)]
    dealt = [name for rank in range(pp) for k in range(rank, pp * v, pp) for name in pieces[k]]
    cuts = {len(prefix) + rank * v * each for rank in range(1, pp)}
    chain = (*prefix, *dealt, *suffix)
    return chain, frozenset({*cuts, len(chain)})


# --------------------------------------------------------------------------- before any intra-op solution


def roofline(problem: SearchProblem) -> Callable[[Candidate], float]:
    """A function candidate -> step time of the FLOPs alone, bubble included: the cheapest bound."""
    device_s = 1 / best_flops_per_s(problem.topology.device, problem.job.dtype)
    seconds = {
        name: facts.forward_flops_per_sample * device_s * (1 + BACKWARD_OVER_FORWARD * facts.trainable_share)
        for name, facts in problem.blocks.items()
    }
    counts = problem.counts
    total = sum(n * seconds[name] for name, n in counts.items())

    def bound(candidate: Candidate) -> float:
        mesh, share = candidate.mesh, 1 / candidate.virtual_stages
        per_sample = candidate.micro_batch / (mesh.tp * mesh.cp)
        crowded = max(-(-n // mesh.pp) * seconds[name] for name, n in counts.items())
        slowest = max(total / mesh.pp, crowded)
        return per_sample * ((candidate.microbatches - share) * slowest + share * total)

    return bound


def best_flops_per_s(device: Device, dtype: str) -> float:
    """What no kernel of the device exceeds: peak times the best efficiency of any compute family."""
    curves = [device.efficiency[family].curve for family in COMPUTE_FAMILIES if family in device.efficiency]
    best = max((fraction for curve in curves for _, fraction in curve), default=1.0)
    return peak_flops_per_s(device, dtype) * best


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """Dense peak at the job's dtype; the device's best when its data sheet does not name that dtype."""
    return device.peak_flops.get(dtype, max(device.peak_flops.values()))


def idealised(problem: SearchProblem, candidate: Candidate) -> IntraSolution:
    """Costs that no intra-op solution can undercut (see the module docstring)."""
    mesh, b = candidate.mesh, candidate.micro_batch
    flops_per_s = best_flops_per_s(problem.topology.device, problem.job.dtype)
    blocks = {}
    for name, facts in problem.blocks.items():
        forward_s = facts.forward_flops_per_sample * b / (mesh.tp * mesh.cp * flops_per_s)
        layer = name in problem.layer_classes
        boundary = facts.boundary_bytes_per_sample * b / (mesh.tp * mesh.cp)
        blocks[name] = BlockCost(
            name=name,
            forward_s=forward_s,
            backward_s=BACKWARD_OVER_FORWARD * facts.trainable_share * forward_s,
            saved_bytes={Recompute.NONE: boundary if layer else 0.0},
            output_bytes=boundary,
            parameters=_ideal_parameters(facts, mesh),
        )
    return IntraSolution(blocks=blocks, sequence_parallel=True, objective_s=0.0, bound_s=0.0, optimal=False)


def _ideal_parameters(facts: BlockFacts, mesh: Mesh) -> tuple[ParameterGroup, ...]:
    groups = []
    for sparse, numel in (
        (False, facts.dense_numel / mesh.tp),
        (True, facts.sparse_numel / mesh.tp / mesh.ep),
    ):
        for trainable, share in ((True, facts.trainable_share), (False, 1 - facts.trainable_share)):
            if numel * share > 0:
                groups.append(
                    ParameterGroup(
                        numel=numel * share,
                        element_bytes=facts.element_bytes,
                        sparse=sparse,
                        trainable=trainable,
                        tensors=1,
                    )
                )
    return tuple(groups)


# --------------------------------------------------------------------------- the price


def price(costed: Costed, plan: StagePlan, *, bound: float) -> Priced:
    """What a candidate with chosen stages and modes costs. `bound`: lower bound of its step time."""
    candidate, problem = costed.candidate, costed.problem
    stages = tuple(_stage(costed, plan, rank) for rank in range(candidate.mesh.pp))
    onces = [_once(costed, plan, rank) for rank in range(candidate.mesh.pp)]
    busy = [stage.forward_s + stage.backward_s for stage in stages]
    pipeline = pipeline_s(busy, microbatches=candidate.microbatches, virtual_stages=candidate.virtual_stages)
    slowest = busy.index(max(busy))
    last = max(range(len(onces)), key=lambda rank: (onces[rank].seconds, -rank))
    parts = {
        label: candidate.microbatches * seconds
        for label, seconds in _microbatch_parts(costed, plan.ranks[slowest]).items()
    }
    parts[BUBBLE] = pipeline - candidate.microbatches * busy[slowest]
    parts |= onces[last].parts | {OVERHEAD: problem.framework.step_overhead_s}
    origin = worst(*(time.origin for time in costed.times.values()), *(once.origin for once in onces))
    communications = _communications(costed, plan.ranks[slowest], onces[last])
    prediction = _prediction(
        costed, parts, stages, origin, bubble=1 - sum(busy) * candidate.microbatches / len(busy) / pipeline
    )
    return Priced(
        candidate=candidate,
        intra=costed.intra,
        stages=stages,
        prediction=prediction,
        communications=communications,
        bound_s=min(bound, prediction.step_time_s),
        solver=plan.solver,
    )


def _stage(costed: Costed, plan: StagePlan, rank: int) -> Stage:
    modes = plan.ranks[rank]
    forward = sum(n * costed.times[name].forward_s for name, n, _ in modes) + costed.handover_s
    backward = sum(n * costed.times[name].backward_s(mode) for name, n, mode in modes) + costed.handover_s
    held = [
        Held(cost=costed.intra.blocks[name], states=costed.states[name], mode=mode, count=n)
        for name, n, mode in modes
    ]
    flying = costed.stage_problem.in_flight[rank]
    memory = stage_memory(
        held, in_flight=flying, prefetch_bytes=costed.prefetch_bytes, framework=costed.problem.framework
    )
    layers = [_layers(costed.problem, modes) for modes in plan.ranks]
    v = costed.candidate.virtual_stages
    pieces = chunk_layers(layers, v)
    return Stage(
        index=rank,
        blocks=tuple((name, n, str(mode)) for name, n, mode in modes),
        first_layer=sum(pieces[r][0] for r in range(rank)),
        layers=layers[rank],
        forward_s=forward,
        backward_s=backward,
        in_flight=math.ceil(flying),
        memory=memory,
        peak_memory_bytes=peak_bytes(memory),
        chunk_layers=pieces[rank] if v > 1 else (),
    )


def _layers(problem: SearchProblem, modes: Modes) -> int:
    return sum(n for name, n, _ in modes if name in problem.layer_classes)


def chunk_layers(layers: Sequence[int], virtual_stages: int) -> list[tuple[int, ...]]:
    """How each rank's layers are dealt to its virtual stages: as evenly as possible."""
    dealt = []
    for n in layers:
        each, extra = divmod(n, virtual_stages)
        dealt.append(tuple(each + (i < extra) for i in range(virtual_stages)))
    return dealt


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


def _communications(costed: Costed, modes: Modes, once: OncePerStep) -> tuple[Communication, ...]:
    """Every collective of the slowest stage, with executions per step, largest total first."""
    m, v = costed.candidate.microbatches, costed.candidate.virtual_stages
    counts: dict[str, int] = {}
    for name, n, _ in modes:
        counts[name] = counts.get(name, 0) + n
    inside = [
        replace(c, count=c.count * n * m)
        for name, n in counts.items()
        for c in costed.times[name].communications
    ]
    handover = [replace(costed.handover, count=2 * v * m)] if costed.handover else []
    return tuple(sorted((*inside, *handover, *once.communications), key=lambda c: -c.seconds * c.count))


def _prediction(
    costed: Costed, parts: Parts, stages: Sequence[Stage], origin: Origin, *, bubble: float
) -> Prediction:
    problem = costed.problem
    step = sum(parts.values())
    devices, device = problem.topology.devices, problem.topology.device
    samples = problem.job.global_batch
    fullest = max(stages, key=lambda stage: stage.peak_memory_bytes)
    below, above = INTERVAL[origin]
    flops = (1 + BACKWARD_OVER_FORWARD) * problem.forward_flops_per_sample * samples
    return Prediction(
        step_time_s=step,
        step_time_interval_s=(step * (1 - below), step * (1 + above)),
        tokens_per_s_per_device=samples * problem.tokens_per_sample / step / devices,
        model_flops_utilization=flops / (step * devices * peak_flops_per_s(device, problem.job.dtype)),
        peak_memory_bytes=fullest.peak_memory_bytes,
        memory_by_kind_bytes={part.kind: part.bytes for part in fullest.memory},
        device_memory_bytes=device.memory_bytes,
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


def memoised(pricing: Pricing, device: Device) -> Pricing:
    """The same cost models, each question asked once (the search asks most of them many times)."""
    collectives: dict[tuple[Collective, float, GroupSpan], object] = {}
    kernels: dict[object, object] = {}

    def collective_time(collective: Collective, nbytes: float, span: GroupSpan):
        key = (collective, nbytes, span)
        if key not in collectives:
            collectives[key] = pricing.collective_time(collective, nbytes, span)
        return collectives[key]

    def kernel_time(work, on: Device):
        assert on is device, "one search, one device"
        if work not in kernels:
            kernels[work] = pricing.kernel_time(work, on)
        return kernels[work]

    return replace(pricing, collective_time=collective_time, kernel_time=kernel_time)
