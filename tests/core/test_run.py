"""`tpplan run`: the torchrun line, the launch files, and what is refused before anything starts."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tpplan import cli
from tpplan.planner.plan_file import load, save

from .sample_plan import llama3_8b


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """64 ranks on 8 nodes."""
    save(llama3_8b(), tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_line_has_the_plans_ranks_and_the_scripts_arguments(plan, capsys):
    code, out, _ = told(
        capsys, "run", "--dry-run", "--address", "node0", plan, "train.py", "--lr", "3e-4", "--to", "a b"
    )
    assert code == 0
    *variables, program = shlex.split(out)[:3]
    assert variables == [f"PLAN={plan.resolve()}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    assert program == "torchrun"
    rest = shlex.split(out)[3:]
    assert rest == [
        "--nnodes=8", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-backend=c10d",
        "--rdzv-endpoint=node0:29500", "--rdzv-id=tpplan", "train.py", "--lr", "3e-4", "--to", "a b",
    ]  # fmt: skip


def test_a_rehearsal_runs_all_ranks_here(plan, capsys):
    _, out, _ = told(capsys, "run", "--dry-run", "--on-cpu", "--max-restarts", "0", plan, "train.py")
    assert "--nnodes=1 --nproc-per-node=64 --max-restarts=0 --standalone train.py" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "the plan is for 8 nodes: give --address FIRST_NODE[:29500]"),
        (("--address", "a b"), "--address a b: expected a host, or host:port"),
        (("--address", "n:99999"), "--address n:99999: expected a host, or host:port"),
        (("--max-restarts", "-1"), "--max-restarts -1: must be 0 or more"),
        (("--to", "slrm"), "unknown batch system; did you mean 'slurm'?"),
        (("-o", "x"), "only launch files are written; give --to slurm or kubernetes"),
    ],
)
def test_impossible_requests_are_refused(plan, capsys, argv, words):
    code, out, err = told(capsys, "run", *argv, plan, "train.py")
    assert (code, out) == (2, "")
    assert words in err


def test_options_behind_the_plan_are_not_taken_for_a_script(plan, capsys):
    code, _, err = told(capsys, "run", plan, "--dry-run", "train.py")
    assert code == 2
    assert "--dry-run stands where the script should" in err


def test_missing_scripts_and_devices_are_named(plan, capsys, tmp_path):
    script = tmp_path / "train.py"
    assert "train.py: give the training script" in told(capsys, "run", "--address", "n", plan, script)[2]
    script.write_text("")
    save(replace(load(plan), cluster=replace(load(plan).cluster, devices_per_node=512)), plan)
    code, _, err = told(capsys, "run", plan, script)
    assert code == 2
    assert "the plan needs 64 x" in err
    assert "rehearse on CPU ranks with --on-cpu" in err


def test_a_slurm_job_runs_the_users_script(plan, capsys, tmp_path):
    where = tmp_path / "job"
    assert told(capsys, "run", "--to", "slurm", "-o", where, plan, "train.py", "--lr", "3e-4")[0] == 0
    assert sorted(path.name for path in where.iterdir()) == ["job.sbatch", "plan.yaml", "run.sh"]
    assert "#SBATCH --nodes=8\n" in (where / "job.sbatch").read_text()
    script = (where / "run.sh").read_text()
    assert script.endswith("  --max-restarts=3 \\\n  train.py --lr 3e-4\n")
    assert 'export PLAN="${PLAN:-plan.yaml}"' in script
    assert "MODEL" not in script


def test_a_kubernetes_job_runs_the_users_script(plan, capsys, tmp_path):
    where = tmp_path / "job"
    _, _, err = told(capsys, "run", "--to", "kubernetes", "-o", where, plan, "train.py")
    assert "which has to hold train.py, plan.yaml and run.sh" in err
    job = yaml.safe_load((where / "pytorchjob.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == 7
    assert worker["template"]["spec"]["containers"][0]["env"] == [{"name": "PLAN", "value": "plan.yaml"}]
