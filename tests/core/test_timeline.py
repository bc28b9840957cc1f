"""A plan's timeline, and its trace file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tpplan.planner.plan import Plan
from tpplan.planner.schedule import Timeline
from tpplan.planner.timeline import plan_timeline
from tpplan.report.trace import trace_json

from .sample_plan import gpt3_175b, llama3_8b


def timeline_of(plan: Plan) -> Timeline:
    timeline = plan_timeline(plan)
    assert timeline
    return timeline


def test_without_a_pipeline_there_is_none():
    assert plan_timeline(llama3_8b()) is None


def test_ranks_work_as_long_as_their_stages():
    """96 microbatches of 52.1 + 110.7 ms on every rank, whatever the virtual stages."""
    for schedule, virtual in (("1f1b", 1), ("interleaved", 4)):
        plan = replace(gpt3_175b(), schedule=schedule, virtual_stages=virtual)
        assert timeline_of(plan).busy_s == pytest.approx([96 * 0.1628] * 8)


def test_uneven_virtual_stages_take_time_by_layers():
    plan = replace(gpt3_175b(), schedule="interleaved", virtual_stages=2)
    stages = tuple(replace(stage, chunk_layers=(9, 3)) for stage in plan.stages)
    first = timeline_of(replace(plan, stages=stages)).spans[0]
    forwards = {span.action.stage: span.end_s - span.start_s for span in first if span.action.kind == "F"}
    assert forwards == pytest.approx({0: 0.0521 * 0.75, 8: 0.0521 * 0.25})


def test_a_trace_has_a_slice_for_every_span():
    plan = replace(gpt3_175b(), schedule="1f1b", virtual_stages=1)
    timeline = timeline_of(plan)
    events = json.loads(trace_json(timeline, plan))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 8 * 96 * 2
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(timeline.makespan_s * 1e6)
    assert slices[0]["args"] == {"kind": "forward", "stage": 0, "microbatch": 0}
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == [f"stage {rank}" for rank in range(8)]


def test_counters_reach_the_microbatches_in_flight():
    plan = replace(gpt3_175b(), schedule="1f1b", virtual_stages=1)
    events = json.loads(trace_json(timeline_of(plan), plan))["traceEvents"]
    held = [event["args"]["microbatches"] for event in events if event["name"] == "in flight, stage 0"]
    assert (max(held), held[-1]) == (8, 0)
