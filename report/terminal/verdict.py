"""The verdict in three lines, and the rest of the reasons."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from ...planner.plan import Infeasible, Plan
from .. import words
from .serving import serving_verdict
from .tables import grid, literal

OTHER_FIXES = 2
"""Fixes listed after the nearest one."""


def title(plan: Plan) -> str:
    """What is planned, and for which hardware."""
    model, cluster = plan.model, plan.cluster
    hardware = f"{cluster.devices:,} x {cluster.device} ({cluster.topology})"
    return f"{model.name}, {words.count(model.parameters)} parameters, on {hardware}"


def verdict(plan: Plan) -> RenderableType:
    """Mesh and schedule; time and memory; the first reason."""
    if plan.serving:
        return serving_verdict(plan, plan.serving)
    rows = [("Plan", _layout(plan)), ("Cost", _cost(plan))]
    return grid([*rows, *(("Why", literal(reason)) for reason in plan.reasons[:1])])


def more_reasons(plan: Plan) -> RenderableType | None:
    """The reasons after the first."""
    return (
        Text("\n").join(literal(f"- {reason}") for reason in plan.reasons[1:]) if plan.reasons[1:] else None
    )


def infeasible_verdict(infeasible: Infeasible) -> RenderableType:
    """Why nothing fits, by how much, and the nearest change that would."""
    sizes = " x ".join(f"{axis}{size}" for axis, size in infeasible.closest.items() if size > 1)
    rows = [("Why", literal(infeasible.reason))]
    if infeasible.short_by_bytes > 0:
        rows.append(("Short by", literal(f"{words.gib(infeasible.short_by_bytes)} GiB a device", "bold red")))
    if sizes:
        rows.append(("Closest", literal(sizes)))
    nearest, *others = infeasible.fixes or (infeasible.nearest_fix,)
    rows.append(("Nearest fix", literal(nearest, "bold")))
    return grid([*rows, *(("Or", literal(fix)) for fix in others[:OTHER_FIXES])])


def _layout(plan: Plan) -> Text:
    parts = [
        words.zero(plan.zero_stage, plan.shard_group),
        words.batches(plan.micro_batch, plan.num_microbatches),
        words.recompute(plan.recompute),
    ]
    if plan.mesh.pp > 1:
        parts.insert(0, words.schedule(plan.schedule, plan.virtual_stages))
    if plan.sequence_parallel:
        parts.append("sequence parallel")
    return literal(plan.mesh, "bold cyan").append(f", {', '.join(parts)}", "default")


def _cost(plan: Plan) -> Text:
    predicted = plan.predicted
    low, high = predicted.step_time_interval_s
    unit = "tokens" if plan.model.tokens_per_sample > 1 else "samples"
    return literal(words.duration(predicted.step_time_s), "bold cyan").append(
        f" a step [{words.duration(low)} to {words.duration(high)}], "
        f"{words.digits(predicted.tokens_per_s_per_device)} {unit}/s/device, "
        f"{words.percent(predicted.model_flops_utilization)} MFU, "
        f"{words.gib(predicted.peak_memory_bytes)} of {words.gib(predicted.device_memory_bytes)} GiB",
        "default",
    )
