"""Plans that none beats in time, memory, devices and cost at once: what else there is to choose.

In: a plan, its cluster, a function that plans for a cluster. Out: `Alternative`s, the fastest first. Each is
the fastest plan for a smaller demand, found by planning again, with a certificate of its own:

    memory     devices have `STEP` of what the fullest one of the plan before held (what the framework takes
               and its allocator may leave unused comes off that), and so on until nothing fits or
               `MOST_CAPS` plans were found
    devices    the parts of the cluster that the objective `cost` compares, at full memory

So along memory the front is exact up to plans between two caps, and along devices up to sizes between two
parts; both at once are not asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .objective import PlanOn, cluster_size, part_sizes, plan_if_any
from .plan import Alternative, ClusterSize, Plan
from .topology import Topology

STEP = 0.9
"""Share of the memory in use that the next plan may use: predictions of memory are known to some percent."""
MOST_CAPS = 8
"""By then a device has less than half the memory: other devices would be meant."""
GIB = 2**30


def pareto(plan: Plan, topology: Topology, plan_on: PlanOn) -> tuple[Alternative, ...]:
    """The front; the plan itself is first, unless something smaller beats it."""
    whole = plan if plan.cluster.devices == topology.devices else plan_if_any(topology, plan_on)
    found = [plan, *_smaller(topology, plan_on)]
    if whole is not None:
        found += [whole, *_leaner(whole, topology, plan_on)]
    return tuple(_beside(plan, other) for other in front(found))


def front(plans: Iterable[Plan]) -> list[Plan]:
    """Those that no other is as good as everywhere and better somewhere, the fastest first."""
    distinct = list({demands(plan): plan for plan in reversed(list(plans))}.values())
    kept = [
        plan
        for plan in distinct
        if not any(
            all(a <= b for a, b in zip(demands(other), demands(plan), strict=True))
            for other in distinct
            if other is not plan
        )
    ]
    return sorted(kept, key=demands)


def demands(plan: Plan) -> tuple[float, ...]:
    """What one wants little of: seconds of a step, devices, bytes of the fullest one, device-hours a token.

    Dollars are device-hours times a price that all devices share.
    """
    predicted = plan.predicted
    hours = plan.device_hours_per_million_tokens
    return (predicted.step_time_s, plan.cluster.devices, predicted.peak_memory_bytes, hours)


def _leaner(plan: Plan, topology: Topology, plan_on: PlanOn) -> Iterator[Plan]:
    """The fastest plan under ever lower caps on a device's memory."""
    found: Plan | None = plan
    for _ in range(MOST_CAPS):
        cap = found.predicted.peak_memory_bytes * STEP
        device = replace(topology.device, memory_bytes=cap)
        found = plan_if_any(replace(topology, device=device), plan_on)
        if found is None:
            return
        yield found


def _smaller(topology: Topology, plan_on: PlanOn) -> Iterator[Plan]:
    found = (plan_if_any(part, plan_on) for part in part_sizes(topology))
    return (plan for plan in found if plan is not None)


def _beside(plan: Plan, other: Plan) -> Alternative:
    size = cluster_size(other)
    reason = "the plan" if other is plan else _traded(cluster_size(plan), size)
    return replace(other.as_alternative(reason), size=size, gap=other.search.gap)


def _traded(plan: ClusterSize, other: ClusterSize) -> str:
    """`12.4% slower, 20.1 GiB less a device, 32 of 64 devices, 3.2% cheaper a token`."""
    slower = other.step_time_s / plan.step_time_s - 1
    less = (plan.peak_memory_bytes - other.peak_memory_bytes) / GIB
    cheaper = 1 - other.device_hours_per_million_tokens / plan.device_hours_per_million_tokens
    said = [f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"]
    if less:
        said.append(f"{abs(less):.1f} GiB {'less' if less > 0 else 'more'} a device")
    if other.devices != plan.devices:
        said.append(f"{other.devices:,} of {plan.devices:,} devices")
        said.append(f"{abs(cheaper):.1%} {'cheaper' if cheaper >= 0 else 'dearer'} a token")
    return ", ".join(said)
