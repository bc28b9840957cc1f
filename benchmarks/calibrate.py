"""One scale per device and framework, and what it is worth on sources it has not seen.

In: rows priced at two scales. Out: the scale of every (framework, device) pair that its rows agree on
best, and per row the prediction under it, without it, and under the scale its pair gets when the row's
own source is left out.

Between two priced scales a step is a line: kernels take `scale` times as long, the rest does not move.
The fit lets the mean of relative errors vanish, each counted up to `CLIP` so that rows which contradict
their siblings do not decide. A pair whose rows are all left out borrows from the same device, then
from the same framework, then from all other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import fmean

LOW, HIGH = 1.0, 1.3
"""Scales at which every row is priced."""
CLIP = 0.10
"""Largest error that counts in a fit."""
SCALE_RANGE = (0.7, 2.0)
STEPS = 40
"""Bisections: far below any digit that is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One row at two scales."""

    id: str
    source: str
    framework: str
    device: str
    measured_s: float
    low_s: float
    high_s: float

    @property
    def pair(self) -> tuple[str, str]:
        """What a scale belongs to."""
        return self.framework, self.device

    def at(self, scale: float) -> float:
        """Step time at a scale."""
        return self.low_s + (self.high_s - self.low_s) * (scale - LOW) / (HIGH - LOW)

    def error(self, scale: float) -> float:
        """Relative error at a scale."""
        return self.at(scale) / self.measured_s - 1


def fit(rows: Sequence[Priced]) -> float:
    """The scale at which the clipped relative errors of `rows` average zero."""
    low, high = SCALE_RANGE
    for _ in range(STEPS):
        middle = (low + high) / 2
        if fmean(max(-CLIP, min(CLIP, row.error(middle))) for row in rows) > 0:
            high = middle
        else:
            low = middle
    return round((low + high) / 2, 4)


def fit_pairs(rows: Sequence[Priced]) -> dict[tuple[str, str], float]:
    """The scale of every pair."""
    return {pair: fit([r for r in rows if r.pair == pair]) for pair in sorted({r.pair for r in rows})}


def left_out(rows: Sequence[Priced]) -> dict[str, float]:
    """Per row: its prediction under the scale that the other sources give its pair."""
    scales: dict[tuple[str, tuple[str, str]], float] = {}
    for key in sorted({(r.source, r.pair) for r in rows}):
        others = [r for r in rows if r.source != key[0]]
        scales[key] = fit(_nearest(others, key[1])) if others else 1.0
    return {r.id: r.at(scales[r.source, r.pair]) for r in rows}


def _nearest(rows: Sequence[Priced], pair: tuple[str, str]) -> Sequence[Priced]:
    """Rows of the pair, else of its device, else of its framework, else all."""
    tests: tuple[Callable[[Priced], bool], ...] = (
        lambda r: r.pair == pair,
        lambda r: r.device == pair[1],
        lambda r: r.framework == pair[0],
        lambda r: True,
    )
    return next(found for test in tests if (found := [r for r in rows if test(r)]))


def data_file(rows: Sequence[Priced], today: date) -> str:
    """The text of the planner's calibration file."""
    lines = [
        "# How much longer kernels take in training than the efficiency curves say, by framework and device.",
        "# Written by `python -m benchmarks.accuracy ROWS.yaml --fit`. error: mean absolute relative error",
        "# of the step time on the rows it was fitted on.",
    ]
    previous = None
    for (framework, device), scale in fit_pairs(rows).items():
        members = [r for r in rows if r.pair == (framework, device)]
        if framework != previous:
            lines.append(f"{framework}:")
        previous = framework
        error = fmean(abs(r.error(scale)) for r in members)
        lines += [f"  {device}:", f"    scale: {scale}", f"    fitted: '{today.isoformat()}'"]
        lines += [f"    error: {error:.4f}", "    rows:"]
        lines += [f"      - {r.id}" for r in members]
    return "\n".join(lines) + "\n"
