"""Figures for slides: both formats of each, the same bytes each time, one point a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tpplan.planner.errors import UserError
from tpplan.planner.timeline import plan_timeline
from tpplan.report import figures
from tpplan.report.points import front, points

from .sample_plan import gpt3_175b, llama3_8b


def test_both_formats_of_every_figure_and_equal_bytes():
    pytest.importorskip("matplotlib")
    plan = replace(gpt3_175b(), schedule="1f1b", virtual_stages=1, num_microbatches=8)
    drawn = figures.draw(plan, plan_timeline(plan))
    names = ("step-time", "memory", "explored", "pipeline")
    assert set(drawn) == {f"{name}.{kind}" for name in names for kind in ("svg", "png")}
    assert all(content.startswith((b"<?xml", b"\x89PNG")) for content in drawn.values())
    assert figures.draw(plan, plan_timeline(plan)) == drawn


def test_without_a_pipeline_there_is_no_such_figure():
    pytest.importorskip("matplotlib")
    assert not any(name.startswith("pipeline") for name in figures.draw(llama3_8b()))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tpplan.report.figures.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"figures need matplotlib: pip install tpplan\[report\]"):
        figures.draw(llama3_8b())


def test_each_plan_is_one_point_and_a_named_one_keeps_its_name():
    plan = llama3_8b()
    rival = plan.alternatives[0]
    mine = replace(
        rival,
        mesh=plan.mesh,
        step_time_s=plan.predicted.step_time_s,
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
    )
    plan = replace(plan, pareto=(mine, replace(rival, seeded_as=None)))
    found = points(plan)
    assert [point.kind for point in found] == ["chosen", "front", "rival", "rival"]
    assert found[1].label == rival.seeded_as == "FSDP"


def test_the_front_holds_what_nothing_beats():
    [one, *_] = points(llama3_8b())
    made = [replace(one, memory_bytes=x, step_s=y) for x, y in [(3, 1), (1, 3), (2, 4), (2, 2), (4, 1)]]
    assert [(p.memory_bytes, p.step_s) for p in front(made)] == [(1, 3), (2, 2), (3, 1)]
