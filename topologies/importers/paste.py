"""Text that people paste, cleaned, in tokens that remember where they stood.

In: text with colour codes (whole, or with the escape character lost), quote marks, table bars, CRLF,
invisible characters. Out: lines of `Token`s with the line and column of the paste as it was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

ESCAPES = re.compile(
    r"(?:\x1b|\^\[|\u241b)\[[0-9;?]*[A-Za-z]"  # a colour or cursor code, the escape written or not
    r"|\[[0-9;]*[mK](?=\s|[A-Z0-9]|\x1b|\[|$)"  # the same after a terminal swallowed its escape
    r"|[\x00-\x08\x0e-\x1f\x7f\u200b-\u200f\u2060\ufeff]"  # what cannot be seen
)
BARS = re.compile(r"[|\u2502`]")
QUOTES = re.compile(r"^[>\s]*>")


@dataclass(frozen=True, slots=True)
class Token:
    """One word of a paste, and where its first character stood (both from 1)."""

    text: str
    line: int
    column: int


def tokens(text: str) -> Iterator[list[Token]]:
    """The words of each line that has any."""
    for number, raw in enumerate(text.splitlines(), start=1):
        found = _words(raw, number)
        if found:
            yield found


def plain(text: str) -> str:
    """The text without colour codes, invisible characters, quote marks and table bars."""
    return "\n".join(ESCAPES.sub("", _unquoted(line)) for line in text.splitlines())


def _words(raw: str, number: int) -> list[Token]:
    """Codes are cut out, so that a word with a code inside stays one word; bars become blanks."""
    blank = _unquoted(raw)
    columns: list[int] = []
    kept: list[str] = []
    last = 0
    for match in ESCAPES.finditer(blank):
        kept.append(blank[last : match.start()])
        columns.extend(range(last, match.start()))
        last = match.end()
    kept.append(blank[last:])
    columns.extend(range(last, len(blank)))
    clean = "".join(kept)
    return [Token(m[0], number, columns[m.start()] + 1) for m in re.finditer(r"\S+", clean)]


def _unquoted(line: str) -> str:
    """Quote marks and bars as blanks, so that columns stay where they were."""
    return QUOTES.sub(lambda match: " " * len(match[0]), BARS.sub(" ", line))
