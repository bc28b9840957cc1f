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


def _layout(alternative: Alternative) -> str:
    parts = (
        str(alternative.mesh),
        words.zero(alternative.zero_stage, alternative.shard_group),
        f"{alternative.num_microbatches} x {alternative.micro_batch}",
        words.recompute(alternative.recompute),
    )
    name = f"{alternative.seeded_as}: " if alternative.seeded_as else ""
    return name + ", ".join(parts)
