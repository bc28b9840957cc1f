"""The collectives that cost the step most, each with what it moves and what of it shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...planner.cost import Communication
from ...planner.plan import Plan
from .. import words
from .tables import literal, number, origin, table
from .tables import words as column

ROWS_SHOWN = 10
SMALLEST_SHARE = 1e-3
"""Collectives that take less of the step than this are only summed."""


def top_communications(plan: Plan) -> RenderableType | None:
    """The most exposed collectives first (then the longest), and the sum of the others."""
    if not plan.communications:
        return None
    ordered = sorted(plan.communications, key=_weight, reverse=True)
    shown = [
        comm for comm in ordered[:ROWS_SHOWN] if _total_s(comm) >= SMALLEST_SHARE * plan.predicted.step_time_s
    ]
    made = _empty_table()
    for comm in shown:
        made.add_row(*_names(comm), words.size(comm.bytes), _times(comm), *_sums([comm], plan), _origin(comm))
    if rest := ordered[len(shown) :]:
        made.add_row(
            f"{len(rest)} {'more' if shown else 'small ones'}", "", "", "", "", *_sums(rest, plan), ""
        )
    made.add_row("all", "", "", "", "", *_sums(ordered, plan), "", style="bold")
    return made


def _empty_table() -> Table:
    names = [column(header) for header in ("For", "Collective", "Over")]
    numbers = [number(header) for header in ("Size", "Times", "ms", "Exposed", "Share")]
    return table(*names, *numbers, column("Origin"))


def _names(comm: Communication) -> Iterator[Text]:
    return map(literal, (comm.label, comm.collective, f"{comm.axis} {comm.group_size}, {comm.level}"))


def _origin(comm: Communication) -> Text:
    return origin(comm.origin, short=True)


def _total_s(comm: Communication) -> float:
    return comm.seconds * comm.count


def _weight(comm: Communication) -> tuple[float, float]:
    return comm.exposed_s * comm.count, _total_s(comm)


def _times(comm: Communication) -> str:
    return f"{comm.count:,.0f}" if comm.count == round(comm.count) else words.digits(comm.count)


def _sums(comms: Sequence[Communication], plan: Plan) -> tuple[str, str, str]:
    """Total and exposed ms a step, and the exposed share of the step."""
    exposed_s = sum(comm.exposed_s * comm.count for comm in comms)
    share = exposed_s / plan.predicted.step_time_s
    return words.milliseconds(sum(map(_total_s, comms))), words.milliseconds(exposed_s), words.percent(share)
