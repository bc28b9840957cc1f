"""A candidate under one intra-op solution: the stage problem it poses, and how fast it can be.

In: a `SearchProblem`, a `Setting` (candidate and cost models), an intra-op solution, real or ideal.
Out: `Costed`, whose parts are worked out when asked for: times and states per block class, the
`StageProblem`, and lower bounds of the step (`bound_s` before stages are chosen, `step_bound_s` after).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from ..cost import Communication, IntraSolution, ParameterGroup, Recompute
from ..estimate.memory import (
    BlockStates,
    block_states,
    dummy_bytes,
    replicas,
    staging_bytes,
    traffic_stage,
    transient_bytes,
    usable_bytes,
)
from ..estimate.moments import BOUNDARIES_IN_BACKWARD, Reduced, most_alive, most_waiting
from ..estimate.step import BlockTime, Setting, block_time, once_per_step, send_recv
from ..layout import Collective
from ..mesh import Mesh
from ..problem import Candidate, Pricing, SearchProblem
from ..schedule import SPLIT_BACKWARD, V_SHAPED, Schedule, in_flight
from ..topology import Device, GroupSpan
from .brackets import StagePlan, bound_s, cheapest_s
from .intervals import BlockClass, Modes, StageProblem, rank_seconds
from .pieces import dealt_chain, lacking

REDUCES_EVERY_MICROBATCH = 2
"""The ZeRO stage from which data-parallel ranks communicate for every microbatch."""


@dataclass(slots=True)
class Shared:
    """What candidates of one search share (memos)."""

    onces: dict[tuple, float] = field(default_factory=dict)
    """Bounds of once-per-step seconds in a pipeline, whatever the microbatch."""
    times: dict[int, tuple[IntraSolution, dict[str, BlockTime]]] = field(default_factory=dict)
    """Seconds of the blocks of an intra-op solution, by its id, where data-parallel ranks stay apart from
    microbatch to microbatch."""


@dataclass(frozen=True, kw_only=True)
class Costed:
    """A candidate under one intra-op solution (real or ideal): all that its stages need."""

    problem: SearchProblem
    setting: Setting
    intra: IntraSolution
    recompute: Recompute | None = None
    handed: Communication | None = None
    """One hand-over, where it is not what the setting makes it."""
    shared: Shared = field(default_factory=Shared)

    @property
    def candidate(self) -> Candidate:
        """The candidate."""
        return self.setting.candidate

    @cached_property
    def times(self) -> dict[str, BlockTime]:
        """Per block class, one microbatch."""
        if self._communicates_every_microbatch:
            return self._block_times()
        key = id(self.intra)
        if key not in self.shared.times:
            self.shared.times[key] = (self.intra, self._block_times())
        return self.shared.times[key][1]

    def _block_times(self) -> dict[str, BlockTime]:
        return {name: block_time(cost, self.setting) for name, cost in self.intra.blocks.items()}

    @property
    def _communicates_every_microbatch(self) -> bool:
        """Whether data-parallel ranks do, so that blocks take longer for where these lie."""
        candidate = self.candidate
        stage = traffic_stage(candidate.zero_stage, candidate.mesh, self.problem.framework)
        return stage >= REDUCES_EVERY_MICROBATCH

    @cached_property
    def states(self) -> dict[str, BlockStates]:
        """Per block class, what stays for the whole step."""
        return {
            name: block_states(
                cost,
                mesh=self.candidate.mesh,
                zero=self.candidate.zero_stage,
                shard_group=self.candidate.shard_group,
                framework=self.problem.framework,
                optimizer=self.problem.optimizer,
                root=name not in self._gathered_layers,
                turns=self._turns,
            )
            for name, cost in self.intra.blocks.items()
        }

    @property
    def _layers(self) -> frozenset[str]:
        """Block classes that repeat; all of them where none does."""
        return frozenset(self.problem.layer_classes or self.problem.chain)

    @property
    def _gathered_layers(self) -> frozenset[str]:
        """Block classes that ZeRO-3 gathers one by one; where tensors are followed none, if none repeats."""
        return self.problem.layer_classes if self.problem.framework.follows_tensors else self._layers

    @property
    def _turns(self) -> int:
        """Virtual stages of a rank that finish one after the other: all when microbatches go in one round."""
        one_round = self.candidate.microbatches <= self.candidate.mesh.pp
        looped = self.candidate.schedule == Schedule.INTERLEAVED
        return self.candidate.virtual_stages if looped and one_round else 1

    @cached_property
    def buffer_bytes(self) -> float:
        """What every rank holds beside its blocks: the next layer gathered, and what stages receive into."""
        gathered = self.prefetch_bytes + self.staging_bytes
        return gathered + self._received_bytes + self._handed_bytes + self._root_bytes

    @property
    def prefetch_bytes(self) -> float:
        """The next layer, gathered while the current block runs (ZeRO-3)."""
        return max((self.states[name].gathered for name in self._gathered_layers), default=0.0)

    @property
    def staging_bytes(self) -> float:
        """The largest group of parameters, before it is copied out of the buffer it was gathered in."""
        if self.candidate.zero_stage < 3:
            return 0.0
        blocks, mesh = self.intra.blocks, self.candidate.mesh
        groups = [[blocks[name]] for name in blocks]
        if mesh.pp == 1:
            groups.append([blocks[name] for name in blocks if name not in self._gathered_layers])
        return max(staging_bytes(group, mesh=mesh, framework=self.problem.framework) for group in groups)

    @property
    def _received_bytes(self) -> float:
        """Boundary tensors set aside for every microbatch."""
        if self.candidate.mesh.pp == 1:
            return 0.0
        stages = self.candidate.microbatches * self.candidate.virtual_stages
        return self.problem.framework.receive_buffers * stages * self.boundary_bytes

    @property
    def boundary_bytes(self) -> float:
        """The activation between neighbouring stages, for one microbatch."""
        return max(self.intra.blocks[name].output_bytes for name in self._layers)

    @property
    def reduces(self) -> Reduced:
        """When a layer's gradients are reduced over data-parallel ranks."""
        mesh = self.candidate.mesh
        if mesh.pp > 1 or mesh.dp * mesh.cp * mesh.ep == 1:
            return Reduced.AFTERWARDS
        return Reduced.EACH if self.candidate.zero_stage >= REDUCES_EVERY_MICROBATCH else Reduced.LAST

    @property
    def _root_bytes(self) -> float:
        """The buffer in which gradients outside layers are reduced, where tensors are followed.

        It stays into the next microbatch's backward if each is reduced; else it is made when no activation is
        left.
        """
        mesh = self.candidate.mesh
        if self.reduces is Reduced.AFTERWARDS or not self.problem.framework.follows_tensors:
            return 0.0
        blocks = [(self.intra.blocks[name], n) for name, n in self.problem.counts.items()]
        numel = sum(
            n * g.numel
            for cost, n in blocks
            if cost.name not in self.problem.layer_classes
            for g in cost.parameters
            if g.trainable and replicas(g, mesh) > 1
        )
        kept = sum(n * min(cost.saved_bytes.values()) for cost, n in blocks)
        kept *= self.reduces is Reduced.LAST
        return max(0.0, numel * self.problem.framework.gradient_bytes - kept)

    @property
    def _handed_bytes(self) -> float:
        """Boundary tensors that stages hold for microbatches in flight, where tensors are followed."""
        candidate = self.candidate
        if candidate.mesh.pp == 1 or not self.problem.framework.follows_tensors:
            return 0.0
        pp, v = candidate.mesh.pp, candidate.virtual_stages
        most = max(microbatches_in_flight(candidate.schedule, pp, v, candidate.microbatches))
        return (most * v + BOUNDARIES_IN_BACKWARD) * self.boundary_bytes

    def _waiting_bytes(self, name: str) -> float:
        """Gradients of a block that wait for the weights' part of backward, where tensors are followed."""
        candidate = self.candidate
        if candidate.schedule not in SPLIT_BACKWARD or not self.problem.framework.follows_tensors:
            return 0.0
        pp, v = candidate.mesh.pp, candidate.virtual_stages
        most = most_waiting(candidate.schedule, pp, v, candidate.microbatches)
        return most / v * self.intra.blocks[name].live.waiting

    def outputs_bytes(self, name: str) -> float:
        """What a block of this class returns to the user, kept for all microbatches."""
        kept = self.problem.framework.keeps_outputs and self.candidate.mesh.pp > 1
        return self.candidate.microbatches * self.intra.blocks[name].logit_bytes if kept else 0.0

    @cached_property
    def dummy_bytes(self) -> float:
        """The most that dummy weight gradients take on any stage."""
        return max(dummy_bytes(cost, self.problem.framework) for cost in self.intra.blocks.values())

    @cached_property
    def handover(self) -> Communication | None:
        """One hand-over of activations between neighbouring stages."""
        if self.handed is not None:
            return self.handed
        return send_recv(self.setting, self.boundary_bytes, whole_on_tp=not self.intra.sequence_parallel)

    @cached_property
    def handover_s(self) -> float:
        """Seconds that hand-overs add to each of a rank's forwards, and to each of its backwards."""
        return self.handover.exposed_s * self.candidate.virtual_stages if self.handover else 0.0

    @cached_property
    def stage_problem(self) -> StageProblem:
        """The chain to cut."""
        candidate, problem = self.candidate, self.problem
        pp, v, schedule = candidate.mesh.pp, candidate.virtual_stages, candidate.schedule
        chain, cuts = dealt_chain(problem, pp, v, schedule)
        device = problem.topology.device
        return StageProblem(
            chain=chain,
            layer_classes=problem.layer_classes or frozenset(problem.chain),
            classes=self.classes,
            stages=pp,
            virtual_stages=v,
            fill_ways=candidate.fill_ways,
            microbatches=candidate.microbatches,
            in_flight=microbatches_in_flight(schedule, pp, v, candidate.microbatches),
            capacity_bytes=usable_bytes(device, problem.framework) - self.buffer_bytes - self.dummy_bytes,
            stage_s=2 * self.handover_s,
            cuts=cuts,
            lacks=lacking(problem.layers, pp, v, schedule) if v > 1 and cuts is None else None,
        )

    @cached_property
    def classes(self) -> dict[str, BlockClass]:
        """Per block class, what the stage problem needs of it."""
        return {name: self._block_class(name) for name in self.intra.blocks}

    def _block_class(self, name: str) -> BlockClass:
        cost, time, states = self.intra.blocks[name], self.times[name], self.states[name]
        modes = list(cost.saved_bytes)
        if self.problem.layer_classes and name not in self.problem.layer_classes:
            modes = [Recompute.NONE]  # only repeated layers are run again
        if self.problem.framework.runs_selective_once and self.candidate.schedule in SPLIT_BACKWARD:
            modes = [mode for mode in modes if mode is not Recompute.SELECTIVE]
        if self.recompute is not None and self.recompute in modes:
            modes = [self.recompute]
        return BlockClass(
            seconds={mode: time.forward_s + time.backward_s(mode) for mode in modes},
            static_bytes=states.total + self.outputs_bytes(name) + self._waiting_bytes(name),
            saved_bytes={mode: cost.saved_bytes[mode] for mode in modes},
            transient_bytes={mode: self._transient_bytes(name, mode) for mode in modes},
        )

    def _transient_bytes(self, name: str, mode: Recompute) -> float:
        """All that exists only while a block of this class runs."""
        cost, states = self.intra.blocks[name], self.states[name]
        if not self.problem.framework.follows_tensors:
            return transient_bytes(cost, states, mode)
        copies = {Reduced.AFTERWARDS: 0, Reduced.LAST: 1, Reduced.EACH: 2}[self.reduces]
        whole = sum(g.numel for g in cost.parameters if g.trainable) * self.problem.framework.gradient_bytes
        return states.gathered + most_alive(cost, mode) + copies * whole

    @cached_property
    def once_bound_s(self) -> float:
        """Once-per-step seconds of the stage that does most, however much computation may hide them."""
        candidate = self.candidate
        if candidate.mesh.pp == 1:
            return self.once_at_least_s(math.inf)
        sharded = (candidate.zero_stage, candidate.shard_group, candidate.schedule in V_SHAPED)
        owned = tuple(self.intra.blocks[name].parameters for name in self.problem.counts)
        key = (candidate.mesh, *sharded, owned)
        if key not in self.shared.onces:
            self.shared.onces[key] = self.once_at_least_s(math.inf)
        return self.shared.onces[key]

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

    def once_s(self, modes: Modes) -> float:
        """Once-per-step seconds of a rank that holds these blocks."""
        counts: dict[str, int] = {}
        for name, n, _ in modes:
            counts[name] = counts.get(name, 0) + n
        forward_s = sum(n * self.times[name].forward_s for name, n, _ in modes)
        backward_s = sum(n * self.times[name].backward_s(mode) for name, n, mode in modes)
        key = (tuple(counts.items()), forward_s, backward_s)
        if key not in self.onces:
            self.onces[key] = self._once_s(counts, forward_s, backward_s, blocks=sum(counts.values()))
        return self.onces[key]

    @cached_property
    def onces(self) -> dict[tuple, float]:
        """What `once_s` has worked out."""
        return {}

    def _once_s(
        self, counts: Mapping[str, float], forward_s: float, backward_s: float, *, blocks: int | None = None
    ) -> float:
        once = once_per_step(
            self.parameters(counts),
            self.setting,
            blocks=blocks or len(self.problem.chain),
            forward_s=max(forward_s, 0.0),
            backward_s=max(backward_s, 0.0),
        )
        return once.seconds

    def step_bound_s(self, plan: StagePlan) -> float:
        """Lower bound of the step under any stages, splits and modes, given the best stages' `plan`.

        Stages slower than `most` would hide more of the gradient sync, but then cost the pipeline
        (m - 1/v) times what they can hide at best.
        """
        problem = self.stage_problem
        share = problem.share
        weight = problem.microbatches - share
        most = math.inf
        if weight >= 1:
            busy = [rank_seconds(problem, modes) - problem.stage_s for modes in plan.ranks]
            spared = sum(busy) - cheapest_s(problem)
            most = max(busy) + share * max(spared, 0.0) / weight
        return plan.bound_s * self.intra.proven_share + self.once_at_least_s(most)

    def parameters(self, counts: Mapping[str, float]) -> list[ParameterGroup]:
        """All parameter groups of `counts` blocks of each class, alike ones added up."""
        sums: dict[tuple, tuple[float, float]] = {}
        for name, n in counts.items():
            for g in self.intra.blocks[name].parameters:
                key = (g.element_bytes, g.sparse, g.trainable, g.replicated_over_tp, g.tied)
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
                tied=tied,
            )
            for (element_bytes, sparse, trainable, over_tp, tied), (numel, tensors) in sums.items()
        ]

    def under(self, candidate: Candidate) -> Costed:
        """The same mesh, microbatch and ZeRO stage under another schedule: nothing is priced again."""
        other = replace(self, setting=replace(self.setting, candidate=candidate))
        alike = ("states", "classes") if other._turns == self._turns else ()
        for name in ("times", "handover", "once_bound_s", *alike):
            other.__dict__[name] = getattr(self, name)
        return other

    def on(self, mesh: Mesh) -> Costed:
        """The same splits on the mesh in another order, in which its slices lie alike."""
        candidate = replace(self.candidate, mesh=mesh)
        other = replace(self, setting=replace(self.setting, candidate=candidate))
        alike = () if other._communicates_every_microbatch else ("times", "classes")
        for name in ("states", *alike):
            other.__dict__[name] = getattr(self, name)
        return other

    @cached_property
    def bound_s(self) -> float:
        """No stages and modes make the step faster; infinite when it is plain that nothing fits."""
        pipeline = bound_s(self.stage_problem)
        return pipeline if math.isinf(pipeline) else pipeline + self.once_bound_s


@cache
def microbatches_in_flight(schedule: str, pp: int, v: int, m: int) -> tuple[float, ...]:
    """Per pipeline rank, microbatches whose activations it holds at its peak."""
    if pp == 1:
        return (1.0,)
    return tuple(in_flight(schedule, pp, v, m, rank) for rank in range(pp))


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
