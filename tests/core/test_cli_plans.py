"""The commands that read a plan file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tpplan import cli
from tpplan.planner.plan_file import load, save
from tpplan.report.exporters import targets

from .sample_plan import gpt3_175b, llama3_8b

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.fixture
def plan(tmp_path: Path) -> str:
    save(llama3_8b(), tmp_path / "plan.yaml")
    return str(tmp_path / "plan.yaml")


# --------------------------------------------------------------------------- export


def test_files_go_to_stdout_and_deviations_to_stderr(plan: str, capsys):
    assert cli.main(["export", plan, "--to", "accelerate"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("# ==> accelerate.yaml <==\n")
    assert "tpplan: deviation: FSDP2 has no ZeRO-1" in told.err


def test_files_are_written_with_the_plan(plan: str, tmp_path: Path, capsys):
    assert cli.main(["export", plan, "--to", "torchrun", "-o", str(tmp_path / "out")]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"train.py", "run.sh", "plan.yaml"}
    assert load(tmp_path / "out" / "plan.yaml") == llama3_8b()
    assert capsys.readouterr().out == ""


def test_export_as_one_json_document(plan: str, capsys):
    assert cli.main(["export", plan, "--to", "megatron", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"to", "files", "deviations"} and "megatron_args.sh" in document["files"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "megatronn"], "did you mean 'megatron'"),
        (["--to", "deepspeed", "-o", "/dev/null/x"], "/dev/null/x"),
        ([], "--to"),
    ],
)
def test_bad_exports_exit_2(plan: str, arguments: list[str], says: str, capsys):
    assert cli.main(["export", plan, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_plan_is_named(capsys):
    assert cli.main(["export", "nowhere.yaml", "--to", "vllm"]) == 2
    assert "nowhere.yaml: cannot read the plan" in capsys.readouterr().err


def test_every_target_is_documented():
    text = DOCS.read_text()
    assert [target.name for target in targets() if f"`{target.name}`" not in text] == []


# --------------------------------------------------------------------------- report


def test_report_shows_the_plan_in_the_terminal(plan: str, capsys):
    assert cli.main(["report", plan]) == 0
    assert "Llama3, 8.03B parameters" in capsys.readouterr().out


def test_report_writes_a_page(plan: str, tmp_path: Path, capsys):
    pytest.importorskip("plotly")
    page = tmp_path / "report.html"
    assert cli.main(["report", plan, "-o", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out == ""


def test_report_writes_a_trace(tmp_path: Path):
    save(replace(gpt3_175b(), schedule="interleaved"), tmp_path / "plan.yaml")
    trace = tmp_path / "trace.json"
    assert cli.main(["report", str(tmp_path / "plan.yaml"), "--trace", str(trace)]) == 0
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_plan_without_pipeline_has_no_trace(plan: str, tmp_path: Path, capsys):
    assert cli.main(["report", plan, "--trace", str(tmp_path / "trace.json")]) == 2
    assert "the plan has no pipeline (pp=1)" in capsys.readouterr().err


def test_a_page_in_a_missing_directory_is_refused_at_once(plan: str, capsys):
    assert cli.main(["report", plan, "-o", "nowhere/report.html"]) == 2
    assert "there is no directory nowhere" in capsys.readouterr().err


def test_a_page_without_the_extra_is_refused(plan: str, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("tpplan.report.html.find_spec", lambda name: None)
    assert cli.main(["report", plan, "-o", "report.html"]) == 2
    assert "pip install tpplan[report]" in capsys.readouterr().err


# --------------------------------------------------------------------------- explain, compare


def test_explain_and_compare_print_pages(plan: str, capsys):
    assert cli.main(["explain", plan]) == 0
    assert "tp=2: tensor parallel" in capsys.readouterr().out
    assert cli.main(["compare", plan, plan]) == 0
    assert "Both take the same time." in capsys.readouterr().out


def test_explain_and_compare_as_json(plan: str, capsys):
    assert cli.main(["explain", plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["paragraphs"][0]["title"] == "tp=2: tensor parallel"
    assert cli.main(["compare", plan, plan, "--json"]) == 0
    assert {"choices", "time_s", "memory_bytes"} <= set(json.loads(capsys.readouterr().out))


# --------------------------------------------------------------------------- estimate --from-args


def test_a_launch_line_is_checked_against_the_cluster(capsys):
    line = "torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 8"
    arguments = ["estimate", "model.py", "-t", "dgx-h100:8", "--from-args", f"{line} --global-batch-size 64"]
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err
    assert "makes 32 devices, dgx-h100:8 has 64" in told and "tpplan: megatron: the line has no --seq" in told


def test_one_source_of_choices_alone(capsys):
    arguments = ["estimate", "model.py", "-t", "dgx-h100:8", "--set", "tp=8", "--from-args", "vllm serve x"]
    assert cli.main(arguments) == 2
    assert "both --set and --from-args" in capsys.readouterr().err
