"""Every command and program of the README and the pages of docs/ runs as written.

A page is a story: its blocks run in order, in one folder that sees the examples. What a fence says:

- `bash`: commands; one that ends in another exit code says so in a comment, `# exit code 3`;
- `console`: a `$ command` and exactly what it prints;
- `python`, `json`, `yaml` with a title: files that later commands use; `python` without: a program that runs;
- anything else is not run, and must not look like a command.

What torchrun launches is launched by the slow tests; the others check the script, and stand a description of
this machine in for its measurement.

Searches are cut to a second here (`--time-limit`): what a command is is tested, not the plan that it finds.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tpplan import cli

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"docs/adding-a-rule.md": "test_rules_doc.py", "docs/runtime.md": "tests/dist"}
"""Pages whose programs are parts of larger ones, which have tests of their own."""
PAGES = sorted(str(page.relative_to(ROOT)) for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONTINUES = {"docs/tutorial/train.md": "docs/tutorial/own-model.md"}
"""Pages that use the files of another."""
SEARCHES = {"suggest"}
LIMIT_S = "1"
LANGUAGES = {"bash", "console", "python", "py", "json", "yaml", "text", ""}


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall((ROOT / page).read_text())]


def lines(block: Block) -> Iterator[tuple[list[str], int]]:
    """(words, exit code) of each command of a bash block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        command, _, comment = line.partition("  #")
        code = re.search(r"exit code (\d)", comment)
        if command.strip() and not command.startswith("#"):
            yield shlex.split(command, comments=True), int(code[1]) if code else 0


def commands(page: str) -> list[list[str]]:
    return [words for block in blocks(page) if block.language == "bash" for words, _ in lines(block)]


def has_commands(page: str) -> bool:
    return any(block.language in ("bash", "console") or block.title for block in blocks(page))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that sees the examples but takes what a command writes."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each model is traced once for all pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPPLAN_CACHE_DIR", str(tmp_path_factory.mktemp("graphs")))
        yield


@pytest.mark.parametrize("page", [page for page in PAGES if has_commands(page)])
def test_a_page_runs_as_written(page: str, folder: Path, capfd: pytest.CaptureFixture[str]):
    follow(page, folder, capfd, launched=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(w[0] == "torchrun" for w in commands(page))])
def test_a_page_with_launches_runs_as_written(page: str, folder: Path, capfd: pytest.CaptureFixture[str]):
    follow(page, folder, capfd, launched=True)


def follow(page: str, folder: Path, capfd: pytest.CaptureFixture[str], *, launched: bool) -> None:
    """Do what a page says, block by block."""
    for block in blocks(CONTINUES.get(page, page)):
        if block.title:
            (folder / block.title).write_text(block.text)
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "bash":
            for words, code in lines(block):
                assert run(words, launched=launched) == code, (words, capfd.readouterr().err)
        elif block.language == "console":
            says_as_written(block, capfd)


def run(words: list[str], *, launched: bool) -> int:
    """Run a command, in this process where it is tpplan's; its exit code."""
    match words:
        case ["tpplan", *arguments]:
            return cli.main([*arguments, *limited(arguments)])
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
            return 0
        case ["torchrun", *arguments] if launched:
            launch = [sys.executable, "-m", "torch.distributed.run", *arguments]
            return subprocess.run([*launch, *budget(arguments)], timeout=300).returncode
        case ["torchrun", *_, "tpplan", "profile", "--quick", "-o", file]:
            return cli.main(["topology", "detect", "-o", file])  # a topology of this machine, unmeasured
        case ["torchrun", "--nproc-per-node", _, script]:
            compile(Path(script).read_text(), script, "exec")
            return 0
        case ["python", *arguments]:
            return subprocess.run([sys.executable, *arguments], cwd=ROOT, timeout=300).returncode
    raise AssertionError(f"no way to run {words}")


def limited(arguments: list[str]) -> list[str]:
    cut = arguments[0] in SEARCHES and "--time-limit" not in arguments
    return ["--time-limit", LIMIT_S] if cut else ["--no-compare"] if arguments[0] == "estimate" else []


def budget(arguments: list[str]) -> list[str]:
    """A measurement of a few seconds instead of minutes."""
    return ["--budget", "20"] if "profile" in arguments else []


def says_as_written(block: Block, capfd: pytest.CaptureFixture[str]) -> None:
    first, _, told = block.text.partition("\n")
    assert first.startswith("$ ")
    capfd.readouterr()
    run(shlex.split(first[2:]), launched=False)
    assert "".join(capfd.readouterr()) == told


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_programs_run_as_written(page: str, folder: Path):
    programs = [block.text for block in blocks(page) if block.language == "python" and not block.title]
    if programs:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        ran = subprocess.run(
            [sys.executable, "-c", "\n".join(programs)], env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES)
def test_whatever_looks_like_a_command_is_one(page: str):
    for block in blocks(page):
        assert block.language in LANGUAGES, block.language
        if block.language in ("text", ""):
            assert not re.search(r"^(\$ |torchrun |make |pip )", block.text, re.MULTILINE), block.text
