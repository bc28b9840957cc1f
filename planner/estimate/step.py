"""Time of one optimizer step from the costs of its blocks.

In: a candidate, one intra-op solution, the cost models. Out: seconds of one block for one
microbatch (`block_times`), of everything that happens once per step on one stage
(`once_per_step`), and of the pipeline (`pipeline_s`).

    step = pipeline + max over stages of (gradient sync + optimizer + ...) + framework overhead
    pipeline = (m - 1/v) max_s t_s + sum_s t_s / v,   t_s = forward + backward of one microbatch

with m microbatches and v virtual stages per device. For even stages this is the familiar
(m + (pp - 1) / v) t (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

ZeRO-1 reduce-scatters gradients and gathers parameters once per step, ZeRO-2 reduce-scatters for
every microbatch, ZeRO-3 also gathers each block in forward and again in backward. Under HSDP this
happens among the ranks of a sharding group; groups sum their gradients once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..cost import BlockCost, Communication, Estimate, Origin, ParameterGroup, Recompute, Work, worst
from ..layout import Collective
from ..mesh import AXES, Mesh
from ..problem import Candidate, Pricing
from ..profile import Framework, Optimizer, hidden_share
from ..schedule import V_SHAPED
from ..topology import GroupSpan, Topology
from .memory import master_bytes, replicas, traffic_stage
from .overlap import exposed_s

TENSORS_PER_LAUNCH = 36
"""Parameter tensors that one fused optimizer kernel takes (PyTorch `MultiTensorApply.cuh`, depth 4)."""
OPTIMIZER_FLOPS = 12
"""Arithmetic per parameter of one AdamW update (arXiv:1711.05101, algorithm 2); it is memory bound."""
NEVER = 4
"""A ZeRO stage that no plan has."""
NORM_BYTES = 4
"""The gradient norm's all-reduce carries one fp32 number."""

DENSE_AXES = ("dp", "cp", "ep")
SPARSE_AXES = ("dp", "cp")

Parts = dict[str, float]
"""Seconds by waterfall label."""

FORWARD, BACKWARD, RECOMPUTE = "forward compute", "backward compute", "recompute"
SEND_RECV, BUBBLE = "pipeline send/recv", "pipeline bubble"
GATHER, REDUCE = "ZeRO parameter gathers", "ZeRO gradient reduce-scatter"
SYNC, PARAMETER_SYNC, NORM_SYNC = "gradient sync", "parameter all-gather", "replicated gradients over tp"
TIED_SYNC = "tied gradients over pp"
OPTIMIZER, GRADIENT_NORM, OVERHEAD = "optimizer", "gradient norm", "framework overhead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What stays fixed while one candidate is priced."""

    candidate: Candidate
    topology: Topology
    framework: Framework
    optimizer: Optimizer
    pricing: Pricing
    span: Callable[[Mesh, tuple[str, ...]], GroupSpan]

    @property
    def mesh(self) -> Mesh:
        """The candidate's mesh."""
        return self.candidate.mesh


def spans(topology: Topology) -> Callable[[Mesh, tuple[str, ...]], GroupSpan]:
    """A memoised function (mesh, axes) -> where the flattened group over these axes lies."""

    @cache
    def by_stride(size: int, stride: int) -> GroupSpan:
        return topology.span(size=size, stride=stride)

    @cache
    def span(mesh: Mesh, axes: tuple[str, ...]) -> GroupSpan:
        present = [axis for axis in mesh.order if axis in axes and mesh.size(axis) > 1]
        if not present:
            return by_stride(1, 1)
        size, stride = 1, mesh.stride(present[-1])
        for axis in reversed(present):
            if mesh.stride(axis) != stride * size:
                return _scattered_span(topology, next(mesh.groups(*present)))
            size *= mesh.size(axis)
        return by_stride(size, stride)

    return span


def _scattered_span(topology: Topology, ranks: Sequence[int]) -> GroupSpan:
    """Members per level of a group whose ranks are not evenly spaced."""
    members, unit, before = [], 1, len(ranks)
    for level in topology.levels:
        unit *= level.size
        here = len({rank // unit for rank in ranks})
        members.append(-(-before // here))
        before = here
    return GroupSpan(members=tuple(members))


def communication(
    setting: Setting,
    label: str,
    collective: Collective,
    nbytes: float,
    axes: tuple[str, ...],
    *,
    count: float,
) -> Communication | None:
    """A priced collective over the flattened `axes`, wholly exposed; None when there is no one to talk to."""
    axis = "+".join(axis for axis in axes if setting.mesh.size(axis) > 1)
    return _priced(setting, label, collective, nbytes, setting.span(setting.mesh, axes), axis, count=count)


def sharding(
    setting: Setting, label: str, collective: Collective, nbytes: float, axes: tuple[str, ...]
) -> Communication | None:
    """A gather or reduce-scatter among the ranks that share one copy: all of `axes`, or a ZeRO group."""
    group = setting.candidate.shard_group
    if group is None:
        return communication(setting, label, collective, nbytes, axes, count=1)
    span = setting.topology.span(size=group, stride=setting.mesh.stride("dp"))
    return _priced(setting, label, collective, nbytes, span, "dp", count=1)


def _priced(
    setting: Setting,
    label: str,
    collective: Collective,
    nbytes: float,
    span: GroupSpan,
    axis: str,
    *,
    count: float,
) -> Communication | None:
    if span.size == 1 or nbytes <= 0:
        return None
    time = setting.pricing.collective_time(collective, nbytes, span)
    return Communication(
        label=label,
        collective=collective,
        axis=axis,
        group_size=span.size,
        bytes=nbytes,
        seconds=time.seconds,
        exposed_s=time.seconds,
        count=count,
        level=setting.topology.levels[span.outermost].name,
        origin=time.origin,
    )


# --------------------------------------------------------------------------- one block, one microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """One block, one microbatch, one device: what the step waits for, by part."""

    forward: Parts
    backward: dict[Recompute, Parts]
    """Recomputation included."""
    communications: tuple[Communication, ...]
    """With the exposed part of each; counts per microbatch."""
    origin: Origin

    @property
    def forward_s(self) -> float:
        """Forward of one microbatch."""
        return sum(self.forward.values())

    def backward_s(self, mode: Recompute) -> float:
        """Backward of one microbatch under a recompute mode."""
        return sum(self.backward[mode].values())


def block_time(cost: BlockCost, setting: Setting) -> BlockTime:
    """Seconds of one block for one microbatch, hidden communication taken off."""
    framework = setting.framework
    zero = traffic_stage(setting.candidate.zero_stage, setting.mesh, framework)
    gathers = list(_gathers(cost, setting, "forward")) if zero >= 3 else []
    again = list(_gathers(cost, setting, "backward")) if zero >= 3 else []
    reduces = list(_gradient_syncs(cost.parameters, setting, Collective.REDUCE_SCATTER)) if zero >= 2 else []
    if zero >= 3:
        reduces = [_no_faster(c, framework) for c in reduces]
    overlaps = (framework.gather_overlap, framework.dp_overlap)
    forward_comm, (gathers, _) = _hide(cost.forward_comm, (gathers, []), overlaps, cost.forward_s, framework)
    backward_comm, (again, reduces) = _hide(
        cost.backward_comm, (again, reduces), overlaps, cost.backward_s, framework
    )
    forward = {FORWARD: cost.forward_s} | _by_axis(forward_comm) | _parts({GATHER: gathers})
    base = {BACKWARD: cost.backward_s} | _by_axis(backward_comm) | _parts({GATHER: again, REDUCE: reduces})
    backward = {}
    for mode in cost.saved_bytes:
        extra = cost.recompute_s.get(mode, 0.0) + cost.recompute_comm_s.get(mode, 0.0)
        backward[mode] = base | ({RECOMPUTE: extra} if extra else {})
    communications = (*forward_comm, *backward_comm, *gathers, *again, *reduces)
    return BlockTime(
        forward=forward,
        backward=backward,
        communications=communications,
        origin=worst(cost.origin, *(c.origin for c in communications)),
    )


Comms = list[Communication]


def _hide(
    inside: Sequence[Communication],
    storage: tuple[Comms, Comms],
    overlaps: tuple[float, float],
    compute_s: float,
    framework: Framework,
) -> tuple[Comms, tuple[Comms, Comms]]:
    """Take off what computation hides: of tp's collectives inside a block, of ZeRO's gathers and reduces."""
    shares = [hidden_share(framework, c.axis) for c in inside]
    shares += [share for group, share in zip(storage, overlaps, strict=True) for _ in group]
    seen = _hidden_behind([*inside, *storage[0], *storage[1]], shares, compute_s=compute_s)
    first, second = len(inside), len(inside) + len(storage[0])
    return seen[:first], (seen[first:second], seen[second:])


def _hidden_behind(
    communications: Sequence[Communication], shares: Sequence[float], *, compute_s: float
) -> Comms:
    """The same collectives with what `compute_s` leaves exposed of each execution."""
    if not communications:
        return []
    comms = [(c.seconds * c.count, share) for c, share in zip(communications, shares, strict=True)]
    exposed = exposed_s(comms, compute_s=compute_s)
    return [
        replace(c, exposed_s=s / c.count if c.count else 0.0)
        for c, s in zip(communications, exposed, strict=True)
    ]


def _gathers(cost: BlockCost, setting: Setting, phase: str) -> Iterator[Communication]:
    for sparse, axes in ((False, DENSE_AXES), (True, SPARSE_AXES)):
        nbytes = sum(g.numel * g.element_bytes for g in cost.parameters if g.sparse is sparse)
        label = f"{cost.name}: parameters gathered for {phase}"
        gather = sharding(setting, label, Collective.ALL_GATHER, nbytes, axes)
        if gather is not None:
            yield _no_faster(gather, setting.framework)


def _no_faster(c: Communication, framework: Framework) -> Communication:
    """ZeRO-3's traffic at the rate that the framework reaches, where that is below the links'."""
    if framework.gather_bytes_per_s is None:
        return c
    seconds = max(c.seconds, c.bytes / framework.gather_bytes_per_s)
    return replace(c, seconds=seconds, exposed_s=seconds)


def _gradient_syncs(
    groups: Sequence[ParameterGroup], setting: Setting, collective: Collective
) -> Iterator[Communication]:
    for sparse, axes in ((False, DENSE_AXES), (True, SPARSE_AXES)):
        numel = sum(g.numel for g in groups if g.trainable and g.sparse is sparse)
        label = f"gradients of {'sparse' if sparse else 'dense'} parameters"
        nbytes = numel * setting.framework.sync_bytes
        if collective is Collective.REDUCE_SCATTER:
            sync = sharding(setting, label, collective, nbytes, axes)
        else:
            sync = communication(setting, label, collective, nbytes, axes, count=1)
        if sync is not None:
            yield sync


def _copies_sync(groups: Sequence[ParameterGroup], setting: Setting) -> Iterator[Communication]:
    """Sharding groups that hold copies of each other sum their shards' gradients, once per step (HSDP)."""
    group, mesh = setting.candidate.shard_group, setting.mesh
    if group is None:
        return
    nbytes = sum(g.numel for g in groups if g.trainable) * setting.framework.sync_bytes / group
    span = setting.topology.span(size=mesh.dp // group, stride=mesh.stride("dp") * group)
    label = "gradients of sharding groups"
    if sync := _priced(setting, label, Collective.ALL_REDUCE, nbytes, span, "dp", count=1):
        yield sync


def _by_axis(communications: Sequence[Communication]) -> Parts:
    parts: Parts = {}
    for c in communications:
        label = f"{c.axis} communication"
        parts[label] = parts.get(label, 0.0) + c.exposed_s * c.count
    return parts


def _parts(groups: dict[str, list[Communication]]) -> Parts:
    sums = {label: sum(c.exposed_s * c.count for c in group) for label, group in groups.items()}
    return {label: seconds for label, seconds in sums.items() if seconds > 0}


# --------------------------------------------------------------------------- once per step


@dataclass(frozen=True, slots=True, kw_only=True)
class OncePerStep:
    """What one stage does after its last microbatch."""

    parts: Parts
    communications: tuple[Communication, ...]
    origin: Origin

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def once_per_step(
    groups: Sequence[ParameterGroup], setting: Setting, *, blocks: int, forward_s: float, backward_s: float
) -> OncePerStep:
    """Gradient sync, gradient norm and optimizer of a stage that holds `groups` in `blocks` blocks.

    `forward_s` and `backward_s` are one microbatch on this stage: the sync may hide behind the
    last backward, the gather of updated parameters behind the next step's first forward. The
    gradients of the block that finishes last have nothing left to hide behind.
    """
    framework = setting.framework
    zero = traffic_stage(setting.candidate.zero_stage, setting.mesh, framework)
    collective = Collective.ALL_REDUCE if zero == 0 else Collective.REDUCE_SCATTER
    syncs = list(_gradient_syncs(groups, setting, collective)) if zero <= 1 else []
    syncs += _copies_sync(groups, setting)
    share = min(framework.dp_overlap, 1 - 1 / blocks)
    syncs = _hidden_behind(syncs, [share] * len(syncs), compute_s=backward_s)
    gathers = list(_updated_parameters(groups, setting)) if zero in (1, 2) else []
    share = min(framework.gather_overlap, 1 - 1 / blocks)
    gathers = _hidden_behind(gathers, [share] * len(gathers), compute_s=forward_s)
    over_tp = list(_replicated_over_tp(groups, setting))
    over_pp = list(_tied(groups, setting))
    norm, norm_sync = _gradient_norm(groups, setting)
    update = _update(groups, setting)
    parts = _parts({SYNC: syncs, PARAMETER_SYNC: gathers, NORM_SYNC: over_tp, TIED_SYNC: over_pp})
    norm_s = norm.seconds + sum(c.seconds for c in norm_sync)
    parts |= {GRADIENT_NORM: norm_s, OPTIMIZER: update.seconds}
    communications = (*syncs, *gathers, *over_tp, *over_pp, *norm_sync)
    return OncePerStep(
        parts=parts,
        communications=communications,
        origin=worst(norm.origin, update.origin, *(c.origin for c in communications)),
    )


def _updated_parameters(groups: Sequence[ParameterGroup], setting: Setting) -> Iterator[Communication]:
    for sparse, axes in ((False, DENSE_AXES), (True, SPARSE_AXES)):
        nbytes = sum(g.numel * g.element_bytes for g in groups if g.trainable and g.sparse is sparse)
        label = f"updated {'sparse' if sparse else 'dense'} parameters"
        gather = sharding(setting, label, Collective.ALL_GATHER, nbytes, axes)
        if gather is not None:
            yield gather


def _replicated_over_tp(groups: Sequence[ParameterGroup], setting: Setting) -> Iterator[Communication]:
    numel = sum(g.numel for g in groups if g.trainable and g.replicated_over_tp)
    label = "gradients of parameters replicated over tp"
    sync = communication(
        setting, label, Collective.ALL_REDUCE, numel * setting.framework.sync_bytes, ("tp",), count=1
    )
    if sync is not None:
        yield sync


def _tied(groups: Sequence[ParameterGroup], setting: Setting) -> Iterator[Communication]:
    """The first and the last stage sum gradients of parameters that both hold, unless one rank has both."""
    if setting.candidate.schedule in V_SHAPED:
        return
    first = 1 if setting.framework.sums_tied_shards else NEVER
    numel = sum(_local_numel(g, setting, from_zero=first) for g in groups if g.trainable and g.tied)
    if numel:
        topology, span = setting.topology, furthest_stages(setting)
        nbytes = numel * setting.framework.sync_bytes
        time = setting.pricing.collective_time(Collective.ALL_REDUCE, nbytes, span)
        yield Communication(
            label="gradients of parameters tied over stages",
            collective=Collective.ALL_REDUCE,
            axis="pp",
            group_size=2,
            bytes=nbytes,
            seconds=time.seconds,
            exposed_s=time.seconds,
            count=1,
            level=topology.levels[span.outermost].name,
            origin=time.origin,
        )


def _local_numel(group: ParameterGroup, setting: Setting, *, from_zero: int) -> float:
    sharded = setting.candidate.zero_stage >= from_zero
    ways = setting.candidate.shard_group or replicas(group, setting.mesh)
    return group.numel / (ways if sharded else 1)


def _gradient_norm(
    groups: Sequence[ParameterGroup], setting: Setting
) -> tuple[Estimate, list[Communication]]:
    """Read every gradient this device owns, then sum one number over all devices."""
    trainable = [g for g in groups if g.trainable]
    numel = sum(_local_numel(g, setting, from_zero=1) for g in trainable)
    work = Work(
        family="memory",
        flops=2 * numel,
        bytes=numel * setting.framework.gradient_bytes,
        dtype="fp32",
        kernels=-(-sum(g.tensors for g in trainable) // TENSORS_PER_LAUNCH) + 1,
    )
    sync = communication(setting, "gradient norm", Collective.ALL_REDUCE, NORM_BYTES, AXES, count=1)
    return setting.pricing.kernel_time(work, setting.topology.device), [sync] if sync else []


def _update(groups: Sequence[ParameterGroup], setting: Setting) -> Estimate:
    """The optimizer reads gradient, master copy and moments, and writes them and the parameter."""
    if setting.optimizer.name == "none":
        return Estimate(0.0, Origin.MEASURED)
    numel = traffic = tensors = 0.0
    for group in groups:
        if not group.trainable:
            continue
        local = _local_numel(group, setting, from_zero=1)
        states = master_bytes(group, setting.framework, setting.optimizer) + setting.optimizer.state_bytes
        per_element = setting.framework.gradient_bytes + 2 * states + group.element_bytes
        if master_bytes(group, setting.framework, setting.optimizer) == 0:
            per_element += group.element_bytes  # the parameter itself is read as well
        numel, traffic, tensors = numel + local, traffic + local * per_element, tensors + group.tensors
    work = Work(
        family="optimizer",
        flops=OPTIMIZER_FLOPS * numel,
        bytes=traffic,
        dtype="fp32",
        kernels=max(1, -(-tensors // TENSORS_PER_LAUNCH)),
    )
    return setting.pricing.kernel_time(work, setting.topology.device)


# --------------------------------------------------------------------------- the pipeline


def furthest_stages(setting: Setting) -> GroupSpan:
    """Where two stages lie that hand over across the outermost level that the pipeline crosses.

    Some neighbours do, wherever the others lie; and so do the first and the last stage.
    """
    whole = setting.span(setting.mesh, ("pp",))
    return GroupSpan(members=tuple(2 if i == whole.outermost else 1 for i in range(len(whole.members))))


def pipeline_s(stage_s: Sequence[float], *, microbatches: int, virtual_stages: float = 1) -> float:
    """Time of all microbatches through stages that take `stage_s` (forward + backward) for each.

    Schedules that fill the pipeline faster by other means count as more virtual stages
    (`schedule.fill_ways`).
    """
    return (microbatches - 1 / virtual_stages) * max(stage_s) + sum(stage_s) / virtual_stages


def send_recv(setting: Setting, nbytes: float, *, whole_on_tp: bool = False) -> Communication | None:
    """Activations (or their gradients) handed to the neighbouring stage, once.

    `whole_on_tp`: every rank of tp holds all of it, so that each may send a part and gather the rest.
    """
    mesh, topology, framework = setting.mesh, setting.topology, setting.framework
    if mesh.pp == 1:
        return None
    span = furthest_stages(setting)
    scatters = whole_on_tp and framework.scatters_handover and mesh.tp > 1
    sent = nbytes / mesh.tp if scatters else nbytes
    time = setting.pricing.collective_time(Collective.SEND_RECV, sent, span)
    if scatters:
        time += setting.pricing.collective_time(Collective.ALL_GATHER, nbytes, setting.span(mesh, ("tp",)))
    return Communication(
        label="activations between stages",
        collective=Collective.SEND_RECV,
        axis="pp",
        group_size=2,
        bytes=sent,
        seconds=time.seconds,
        exposed_s=time.seconds * (1 - framework.p2p_overlap),
        count=1,
        level=topology.levels[span.outermost].name,
        origin=time.origin,
    )
