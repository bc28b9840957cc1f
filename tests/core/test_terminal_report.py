"""The terminal report: it fits, it adds up, it reads without colour or Unicode, and says what matters."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from tpplan.planner.cost import Origin
from tpplan.planner.mesh import Mesh
from tpplan.planner.objective import cluster_size
from tpplan.planner.plan import Change, Infeasible, Plan
from tpplan.report import words
from tpplan.report.terminal import (
    SECTIONS,
    open_console,
    print_infeasible,
    print_report,
    render,
    render_infeasible,
)
from tpplan.report.terminal.bars import Piece, SpanBar, StackedBar

from .sample_plan import ALL_PLANS, GIB, gpt3_175b, llama3_8b, llama3_70b_on_rtx4090, mixtral_8x7b

PLANS = pytest.mark.parametrize("make", ALL_PLANS.values(), ids=ALL_PLANS)


def report(plan: Plan, *, width: int = 100) -> str:
    """The report as plain text."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    print_report(plan, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def section(text: str, title: str) -> list[str]:
    """The lines of one section of a report, without its heading."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{title} ─")) + 1
    return lines[first : lines.index("", first)]


@PLANS
@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_exceeds_the_screen_or_100_columns(make: Callable[[], Plan], width: int) -> None:
    lines = report(make(), width=width).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    assert not any(line.endswith(" ") or "…" in line for line in lines)


@PLANS
def test_a_dark_terminal_gets_the_same_words_in_colour(make: Callable[[], Plan], monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    coloured.print(render(make()))
    assert isinstance(coloured.file, io.StringIO)
    text = coloured.file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b[" in text
    assert [line.rstrip() for line in plain.splitlines()] == report(make()).splitlines()


@PLANS
def test_plain_ascii_where_the_file_can_do_no_more(make: Callable[[], Plan]) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_report(replace(make(), warnings=("naïve",)), open_console(file))
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "\x1b" not in text
    assert "na?ve" in text
    assert "####" in section_ascii(text, "Step time")
    assert "AAAA" in section_ascii(text, "Memory by stage")


def section_ascii(text: str, title: str) -> str:
    return text.split(f"\n{title} -")[1].split("\n\n")[0]


def test_the_sections_come_in_order() -> None:
    change = Change(what="memory", value=0.0, sentence="8 GiB more per device would save nothing.")
    plan = llama3_8b()
    traded = replace(plan.alternatives[0], size=cluster_size(plan), gap=0.0)
    text = report(replace(plan, changes=(change,), pareto=(traded,)))
    places = [text.index(f"\n{title} ─") for title, _ in SECTIONS] + [text.index("\nWarnings ─")]
    assert places == sorted(places)


def test_the_verdict_is_three_lines() -> None:
    assert report(llama3_8b()).splitlines()[1:5] == [
        "Plan  dp32 x tp2, ZeRO-1, 4 microbatches of 1, no recompute, sequence parallel",
        "Cost  881 ms a step [812 ms to 969 ms], 18,605 tokens/s/device, 47.8 % MFU, 68.3 of 80.0 GiB",
        "Why   tp=2 halves the activations, which would not fit at tp=1 without recomputing.",
        "",
    ]


def test_the_schedule_is_told_only_with_a_pipeline() -> None:
    assert "interleaved-1f1b with 4 virtual stages" in report(gpt3_175b())
    assert "virtual" not in report(llama3_8b())


def test_the_rank_table_names_groups_and_links() -> None:
    assert section(report(gpt3_175b()), "Mesh and ranks") == [
        "Axis        Size Stride Groups Ranks                              Talks over",
        "pp pipeline    8    128    128 0,128,..,896  ...  127,255,..,1023 infiniband (cluster), 25.0 GB/s",
        "dp data       16      8     64 0,8,..,120  ...  903,911,..,1023   infiniband (cluster), 25.0 GB/s",
        "tp tensor      8      1    128 0-7  8-15  ...  1016-1023          nvlink (node), 450 GB/s",
        "rank = 128 pp + 8 dp + tp; node 0 holds ranks 0-7: pp 0, dp 0, tp 0-7",
    ]


def test_axes_that_talk_together_have_a_row_and_their_order_counts() -> None:
    plan = mixtral_8x7b()
    joined = replace(plan.communications[-1], axis="dp+ep", group_size=64)
    lines = section(report(replace(plan, communications=(joined,))), "Mesh and ranks")
    assert re.fullmatch(r"dp\+ep +64 +1 0-63 +infiniband \(cluster\), 50\.0 GB/s", lines[3])
    assert lines[2].startswith("ep expert    8      1      8 0-7")


def test_without_links_the_communications_name_the_level() -> None:
    plan = llama3_8b()
    lines = section(report(replace(plan, cluster=replace(plan.cluster, links=()))), "Mesh and ranks")
    assert lines[1].endswith("cluster")
    assert lines[2].endswith("node")


def test_splits_are_told_by_block_in_execution_order() -> None:
    lines = section(report(llama3_8b()), "Splits by block")
    block = lines[lines.index("LlamaBlock x 32, in layers.*") :]
    assert re.fullmatch(r" +dp +all 13 ops +batch split over dp", block[1])
    assert re.fullmatch(r" +tp +attn_norm, add_1, mlp_norm, add_2 +sequence split over tp", block[2])
    assert re.fullmatch(r" +tp +mlp.down +reduced over ffn, row -> reduce-scatter over sequence", block[10])


@PLANS
def test_the_waterfall_adds_up(make: Callable[[], Plan]) -> None:
    plan = make()
    rows = [
        re.search(r" ([\d,]+\.\d) +([\d.]+) % ", line) for line in section(report(plan), "Step time")[1:-1]
    ]
    ms = [float(row[1].replace(",", "")) for row in rows if row]
    assert len(ms) == len(plan.predicted.waterfall) + 1
    assert sum(ms[:-1]) == pytest.approx(ms[-1], abs=0.05 * len(ms))


def test_a_waterfall_that_does_not_add_up_says_so() -> None:
    plan = llama3_8b()
    short = replace(plan.predicted, waterfall=plan.predicted.waterfall[:-1])
    assert re.search(r"not attributed +3\.0 +0\.3 %", report(replace(plan, predicted=short)))


def test_memory_bars_share_a_scale_with_the_device() -> None:
    lines = section(report(gpt3_175b()), "Memory by stage")[1:9]
    bars = [line[line.index("P") : line.index("|") + 1] for line in lines]
    assert len({len(bar) for bar in bars}) == 1
    assert [bar.count("A") for bar in bars] == sorted((bar.count("A") for bar in bars), reverse=True)


def test_a_stage_beyond_the_device_crosses_the_mark() -> None:
    plan = llama3_8b()
    stage = replace(plan.stages[0], peak_memory_bytes=100 * GIB)
    line = section(report(replace(plan, stages=(stage,))), "Memory by stage")[1]
    assert line.endswith("100.0 125.0 %")
    assert "|~" in line


def test_many_stages_are_cut_but_the_fullest_is_shown() -> None:
    plan = gpt3_175b()
    stages = tuple(replace(plan.stages[7], index=i) for i in range(64))
    fullest = replace(stages[30], peak_memory_bytes=79 * GIB)
    many = replace(plan, stages=(*stages[:30], fullest, *stages[31:]))
    lines = section(report(many), "Memory by stage")
    assert sum(line.strip().startswith("30 ") for line in lines) == 1
    assert "48 stages between, none fuller" in lines


def test_small_collectives_are_summed_and_the_sum_is_whole() -> None:
    plan = gpt3_175b()
    lines = section(report(plan), "Communication in a step")
    total_ms = sum(comm.seconds * comm.count for comm in plan.communications) * 1e3
    assert any(line.startswith("9 more") for line in lines)
    assert f"{total_ms:,.1f}" in lines[-1]


def test_runner_ups_tell_why_they_lost() -> None:
    text = "\n".join(section(report(llama3_8b()), "Runners-up"))
    assert re.search(r"Megatron 3D: pp2 x dp16 x tp2, +1\.01 s +\+14\.9 % 52\.9 11 % pipeline bubble", text)


def test_a_stopped_search_is_reported_as_such() -> None:
    assert "search complete" in report(llama3_8b())
    assert "stopped early: a better plan may exist" in report(gpt3_175b())


def test_the_certificate_tells_trust_price_and_profile() -> None:
    text = report(gpt3_175b())
    assert "step time is 11.8 % measured, 82.0 % interpolated, 6.2 % modelled" in text
    assert "as the framework profile 'megatron' runs it" in " ".join(text.split())
    assert "Price     11.7 a step" in text  # 1,024 devices x 16.41 s x 2.50 / 3600 s
    plan = llama3_8b()
    assert "Price" not in report(replace(plan, cluster=replace(plan.cluster, price_per_device_hour=None)))


def test_names_are_text_not_markup_and_cannot_drive_the_terminal() -> None:
    plan = llama3_8b()
    odd = "[bold]x[/bold] :smile: \x1b[31mred\x07"
    splits = tuple(replace(split, module=odd, block="[red]B") for split in plan.splits[:1])
    text = report(
        replace(
            plan,
            model=replace(plan.model, name=odd),
            splits=splits,
            reasons=(odd, odd),
            warnings=(odd,),
            alternatives=(replace(plan.alternatives[0], reason=odd),),
            communications=(replace(plan.communications[0], label=odd),),
        )
    )
    assert text.count("[bold]x[/bold]") >= 5
    assert "[red]B" in text
    assert ":smile:" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_plan_of_one_device_with_nothing_else_to_say() -> None:
    plan = llama3_8b()
    alone = replace(
        plan,
        mesh=Mesh(),
        cluster=replace(plan.cluster, devices=1, nodes=1, devices_per_node=1, links=()),
        splits=(),
        communications=(),
        alternatives=(),
        reasons=(),
        warnings=(),
    )
    text = report(alone)
    assert "one device: no groups" in text
    for title in ("More reasons", "Splits by block", "Communication in a step", "Runners-up", "Warnings"):
        assert f"{title} ─" not in text


def test_nothing_fits_is_told_with_the_shortfall_and_the_fix() -> None:
    console = Console(width=100, file=io.StringIO())
    print_infeasible(llama3_70b_on_rtx4090(), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("No plan fits ─")
    assert lines[2:5] == [
        "Short by     117.9 GiB a device",
        "Closest      tp8",
        "Nearest fix  8x-rtx4090:7 (56 devices) would fit with pp=7 x tp=8 and full recompute",
    ]


def test_a_divisibility_failure_has_no_shortfall() -> None:
    answer = Infeasible(reason="batch 7 does not divide", short_by_bytes=0, nearest_fix="batch 8")
    console = Console(width=100, file=io.StringIO())
    console.print(render_infeasible(answer))
    assert isinstance(console.file, io.StringIO)
    assert "Short by" not in console.file.getvalue()


def _drawn(bar: SpanBar | StackedBar, encoding: str) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=40)
    return "".join(segment.text for segment in console.render(bar, console.options))


@pytest.mark.parametrize(
    ("begin", "end", "blocks", "ascii_only"),
    [
        (0, 8, "████████", "########"),
        (0, 4, "████    ", "####    "),
        (2, 4.5, "  ██▌   ", "  ##    "),
        (7.9, 8, "       █", "       #"),
        (0, 0, "▏       ", "#       "),
        (8, 8, "       ▏", "       #"),
    ],
)
def test_a_span_bar_keeps_its_width_and_never_vanishes(begin, end, blocks, ascii_only) -> None:
    bar = SpanBar(begin=begin, end=end, total=8, width=8, style="")
    assert _drawn(bar, "utf-8") == blocks
    assert _drawn(bar, "ascii") == ascii_only


@pytest.mark.parametrize(
    ("sizes", "limit", "drawn"),
    [
        ((2, 3), 8, "PPAAA···|"),
        ((2, 3), 5, "PPAAA|···"),
        ((2, 3), 4, "PPAA|A···"),
        ((0.4, 0.4, 0.4), 8, "A·······|"),
        ((8, 0), 8, "PPPPPPPP|"),
    ],
)
def test_a_stacked_bar_is_true_in_sum_and_marks_the_limit(sizes, limit, drawn) -> None:
    pieces = [Piece(letter, size, "") for letter, size in zip("PAB", sizes, strict=False)]
    assert _drawn(StackedBar(pieces=pieces, total=8, limit=limit, width=9), "utf-8") == drawn
    assert _drawn(StackedBar(pieces=pieces, total=8, limit=limit, width=9), "ascii") == drawn.replace(
        "·", "."
    )


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (words.duration(0.8123), "812 ms"),
        (words.duration(2.4), "2.40 s"),
        (words.duration(0.99999), "1.00 s"),
        (words.duration(3.14e-5), "31.4 us"),
        (words.duration(12345), "12,345 s"),
        (words.duration(0), "0 s"),
        (words.duration(float("inf")), "unknown"),
        (words.size(48 * 2**20), "48.0 MiB"),
        (words.size(1023.9 * 2**20), "1.00 GiB"),
        (words.size(12), "12.0 B"),
        (words.rate(450e9), "450 GB/s"),
        (words.rate(3.35e12), "3.35 TB/s"),
        (words.count(8_030_261_248), "8.03B"),
        (words.count(512), "512"),
        (words.percent(0.4321), "43.2 %"),
        (words.ranks(range(8)), "0-7"),
        (words.ranks((0, 8, 16, 24, 32)), "0,8,..,32"),
        (words.ranks((0, 1)), "0,1"),
        (words.ranks((5,)), "5"),
        (words.listed("abcdef"), "a, b, c, d and 2 more"),
        (words.rank_formula(Mesh(pp=2, tp=8)), "rank = 8 pp + tp"),
        (words.rank_formula(Mesh()), "rank = 0"),
        (words.batches(2, 1), "1 microbatch of 2"),
        (words.zero(0), "no ZeRO"),
    ],
)
def test_numbers_in_words(said: str, expected: str) -> None:
    assert said == expected


def test_every_origin_has_a_colour() -> None:
    plan = llama3_8b()
    for origin in Origin:
        parts = tuple(replace(part, origin=origin) for part in plan.predicted.waterfall)
        assert f"100.0 % {origin}" in report(
            replace(plan, predicted=replace(plan.predicted, waterfall=parts))
        )


def test_a_pipe_is_100_columns_wide_whatever_the_screen(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    console = open_console(io.StringIO())
    assert console.width == 100
    assert not console.is_terminal
