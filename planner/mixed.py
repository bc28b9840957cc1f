"""Plans for clusters of several kinds of nodes.

In: a built graph, a `MixedTopology`, a job. Out: the best of three things, with what the others take:
one kind alone, the others idle; a pipeline whose stages lie on different kinds; data-parallel ranks on all
kinds with shares by speed (`solve.mixed_space` lists what is tried).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from ..topologies import topology_hash
from .errors import OptionError
from .estimate import collectives
from .graph import Graph
from .options import pin_values
from .plan import Alternative, ClusterInfo, ClusterPart, Infeasible, Link, Plan, SearchSummary
from .planning import Asked, Prepared, plan_graph, plan_of, prepared
from .problem import Outcome, Pricing
from .profile import Job
from .solve.explain import gib, seconds_in_words
from .solve.mixed import Kind, MixedOutcome, MixedPlan, search_mixed
from .topology import Cluster, Level, MixedTopology, Topology

AT_ONCE_S = 1e-3
"""Time limit of the searches that are left when the user has interrupted one."""
ON_ALL_KINDS = "on all kinds: a bound is above the best plan, or nothing fits"


def plan_cluster(graph: Graph, cluster: Cluster, job: Job, **asked: Unpack[Asked]) -> Plan | Infeasible:
    """Plan a built graph for a cluster of one kind of nodes or of several; arguments as for `plan_graph`."""
    if isinstance(cluster, MixedTopology):
        return plan_mixed(graph, cluster, job, **asked)
    return plan_graph(graph, cluster, job, **asked)


def plan_mixed(
    graph: Graph,
    cluster: MixedTopology,
    job: Job,
    *,
    pins: Mapping[str, int | str] | None = None,
    source: str = "",
    top: int = 5,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan | Infeasible:
    """Plan a graph for all kinds of nodes together. Raises `OptionError` for pins that cannot hold."""
    checked = pin_values(pins)
    options = {"pins": checked, "source": source, "top": top, "progress": progress}
    each_s = None if time_limit_s is None else time_limit_s / (len(cluster.parts) + 1)
    alone: list[Plan | Infeasible | OptionError] = []
    for part in cluster.parts:
        alone.append(_alone(graph, part, job, time_limit_s=each_s, **options))
        if _interrupted(alone[-1], each_s):
            each_s = AT_ONCE_S
    plans = [plan for plan in alone if isinstance(plan, Plan)]
    known_s = min((plan.predicted.step_time_s for plan in plans), default=math.inf)
    made = [prepared(graph, _as_if_whole(part, cluster), job) for part in cluster.parts]
    kinds = [_kind(p, part, cluster.link) for p, part in zip(made, cluster.parts, strict=True)]
    found = search_mixed(kinds, cluster, checked, known_s=known_s, time_limit_s=each_s)
    if found.best is not None:
        return _together(graph, cluster, job, made, found, found.best, plans, source=source)
    if not plans:
        return _infeasible(alone, cluster, checked)
    best = min(plans, key=lambda plan: plan.predicted.step_time_s)
    return _one_kind(best, cluster, found, plans)


def _alone(graph: Graph, part: Topology, job: Job, **options) -> Plan | Infeasible | OptionError:
    """The best plan on one kind, the others idle; the pins may not fit its number of devices."""
    try:
        return plan_graph(graph, part, job, **options)
    except OptionError as error:
        return error


def _interrupted(found: Plan | Infeasible | OptionError, limit_s: float | None) -> bool:
    """Whether a search without a time limit was stopped nevertheless."""
    return limit_s is None and isinstance(found, Plan) and not found.search.complete


def _as_if_whole(part: Topology, cluster: MixedTopology) -> Topology:
    return part.with_nodes(-(-cluster.devices // part.devices_per_node))


def _kind(made: Prepared, part: Topology, link: Level) -> Kind:
    levels = made.topology.levels
    joined = collectives.model(replace(made.topology, levels=(*levels[:-1], _slower(levels[-1], link))))
    return Kind(
        problem=made.problem,
        devices=part.devices,
        pricing=made.pricing,
        joined=Pricing(
            intra=made.pricing.intra,
            collective_time=joined.time,
            kernel_time=made.pricing.kernel_time,
        ),
        again=made.intra.again,
    )


def _slower(own: Level, link: Level) -> Level:
    """What traffic between this kind and another gets: the worse of its own network and the link."""
    worse = min(own, link, key=lambda level: level.bytes_per_s * level.efficiency)
    return replace(
        own,
        kind=worse.kind,
        bytes_per_s=worse.bytes_per_s,
        efficiency=worse.efficiency,
        latency_s=max(own.latency_s, link.latency_s),
        curves=() if worse is link else own.curves,
    )


# --------------------------------------------------------------------------- the answer


def _together(
    graph: Graph,
    cluster: MixedTopology,
    job: Job,
    made: Sequence[Prepared],
    found: MixedOutcome,
    best: MixedPlan,
    plans: Sequence[Plan],
    *,
    source: str,
) -> Plan:
    placed, priced = best.placed, best.priced
    outcome = Outcome(
        best=priced,
        alternatives=(),
        summary=_summary(priced.step_time_s, priced.solver, found, plans),
        reasons=tuple(_reasons(cluster, best)),
        warnings=_warnings(best, job),
    )
    plan = plan_of(graph, made[placed.kinds[0]].topology, job, outcome, source=source)
    told = tuple(_alternatives(priced.step_time_s, plans))
    per_part = placed.microbatches
    return replace(
        plan,
        mesh=placed.candidate.mesh,
        num_microbatches=placed.candidate.microbatches,
        cluster=_info(cluster, _used(best)),
        alternatives=told,
        microbatches_per_part=per_part if len(set(per_part)) > 1 else (),
    )


def _one_kind(best: Plan, cluster: MixedTopology, found: MixedOutcome, plans: Sequence[Plan]) -> Plan:
    """A plan on one kind as the answer for the whole cluster."""
    name, step_s = best.cluster.topology, best.predicted.step_time_s
    used = [part.devices if part.name == name else 0 for part in cluster.parts]
    idle = cluster.devices - sum(used)
    reason = (
        f"All stages lie on {name} ({sum(used)} x {best.cluster.device}); the other {idle} devices are left "
        f"idle: no plan that uses all kinds takes less than {seconds_in_words(found.lower_bound_s)} a step."
    )
    memory = best.cluster.device_memory_bytes
    stages = tuple(
        replace(stage, device=best.cluster.device, device_memory_bytes=memory) for stage in best.stages
    )
    share = sum(used) / cluster.devices
    return replace(
        best,
        stages=stages,
        cluster=_info(cluster, used),
        predicted=replace(
            best.predicted, tokens_per_s_per_device=best.predicted.tokens_per_s_per_device * share
        ),
        search=_summary(step_s, best.search.solver, found, plans),
        reasons=(reason, *best.reasons),
        alternatives=(*_alternatives(step_s, [p for p in plans if p is not best]), *best.alternatives),
    )


def _summary(step_s: float, solver: str, found: MixedOutcome, plans: Sequence[Plan]) -> SearchSummary:
    """One certificate for plans on all kinds and on each kind alone."""
    lower = min(found.lower_bound_s, *(plan.search.lower_bound_s for plan in plans), step_s)
    left = Counter({ON_ALL_KINDS: found.considered - found.solved})
    for plan in plans:
        left.update(dict(plan.search.pruned_by))
    return SearchSummary(
        meshes_considered=found.considered + sum(plan.search.meshes_considered for plan in plans),
        meshes_pruned=left.total(),
        pruned_by=tuple(left.items()),
        lower_bound_s=lower,
        gap=(step_s - lower) / step_s,
        solver=solver,
        complete=found.complete and all(plan.search.complete for plan in plans),
    )


def _used(best: MixedPlan) -> list[int]:
    placed, mesh = best.placed, best.placed.candidate.mesh
    if placed.ranks:
        return [ranks * mesh.tp for ranks in placed.ranks]
    stage = mesh.devices // mesh.pp
    return [placed.kinds.count(kind) * stage for kind in sorted(set(placed.kinds))]


def _info(cluster: MixedTopology, used: Sequence[int]) -> ClusterInfo:
    parts, link = cluster.parts, cluster.link
    devices = " + ".join(dict.fromkeys(part.device.name for part in parts))
    return ClusterInfo(
        topology=cluster.name,
        topology_hash=topology_hash(cluster),
        device=devices,
        devices=cluster.devices,
        nodes=cluster.nodes,
        devices_per_node=min(part.devices_per_node for part in parts),
        device_memory_bytes=min(part.device.memory_bytes for part in parts),
        price_per_device_hour=_price(parts),
        links=(Link(level=link.name, size=link.size, kind=link.kind, bytes_per_s=link.bytes_per_s),),
        parts=tuple(
            ClusterPart(
                topology=part.name,
                device=part.device.name,
                nodes=part.nodes,
                devices_per_node=part.devices_per_node,
                device_memory_bytes=part.device.memory_bytes,
                price_per_device_hour=part.usd_per_device_hour,
                used_devices=n,
            )
            for part, n in zip(parts, used, strict=True)
        ),
    )


def _price(parts: Sequence[Topology]) -> float | None:
    """Dollars per device-hour over all devices, idle ones included; None where a kind has no price."""
    prices = [part.usd_per_device_hour for part in parts]
    if any(price is None for price in prices):
        return None
    paid = sum(part.devices * (price or 0.0) for part, price in zip(parts, prices, strict=True))
    return paid / sum(part.devices for part in parts)


# --------------------------------------------------------------------------- words


def _reasons(cluster: MixedTopology, best: MixedPlan) -> Iterator[str]:
    placed = best.placed
    used = _used(best)
    if placed.microbatches:
        shares = [
            f"{ranks} ranks on {part.name} ({part.device.name}) run {m} microbatches each"
            for ranks, part, m in zip(placed.ranks, cluster.parts, placed.microbatches, strict=True)
        ]
        yield f"Data-parallel ranks lie on all kinds, with shares by speed: {', '.join(shares)}."
    else:
        told = "; ".join(_where(cluster, best))
        yield f"{told[0].upper()}{told[1:]}."
    for part, n in zip(cluster.parts, used, strict=True):
        if n < part.devices:
            yield f"{part.devices - n} of the {part.devices} devices of {part.name} are left idle."


def _where(cluster: MixedTopology, best: MixedPlan) -> Iterator[str]:
    """`stages 0-1 lie on dgx-h100 (16 x h100), 20 layers each, at most 70.1 of 80.0 GiB`."""
    kinds, stages = best.placed.kinds, best.priced.stages
    mesh = best.placed.candidate.mesh
    for kind in dict.fromkeys(kinds):
        part, ranks = cluster.parts[kind], [r for r, k in enumerate(kinds) if k == kind]
        layers = sorted({stages[r].layers for r in ranks})
        each = str(layers[0]) if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        fullest = max(stages[r].peak_memory_bytes for r in ranks)
        span = f"stage {ranks[0]} lies" if len(ranks) == 1 else f"stages {ranks[0]}-{ranks[-1]} lie"
        devices = len(ranks) * mesh.devices // mesh.pp
        yield (
            f"{span} on {part.name} ({devices} x {part.device.name}), {each} layers each, "
            f"{gib(fullest)} of {gib(part.device.memory_bytes)}"
        )


def _warnings(best: MixedPlan, job: Job) -> tuple[str, ...]:
    if len(set(best.placed.microbatches)) <= 1:
        return ()
    return (
        f"ranks of different kinds run different numbers of microbatches: {job.framework} has to be told so, "
        f"and to weight each rank's loss by its share of the {job.global_batch} samples",
    )


def _alternatives(step_s: float, plans: Sequence[Plan]) -> Iterator[Alternative]:
    for plan in sorted(plans, key=lambda plan: plan.predicted.step_time_s):
        more_s = plan.predicted.step_time_s - step_s
        yield plan.as_alternative(f"on {plan.cluster.topology} alone: slower by {seconds_in_words(more_s)}")


def _infeasible(
    alone: Sequence[Plan | Infeasible | OptionError], cluster: MixedTopology, pins: Mapping[str, int | str]
) -> Infeasible:
    """Nothing fits on all kinds or on any: the kind that comes closest says what is missing."""
    misfits = [found for found in alone if isinstance(found, Infeasible)]
    if not misfits:
        raise next(found for found in alone if isinstance(found, OptionError))
    closest = min(misfits, key=lambda found: found.short_by_bytes or math.inf)
    told = f"no plan fits on all of {cluster.name}, nor on one kind alone: {closest.reason}"
    return replace(closest, reason=told)
