"""The README begins with the two commands, holds a report, and points at things that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))


def commands(text: str) -> list[str]:
    """The lines of every fenced `bash` block, comments cut off."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = (line.split(" #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]


def test_it_starts_with_the_two_commands():
    assert commands(README)[:2] == ["make demo", "make test"]


def test_every_make_target_exists():
    named = [line.split()[1] for line in commands(README) if line.startswith("make ")]
    named += re.findall(r"`make ([a-z]+)`", README)
    assert set(named) <= TARGETS


def test_every_command_is_ours():
    assert {line.split()[0] for line in commands(README)} == {"make", "tpplan"}


def test_every_file_it_names_exists():
    paths = re.findall(r"\]\(([^)#:]+)\)", README)
    paths += re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", README)
    paths += [word for line in commands(README) for word in line.split() if word.startswith("examples/")]
    assert len(paths) > 10
    places = [ROOT, ROOT / "planner", ROOT / "tests", ROOT / "docs"]
    missing = [path for path in paths if not any((place / path).exists() for place in places)]
    assert missing == []


def test_it_holds_a_report():
    region = re.search(
        r"<!-- report: begin.*?-->\n```text\n(.*?)\n```\n<!-- report: end -->", README, re.DOTALL
    )
    assert region and len(region[1].splitlines()) > 30
    assert max(len(line) for line in region[1].splitlines()) <= 100


def test_the_rooms_it_lists_are_the_rooms_there_are():
    listed = set(re.findall(r"^\| `([\w]+)/` \|", README, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = {room for room in project["tool"]["setuptools"]["package-dir"].values() if room != "."}
    assert packed <= listed


@pytest.mark.parametrize(
    "record", sorted((ROOT / "docs" / "decisions").glob("0*.md")), ids=lambda path: path.name[:4]
)
def test_a_decision_is_numbered_as_it_is_named_and_short(record: Path):
    text = record.read_text()
    assert text.startswith(f"# {record.name[:4]}: ")
    assert len(text.splitlines()) <= 60


def test_decisions_are_numbered_without_gaps():
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "decisions").glob("0*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_make_check_runs_every_piece_that_pre_commit_runs():
    hooks = re.findall(r"entry: make (\w+)", (ROOT / ".pre-commit-config.yaml").read_text())
    check = re.search(r"^check: (.*)$", MAKEFILE, re.MULTILINE)
    assert check and sorted(hooks) == sorted(check[1].split())


def test_the_constraints_pin_torch():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert any(re.fullmatch(r"torch==\d+\.\d+\.\d+", pin) for pin in pins)
    assert "-c constraints.txt" in MAKEFILE
