"""The loop closed: runs that take what a cluster with hidden scales predicts tell these scales."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import tpplan
import yaml
from tpplan import cli
from tpplan.planner.plan_file import save
from tpplan.planner.run_file import load_runs
from tpplan.planner.topology import MeasuredScale, Topology
from tpplan.runtime.bench import Measured
from tpplan.runtime.record import add_run
from tpplan.topologies import load, load_file

MLP = Path(__file__).parents[2] / "examples" / "mlp.py"
HIDDEN = {"kernels": 1.6, "collectives": 1.3}
CHOICES = ("tp=1,dp=4,pp=1", "tp=2,dp=2,pp=1", "tp=4,dp=1,pp=1", "tp=1,dp=4,pp=1,zero=3")


def hidden(topology: Topology) -> Topology:
    scales = (
        MeasuredScale(name=name, framework="tpplan", value=value, uncertainty=0.0, runs=1, source="hidden")
        for name, value in HIDDEN.items()
    )
    return replace(topology, scales=tuple(scales))


def plan(topology: Topology, choices: str, batch: int) -> tpplan.Plan:
    pins = dict(part.split("=") for part in choices.split(","))
    found = tpplan.suggest(str(MLP), topology=topology, global_batch=batch, pins=pins)
    assert isinstance(found, tpplan.Plan)
    return found


def test_hidden_scales_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cluster, runs = tmp_path / "lab.yaml", tmp_path / "runs.yaml"
    cluster.write_text(
        "name: lab\ndevice: cpu\nlevels:\n"
        "  - {name: node, size: 4, kind: tcp, gb_per_s: 1, latency_us: 60, efficiency: 0.7}\n"
        "  - {name: cluster, size: 1, kind: tcp, gb_per_s: 1, latency_us: 60, efficiency: 0.7}\n"
    )
    rows = []
    for i, choices in enumerate(CHOICES):
        batch = 64 * 4**i
        saved = plan(load_file(cluster), choices, batch)
        save(saved, tmp_path / f"{i}.yaml")
        taken = plan(hidden(load_file(cluster)), choices, batch).predicted.step_time_s
        rows.append({"model": str(MLP), "plan": f"{i}.yaml", "step_s": taken})
    runs.write_text(yaml.safe_dump({"runs": rows}))
    assert cli.main(["calibrate", str(cluster), str(runs), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {scale["name"]: scale["value"] for scale in told["scales"]}
    assert found == {name: pytest.approx(value, rel=0.1) for name, value in HIDDEN.items()}
    assert max(abs(run["error_after"]) for run in told["runs"]) < 0.05
    after = plan(load_file(cluster), CHOICES[0], 64)
    assert after.predicted.step_time_s == pytest.approx(rows[0]["step_s"], rel=0.05)
    assert any("kernels take" in line and "4 runs measured on" in line for line in after.assumptions)


def test_a_plan_of_another_cluster_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(plan(load("cpu-gloo").with_nodes(1), "tp=1", 64), tmp_path / "plan.yaml")
    (tmp_path / "runs.yaml").write_text(f"runs: [{{model: {MLP}, plan: plan.yaml, step_s: 1.0}}]")
    (tmp_path / "lab.yaml").write_text(
        "name: lab\ndevice: cpu\nlevels:\n"
        "  - {name: node, size: 3, kind: tcp, gb_per_s: 1, latency_us: 60, efficiency: 0.7}\n"
        "  - {name: cluster, size: 1, kind: tcp, gb_per_s: 1, latency_us: 60, efficiency: 0.7}\n"
    )
    assert cli.main(["calibrate", str(tmp_path / "lab.yaml"), str(tmp_path / "runs.yaml")]) == 2
    assert "lab has nodes of 3" in capsys.readouterr().err


def test_what_bench_records_can_be_read(tmp_path: Path):
    save(plan(load("cpu-gloo").with_nodes(1), "tp=1", 64), tmp_path / "plan.yaml")
    measured = Measured(
        ranks=4, device="cpu", step_s=0.5, steps_s=(0.5, 0.5), phases_s={}, memory_bytes=12, apply_s=0.1,
        first_step_s=1.0,
    )  # fmt: skip
    path = tmp_path / "runs.yaml"
    add_run(path, measured, model=str(MLP), plan=tmp_path / "plan.yaml", today=date(2026, 11, 30))
    (run,) = load_runs(path)
    assert (run.step_s, run.memory_bytes, run.ranks) == (0.5, 12, 4)
    assert run.plan == str(tmp_path / "plan.yaml") and run.model == str(MLP)
