"""`tpplan why` from a plan file of an example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tpplan import cli

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("why") / "plan.yaml"
    model = str(EXAMPLES / "gpt2.py")
    options = ["--global-batch", "64", "--seq-len", "1024", "-q", "--json", "-o", str(path)]
    assert cli.main(["suggest", model, "-t", "dgx-h100:2", *options]) == 0
    return str(path)


def test_a_pinned_choice_is_never_better_than_a_proven_plan(plan: str, capsys):
    assert cli.main(["why", plan, "--set", "tp=4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    ours, pinned = document["step_time_s"]
    assert pinned >= ours * (1 - 1e-2)  # the gap of the search is below one percent
    rows = {row["name"]: row for row in document["time_s"]}
    assert sum(row["right"] - row["left"] for row in rows.values()) == pytest.approx(pinned - ours, rel=1e-6)
    assert {row["name"]: row["right"] for row in document["choices"]}["tp"] == "4"


def test_zero_3_under_a_pipeline_says_why_it_gathers_no_more_than_zero_1(plan: str, capsys):
    assert cli.main(["why", plan, "--set", "zero=3,pp=2", "--json"]) == 0
    assert "gathers ZeRO-3's parameters once a step and keeps them" in capsys.readouterr().err


def test_the_plan_itself_changes_nothing(plan: str, capsys):
    assert cli.main(["why", plan, "--set", "pp=1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["reasons"][0] == "pp=1 is what the plan has: nothing changes."


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "nothing to compare with"),
        (["--set", "tp=3"], "tp=3"),
        (["--set", "tp=4", "-t", "dgx-a100-80:2"], "is not the one that the plan was made for"),
        (["--set", "tp=4", "--model", str(EXAMPLES / "mlp.py")], "parameters"),
    ],
)
def test_bad_questions_exit_2(plan: str, arguments: list[str], says: str, capsys):
    assert cli.main(["why", plan, *arguments]) == 2
    assert says in capsys.readouterr().err
