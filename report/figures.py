"""The main figures of a report as SVG and PNG, for slides and papers.

In: a `Plan`, the `Timeline` of its pipeline if there is one. Out: bytes by file name: `step-time`,
`memory`, `explored` and, for pipelines, `pipeline`. Drawn by matplotlib (extra `[report]`), which needs no
browser and gives both formats from one drawing; equal plans give equal bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..planner.errors import UserError
from ..planner.plan import Plan
from ..planner.schedule import ActionKind, Timeline
from . import words
from .points import apart, front, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
WIDTH_INCHES = 9.0
ROW_INCHES = 0.3
"""Height of one bar with its gap."""
PNG_DPI = 160
MOST_SHAPES = 3000
"""Spans that are drawn as shapes; more are drawn as pixels, in the SVG as well."""
INK, MUTED, LINE, BAD, ACCENT = "#17212b", "#5b6876", "#dfe4ea", "#c23434", "#1f64d6"
ORIGINS = {"measured": "#1e9a61", "interpolated": "#d79a1e", "modelled": "#9465c9"}
MEMORY = ("#3f7bd9", "#35b0c9", "#4aa564", "#e6b33c", "#b66bc4", "#e0674d", "#7d8fdd", "#9aa6b3", "#6b7682")
ACTIONS = {
    ActionKind.FORWARD: ("forward", "#4a86e0"),
    ActionKind.BACKWARD: ("backward", "#22a38a"),
    ActionKind.BACKWARD_INPUT: ("gradient of inputs", "#22a38a"),
    ActionKind.BACKWARD_WEIGHT: ("gradient of weights", "#e2ab3a"),
}
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "tpplan",
}


def require() -> None:
    """Raise UserError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: pip install tpplan[report]")


def draw(plan: Plan, timeline: Timeline | None = None) -> dict[str, bytes]:
    """Every figure of the plan, as `NAME.svg` and `NAME.png`. Raises UserError without matplotlib."""
    require()
    made = {
        **_saved("step-time", len(plan.predicted.waterfall) + 2, lambda axes: _waterfall(axes, plan)),
        **_saved("memory", len(plan.stages) + 3, lambda axes: _memory(axes, plan)),
        **_saved("explored", 14, lambda axes: _explored(axes, plan)),
    }
    if timeline:
        made |= _saved("pipeline", len(timeline.spans) + 3, lambda axes: _pipeline(axes, timeline))
    return made


def _saved(name: str, rows: int, fill: Callable[[Axes], None]) -> dict[str, bytes]:
    """One figure with `rows` bars, in both formats."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, max(2.0, rows * ROW_INCHES)), layout="constrained")
        fill(figure.add_subplot())
        files = {}
        for kind in ("svg", "png"):
            file = io.BytesIO()
            dated: Any = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(file, format=kind, dpi=PNG_DPI, metadata=dated)
            files[f"{name}.{kind}"] = file.getvalue()
    return files


def _rows(axes: Axes, labels: list[str]) -> None:
    """One named row a bar, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def _waterfall(axes: Axes, plan: Plan) -> None:
    """The step, part by part, each beginning where the last one ended."""
    begin_ms, shown = 0.0, set()
    for row, part in enumerate(plan.predicted.waterfall):
        name = str(part.origin)
        label = None if name in shown else name
        shown.add(name)
        axes.barh(row, part.seconds * 1e3, left=begin_ms, height=0.7, color=ORIGINS[name], label=label)
        begin_ms += part.seconds * 1e3
        axes.annotate(
            f" {words.milliseconds(part.seconds)}", (begin_ms, row), va="center", color=MUTED, fontsize=8
        )
    _rows(axes, [part.label for part in plan.predicted.waterfall])
    low, high = plan.predicted.step_time_interval_s
    axes.set_xlim(0, begin_ms * 1.12)
    axes.set_xlabel(
        f"ms; a step takes {words.duration(plan.predicted.step_time_s)}, "
        f"between {words.duration(low)} and {words.duration(high)}"
    )
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(ORIGINS))


def _memory(axes: Axes, plan: Plan) -> None:
    """Each stage's memory by kind, against the device."""
    kinds = dict.fromkeys(part.kind for stage in plan.stages for part in stage.memory if part.bytes > 0)
    begins = [0.0] * len(plan.stages)
    for i, kind in enumerate(kinds):
        sizes = [sum(p.bytes for p in stage.memory if p.kind == kind) / GIB for stage in plan.stages]
        color = MEMORY[i % len(MEMORY)]
        axes.barh(range(len(sizes)), sizes, left=begins, height=0.7, color=color, label=kind)
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    device = plan.predicted.device_memory_bytes / GIB
    axes.axvline(device, color=BAD, linestyle="--", linewidth=1.2, label=f"device, {device:.1f}")
    for row, stage in enumerate(plan.stages):
        peak = stage.peak_memory_bytes / GIB
        axes.plot([peak, peak], [row - 0.35, row + 0.35], color=INK, linestyle=":", linewidth=1.2)
    _rows(axes, [f"stage {stage.index}" for stage in plan.stages])
    axes.set_xlabel("GiB on the fullest device of the stage; dotted: the upper band, which must fit")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5)


def _pipeline(axes: Axes, timeline: Timeline) -> None:
    """One simulated step: a row a rank."""
    pixels = sum(map(len, timeline.spans)) > MOST_SHAPES
    for kind, (name, color) in ACTIONS.items():
        label: str | None = name
        for rank, spans in enumerate(timeline.spans):
            bars = [(s.start_s * 1e3, (s.end_s - s.start_s) * 1e3) for s in spans if s.action.kind is kind]
            if bars:
                edge = {"edgecolor": "white", "linewidth": 0.0 if pixels else 0.3}
                axes.broken_barh(
                    bars, (rank - 0.4, 0.8), facecolor=color, label=label, rasterized=pixels, **edge
                )
                label = None
    ranks = len(timeline.spans)
    _rows(axes, [f"stage {rank}" for rank in range(ranks)])
    axes.set_xlim(0, timeline.makespan_s * 1e3)
    axes.set_xlabel("ms since the step began")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


def _explored(axes: Axes, plan: Plan) -> None:
    """Step time against memory: the plan, its rivals, and the front."""
    found = points(plan)
    line = front(found)
    axes.plot(
        [p.memory_bytes / GIB for p in line],
        [p.step_s for p in line],
        color=MUTED,
        linestyle=":",
        linewidth=1,
        label="none is both faster and smaller",
    )
    device = plan.predicted.device_memory_bytes / GIB
    axes.axvline(device, color=BAD, linestyle="--", linewidth=1.2, label=f"device, {device:.1f} GiB")
    widest = max(device, *(point.memory_bytes / GIB for point in found)) * 1.05
    axes.set_xlim(0, widest)
    axes.margins(y=0.12)
    for point in reversed(found):  # the plan last: on top
        mine = point.kind == "chosen"
        size, marker, color = (140, "*", ACCENT) if mine else (32, "o", MUTED)
        axes.scatter(point.memory_bytes / GIB, point.step_s, s=size, marker=marker, color=color)
    for point in apart(found):
        left = point.memory_bytes / GIB > widest / 2
        axes.annotate(
            point.label,
            (point.memory_bytes / GIB, point.step_s),
            xytext=(-9 if left else 9, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontsize=8,
            color=ACCENT if point.kind == "chosen" else MUTED,
            parse_math=False,
        )
    axes.set_xlabel("GiB, fullest device")
    axes.set_ylabel("s a step")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
