"""The accuracy report: `docs/accuracy.md` and its plot, from predicted rows.

In: `Result`s. Out: two files: Markdown with the tables and what was assumed, and an SVG of predicted
against measured step times on logarithmic axes, one colour a source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tpplan.planner.estimate.calibration import calibrations

from .accuracy import HEADINGS, Result, coverage, mape, summary_lines
from .scores import kendall_tau, percent, regret, scores

WORST = 15
"""Rows listed with their largest errors."""
COLOURS = (
    *("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948"),
    *("#b07aa1", "#ff9da7", "#9c755f", "#86bcb6", "#d37295"),
)
SIZE, MARGIN, LEGEND = 520, 60, 130
"""Side of the plot, its margin and the legend's width, pixels."""
MENU, MENUS = 10, 1000
"""Plans of a random menu, and how many menus."""
BAND = 0.10
"""The band that the plot shades, as a share of the measurement."""

METHOD = """\
Every training row is predicted with its published plan forced: sizes of the mesh, microbatch, ZeRO stage,
recomputation, schedule and virtual stages. The model is a plain PyTorch decoder with the row's dims,
traced like any user's; the cluster is the bundled one of the row's device with the row's node size and
network. The framework is the product's own profile of the family with what that source's software
generation did differently (`benchmarks/row_setting.py`). What a source does not state is filled in by
rule (`benchmarks/rows.py`) and listed in the JSON under `assumed`.

*MAPE* is the mean absolute relative error of the step time. One scale per device and framework multiplies
kernel times (`planner/estimate/calibration.yaml`); nothing else is fitted per device, and nothing per
row. *Left out* is the error under scales fitted without the row's own source: where no other source has
the same pair, the scale of the same device under another framework is borrowed. *No scale* is the error
with all scales at one. The form of the model was adjusted after seeing residuals of these rows, so that
all three are in sample for form. The matmul curves of Hopper and Blackwell are set at what long training
runs reach; *no scale* knows that much of them.
"""

CAUSES = """\
- **Plans with tp=2 on 64 nodes (vTrain, 6 rows)**: 8 to 33% slower than predicted, and slower than their
  siblings allow: dp32 x pp8 at micro-batch 2 takes longer than at 3. Contention is suspected, not shown.
- **Gradient syncs of groups with 2 or 4 devices a node (vTrain)**: they ran at about a third of the rate of
  groups with 1 or 8. The level's `partial_efficiency` says so, read off GPT 18.4B runs of the same data set
  that are not among these rows.
- **Context parallelism over 4 and more ranks in torchtitan**: the cost of 32k more tokens a device rises
  from 4.5 s to 7.3 s between cp=2 and cp=4: attention slows down there, and nothing published says why.
- **GPT-OSS on H100**: 10 to 20% slower than predicted; the same recipe agrees on B200.
- **Megatron-Turing 530B**: the micro-batch is unknown; 2 fits the scaling and misses the level by 12%, 4
  fits the level and misses the scaling.
- **ZeRO-3 in 2021**: the six rows agree with gathers at 17 GB/s a device, one constant read off them.
- **Micro-batch 2 on 64 A100 40 GB (MPT 70B)**: 30% slower than its sibling at 4.
- **Releases**: the same plan on the same hardware drifts by 2 to 6% between software releases.
"""


def write(results: Sequence[Result], path: Path) -> None:
    """Write the report to `path` and the plot beside it."""
    plot = path.with_suffix(".svg")
    plot.write_text(svg(results), "utf-8")
    path.write_text(markdown(results, plot.name), "utf-8")


def markdown(results: Sequence[Result], plot: str) -> str:
    """The report's text."""
    known = [r for r in results if r.error is None]
    failed = [r for r in results if r.error is not None]
    sections = [
        "# How accurate predictions are",
        "Written by `python -m benchmarks.accuracy ROWS.yaml --docs docs/accuracy.md`. Do not edit.",
        f"{len(results)} published training runs, {len(failed)} without a prediction.",
        f"![Predicted against measured step time]({plot})",
        "## By source",
        _table(HEADINGS, summary_lines(results)),
        "Errors in percent; *bias* is the mean error, *tau* Kendall's rank agreement within the group.",
        "## Groups with a target",
        _table(("group", "rows", "MAPE %"), _groups(known)),
        "## Intervals",
        INTERVALS.strip(),
        _table(("source", "rows", "inside %"), _coverage(known)),
        "## Method",
        METHOD.strip(),
        "## Scales",
        _table(("framework", "device", "kernels take", "rows", "error %"), _scales()),
        "## Worst rows",
        _table(("row", "predicted s", "measured s", "error %"), _worst(known)),
        "## Residuals by cause",
        CAUSES.strip(),
        "## Memory",
        _table(("source", "rows", "MAPE %", "bias %", "largest %"), _memory(known)),
        MEMORY.strip(),
        "## Ranking plans (vTrain)",
        _table(("menu", "plans", "tau", "cost of our pick %", "of our best three %"), _ranking(known)),
        f"Costs: how much slower than the best measured plan, over {MENUS} random menus of {MENU} plans.",
        "## Others on the same rows",
        OTHERS.strip(),
        _table(("rows", "count", "this", "this, no scale", "Calculon", "llm-analysis"), _same_rows(known)),
        ELSEWHERE.strip(),
    ]
    if failed:
        sections += [
            "## Without a prediction",
            _table(("row", "why"), [(r.id, r.error or "") for r in failed]),
        ]
    return "\n\n".join(sections) + "\n"


MEMORY = """\
SimuMax publishes allocated memory, torchtitan reserved memory (the largest rank of each). What is kept for
backward is what autograd keeps of the traced model, less what a framework's kernels do without
(`planner/estimate/as_run.py`): a fused kernel keeps what it reads, not what it makes on the way; flash
attention keeps no scores; the loss lives on a stated number of bytes per logit. Megatron adds dummy weight
gradients of one layer. Torchtitan's terms, each read in its code or PyTorch's (`FRAMEWORKS["torch"].source`):

- fp32 shards of parameters, moments and gradients; the gradients' shards lie in the reduce stream's pool and
  so come on top of the peak of the main one;
- the root module (embedding, last norm, head) whole from forward to backward; the next layer gathered; a copy
  of the largest group in the pool of the stream that gathers;
- 12 bytes a logit at the loss, which was not compiled: log-softmax and two gradients in fp32. With tp, 16:
  `loss_parallel` holds four fp32 tensors;
- selective recomputation keeps every second product; compiled, only those that backward reads (4 GiB less);
- under pipeline stages whole parameters and whole fp32 gradients (of one virtual stage at a time where one
  round takes all microbatches), receive buffers for every microbatch, and all logits on the last stage;
- reserved over allocated 1.09.

What is left, by cause. **70B with tp=8**: 10% short where tp is not overlapped, 5% where it is; the peak is
the loss in both, so that the difference is in how free memory is cut up. **405B, 1F1B, 4 sequences a
microbatch**: 10% short, while one sequence of the same length agrees; likely activations gathered along the
sequence, which are copied once more when the batch is not 1. **405B, cp=8**: 12% short; likely keys and
values, repeated to all query heads and gathered over cp with their gradients; cp=2 and cp=4 hardly show it.
"""

INTERVALS = """\
Every prediction under a fitted scale comes with the interval in which four in five runs should lie; here is
the share that does. The interval is the same everywhere, so sources with large errors fall short of it.
"""

OTHERS = """\
The GPT rows on A100, priced by others under the rows' own plans; MAPE in percent. Calculon: commit caa4b11,
its shipped A100 80 GB file, memory unlimited, 25 GB/s a device between nodes for Megatron's machine and 12.5
for vTrain's; sequence parallelism as reduce-scatter and all-gather; nothing tuned. llm-analysis: commit
d841e40, its time by FLOPs, at the one efficiency per source that suits these very rows best.
"""

ELSEWHERE = """\
As published elsewhere: Calculon 3.65 on its own 8 rows (Korthikanti et al., table 5; tuned to that machine);
vTrain 8.4 on one node and 14.7 on several (kernels profiled on that machine); SimuMax 5.6 on 43 runs of its
own on B200 (efficiencies measured on that machine).
"""

PEERS = {
    "sc21": ("Megatron 2021, without ZeRO-3", 7.6, 6.5),
    "seqsel": ("Megatron 2022", 4.1, 7.1),
    "vtrain": ("vTrain", 11.9, 11.9),
}
"""By source: its rows in words, and the MAPE of Calculon and llm-analysis on them, percent."""


def _same_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    lines = []
    for source, (words, *others) in PEERS.items():
        rows = [r for r in results if r.source == source and "_z3_" not in r.id]
        ours = (mape(rows, "predicted_s"), mape(rows, "uncalibrated_s"))
        lines.append((words, str(len(rows)), *map(percent, ours), *(f"{other:.1f}" for other in others)))
    return lines


def _coverage(results: Sequence[Result]) -> list[tuple[str, ...]]:
    sources = dict.fromkeys(r.source for r in results)
    groups = {"all": results} | {name: [r for r in results if r.source == name] for name in sources}
    return [(name, str(len(rows)), percent(coverage(rows))) for name, rows in groups.items()]


def _groups(results: Sequence[Result]) -> list[tuple[str, ...]]:
    groups = {
        "Megatron on A100 (2021, 2022), without ZeRO-3": [
            r for r in results if r.source in ("sc21", "seqsel") and "_z3_" not in r.id
        ],
        "mixtures of experts": [r for r in results if _is_sparse(r.id)],
        "context parallel": [r for r in results if "_cp" in r.id and "_cp1_" not in r.id],
    }
    return [(name, str(len(rows)), percent(mape(rows, "predicted_s"))) for name, rows in groups.items()]


def _is_sparse(name: str) -> bool:
    return any(word in name for word in ("gpt_oss", "deepseek", "moe"))


def _scales() -> list[tuple[str, ...]]:
    return [
        (c.framework, c.device, f"{c.scale:.3f} x", str(len(c.rows)), percent(c.error))
        for c in calibrations()
    ]


def _worst(results: Sequence[Result]) -> list[tuple[str, ...]]:
    ordered = sorted(results, key=lambda r: -abs(r.relative_error or 0.0))[:WORST]
    return [(r.id, f"{r.predicted_s:.3g}", f"{r.measured_s:.3g}", percent(r.relative_error)) for r in ordered]


def _memory(results: Sequence[Result]) -> list[tuple[str, ...]]:
    lines = []
    for source in dict.fromkeys(r.source for r in results if r.measured_memory_bytes):
        pairs = [(r.predicted_memory_bytes, r.measured_memory_bytes) for r in results if r.source == source]
        s = scores(pairs)
        count = sum(m is not None for _, m in pairs)
        lines.append((source, str(count), percent(s.mape), percent(s.bias), percent(s.largest)))
    return lines


def _ranking(results: Sequence[Result]) -> list[tuple[str, ...]]:
    menus = {
        "3.6B on 64 devices": lambda name: "_3.6b_" in name,
        "39.1B on 512 devices": lambda name: "_39.1b_" in name,
        "39.1B, tp=8 only": lambda name: "_39.1b_tp8" in name,
    }
    lines = []
    for title, holds in menus.items():
        pairs = [
            (r.predicted_s, r.measured_s)
            for r in results
            if r.source == "vtrain" and holds(r.id) and r.predicted_s and r.measured_s
        ]
        if len(pairs) > MENU:
            tau = f"{kendall_tau(pairs):.2f}"
            regrets = (regret(pairs, menu=MENU, menus=MENUS, top=top) for top in (1, 3))
            lines.append((title, str(len(pairs)), tau, *map(percent, regrets)))
    return lines


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


# --------------------------------------------------------------------------- the plot


def svg(results: Sequence[Result]) -> str:
    """Predicted against measured step time, logarithmic axes."""
    points = [(r.measured_s, r.predicted_s, r) for r in results if r.predicted_s and r.measured_s]
    values = [v for measured, predicted, _ in points for v in (measured, predicted)]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))

    def place(value: float) -> float:
        return MARGIN + (SIZE - 2 * MARGIN) * math.log(value / low) / math.log(high / low)

    sources = sorted({r.source for _, _, r in points})
    colours = {source: COLOURS[i % len(COLOURS)] for i, source in enumerate(sources)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE + LEGEND} {SIZE}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{SIZE + LEGEND}" height="{SIZE}" fill="white"/>',
        _band(place, low, high),
        *_grid(place, low, high),
    ]
    for measured, predicted, r in points:
        x, y = place(measured), SIZE - place(predicted)
        title = escape(f"{r.id}: {predicted:.3g} s predicted, {measured:.3g} s measured")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[r.source]}" fill-opacity="0.7">'
            f"<title>{title}</title></circle>"
        )
    for i, source in enumerate(sources):
        y = MARGIN + 20 * i
        parts.append(f'<circle cx="{SIZE}" cy="{y}" r="4" fill="{colours[source]}"/>')
        parts.append(f'<text x="{SIZE + 10}" y="{y + 4}">{escape(source)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _band(place, low: float, high: float) -> str:
    ends = [
        (low, low * (1 - BAND)),
        (high, high * (1 - BAND)),
        (high, high * (1 + BAND)),
        (low, low * (1 + BAND)),
    ]
    corners = " ".join(f"{place(m):.1f},{SIZE - place(p):.1f}" for m, p in ends)
    return f'<polygon points="{corners}" fill="#dddddd"/>'


def _grid(place, low: float, high: float) -> list[str]:
    first, last = MARGIN, SIZE - MARGIN
    parts = [f'<line x1="{first}" y1="{last}" x2="{last}" y2="{first}" stroke="#888888"/>']
    value = low
    while value <= high * 1.001:
        at = place(value)
        parts.append(f'<line x1="{at:.1f}" y1="{first}" x2="{at:.1f}" y2="{last}" stroke="#eeeeee"/>')
        parts.append(
            f'<line x1="{first}" y1="{SIZE - at:.1f}" x2="{last}" y2="{SIZE - at:.1f}" stroke="#eeeeee"/>'
        )
        parts.append(f'<text x="{at:.1f}" y="{last + 18}" text-anchor="middle">{value:g}</text>')
        parts.append(f'<text x="{first - 8}" y="{SIZE - at + 4:.1f}" text-anchor="end">{value:g}</text>')
        value *= 10
    middle = SIZE // 2
    parts.append(f'<text x="{middle}" y="{SIZE - 14}" text-anchor="middle">measured step time, s</text>')
    parts.append(
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        "predicted step time, s</text>"
    )
    return parts
