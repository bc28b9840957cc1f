"""Bars that render themselves: blocks where the terminal can show them, plain ASCII elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

EIGHTHS = " ▏▎▍▌▋▊▉█"
"""Left-aligned blocks of 0 to 8 eighths of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanBar:
    """A bar from `begin` to `end` on a scale of `total`, as in a waterfall."""

    begin: float
    end: float
    total: float
    width: int
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width, options.max_width)
        begin, end = (_cells(value, self.total, width) for value in (self.begin, self.end))
        filled = _ascii_span(begin, end) if options.ascii_only else _block_span(begin, end)
        left = min(round(begin) if options.ascii_only else int(begin), width - len(filled))
        yield Segment(" " * left)
        yield Segment(filled, console.get_style(self.style))
        yield Segment(" " * (width - left - len(filled)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(8, self.width), self.width)


def _cells(value: float, total: float, width: int) -> float:
    return max(0.0, min(float(width), value / total * width)) if total > 0 else 0.0


def _ascii_span(begin: float, end: float) -> str:
    return "#" * max(1, round(end) - round(begin))


def _block_span(begin: float, end: float) -> str:
    """Blocks from cell `begin` to `end`; the end is exact to an eighth, and nothing vanishes."""
    eighths = max(1, round((end - int(begin)) * 8))
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a stacked bar: its letter, its size on the bar's scale, its style."""

    letter: str
    size: float
    style: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBar:
    """Pieces laid end to end on a scale of `total`, with a mark at `limit`.

    Pieces show as letters, coloured where there is colour, so that the bar reads everywhere.
    """

    pieces: Sequence[Piece]
    total: float
    limit: float
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width, options.max_width) - 1
        used = 0
        mark = round(_cells(self.limit, self.total, width))
        for letter, cells, style in self._runs(width):
            for text, shown in _marked(letter * cells, used, mark):
                yield Segment(text, console.get_style("bold red" if shown else style))
            used += cells
        for text, shown in _marked(
            ("." if options.ascii_only else "·") * (width - used), used, mark, last=True
        ):
            yield Segment(text, console.get_style("bold red" if shown else "dim"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(16, self.width), self.width)

    def _runs(self, width: int) -> Iterator[tuple[str, int, str]]:
        """(letter, cells, style); rounding the running sum keeps the whole bar's length true."""
        reached, used = 0.0, 0
        for piece in self.pieces:
            reached += piece.size
            cells = round(_cells(reached, self.total, width)) - used
            used += cells
            yield piece.letter, cells, piece.style


def _marked(text: str, begin: int, mark: int, *, last: bool = False) -> Iterator[tuple[str, bool]]:
    """`text`, which begins at cell `begin`, with the limit's bar inserted before cell `mark`."""
    cut = mark - begin
    if 0 <= cut < len(text) or (last and cut == len(text)):
        yield from ((text[:cut], False), ("|", True), (text[cut:], False))
    else:
        yield text, False
