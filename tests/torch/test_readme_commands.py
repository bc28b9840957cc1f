"""Every `tpplan` command in the README runs as written, and the pasted report is the one it gives."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TPPLAN = Path(sys.executable).with_name("tpplan")


def fenced(language: str) -> list[str]:
    """The contents of all fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


COMMANDS = [
    line.split(" #")[0].strip()
    for block in fenced("bash")
    for line in block.splitlines()
    if line.startswith("tpplan ")
]


def run(command: list[str], folder: Path) -> str:
    """Standard output of a command that must succeed."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that sees the examples but takes what a command writes."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_as_written(command: str, folder: Path):
    words = shlex.split(command)
    assert run([str(TPPLAN), *words[1:]], folder).strip()
    if "-o" in words:
        assert (folder / words[words.index("-o") + 1]).stat().st_size > 0


@pytest.mark.slow
def test_the_program_runs_as_written(folder: Path):
    program = next(block for block in fenced("python") if "import tpplan" in block)
    assert run([sys.executable, "-c", program], folder).strip()


def masked(report: str) -> list[str]:
    """A report's lines without what changes from run to run: how long the search took."""
    return [
        re.sub(r"\d+(\.\d+)? ?(ms|s)\b", "<time>", line).rstrip() for line in report.strip("\n").splitlines()
    ]


@pytest.mark.slow
def test_the_pasted_report_is_current(folder: Path):
    """`make readme` writes it anew."""
    recipe = re.search(r"^demo:.*\n\t@\$\(BIN\)/tpplan (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pasted = re.search(r"<!-- report: begin.*?-->\n```text\n(.*?)\n```\n", README, re.DOTALL)
    assert recipe and pasted
    assert masked(run([str(TPPLAN), *shlex.split(recipe[1])], folder)) == masked(pasted[1])
