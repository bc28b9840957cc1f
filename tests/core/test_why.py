"""Why not another choice: the sentences, on plans made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tpplan.planner.cost import Origin
from tpplan.planner.layout import Collective
from tpplan.planner.plan import Infeasible, Plan, TimePart
from tpplan.report.terminal.pages import render_why
from tpplan.report.why import why_document, why_sentences

from .sample_plan import llama3_8b


def slower(plan: Plan, *, seconds: float, label: str) -> Plan:
    """The same plan with one more part in its step."""
    part = TimePart(label=label, seconds=seconds, origin=Origin.MODELLED)
    predicted = replace(
        plan.predicted,
        step_time_s=plan.predicted.step_time_s + seconds,
        waterfall=(*plan.predicted.waterfall, part),
    )
    return replace(plan, predicted=predicted)


def test_the_difference_is_told_with_its_cause():
    plan = llama3_8b()
    seconds = plan.predicted.step_time_s / 4
    pinned = replace(slower(plan, seconds=seconds, label="ZeRO parameter gathers"), zero_stage=3)
    first, second, *_ = why_sentences(plan, pinned, {"zero": 3})
    assert "(25.0 %) slower" in first and "more ZeRO parameter gathers" in second


def test_a_faster_answer_says_that_the_plan_was_not_the_best():
    plan = llama3_8b()
    other = slower(replace(plan, zero_stage=3), seconds=1.0, label="anything")
    assert "The plan was not the best" in why_sentences(other, plan, {"zero": 1})[0]


def test_choices_that_change_nothing_say_so():
    plan = llama3_8b()
    assert why_sentences(plan, plan, {"tp": plan.mesh.tp}) == (
        f"tp={plan.mesh.tp} is what the plan has: nothing changes.",
    )


def test_memory_is_told_by_kind():
    plan = llama3_8b()
    kinds = plan.predicted.memory_by_kind_bytes
    more = {**kinds, "activations": kinds.get("activations", 0.0) + 8 * 2**30}
    pinned = replace(
        plan,
        recompute="full",
        predicted=replace(
            plan.predicted,
            memory_by_kind_bytes=more,
            peak_memory_bytes=plan.predicted.peak_memory_bytes + 8 * 2**30,
        ),
    )
    assert any(
        "8.0 GiB more activations" in told for told in why_sentences(plan, pinned, {"recompute": "full"})
    )


def test_links_that_an_axis_moves_to_are_named():
    plan = llama3_8b()
    axis = next(axis for axis in ("tp", "dp", "pp") if plan.mesh.size(axis) > 1)
    sample = replace(plan.communications[0], axis=axis, collective=Collective.ALL_REDUCE)
    inner, outer = plan.cluster.links[0], plan.cluster.links[-1]
    here = replace(plan, communications=(replace(sample, level=inner.level),))
    there = replace(plan, zero_stage=3, communications=(replace(sample, level=outer.level),))
    assert any(f"not the {inner.level}'s" in told for told in why_sentences(here, there, {"zero": 3}))


@pytest.fixture
def misfit() -> Infeasible:
    return Infeasible(reason="no plan fits", short_by_bytes=3 * 2**30, nearest_fix="drop zero=0")


def test_what_does_not_fit_says_by_how_much(misfit: Infeasible):
    told = why_sentences(llama3_8b(), misfit, {"zero": 0})
    assert told == (
        "Under zero=0 no plan fits.", "3.0 GiB a device are missing.", "What would help: drop zero=0.",
    )  # fmt: skip
    assert why_document(llama3_8b(), misfit, {"zero": 0})["infeasible"]["short_by_bytes"] == 3 * 2**30


def test_the_page_renders_both_ways(misfit: Infeasible):
    for answer in (misfit, replace(llama3_8b(), zero_stage=3)):
        assert render_why(llama3_8b(), answer, {"zero": 3}) is not None
