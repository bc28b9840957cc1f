"""What `verify` found, as a page: equality first, then the collectives one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from .tables import Heading, literal, number, table, words

if TYPE_CHECKING:
    from ...runtime.fidelity import Row
    from ...runtime.verify import Verdict


def render_verdict(verdict: Verdict) -> Group:
    """The whole page."""
    return Group(*_parts(verdict))


def _parts(verdict: Verdict) -> Iterator[RenderableType]:
    yield Heading(f"{verdict.ranks} ranks against one process, {verdict.width}")
    outcome = "equal" if verdict.equal else "NOT EQUAL"
    yield literal(f"{outcome}: loss {verdict.loss:.7g}, expected {verdict.expected_loss:.7g}")
    yield literal(
        f"largest relative error of a gradient {verdict.gradient_error:.1e} ({verdict.worst_gradient})"
    )
    yield literal(f"largest relative error of a parameter after one step {verdict.step_error:.1e}")
    order = "the same on all ranks" if verdict.same_order else "DIFFERENT between ranks"
    yield literal(f"order of collectives: {order}")
    yield Heading("Collectives of one step, planned and executed on the busiest rank, compared on all")
    yield _collectives(verdict)
    for rule in dict.fromkeys(row.rule for row in verdict.collectives if row.agrees and row.rule):
        yield literal(f"by rule: {rule}")
    for difference in verdict.differences:
        yield literal(f"known difference: {difference}")


def _collectives(verdict: Verdict) -> RenderableType:
    made = table(
        words("what", ratio=1),
        words("collective"),
        words("axis"),
        number("planned"),
        number("ran"),
        words(""),
    )
    for row in verdict.collectives:
        made.add_row(
            literal(row.label),
            literal(row.collective),
            literal(row.axis),
            _amount(row.planned_count, row.planned_bytes),
            _amount(row.executed_count, row.executed_bytes),
            _mark(row),
        )
    return made


def _amount(count: float, nbytes: float) -> Text:
    return literal(f"{count:g} x {nbytes / max(count, 1) / 1e3:.4g} kB" if count else "-")


def _mark(row: Row) -> Text:
    if row.agrees:
        return literal("by rule" if row.rule else "as planned", "green")
    return literal("known", "yellow") if row.announced else literal("differs", "red")
