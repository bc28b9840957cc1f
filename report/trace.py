"""A pipeline's timeline in the trace format that Perfetto and chrome://tracing read.

In: a `Timeline`, the plan it is of. Out: one JSON text: a thread a pipeline rank, a slice a span
(microseconds since the step began), a counter a rank for the microbatches it holds. Format:
"Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..planner.plan import Plan
from ..planner.schedule import ActionKind, Span, Timeline

MICROSECONDS = 1e6
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward, inputs",
    ActionKind.BACKWARD_WEIGHT: "backward, weights",
}

Event = dict[str, Any]


def trace_json(timeline: Timeline, plan: Plan) -> str:
    """The timeline as a trace file's text."""
    events = [*_names(timeline, plan), *_slices(timeline), *_counters(timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _names(timeline: Timeline, plan: Plan) -> Iterator[Event]:
    process = f"{plan.model.name}: {plan.schedule}, {plan.num_microbatches} microbatches"
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}}
    for rank in range(len(timeline.spans)):
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"stage {rank}"}}
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slices(timeline: Timeline) -> Iterator[Event]:
    for rank, spans in enumerate(timeline.spans):
        yield from (_slice(rank, span) for span in spans)


def _slice(rank: int, span: Span) -> Event:
    action = span.action
    return {
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "name": str(action),
        "cat": NAMES[action.kind],
        "ts": span.start_s * MICROSECONDS,
        "dur": (span.end_s - span.start_s) * MICROSECONDS,
        "args": {"kind": NAMES[action.kind], "stage": action.stage, "microbatch": action.microbatch},
    }


def _counters(timeline: Timeline) -> Iterator[Event]:
    """Microbatches held by each rank, in units of all its stages."""
    stages = 1 + max(span.action.stage for spans in timeline.spans for span in spans)
    per_rank = len(timeline.spans) / stages
    for rank, points in enumerate(timeline.memory([per_rank] * stages)):
        for seconds, held in points:
            yield {
                "ph": "C",
                "pid": 0,
                "name": f"in flight, stage {rank}",
                "ts": seconds * MICROSECONDS,
                "args": {"microbatches": held},
            }
