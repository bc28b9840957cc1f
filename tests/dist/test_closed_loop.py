"""The benchmarks of the runtime: what they compare is alike, what they conclude follows from their rows."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pool import RankPool

from benchmarks import closed_loop, runtime_speed
from benchmarks.two_nodes import missing

ROOT = Path(__file__).parents[2]


def row(plan: str, predicted_s: float, measured_s: float, *, chosen: bool = False) -> closed_loop.Row:
    return closed_loop.Row(
        model="gpt", plan=plan, chosen=chosen, predicted_s=predicted_s, measured_s=measured_s, rounds_s=()
    )


def test_regret_error_and_rank_follow_from_the_rows(capsys: pytest.CaptureFixture[str]):
    rows = [row("a", 1.0, 2.0), row("b", 0.9, 2.1, chosen=True), row("c", 3.0, 3.0)]
    found = closed_loop.verdict("gpt", rows)
    assert found.regret == pytest.approx(0.05)
    assert found.chosen_error == pytest.approx(0.9 / 2.1 - 1)
    assert found.mean_error == pytest.approx((0.5 + 1.2 / 2.1 + 0.0) / 3)
    assert found.kendall_tau == pytest.approx(1 / 3)
    closed_loop.show(rows, [found])
    out = capsys.readouterr().out
    assert "regret 5.0%" in out
    assert out.index("a ") < out.index("b ") < out.index("c ")


def test_every_mesh_of_the_devices_is_asked_for_once():
    meshes = [tuple(pins.values()) for pins in closed_loop.meshes(experts=True)]
    assert len(set(meshes)) == len(meshes)
    assert all(math.prod(sizes[:5]) == closed_loop.DEVICES for sizes in meshes)
    assert {"pp": 1, "dp": 2, "cp": 1, "ep": 1, "tp": 2, "zero": 3} in list(closed_loop.meshes(experts=False))


def test_the_hand_written_model_computes_what_the_planned_one_does(ranks: Callable[[int], RankPool]):
    plan = runtime_speed.plan_for({"dp": 2, "tp": 2, "pp": 1, "zero": 3})
    for found in ranks(4).run(runtime_speed.measure, (plan, 2, 0.0)):
        assert found.loss_difference < 1e-5
        assert found.ratio > 0


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "nodes can be emulated")
def test_the_loop_closes_on_two_emulated_nodes():
    command = [sys.executable, "-m", "benchmarks.closed_loop", "--model", "gpt", "--rounds", "3"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert "<- chosen" in run.stdout, run.stderr
    assert "Kendall tau" in run.stdout
