"""What was searched, how good the plan is proven to be, and what the prediction assumes."""

from __future__ import annotations

from rich.console import RenderableType

from ...planner.cost import Origin
from ...planner.plan import Plan
from .. import words
from .tables import grid, literal

SECONDS_PER_HOUR = 3600
HASH_SHOWN = 12
"""Characters of a hash that a reader compares."""


def certificate(plan: Plan) -> RenderableType:
    """Search, bound, solver; then the job, the framework profile and how far to trust the numbers."""
    rows = {
        "Searched": _searched(plan),
        "Bound": _bound(plan),
        "Solver": _solver(plan),
        "Assumed": _assumed(plan),
        "Trust": _trust(plan),
        "Price": _price(plan),
        "For": _identity(plan),
    }
    return grid((word, literal(meaning)) for word, meaning in rows.items() if meaning)


def _searched(plan: Plan) -> str:
    search = plan.search
    bounds = ", ".join(f"{bound} {number:,}" for bound, number in search.pruned_by)
    by = f" ({bounds})" if bounds else ""
    left = search.meshes_considered - search.meshes_pruned
    considered = words.plural(search.meshes_considered, "mesh", "meshes")
    return f"{considered}; {search.meshes_pruned:,} ruled out by bounds{by}; {left:,} solved"


def _bound(plan: Plan) -> str:
    search = plan.search
    return (
        f"no plan of this space can be predicted below {words.duration(search.lower_bound_s)}: "
        f"this one is within {search.gap * 100:.2f} %"
    )


def _solver(plan: Plan) -> str:
    ended = "search complete" if plan.search.complete else "stopped early: a better plan may exist"
    return f"{plan.search.solver}; {ended}"


def _assumed(plan: Plan) -> str:
    job = plan.job
    tokens = f" of {job.seq_len:,} tokens" if plan.model.tokens_per_sample > 1 else ""
    return (
        f"{job.mode} for {job.objective}, global batch {job.global_batch:,}{tokens}, {job.dtype}, "
        f"optimizer {job.optimizer}, as the framework profile {job.framework!r} runs it"
        + "".join(f"; {text}" for text in plan.assumptions)
    )


def _trust(plan: Plan) -> str:
    """Share of the step time by origin."""
    seconds = {origin: 0.0 for origin in Origin}
    for part in plan.predicted.waterfall:
        seconds[part.origin] += part.seconds
    total_s = sum(seconds.values())
    told = ", ".join(f"{words.percent(s / total_s)} {origin}" for origin, s in seconds.items() if s)
    return f"step time is {told}" if told else "no part of the step time has an origin"


def _price(plan: Plan) -> str:
    """What a step costs in money; empty where the cluster names no price."""
    price = plan.cluster.price_per_device_hour
    if price is None:
        return ""
    device_hours = plan.cluster.devices * plan.predicted.step_time_s / SECONDS_PER_HOUR
    return f"{words.digits(price * device_hours)} a step, at {price:,.2f} a device-hour"


def _identity(plan: Plan) -> str:
    graph, topology = plan.model.graph_hash[:HASH_SHOWN], plan.cluster.topology_hash[:HASH_SHOWN]
    return f"model graph {graph}, topology {topology}, by tpplan {plan.tpplan_version}"
