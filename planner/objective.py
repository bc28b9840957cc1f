"""Objectives that choose the cluster's size too: the fewest devices, or the cheapest tokens.

In: a function that plans for a cluster, the cluster at its full size, the objective. Out: the plan on
the best size, with what the other sizes would take.

    throughput, latency   the fastest step on all devices: at a fixed batch the two are the same
    memory                the fewest devices on which any plan fits, and the fastest plan there
    cost                  the size at which a token takes the fewest device-hours (dollars, where the
                          cluster has a price: it is the same for all its devices)

Sizes tried are whole nodes (powers of two, and three times those for `memory`), and parts of one node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .errors import OptionError
from .plan import ClusterSize, Infeasible, Plan
from .topology import Topology

PlanOn = Callable[[Topology], Plan | Infeasible]
"""The best plan on a cluster, or why there is none."""


def plan_for(objective: str, topology: Topology, plan_on: PlanOn) -> Plan | Infeasible:
    """The plan that is best for `objective` on this cluster, or a part of it."""
    if objective == "memory":
        return _fewest(topology, plan_on)
    if objective == "cost":
        return _cheapest(topology, plan_on)
    return plan_on(topology)


def smallest_fit(topology: Topology, plan_on: PlanOn, *, whole: Plan) -> Plan:
    """The plan on the fewest devices, taking what fits fewer to fit more. `whole`: the plan on all."""
    sizes, best = [*part_sizes(topology, threes=True), topology], whole
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        if found := plan_if_any(sizes[middle], plan_on):
            high, best = middle, found
        else:
            low = middle + 1
    return best


def part_sizes(topology: Topology, *, threes: bool = False) -> list[Topology]:
    """The same cluster with fewer devices, the smallest first."""
    parts = []
    if len(topology.levels) == 2:
        node, outer = topology.levels
        within = [n for n in range(1, node.size) if node.size % n == 0]
        one = replace(outer, size=1)
        parts += [replace(topology, levels=(replace(node, size=n), one)) for n in within]
    counts = {2**k for k in range(topology.levels[-1].size.bit_length())}
    counts |= {3 * n for n in counts} if threes else set()
    return parts + [topology.with_nodes(n) for n in sorted(counts) if n < topology.levels[-1].size]


def plan_if_any(topology: Topology, plan_on: PlanOn) -> Plan | None:
    """None where nothing fits, or where the user's choices or batch do not divide."""
    try:
        found = plan_on(topology)
    except OptionError:
        return None
    return None if isinstance(found, Infeasible) else found


def _fewest(topology: Topology, plan_on: PlanOn) -> Plan | Infeasible:
    whole = plan_on(topology)
    if isinstance(whole, Infeasible):
        return whole
    fewest = smallest_fit(topology, plan_on, whole=whole)
    devices = fewest.cluster.devices
    reason = f"{devices} of {topology.devices} devices are the fewest that fit (objective: memory)."
    return _with_sizes(fewest, [fewest, whole], reason)


def _cheapest(topology: Topology, plan_on: PlanOn) -> Plan | Infeasible:
    whole = plan_on(topology)
    if isinstance(whole, Infeasible):
        return whole
    tried = [plan_if_any(size, plan_on) for size in part_sizes(topology)]
    plans = [plan for plan in tried if plan] + [whole]
    best = min(plans, key=lambda plan: (plan.device_hours_per_million_tokens, plan.cluster.devices))
    hours = best.device_hours_per_million_tokens
    cost = best.usd_per_million_tokens
    told = f"${cost:.4g}" if cost is not None else f"{hours:.4g} device-hours (the cluster names no price)"
    reason = (
        f"{best.cluster.devices} of {topology.devices} devices make tokens cheapest (objective: cost): "
        f"{told} per million."
    )
    return _with_sizes(best, plans, reason)


def _with_sizes(best: Plan, plans: Sequence[Plan], reason: str) -> Plan:
    sizes = {plan.cluster.devices: cluster_size(plan) for plan in plans}
    ordered = tuple(sizes[devices] for devices in sorted(sizes))
    return replace(best, reasons=(reason, *best.reasons), sizes=ordered)


def cluster_size(plan: Plan) -> ClusterSize:
    """What a plan takes on its cluster."""
    return ClusterSize(
        devices=plan.cluster.devices,
        nodes=plan.cluster.nodes,
        step_time_s=plan.predicted.step_time_s,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
        device_hours_per_million_tokens=plan.device_hours_per_million_tokens,
        usd_per_million_tokens=plan.usd_per_million_tokens,
    )
