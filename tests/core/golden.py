"""Reports of the sample plans as text, and the files that hold what they should be.

`make golden` writes the files anew; look at their diff before you commit it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console
from tpplan.planner.plan import Plan
from tpplan.planner.timeline import plan_timeline
from tpplan.report.html import render
from tpplan.report.terminal import print_report

from .sample_plan import ALL_PLANS

FOLDER = Path(__file__).parent / "golden"
WIDTH = 100
BLOCKS = {
    "p",
    "div",
    "li",
    "tr",
    "h1",
    "h2",
    "h3",
    "section",
    "summary",
    "figcaption",
    "title",
    "dt",
    "dd",
    "pre",
}
SILENT = {"style", "script"}


def terminal(plan: Plan) -> str:
    """The terminal report at a fixed width, without colour."""
    file = io.StringIO()
    print_report(plan, Console(width=WIDTH, file=file, force_terminal=False))
    return file.getvalue()


class _Words(HTMLParser):
    """The words of a page, a line for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in SILENT
        self.text += "\n" if tag in BLOCKS else " " if tag in ("td", "th", "span", "i") else ""
        self.text += "".join(f"[{value}] " for name, value in attrs if name == "title" and tag == "i")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in SILENT

    def handle_data(self, data: str) -> None:
        self.text += "" if self._silent else data


def page(plan: Plan) -> str:
    """The words of the HTML page, in reading order."""
    words = _Words()
    words.feed(render(plan, timeline=plan_timeline(plan)))
    lines = (re.sub(r"\s+", " ", line).strip() for line in words.text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


KINDS: dict[str, Callable[[Plan], str]] = {"terminal": terminal, "page": page}


def path(name: str, kind: str) -> Path:
    """The file of one plan's report."""
    return FOLDER / f"{name}.{kind}.txt"


if __name__ == "__main__":
    for name, make in ALL_PLANS.items():
        for kind, report in KINDS.items():
            path(name, kind).write_text(report(make()))
