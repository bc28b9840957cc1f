"""What `explain` and `compare` say follows from the plans."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import Plan
from tpplan.report.compare import compare, comparison_document
from tpplan.report.explain import explain
from tpplan.report.terminal.pages import render_comparison, render_explanation

from .sample_plan import ALL_PLANS, GIB, gpt3_175b, llama3_8b, mixtral_8x7b


def told(plan: Plan, title: str) -> str:
    """The sentences of the paragraph whose title begins with `title`."""
    [paragraph] = [p for p in explain(plan) if p.title.startswith(title)]
    return " ".join(paragraph.sentences)


def text(renderable: RenderableType) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", ALL_PLANS)
def test_an_explanation_fits_a_page(name: str):
    lines = text(render_explanation(ALL_PLANS[name]())).splitlines()
    assert len(lines) <= 60 and max(map(len, lines)) <= 100


def test_each_axis_in_use_has_a_paragraph():
    titles = [paragraph.title for paragraph in explain(gpt3_175b())]
    assert titles[:3] == ["pp=8: pipeline stages", "tp=8: tensor parallel", "dp=16: data parallel"]


def test_tensor_parallelism_names_dims_and_costs():
    """The norms' 9 all-reduces of 20 us and 4 x 2,304 collectives of 0.31 ms: 2.86 s."""
    said = told(gpt3_175b(), "tp=8")
    assert "heads (as in transformer.h.*.attn.q)" in said and "ffn (as in transformer.h.*.mlp.gate)" in said
    assert "9,225 collectives" in said and "2.86 s" in said and "nvlink (450 GB/s)" in said


def test_data_parallelism_says_what_is_sharded():
    said = told(gpt3_175b(), "dp=16")
    assert "96 samples of the 1,536" in said and "ZeRO-1 shards the optimizer state" in said


def test_the_other_axes():
    assert "Experts (or table rows) are spread over 8 devices" in told(mixtral_8x7b(), "ep=8")
    context = replace(llama3_8b(), mesh=Mesh(dp=16, cp=2, tp=2))
    assert "cut into 2" in told(context, "cp=2")


def test_an_axis_left_alone_names_the_rival_that_uses_it():
    assert "pp: the best plan found with it is Megatron 3D, pp2 x dp16 x tp2" in told(
        llama3_8b(), "Axes left"
    )


def test_recomputation_is_counted_and_priced():
    assert "selective in 64 blocks; it costs 610 ms a step." in told(gpt3_175b(), "Recomputation")
    assert told(llama3_8b(), "Recomputation").startswith("None")


@pytest.mark.parametrize(("share", "says"), [(0.99, "Memory binds"), (0.5, "Memory does not bind")])
def test_what_binds(share: float, says: str):
    plan = llama3_8b()
    predicted = replace(plan.predicted, peak_memory_bytes=share * plan.predicted.device_memory_bytes)
    assert says in told(replace(plan, predicted=predicted), "What would change it")


def test_names_are_taken_literally():
    plan = llama3_8b()
    assert "[red]x" in text(render_explanation(replace(plan, reasons=("[red]x",))))


# --------------------------------------------------------------------------- compare


def other() -> Plan:
    """The same job on another mesh, half a gibibyte fuller and twice as slow."""
    plan = llama3_8b()
    predicted = replace(
        plan.predicted,
        step_time_s=2 * plan.predicted.step_time_s,
        waterfall=tuple(replace(part, seconds=2 * part.seconds) for part in plan.predicted.waterfall),
        peak_memory_bytes=plan.predicted.peak_memory_bytes + GIB / 2,
    )
    return replace(plan, mesh=Mesh(dp=16, tp=4), predicted=predicted)


def test_parts_of_both_plans_add_up():
    found = compare(llama3_8b(), other())
    for side in (1, 2):
        assert sum(row[side] for row in found.time_s) == pytest.approx(found.step_time_s[side - 1])


def test_parts_that_one_plan_lacks_are_zero():
    rows = {name: (left, right) for name, left, right in compare(llama3_8b(), gpt3_175b()).time_s}
    assert rows["pipeline bubble"] == (0, 0.88) and rows["host overhead"] == (0.003, 0)


def test_the_table_shows_what_differs():
    shown = text(render_comparison(llama3_8b(), other(), ("a.yaml", "b.yaml")))
    assert "the same in both: pp, cp, ep, rank order, ZeRO" in shown
    assert "a.yaml is faster: b.yaml takes 100.0 % longer." in shown
    [band] = [line.split() for line in shown.splitlines() if line.startswith("upper band")]
    assert band == ["upper", "band", "68.3", "68.8", "+0.5"]


def test_equal_plans_take_the_same_time():
    assert "Both take the same time." in text(render_comparison(other(), other(), ("a", "b")))


def test_plans_for_other_questions_are_not_ranked():
    found = compare(llama3_8b(), gpt3_175b())
    assert any("different models: Llama3 (graph 2b9ce0a4f7d1) and GPT3" in w for w in found.warnings)
    assert "different questions" in text(render_comparison(llama3_8b(), gpt3_175b(), ("a", "b")))


def test_the_document_names_both_sides():
    document = comparison_document(compare(llama3_8b(), other()))
    assert {"name": "tp", "left": "2", "right": "4"} in document["choices"]
