"""`bench`: what is measured on ranks, how it is set beside the prediction, and the file of runs."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import cases
import pytest
import torch
import yaml
from pool import RankPool
from tpplan.planner.errors import OptionError
from tpplan.planner.plan import Plan
from tpplan.planner.run_file import load_runs
from tpplan.report.terminal import open_console
from tpplan.report.terminal.measurement import (
    measurement_document,
    predicted_phases_s,
    render_measurement,
)
from tpplan.runtime.bench import Measured, Trial, bench_here
from tpplan.runtime.peak import track
from tpplan.runtime.phases import BACKWARD, COMMUNICATION, FORWARD, PHASES, PhaseClock, watch
from tpplan.runtime.record import add_run

MEASURED = Measured(
    ranks=2, device="cpu", step_s=0.2, steps_s=(0.1, 0.2, 0.2, 0.2, 0.3),
    phases_s=dict.fromkeys(PHASES, 0.04), memory_bytes=10**6, apply_s=1.0, first_step_s=0.5,
)  # fmt: skip


def trial(name: str, plan: Plan, steps: int = 3) -> Trial:
    return Trial(
        build=functools.partial(cases.built, name), batch=cases.inputs(name), loss=cases.LOSS[name],
        plan=plan, steps=steps, warmup=0,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["none", "1f1b"])
def test_a_step_is_measured_on_every_rank(schedule: str, ranks: Callable[[int], RankPool]):
    plan = cases.planned("llama", dp=1, tp=2)
    if schedule == "1f1b":
        plan = cases.staged(
            cases.stepped(cases.planned("llama", dp=1, tp=1), microbatches=4), schedule, [2, 2]
        )
    first, second = ranks(2).run(bench_here, trial("llama", plan))
    assert first == second
    assert (first.ranks, first.device, len(first.steps_s)) == (2, "cpu", 3)
    assert set(first.phases_s) == set(PHASES)
    assert min(first.phases_s.values()) > 0
    held = sum(p.numel() for p in cases.built("llama").parameters()) * 4 * 4 / 2
    assert held < first.memory_bytes < 10 * held  # parameter, gradient and two moments, and activations


def test_the_peak_counts_each_storage_once_at_its_size():
    there = torch.zeros(1000)
    with track([there]) as peak:
        made = there + 1
        view = made.view(10, 100)
        gone = view * 2
        del gone
        emptied = torch.zeros(500)
        emptied.untyped_storage().resize_(0)
        assert peak.now_bytes == 4 * 2000
    assert peak.peak_bytes == 4 * 3000


def test_each_moment_counts_for_the_innermost_phase(monkeypatch: pytest.MonkeyPatch):
    seconds = iter(range(100))
    monkeypatch.setattr("tpplan.runtime.phases.time.perf_counter", lambda: float(next(seconds)))
    clock = PhaseClock(torch.device("cpu"))
    x = torch.ones(2, requires_grad=True)
    with watch(clock), clock.phase(FORWARD):  # 0
        with clock.phase(COMMUNICATION):  # 1
            pass  # 2
        x.sum().backward()  # 3, 4
    # 5
    assert clock.seconds[FORWARD] == 3
    assert clock.seconds[COMMUNICATION] == clock.seconds[BACKWARD] == 1


def test_predicted_and_measured_stand_side_by_side(capsys: pytest.CaptureFixture[str]):
    plan = cases.planned("llama", dp=1, tp=2)
    assert math.isclose(sum(predicted_phases_s(plan).values()), plan.predicted.step_time_s)
    document = measurement_document(plan, MEASURED)
    assert document["step_time_error"] == plan.predicted.step_time_s / 0.2 - 1
    assert document["measured"]["spread"] == pytest.approx(0.0)
    open_console(sys.stdout).print(render_measurement(plan, MEASURED))
    out = capsys.readouterr().out
    assert "tp2 on 2 ranks (cpu)" in out
    assert "200 ms" in out
    assert "40.0 ms" in out


def test_runs_are_added_to_a_file(tmp_path: Path):
    path = tmp_path / "runs.yaml"
    for name in ("a", "b"):
        plan = tmp_path / "plans" / f"{name}.yaml"
        add_run(path, MEASURED, model="small.py", plan=plan, today=date(2026, 1, 2))
    runs = yaml.safe_load(path.read_text())["runs"]
    assert [run["plan"] for run in runs] == ["plans/a.yaml", "plans/b.yaml"]
    assert runs[0] == {
        "model": "small.py", "plan": "plans/a.yaml", "step_s": 0.2, "memory_bytes": 10**6, "device": "cpu",
        "ranks": 2, "date": "2026-01-02",
    }  # fmt: skip


def test_calibrate_reads_what_bench_writes(tmp_path: Path):
    (tmp_path / "plan.yaml").write_text("")
    (tmp_path / "small.py").write_text("")
    path = tmp_path / "runs.yaml"
    add_run(path, MEASURED, model="small.py:gpt", plan=tmp_path / "plan.yaml", today=date(2026, 1, 2))
    (found,) = load_runs(path)
    assert (found.step_s, found.memory_bytes, found.ranks, found.device) == (0.2, 10**6, 2, "cpu")
    assert found.model == f"{tmp_path / 'small.py'}:gpt"


def test_another_file_is_left_as_it_is(tmp_path: Path):
    path = tmp_path / "plan.yaml"
    path.write_text("version: 1\n")
    with pytest.raises(OptionError, match="is no file of runs"):
        add_run(path, MEASURED, model="small.py", plan=path, today=date(2026, 1, 2))
    assert path.read_text() == "version: 1\n"


def test_a_plan_without_an_optimizer_has_no_step():
    plan = cases.planned("llama", dp=1, tp=2)
    without = replace(plan, job=replace(plan.job, optimizer="none"))
    with pytest.raises(OptionError, match="no optimizer"):
        bench_here(trial("llama", without))
    with pytest.raises(OptionError, match="at least 2"):
        bench_here(trial("llama", plan, steps=1))
