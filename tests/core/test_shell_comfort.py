"""What makes the command pleasant: completion, examples in every help, JSON, colours that can be off."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
import typer
from tpplan import cli, save_plan
from tpplan.cli import complete
from tpplan.cli.app import app

from .sample_plan import llama3_8b

COLOUR = re.compile(r"\x1b\[(\d;)?(3|9)\d")
WITHOUT_JSON = {("run",)}
"""Commands that become another program, whose output is its own."""


def commands(
    group: typer.Typer = app, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """(path, command) for every command."""
    for info in group.registered_commands:
        yield (*path, info.name or str(getattr(info.callback, "__name__", ""))), info
    for info in group.registered_groups:
        assert info.typer_instance
        yield from commands(info.typer_instance, (*path, info.name) if info.name else path)


COMMANDS = dict(commands())


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_has_an_example_of_itself(path: tuple[str, ...]):
    examples = COMMANDS[path].epilog or ""  # pyright: ignore[reportAttributeAccessIssue]
    assert re.search(rf"^(Example:|Examples:\n\n).*\btpplan {' '.join(path)} ", examples, re.DOTALL), examples


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_speaks_json(path: tuple[str, ...]):
    arguments = inspect.signature(COMMANDS[path].callback).parameters  # pyright: ignore
    assert ("json_" in arguments) != (path in WITHOUT_JSON)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tpplan sug", ["suggest"]),
        ("tpplan suggest m.py -t dgx-h", ["dgx-h100"]),
        ("tpplan suggest m.py --objective th", ["throughput"]),
        ("tpplan suggest m.py --set pp=2,mi", ["pp=2,micro_batch="]),
        ("tpplan export plan.yaml --to meg", ["megatron"]),
        ("tpplan topology show gb200", ["gb200-nvl72"]),
        ("tpplan suggest --sens", ["--sensitivity"]),
    ],
)
def test_the_tab_key_offers_names(typed: str, offered: list[str], monkeypatch, capsys):
    monkeypatch.setenv("_TPPLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        cli.main([])
    assert capsys.readouterr().out.split() == offered


def test_files_of_the_folder_are_clusters_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.yaml").write_text("")
    assert complete.topologies("la") == ["lab.yaml"]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("sugest m.py", "Did you mean 'suggest'"),
        ("topology shwo x", "Did you mean 'show'"),
        ("suggest m.py --topolgy x", "--topology"),
        ("topology show dgx-h10", "did you mean 'dgx-h100'"),
        ("suggest m.py -t dgx-h100 --objective throughputt", "did you mean 'throughput'"),
    ],
)
def test_a_typing_error_is_answered_with_the_nearest_name(line: str, hint: str, capsys):
    assert cli.main(line.split()) == 2
    assert hint in capsys.readouterr().err


def test_no_color_is_obeyed_even_where_colour_is_forced(monkeypatch, capsys, tmp_path):
    save_plan(llama3_8b(), tmp_path / "plan.yaml")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["report", str(tmp_path / "plan.yaml")]) == 0
    assert COLOUR.search(capsys.readouterr().out)
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["report", str(tmp_path / "plan.yaml")]) == 0
    assert not COLOUR.search(capsys.readouterr().out)
