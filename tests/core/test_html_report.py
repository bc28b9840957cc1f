"""The HTML page: whole, self-contained, escaped, and its numbers are the plan's."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from tpplan.planner.errors import UserError
from tpplan.planner.layout import Collective
from tpplan.planner.mesh import Mesh
from tpplan.planner.objective import cluster_size
from tpplan.planner.plan import Change, Plan
from tpplan.planner.timeline import plan_timeline
from tpplan.report import words
from tpplan.report.html import figures, links, render, require, sections, tree
from tpplan.report.html.mesh_picture import mesh_picture

from .sample_plan import ALL_PLANS, gpt3_175b, llama3_8b

pytest.importorskip("plotly")
pytest.importorskip("jinja2")

SECTIONS = ["verdict", "mesh", "time", "memory", "splits", "communication", "explored", "trust", "run"]
VOID = {"meta", "br", "img", "link", "input", "hr"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }}"


def gpt3() -> Plan:
    return replace(gpt3_175b(), schedule="interleaved")


def page_without_plotly(plan: Plan, **options: Any) -> str:
    """The page's own text: plotly's script cut out."""
    from plotly.offline import get_plotlyjs

    return render(plan, **options).replace(get_plotlyjs(), "")


class Outline(HTMLParser):
    """Collects ids and tags, and checks that tags nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [str(given["id"])] if given.get("id") else []
        self.links += [str(given[name]) for name in ("src", "href") if given.get(name)]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.mark.parametrize("name", ALL_PLANS)
def test_every_section_is_there_and_nothing_is_loaded(name: str):
    outline = Outline(page_without_plotly(ALL_PLANS[name]()))
    assert [part for part in SECTIONS if part not in outline.ids] == []
    assert len(outline.ids) == len(set(outline.ids))
    assert all(link.startswith("#") for link in outline.links)
    assert {link[1:] for link in outline.links} <= set(outline.ids)


def test_the_timeline_is_drawn_when_there_is_one():
    plan = gpt3()
    outline = Outline(page_without_plotly(plan, timeline=plan_timeline(plan)))
    assert {"plot-timeline", "plot-memory-time", "plot-explored"} <= set(outline.ids)


def test_hostile_names_are_only_text():
    plan = llama3_8b()
    plan = replace(
        plan,
        model=replace(plan.model, name=HOSTILE, source=HOSTILE),
        reasons=(HOSTILE,),
        warnings=(HOSTILE,),
        splits=tuple(replace(split, module=HOSTILE, words=HOSTILE) for split in plan.splits),
        alternatives=tuple(replace(a, seeded_as=HOSTILE, reason=HOSTILE) for a in plan.alternatives),
        communications=tuple(replace(c, label=HOSTILE) for c in plan.communications),
    )
    page = page_without_plotly(plan)
    assert "<img" not in page and "<script>alert" not in page and "49" not in html.unescape(HOSTILE)
    assert Outline(page).tags.count("script") == 4
    [point] = [trace for trace in figures.explored(plan)["data"] if "other plans" in trace["name"]]
    assert all("<" not in label for label in point["text"])


def test_numbers_are_the_plans():
    plan = llama3_8b()
    page = html.unescape(page_without_plotly(plan))
    predicted = plan.predicted
    for text in (
        words.duration(predicted.step_time_s),
        words.digits(predicted.tokens_per_s_per_device),
        words.percent(predicted.model_flops_utilization),
        f"{words.gib(predicted.peak_memory_bytes)} GiB",
        *(f"{words.milliseconds(part.seconds)} ms" for part in predicted.waterfall),
        *plan.reasons,
        *(alternative.reason for alternative in plan.alternatives),
    ):
        assert text in page


def test_the_waterfall_fills_the_step():
    rows = sections.waterfall(gpt3())
    assert rows[0]["begin"] == 0
    assert rows[-1]["begin"] + rows[-1]["width"] == pytest.approx(100, abs=0.01)


def test_memory_bars_end_where_the_kinds_do():
    plan = gpt3()
    for row, stage in zip(sections.memory(plan)["stages"], plan.stages, strict=True):
        total = sum(part.bytes for part in stage.memory)
        share = total / plan.predicted.device_memory_bytes * 100
        assert sum(part["width"] for part in row["parts"]) == pytest.approx(share, abs=0.01)


def test_memory_over_time_peaks_at_the_plans_peak():
    plan = gpt3()
    timeline = plan_timeline(plan)
    assert timeline
    figure = figures.memory_over_time(plan, timeline)
    for line, stage in zip(figure["data"], plan.stages, strict=True):
        assert max(line["y"]) == pytest.approx(stage.peak_memory_bytes / 2**30, abs=1e-3)


def test_all_spans_are_drawn():
    plan = gpt3()
    timeline = plan_timeline(plan)
    assert timeline
    count = sum(map(len, timeline.spans))
    assert count > figures.MOST_BARS
    assert sum(len(trace["spans"]) for trace in figures.pipeline(timeline)["data"]) == count
    few = plan_timeline(replace(plan, num_microbatches=8))
    assert few
    assert sum(len(trace["x"]) for trace in figures.pipeline(few)["data"]) == sum(map(len, few.spans))


def test_small_clusters_show_every_device():
    picture = mesh_picture(llama3_8b())
    assert [rank for node in picture["nodes"] for rank in node["ranks"]] == list(range(64))


def test_large_clusters_fold_replicas():
    picture = mesh_picture(gpt3())
    assert [node["ranks"][0] for node in picture["nodes"]] == list(range(0, 1024, 128))
    assert sum(node["stands_for"] for node in picture["nodes"]) == 128


def test_a_cluster_of_many_kinds_of_nodes_is_cut():
    plan = replace(gpt3(), mesh=Mesh(pp=128, tp=8))
    picture = mesh_picture(plan)
    assert (len(picture["nodes"]), picture["left_out"]) == (32, 96)


def test_modules_form_a_tree():
    embedding, block, _ = tree.split_tree(llama3_8b())
    assert (embedding["name"], embedding["times"]) == ("Embedding", 1)
    [layers] = block["children"]
    assert layers["name"] == "layers.*"
    attention = next(child for child in layers["children"] if child["name"] == "attn")
    assert [child["name"] for child in attention["children"]] == ["q", "k", "v", "out"]
    assert [axis for axis, _ in attention["ops"][0]["splits"]] == ["dp", "tp"]


def test_a_tree_tells_bytes_collectives_and_lines():
    plan = llama3_8b()
    plan = replace(plan, splits=tuple(replace(s, source="llama.py:54") for s in plan.splits))
    embedding, block, _ = tree.split_tree(plan)
    assert embedding["bytes"] == f"{words.size(128256 * 4096 * 2)}, {words.size(128256 * 4096)} a device"
    attention = next(child for child in block["children"][0]["children"] if child["name"] == "attn")
    [out] = [child for child in attention["children"] if child["name"] == "out"]
    [(_, split)] = [(axis, split) for axis, split in out["ops"][0]["splits"] if axis == "tp"]
    assert (split["words"], split["after"]) == ("reduced over heads, row", "reduce-scatter over sequence")
    assert out["ops"][0]["source"] == "llama.py:54" and "llama.py:54" in page_without_plotly(plan)


def test_modules_are_there_even_where_nothing_is_split():
    plan = replace(llama3_8b(), splits=(), mesh=Mesh(dp=64))
    [model] = tree.split_tree(plan)
    assert [child["name"] for child in model["children"]] == ["embed", "layers.*", "norm"]
    assert "No op is split" in page_without_plotly(plan)


def test_what_a_link_carries_by_hand():
    """tp 2 in a node: half of 64 MiB leaves each device. dp 32: 4 in each of 8 nodes share the crossing."""
    plan = llama3_8b()
    scatter, _, gradients, _ = plan.communications
    assert links.crossing_bytes(plan, scatter, unit=1) == 32 * 2**20
    assert links.crossing_bytes(plan, gradients, unit=8) == pytest.approx(16.06e9 * 31 / 32 / 4)
    reduce = replace(gradients, collective=Collective.ALL_REDUCE)
    assert links.crossing_bytes(plan, reduce, unit=8) == pytest.approx(2 * 16.06e9 * 31 / 32 / 4)
    exchange = replace(gradients, collective=Collective.ALL_TO_ALL)
    assert links.crossing_bytes(plan, exchange, unit=8) == pytest.approx(16.06e9 * 28 / 32)
    send = replace(gradients, collective=Collective.SEND_RECV)
    assert links.crossing_bytes(plan, send, unit=8) == 16.06e9


def test_what_would_change_the_plan_is_told():
    plan = replace(
        llama3_8b(), changes=(Change(what="memory", value=0.1, sentence="With 8 GiB more, dp=64."),)
    )
    assert "With 8 GiB more, dp=64." in page_without_plotly(plan)
    assert "tpplan suggest --sensitivity" in page_without_plotly(llama3_8b())


def test_kinds_of_memory_over_time_add_up_to_the_peak():
    plan = gpt3()
    timeline = plan_timeline(plan)
    assert timeline
    for kinds, stage in zip(figures.memory_over_time(plan, timeline)["kinds"], plan.stages, strict=True):
        activations = sum(part.bytes for part in stage.memory if part.kind == "activations")
        total = sum(size for _, size, _ in kinds) * 2**30 + activations
        assert total == pytest.approx(stage.peak_memory_bytes, rel=1e-3)


def test_commands_quote_what_the_shell_would_split():
    plan = llama3_8b()
    plan = replace(plan, model=replace(plan.model, source="my model.py"))
    commands = dict(sections.commands(plan, "a b.yaml"))
    assert "'my model.py' --topology dgx-h100:8" in commands["Find this plan again"]
    assert commands["Or have the script written"].endswith("export 'a b.yaml' --to torchrun -o launch")


def test_the_data_in_the_page_is_json():
    page = page_without_plotly(llama3_8b())
    [text] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert set(json.loads(text)) == {"explored"}


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tpplan.report.html.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs jinja2 and plotly: pip install tpplan\[report\]"):
        require()


def test_what_else_there_is_to_choose_is_listed_where_it_was_asked_for() -> None:
    plan = llama3_8b()
    traded = replace(plan.alternatives[0], size=cluster_size(plan), gap=0.004)
    page = page_without_plotly(replace(plan, pareto=(traded,)))
    assert "What else there is to choose" in page
    assert "within 0.40% of the best for that" in page
    assert "What else there is to choose" not in page_without_plotly(plan)
