"""What measured runs told of a cluster, as a page and as a JSON document.

In: the scales and the runs by framework. Out: a table of runs (measured, predicted before and after), and a
sentence for each scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType

from ..planner.topology import ExplainedRun, MeasuredScale
from . import words as say
from .terminal.tables import Heading, literal, number, table, words

TIMES = ("kernels", "collectives")

Told = Mapping[str, tuple[Sequence[MeasuredScale], Sequence[ExplainedRun]]]
"""By framework."""


def calibration_document(told: Told) -> dict[str, Any]:
    """The JSON of `calibrate`: times in seconds, uncertainties relative."""
    return {
        "scales": [asdict(scale) for scales, _ in told.values() for scale in scales],
        "runs": [
            {"framework": framework, **asdict(run), "error_after": run.after_s / run.measured_s - 1}
            for framework, (_, runs) in told.items()
            for run in runs
        ],
    }


def render_calibration(told: Told) -> Group:
    """The whole page."""
    return Group(
        *(part for framework, (scales, runs) in told.items() for part in _parts(framework, scales, runs))
    )


def _parts(
    framework: str, scales: Sequence[MeasuredScale], runs: Sequence[ExplainedRun]
) -> Iterator[RenderableType]:
    yield Heading(f"{say.plural(len(runs), 'run')} under {framework}")
    made = table(
        words("run"), number("measured"), number("predicted"), number("off"), number("now"), number("off")
    )
    for run in runs:
        made.add_row(
            literal(run.name),
            literal(say.duration(run.measured_s)),
            literal(say.duration(run.before_s)),
            literal(_off(run.before_s, run)),
            literal(say.duration(run.after_s)),
            literal(_off(run.after_s, run)),
        )
    yield made
    for scale in scales:
        yield literal(str(scale))
    if missing := [name for name in TIMES if name not in {scale.name for scale in scales}]:
        yield literal(f"these runs do not tell the scale of {' and '.join(missing)}: it stays as it was")


def _off(seconds: float, run: ExplainedRun) -> str:
    return f"{seconds / run.measured_s - 1:+.1%}"
