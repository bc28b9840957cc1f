"""`explain` and `compare` on a terminal, in the looks of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from ...planner.plan import Infeasible, Plan
from ...planner.problem import pins_in_words
from .. import words
from ..compare import Comparison, compare
from ..explain import Paragraph, explain
from ..why import Pins, why_sentences
from .tables import Heading, literal, number, table
from .tables import words as column
from .verdict import title, verdict

MAX_COLUMNS = 100


def render_explanation(plan: Plan) -> RenderableType:
    """The verdict, then a paragraph an axis, then why."""
    short = verdict(replace(plan, reasons=()))
    parts: list[RenderableType] = [Heading(title(plan)), Padding(short, (0, 0, 1, 0))]
    for paragraph in explain(plan):
        parts += [literal(paragraph.title, "bold cyan"), Padding(_sentences(paragraph), (0, 0, 1, 2))]
    return Constrain(Group(*parts), MAX_COLUMNS)


def _sentences(paragraph: Paragraph) -> RenderableType:
    """An axis is told in one paragraph; reasons and the like stand on lines of their own."""
    if ": " in paragraph.title:
        return literal(" ".join(paragraph.sentences))
    return Text("\n").join(literal(f"- {sentence}") for sentence in paragraph.sentences)


def render_comparison(left: Plan, right: Plan, names: tuple[str, str]) -> RenderableType:
    """Choices that differ, time by part, memory by kind."""
    found = compare(left, right)
    parts: list[RenderableType] = [literal(f"! {warning}", "yellow") for warning in found.warnings]
    parts += [Heading("Choices"), Padding(_choices(found, names), (0, 0, 1, 0))]
    parts += [Heading("Step time, ms"), Padding(_times(found, names), (0, 0, 1, 0))]
    parts += [Heading("Memory of the fullest device, GiB"), Padding(_memory(found, names), (0, 0, 1, 0))]
    parts.append(literal(_verdict(found, names), "bold"))
    return Constrain(Group(*parts), MAX_COLUMNS)


def render_why(plan: Plan, pinned: Plan | Infeasible, pins: Pins) -> RenderableType:
    """The reasons, then the comparison they come from."""
    reasons = why_sentences(plan, pinned, pins)
    parts: list[RenderableType] = [Heading(f"Why not {pins_in_words(pins)}"), literal(reasons[0], "bold")]
    parts += [literal(f"- {reason}") for reason in reasons[1:]]
    if isinstance(pinned, Plan):
        parts += ["", render_comparison(plan, pinned, ("plan", pins_in_words(pins)))]
    return Constrain(Group(*parts), MAX_COLUMNS)


def _choices(found: Comparison, names: tuple[str, str]) -> RenderableType:
    made = table(column("Choice"), column(names[0]), column(names[1]))
    for name, left, right in found.choices:
        if left != right:
            made.add_row(*map(literal, (name, left or "-", right or "-")))
    same = [name for name, left, right in found.choices if left == right]
    return Group(made, literal(f"the same in both: {', '.join(same)}", "dim")) if same else made


def _times(found: Comparison, names: tuple[str, str]) -> Table:
    made = table(column("Part"), *_numbers(names))
    for name, left, right in found.time_s:
        made.add_row(literal(name), *_cells(words.milliseconds, left, right))
    made.add_row("step", *_cells(words.milliseconds, *found.step_time_s), style="bold")
    return made


def _memory(found: Comparison, names: tuple[str, str]) -> Table:
    made = table(column("Kind"), *_numbers(names))
    for name, left, right in found.memory_bytes:
        made.add_row(literal(name), *_cells(words.gib, left, right))
    made.add_row("upper band", *_cells(words.gib, *found.peak_memory_bytes), style="bold")
    return made


def _numbers(names: tuple[str, str]) -> tuple[Column, Column, Column]:
    return (number(names[0]), number(names[1]), number("Difference"))


def _cells(show: Callable[[float], str], left: float, right: float) -> Iterator[Text]:
    """Both values, and the right one less the left one with its sign."""
    difference = show(right - left)
    signed = difference if difference.startswith("-") or right == left else f"+{difference}"
    return map(literal, (show(left), show(right), signed))


def _verdict(found: Comparison, names: tuple[str, str]) -> str:
    if found.warnings:
        return "The two answer different questions: their totals say little about each other."
    first, second = found.step_time_s
    faster, slower = (names, (first, second)) if first <= second else (names[::-1], (second, first))
    saved = slower[1] / slower[0] - 1
    if words.percent(saved) == words.percent(0):
        return "Both take the same time."
    return f"{faster[0]} is faster: {faster[1]} takes {words.percent(saved)} longer."
