"""docs/models.md is what `python -m benchmarks.models` writes, but for what varies from run to run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .models import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
SAMPLE = "MLP"
STABLE = ("family", "ops", "blocks", "parameters", "forward FLOPs a sample", "under a rule")
"""Columns that are the same in every run."""


def rows(text: str) -> dict[str, dict[str, str]]:
    """The table's rows by family, each by column."""
    lines = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: dict(zip(lines[0], cells, strict=True)) for cells in lines[1:]}


def test_every_family_is_listed_and_covered():
    table = rows(PAGE.read_text())
    assert list(table) == list(FAMILIES)
    for name, row in table.items():
        share = float(row["under a rule"].rstrip("%"))
        assert share >= (100.0 if FAMILIES[name].decoder_only else 99.5)


def test_the_page_is_fresh():
    command = (sys.executable, "-m", "benchmarks.models", "--only", SAMPLE)
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    old, new = PAGE.read_text(), written
    assert old.partition("| family")[0] == new.partition("| family")[0]
    ours, theirs = rows(old)[SAMPLE], rows(new)[SAMPLE]
    assert list(ours) == list(theirs)
    assert {column: ours[column] for column in STABLE} == {column: theirs[column] for column in STABLE}
