"""What would change the answer: slower links between nodes, more memory, fewer devices.

In: a plan, its cluster, a function that plans for a cluster. Out: `Change`s, each with the value at
which it happens and a sentence. Every one is found by planning again, at most `BANDWIDTH_TRIES` +
`BISECTIONS` times for the links, once for memory and a few times for the smallest cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .objective import PlanOn, smallest_fit
from .plan import Change, Infeasible, Plan
from .topology import Level, Topology

BANDWIDTH_TRIES = 6
"""Halvings of the bandwidth: beyond a factor of 64 another kind of network would be meant."""
BISECTIONS = 3
"""After them the threshold is known to 2 ** (1 / 8), 9%: bandwidths are not known better."""
MORE_BYTES = 8 * 2**30
GIB, GIGA = 2**30, 1e9
WORTH_TELLING = 1e-3
"""A saving below this share of the step is called none."""


def sensitivity(plan: Plan, topology: Topology, plan_on: PlanOn) -> tuple[Change, ...]:
    """All that was asked, most telling first."""
    return (
        *_slower_links(plan, topology, plan_on),
        _more_memory(plan, topology, plan_on),
        _fewer_devices(plan, topology, plan_on),
    )


def choices(plan: Plan) -> tuple[object, ...]:
    """What makes two plans the same answer; stages and recomputation may shift."""
    virtual = plan.virtual_stages
    return (plan.mesh, plan.zero_stage, plan.shard_group, plan.micro_batch, plan.schedule, virtual)


# --------------------------------------------------------------------------- links


def _slower_links(plan: Plan, topology: Topology, plan_on: PlanOn) -> Iterator[Change]:
    """The share of the outermost level's bandwidth below which another plan is better."""
    level = topology.levels[-1]
    if len(topology.levels) < 2 or level.size == 1:
        return
    kept, changed, other = 1.0, None, None
    for _ in range(BANDWIDTH_TRIES):
        found = plan_on(slower(topology, kept / 2))
        if isinstance(found, Infeasible) or choices(found) != choices(plan):
            changed, other = kept / 2, found
            break
        kept /= 2
    if changed is None:
        told = f"The plan stays the same down to {_rate(level, kept)} between nodes (now {_rate(level, 1)})."
        yield Change(what="bandwidth", value=level.bytes_per_s * kept, sentence=told)
        return
    for _ in range(BISECTIONS):
        middle = (kept * changed) ** 0.5
        found = plan_on(slower(topology, middle))
        if isinstance(found, Infeasible) or choices(found) != choices(plan):
            changed, other = middle, found
        else:
            kept = middle
    told = (
        f"The plan changes if the bandwidth between nodes falls under {_rate(level, kept)} a device "
        f"(now {_rate(level, 1)}){_then(plan, other)}."
    )
    yield Change(what="bandwidth", value=level.bytes_per_s * kept, sentence=told)


def slower(topology: Topology, share: float) -> Topology:
    """The cluster with that share of its outermost level's bandwidth; latencies stay."""
    level = topology.levels[-1]
    curves = tuple(
        replace(curve, points=tuple((nbytes, seconds / share) for nbytes, seconds in curve.points))
        for curve in level.curves
    )
    outer = replace(level, bytes_per_s=level.bytes_per_s * share, curves=curves)
    return replace(topology, levels=(*topology.levels[:-1], outer))


def _rate(level: Level, share: float) -> str:
    return f"{level.bytes_per_s * share / GIGA:.3g} GB/s"


def _then(plan: Plan, other: Plan | Infeasible | None) -> str:
    if not isinstance(other, Plan):
        return ""
    virtual = f" with {other.virtual_stages} virtual stages" if other.virtual_stages > 1 else ""
    schedule = f", {other.schedule}{virtual}" if other.mesh.pp > 1 else ""
    group = f" in groups of {other.shard_group}" if other.shard_group else ""
    sharded = f"ZeRO-{other.zero_stage}{group}"
    return f": then {other.mesh}, {sharded}, microbatch {other.micro_batch}{schedule} is better"


# --------------------------------------------------------------------------- memory and devices


def _more_memory(plan: Plan, topology: Topology, plan_on: PlanOn) -> Change:
    device = replace(topology.device, memory_bytes=topology.device.memory_bytes + MORE_BYTES)
    found = plan_on(replace(topology, device=device))
    before = plan.predicted.step_time_s
    saved = 0.0 if isinstance(found, Infeasible) else 1 - found.predicted.step_time_s / before
    more = f"{MORE_BYTES // GIB} GiB more per device"
    told = (
        f"{more} would save {saved:.1%} of the step."
        if saved > WORTH_TELLING
        else f"{more} would save nothing."
    )
    return Change(what="memory", value=saved, sentence=told)


def _fewer_devices(plan: Plan, topology: Topology, plan_on: PlanOn) -> Change:
    fewest = smallest_fit(topology, plan_on, whole=plan)
    devices, step = fewest.cluster.devices, fewest.predicted.step_time_s
    if devices == topology.devices:
        told = f"No fewer devices than these {devices} were found to fit."
    else:
        slowdown = step / plan.predicted.step_time_s
        told = f"The smallest cluster found to fit: {devices} devices, {slowdown:.3g} times as long a step."
    return Change(what="devices", value=devices, sentence=told)
