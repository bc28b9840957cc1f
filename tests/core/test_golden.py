"""Terminal and HTML reports are what they were, word for word, and say the plan's own numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tpplan.planner.plan import Plan
from tpplan.report import words

from .golden import KINDS, page, path, terminal
from .sample_plan import ALL_PLANS, gpt3_175b

pytest.importorskip("plotly")
pytest.importorskip("jinja2")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL_PLANS)
def test_a_report_is_what_it_was(name: str, kind: str):
    """`make golden` writes the files anew."""
    assert KINDS[kind](ALL_PLANS[name]()) == path(name, kind).read_text()


def scrambled(plan: Plan, seed: int) -> Plan:
    """The plan with other numbers everywhere."""
    draw = random.Random(seed)

    def other(value: float) -> float:
        return value * draw.uniform(0.3, 3.0)

    waterfall = tuple(replace(part, seconds=other(part.seconds)) for part in plan.predicted.waterfall)
    stages = tuple(
        replace(
            stage,
            memory=tuple(replace(part, bytes=other(part.bytes)) for part in stage.memory),
            peak_memory_bytes=other(stage.peak_memory_bytes),
        )
        for stage in plan.stages
    )
    step_s = sum(part.seconds for part in waterfall)
    return replace(
        plan,
        stages=stages,
        predicted=replace(
            plan.predicted,
            step_time_s=step_s,
            step_time_interval_s=(0.9 * step_s, 1.2 * step_s),
            tokens_per_s_per_device=other(plan.predicted.tokens_per_s_per_device),
            model_flops_utilization=draw.random(),
            peak_memory_bytes=max(stage.peak_memory_bytes for stage in stages),
            waterfall=waterfall,
        ),
        communications=tuple(
            replace(comm, seconds=other(comm.seconds), bytes=other(comm.bytes))
            for comm in plan.communications
        ),
        alternatives=tuple(
            replace(a, step_time_s=other(a.step_time_s), peak_memory_bytes=other(a.peak_memory_bytes))
            for a in plan.alternatives
        ),
    )


@pytest.mark.parametrize("report", [terminal, page])
@pytest.mark.parametrize("seed", range(3))
def test_every_number_is_the_plans(report, seed: int):
    plan = scrambled(replace(gpt3_175b(), schedule="interleaved"), seed)
    said = " ".join(report(plan).split())
    predicted = plan.predicted
    low, high = predicted.step_time_interval_s
    expected = [
        words.duration(predicted.step_time_s),
        words.duration(low),
        words.duration(high),
        words.digits(predicted.tokens_per_s_per_device),
        words.percent(predicted.model_flops_utilization),
        *(words.milliseconds(part.seconds) for part in predicted.waterfall),
        *(words.percent(part.seconds / predicted.step_time_s) for part in predicted.waterfall),
        *(words.gib(stage.peak_memory_bytes) for stage in plan.stages),
        *(words.duration(a.step_time_s) for a in plan.alternatives),
        *(words.gib(a.peak_memory_bytes) for a in plan.alternatives),
    ]
    assert [number for number in expected if number not in said] == []
