"""The page's plotly figures as plain data: pipeline timeline, memory over time, explored plans.

Colours are names of the page's CSS variables (`var:--blue`), so that light, dark and print each
show their own. Times are in milliseconds, memory in GiB. Plotly reads labels as a kind of HTML:
names are escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ...planner.plan import Plan, Stage
from ...planner.schedule import ActionKind, Span, Timeline
from ..points import Point, apart, front, points
from .sections import color

MOST_BARS = 3000
"""Spans that are drawn as bars with a label each; more become one broken line a kind."""
MOST_MEMORY_LINES = 8
"""Ranks whose memory over time is drawn: the first, the last and those between, evenly chosen."""
SPANS_IN_VIEW = 64
"""Spans of a rank that a reader can tell apart in one view."""
GIB = 2**30
MS = 1e3
KINDS = {
    ActionKind.FORWARD: ("forward", "--forward"),
    ActionKind.BACKWARD: ("backward", "--backward"),
    ActionKind.BACKWARD_INPUT: ("gradient of inputs", "--backward"),
    ActionKind.BACKWARD_WEIGHT: ("gradient of weights", "--weights"),
}

Figure = dict[str, Any]


def all_figures(plan: Plan, timeline: Timeline | None) -> dict[str, Figure]:
    """The figures that this plan has, by the id of their place in the page."""
    made = {"explored": explored(plan)} if plan.alternatives or len(plan.pareto) > 1 else {}
    if timeline:
        made |= {"timeline": pipeline(timeline), "memory-time": memory_over_time(plan, timeline)}
    return made


# --------------------------------------------------------------------------- the pipeline


def pipeline(timeline: Timeline) -> Figure:
    """One row a rank, one bar a span."""
    spans = [(rank, span) for rank, row in enumerate(timeline.spans) for span in row]
    draw = _bars if len(spans) <= MOST_BARS else _lines
    traces = [
        draw([(rank, span) for rank, span in spans if span.action.kind is kind], name, color)
        for kind, (name, color) in KINDS.items()
        if any(span.action.kind is kind for _, span in spans)
    ]
    ranks = len(timeline.spans)
    views = windows(timeline)
    return {
        "data": traces,
        "windows": views,
        "layout": {
            "barmode": "overlay",
            "bargap": 0.18,
            "xaxis": {"title": {"text": "ms since the step began"}, "range": views["start"]},
            "yaxis": {
                "range": [ranks - 0.4, -0.6],
                "fixedrange": ranks <= 8,
                "tickmode": "array" if ranks <= 16 else "auto",
                "tickvals": list(range(ranks)),
                "ticktext": [f"stage {rank}" for rank in range(ranks)],
            },
            "legend": {"orientation": "h", "y": 1.12},
            "height": max(220, min(640, 110 + 34 * ranks)),
        },
    }


def _bars(spans: Sequence[tuple[int, Span]], name: str, color: str) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [rank for rank, _ in spans],
        "base": [_ms(span.start_s) for _, span in spans],
        "x": [_ms(span.end_s - span.start_s) for _, span in spans],
        "customdata": [[span.action.stage, span.action.microbatch] for _, span in spans],
        "hovertemplate": f"{name}, microbatch %{{customdata[1]}}<br>stage %{{customdata[0]}} of the model<br>"
        "from %{base:.2f} for %{x:.2f} ms<extra></extra>",
        "marker": {"color": f"var:{color}", "line": {"color": "var:--card", "width": 0.6}},
    }


def _lines(spans: Sequence[tuple[int, Span]], name: str, color: str) -> Figure:
    """All spans of a kind as one broken thick line: light enough for tens of thousands.

    The page's script strings the line together from `spans`: (rank, start, end, stage, microbatch).
    """
    rows = 1 + max(rank for rank, _ in spans)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "spans": [
            [
                rank,
                round(span.start_s * MS, 2),
                round(span.end_s * MS, 2),
                span.action.stage,
                span.action.microbatch,
            ]
            for rank, span in spans
        ],
        "hovertemplate": f"{name}, microbatch %{{customdata[1]}}<br>stage %{{customdata[0]}} of the model"
        "<br>%{x:.2f} ms<extra></extra>",
        "line": {"color": f"var:{color}", "width": min(20, 420 // rows), "simplify": False},
    }


def windows(timeline: Timeline) -> dict[str, list[float]]:
    """Ranges of time, ms, worth looking at: the whole step, its start, its end."""
    most = max(len(row) for row in timeline.spans)
    whole = timeline.makespan_s * MS
    part = whole * min(1.0, SPANS_IN_VIEW / most)
    return {"whole": [0, whole], "start": [0, part], "end": [whole - part, whole]}


def _ms(seconds: float) -> float:
    return round(seconds * MS, 4)


# --------------------------------------------------------------------------- memory over time


def memory_over_time(plan: Plan, timeline: Timeline) -> Figure:
    """Memory of a rank through the step: what it always holds, and its activations.

    The simulation gives the shape; each rank's activations are scaled so that their peak is the plan's.
    """
    held = timeline.memory([1.0] * _model_stages(timeline))
    shown = _some(len(plan.stages), MOST_MEMORY_LINES)
    device = plan.predicted.device_memory_bytes / GIB
    lines = [
        _memory_line(plan.stages[rank], held[rank], timeline.makespan_s, i / max(1, len(shown) - 1))
        for i, rank in enumerate(shown)
    ]
    return {
        "data": lines,
        "kinds": [_kinds(plan.stages[rank]) for rank in shown],
        "layout": {
            "xaxis": {"title": {"text": "ms since the step began"}, "range": [0, timeline.makespan_s * MS]},
            "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero", "fixedrange": True},
            "shapes": [_limit_line("y", device)],
            "annotations": [_limit_label(device)],
            "legend": {"orientation": "h", "y": -0.22},
            "height": 340,
        },
    }


def _kinds(stage: Stage) -> list[list[Any]]:
    """(kind, GiB at the peak, its colour's number), activations last: what the page's script stacks up."""
    parts = [
        (part.kind, part.bytes) for part in stage.memory if part.bytes > 0 and part.kind != "activations"
    ]
    above = stage.peak_memory_bytes - sum(part.bytes for part in stage.memory)
    if above > 0:
        parts.append(("upper band", above))
    return [[kind, round(size / GIB, 3), color(kind)] for kind, size in parts]


def _model_stages(timeline: Timeline) -> int:
    return 1 + max(span.action.stage for row in timeline.spans for span in row)


def _some(count: int, most: int) -> list[int]:
    """At most `most` of range(count): the first, the last, and evenly between."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _memory_line(stage: Stage, held: Sequence[tuple[float, float]], end_s: float, shade: float) -> Figure:
    activations = sum(part.bytes for part in stage.memory if part.kind == "activations")
    peak = max((level for _, level in held), default=0.0) or 1.0
    floor = stage.peak_memory_bytes - activations
    points = [(0.0, 0.0), *held, (end_s, held[-1][1] if held else 0.0)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"stage {stage.index}",
        "x": [_ms(seconds) for seconds, _ in points],
        "y": [round((floor + activations * level / peak) / GIB, 3) for _, level in points],
        "line": {"shape": "hv", "width": 1.6, "color": f"hue:{shade:.3f}"},
        "hovertemplate": f"stage {stage.index}: %{{y:.1f}} GiB at %{{x:.1f}} ms<extra></extra>",
    }


def _limit_line(axis: str, value: float) -> Figure:
    other = "x" if axis == "y" else "y"
    return {
        "type": "line",
        f"{axis}0": value,
        f"{axis}1": value,
        f"{other}ref": "paper",
        f"{other}0": 0,
        f"{other}1": 1,
        "line": {"color": "var:--bad", "width": 1.5, "dash": "dash"},
    }


def _limit_label(value: float) -> Figure:
    return {
        "xref": "paper",
        "x": 1,
        "xanchor": "right",
        "y": value,
        "yanchor": "bottom",
        "showarrow": False,
        "text": f"device: {value:.1f} GiB",
        "font": {"color": "var:--bad", "size": 11},
    }


# --------------------------------------------------------------------------- explored plans


def explored(plan: Plan) -> Figure:
    """Step time against memory: the plan, its rivals, the front that none of them beats in both."""
    found = points(plan)
    scale, unit = (1.0, "s") if plan.predicted.step_time_s >= 1 else (MS, "ms")
    line = front(found)
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "none is both faster and smaller",
                "x": [point.memory_bytes / GIB for point in line],
                "y": [point.step_s * scale for point in line],
                "line": {"color": "var:--muted", "width": 1, "dash": "dot"},
                "hoverinfo": "skip",
            },
            _points(found, scale, unit),
            _chosen(found[0], scale, unit),
        ],
        "layout": {
            "xaxis": {"title": {"text": "GiB, fullest device"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": f"step, {unit}"}},
            "shapes": [_limit_line("x", plan.predicted.device_memory_bytes / GIB)],
            "legend": {"orientation": "h", "y": -0.22},
            "hovermode": "closest",
            "height": 400,
        },
    }


def _points(found: Sequence[Point], scale: float, unit: str) -> Figure:
    rivals = found[1:]
    middle = max(point.memory_bytes for point in rivals) / 2
    labelled = apart(found)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "textposition": ["middle right" if p.memory_bytes < middle else "middle left" for p in rivals],
        "textfont": {"size": 11, "color": "var:--muted"},
        "name": "other plans (select one)",
        "x": [point.memory_bytes / GIB for point in rivals],
        "y": [point.step_s * scale for point in rivals],
        "text": [f"  {escape(point.label)}  " if point in labelled else "" for point in rivals],
        "customdata": [_told(point) for point in rivals],
        "hovertext": [escape(point.label) for point in rivals],
        "hovertemplate": f"%{{hovertext}}<br>%{{y:.3~g}} {unit}, %{{x:.1f}} GiB<extra></extra>",
        "marker": {"size": 11, "color": "var:--muted", "line": {"color": "var:--card", "width": 1}},
    }


def _told(point: Point) -> list[str]:
    """What the page says when the point is selected: the plan, its choices, why it lost."""
    name = f"{point.label}: {point.mesh}" if point.label != point.mesh else point.mesh
    return [name, point.choices, point.reason]


def _chosen(mine: Point, scale: float, unit: str) -> Figure:
    _, rest, why = _told(mine)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "this plan",
        "x": [mine.memory_bytes / GIB],
        "y": [mine.step_s * scale],
        "text": [escape(mine.mesh)],
        "customdata": [[f"{mine.mesh} (this plan)", rest, why]],
        "hovertemplate": f"%{{text}}<br>%{{y:.3~g}} {unit}, %{{x:.1f}} GiB<extra></extra>",
        "marker": {"size": 16, "symbol": "star", "color": "var:--accent"},
    }
