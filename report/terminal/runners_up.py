"""The plans that came after, and why each lost."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from ...planner.plan import Alternative, Plan
from .. import words
from ..explain import sizes
from .tables import literal, number, table
from .tables import words as column


def runners_up(plan: Plan) -> RenderableType | None:
    """One row an alternative, best first."""
    if not plan.alternatives:
        return None
    layout, why = column("Plan", ratio=5), column("Why it lost", ratio=6)
    made = table(layout, number("Step"), number("Slower"), number("GiB"), why, expand=True)
    for alternative in plan.alternatives:
        slower = alternative.step_time_s / plan.predicted.step_time_s - 1
        made.add_row(
            literal(_layout(alternative)),
            words.duration(alternative.step_time_s),
            f"{slower * 100:+.1f} %",
            words.gib(alternative.peak_memory_bytes),
            literal(alternative.reason),
        )
    return made


def what_would_change(plan: Plan) -> RenderableType | None:
    """Other sizes of the cluster that were compared, and under which conditions the answer is another."""
    told = [*sizes(plan), *(change.sentence for change in plan.changes)]
    return Text("\n").join(literal(f"- {sentence}") for sentence in told) if told else None


def what_else(plan: Plan) -> RenderableType | None:
    """Plans that none beats in time, memory, devices and cost at once, the fastest first."""
    asked = [(found, found.size) for found in plan.pareto if found.size]
    if not asked:
        return None
    layout, why = column("Plan", ratio=5), column("Against the plan", ratio=5)
    headings = ("Step", "Devices", "GiB", "$/Mtok" if _priced(plan) else "h/Mtok")
    made = table(layout, *(number(heading) for heading in headings), why, expand=True)
    for found, size in asked:
        cost = size.usd_per_million_tokens or size.device_hours_per_million_tokens
        made.add_row(
            literal(_layout(found)),
            words.duration(size.step_time_s),
            f"{size.devices:,}",
            words.gib(size.peak_memory_bytes),
            f"{cost:.3g}",
            literal(found.reason),
        )
    return made


def _priced(plan: Plan) -> bool:
    return plan.cluster.price_per_device_hour is not None


def _layout(alternative: Alternative) -> str:
    parts = (
        str(alternative.mesh),
        words.zero(alternative.zero_stage, alternative.shard_group),
        f"{alternative.num_microbatches} x {alternative.micro_batch}",
        words.recompute(alternative.recompute),
    )
    name = f"{alternative.seeded_as}: " if alternative.seeded_as else ""
    return name + ", ".join(parts)
