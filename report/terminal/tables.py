"""The looks that all sections share: text taken literally, plain tables, word and value grids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

# Colours of the origin tags, here and in the bars.
ORIGIN_STYLES = {"measured": "green", "interpolated": "yellow", "modelled": "magenta"}


SHORTEST_LINE = 3
"""Cells below which a heading has no line."""


def literal(value: object, style: str = "") -> Text:
    """`value` as it is: brackets are no markup, and control characters cannot reach the terminal."""
    return Text("".join(c if c.isprintable() else "?" for c in str(value)), style=style, overflow="fold")


@dataclass(frozen=True, slots=True)
class Heading:
    """A section's title with a line to the right edge; a title that is too long folds instead."""

    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = literal(self.title, "bold")
        room = options.max_width - text.cell_len
        yield Rule(text, align="left", style="dim") if room >= SHORTEST_LINE else text


def number(header: str) -> Column:
    """A right-aligned column; on a narrow screen it folds, for a cut number is a wrong one."""
    return Column(header, justify="right", overflow="fold", header_style="bold")


def words(header: str, *, ratio: int | None = None, min_width: int | None = None) -> Column:
    """A left-aligned column that folds its text."""
    return Column(header, overflow="fold", ratio=ratio, min_width=min_width, header_style="bold")


def table(*columns: Column, expand: bool = False, header: bool = True) -> Table:
    """A table without lines: a bold header, one blank between columns."""
    return Table(*columns, box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=expand, show_header=header)


def grid(rows: Iterable[tuple[str, Text]]) -> Table:
    """Bold words at the left, what they mean at the right."""
    made = Table.grid(Column(style="bold"), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for word, meaning in rows:
        made.add_row(word, meaning)
    return made


def origin(value: str, *, short: bool = False) -> Text:
    """An origin tag in its colour; `short` is for narrow tables."""
    return literal("interp." if short and value == "interpolated" else value, ORIGIN_STYLES[value])
