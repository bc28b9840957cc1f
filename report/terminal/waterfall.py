"""Where the step's time goes: parts end to end, adding up to the step time."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column

from ...planner.plan import Plan
from .. import words
from .bars import SpanBar
from .tables import ORIGIN_STYLES, literal, number, origin, table
from .tables import words as column

BAR_CELLS = 36
SUM_TOLERANCE = 1e-6
"""Relative difference between the parts' sum and the step time that rounding explains."""


def waterfall(plan: Plan) -> RenderableType:
    """One bar a part, each starting where the last one ended, and the total."""
    step_s = plan.predicted.step_time_s
    made = table(column("Part"), Column(""), number("ms"), number("Share"), column("Origin"))
    begin_s = 0.0
    for part in plan.predicted.waterfall:
        end_s = begin_s + part.seconds
        style = ORIGIN_STYLES[part.origin]
        bar = SpanBar(begin=begin_s, end=end_s, total=step_s, width=BAR_CELLS, style=style)
        made.add_row(literal(part.label), bar, *_numbers(part.seconds, step_s), origin(part.origin))
        begin_s = end_s
    if abs(step_s - begin_s) > SUM_TOLERANCE * abs(step_s):
        made.add_row(literal("not attributed", "red"), "", *_numbers(step_s - begin_s, step_s), "")
    total = SpanBar(begin=0.0, end=step_s, total=step_s, width=BAR_CELLS, style="bold")
    made.add_row(
        "token" if plan.serving else "step",
        total,
        *_numbers(step_s, step_s),
        origin(plan.predicted.origin),
        style="bold",
    )
    return Group(made, literal(_summary(plan), "dim"))


def _numbers(seconds: float, step_s: float) -> tuple[str, str]:
    return words.milliseconds(seconds), words.percent(seconds / step_s) if step_s else "unknown"


def _summary(plan: Plan) -> str:
    predicted = plan.predicted
    low, high = map(words.duration, predicted.step_time_interval_s)
    if plan.serving:
        return f"between {low} and {high}"
    return (
        f"between {low} and {high}; {words.duration(predicted.exposed_communication_s)} of communication "
        f"is exposed; the pipeline bubble is {words.percent(predicted.bubble_fraction)}"
    )
