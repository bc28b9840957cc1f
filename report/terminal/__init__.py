"""The report on a terminal: `render` makes it, `print_report` prints it, one section a file.

In: a `Plan` (or `Infeasible`). Out: a rich renderable that fits 100 columns and needs neither
colour nor Unicode: consoles without them get plain ASCII.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import TextIOWrapper
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.text import Text

from ...planner.plan import Infeasible, Plan
from .certificate import certificate
from .communication import top_communications
from .memory import memory_bars
from .ranks import rank_table
from .runners_up import runners_up, what_else, what_would_change
from .serving import serving_certificate, slower_servers
from .splits import split_table
from .tables import Heading, literal
from .verdict import infeasible_verdict, more_reasons, title, verdict
from .waterfall import waterfall

MAX_COLUMNS = 100

SECTIONS: tuple[tuple[str, Callable[[Plan], RenderableType | None]], ...] = (
    ("More reasons", more_reasons),
    ("Mesh and ranks", rank_table),
    ("Splits by block", split_table),
    ("Step time", waterfall),
    ("Memory by stage", memory_bars),
    ("Communication in a step", top_communications),
    ("Runners-up", runners_up),
    ("What else there is to choose", what_else),
    ("What would change the plan", what_would_change),
    ("Certificate and assumptions", certificate),
)


SERVING_SECTIONS: tuple[tuple[str, Callable[[Plan], RenderableType | None]], ...] = (
    ("More reasons", more_reasons),
    ("Mesh and ranks", rank_table),
    ("Splits by block", split_table),
    ("Time between two tokens", waterfall),
    ("Memory by stage", memory_bars),
    ("Communication for a token", top_communications),
    ("Runners-up", slower_servers),
    ("What would change the plan", what_would_change),
    ("Assumptions", serving_certificate),
)
"""What a plan for serving tells of itself."""


def render(plan: Plan, *, width: int | None = None) -> RenderableType:
    """The whole report, at most `width` (by default 100) columns wide."""
    return Constrain(Group(*_sections(plan)), width or MAX_COLUMNS)


def render_infeasible(infeasible: Infeasible, *, width: int | None = None) -> RenderableType:
    """The answer that nothing fits: why, by how much, and the nearest change that would."""
    return Constrain(Group(*_section("No plan fits", infeasible_verdict(infeasible))), width or MAX_COLUMNS)


def print_report(plan: Plan, console: Console) -> None:
    """Print the report."""
    _print(render(plan), console)


def print_infeasible(infeasible: Infeasible, console: Console) -> None:
    """Print the answer that nothing fits."""
    _print(render_infeasible(infeasible), console)


def _print(report: RenderableType, console: Console) -> None:
    """Print; in a pipe or file, without the blanks that pad lines to the full width."""
    if console.is_terminal:
        console.print(report)
        return
    with console.capture() as captured:
        console.print(report)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")


def open_console(file: TextIO) -> Console:
    """A console on `file` for reports: 100 columns when piped, else the terminal's (100 at most).

    Characters that the file's encoding lacks are replaced, never an error.
    """
    if isinstance(file, TextIOWrapper):
        file.reconfigure(errors="replace")
    natural = Console(file=file, highlight=False)
    width = min(natural.width, MAX_COLUMNS) if natural.is_terminal else MAX_COLUMNS
    return Console(file=file, highlight=False, width=width)


def _sections(plan: Plan) -> Iterator[RenderableType]:
    yield from _section(title(plan), verdict(plan))
    for name, make in SERVING_SECTIONS if plan.serving else SECTIONS:
        body = make(plan)
        if body is not None:
            yield from _section(name, body)
    if plan.warnings:
        notes = Text("\n").join(literal(f"! {warning}", "yellow") for warning in plan.warnings)
        yield from _section("Warnings", notes)


def _section(name: str, body: RenderableType) -> Iterator[RenderableType]:
    """A titled line, the body, a blank line."""
    yield Heading(name)
    yield Padding(body, (0, 0, 1, 0))
