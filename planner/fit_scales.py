"""From measured runs to the scales of a cluster.

In: runs, each as a function from scales to its prediction, and what was measured. Out: `Fitted`: the scales
that the runs tell, how sure they are, and every run before and after.

Times are fitted by least squares over log scales (Gauss-Newton; derivatives by differences), with scales
pulled weakly towards 1:

    min over log k, log c of  sum log^2(predicted / measured) / NOISE^2 + (log^2 k + log^2 c) / PULL^2

A scale that the runs do not tell (its standard error above `UNSURE`) stays 1 and is not reported. Memory is
the geometric mean of measured over predicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .topology import ExplainedRun, MeasuredScale

NOISE = 0.04
"""Relative error of a step time that no scale explains: the spread of runs measured twice. Judgement."""
PULL = 0.7
"""Natural logarithm by which a scale may differ from 1 as a matter of course: a factor of two."""
UNSURE = 0.25
"""Relative standard error above which runs do not tell a scale."""
STEP = 0.1
"""Difference in log scale over which derivatives are taken: steps have kinks where overlap changes."""
ROUNDS = 6
PRIOR_RUNS, PRIOR_ERROR = 2, 0.08
"""The uncertainty of few runs leans on that of published ones: median error 8% (docs/accuracy.md)."""
FOUR_IN_FIVE = 1.2816
"""Standard deviations within which 80% of a normal distribution lie."""

TIMES = ("kernels", "collectives")
Scales = Mapping[str, float]
"""By name; a missing one is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run to fit."""

    name: str
    step_s: float
    memory_bytes: float | None
    predict: Callable[[Scales], float]
    """Step time under scales of times, seconds."""
    allocated_bytes: float
    """Predicted bytes on the fullest device, without the allocator's reserve and context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What the runs told."""

    scales: tuple[MeasuredScale, ...]
    runs: tuple[ExplainedRun, ...]


def fit_scales(cases: Sequence[Case], *, framework: str, source: str) -> Fitted:
    """The scales of runs under one framework. `source` says where and when they were measured."""
    chosen = _times(cases)
    after = [case.predict(chosen) for case in cases]
    errors = [math.log(seconds / case.step_s) for case, seconds in zip(cases, after, strict=True)]
    scales = [
        _scale(name, value, errors, framework=framework, source=source) for name, value in chosen.items()
    ]
    ratios = [case.memory_bytes / case.allocated_bytes for case in cases if case.memory_bytes]
    if ratios:
        value = math.exp(fmean(map(math.log, ratios)))
        misses = [math.log(value / ratio) for ratio in ratios]
        scales.append(_scale("memory", value, misses, framework=framework, source=source))
    runs = (
        ExplainedRun(name=case.name, measured_s=case.step_s, before_s=case.predict({}), after_s=seconds)
        for case, seconds in zip(cases, after, strict=True)
    )
    return Fitted(scales=tuple(scales), runs=tuple(runs))


def _scale(name: str, value: float, errors: Sequence[float], *, framework: str, source: str) -> MeasuredScale:
    squares = sum(error**2 for error in errors) + PRIOR_RUNS * PRIOR_ERROR**2
    uncertainty = math.expm1(FOUR_IN_FIVE * math.sqrt(squares / (len(errors) + PRIOR_RUNS)))
    return MeasuredScale(
        name=name,
        framework=framework,
        value=float(f"{value:.4g}"),
        uncertainty=float(f"{uncertainty:.3g}"),
        runs=len(errors),
        source=source,
    )


def _times(cases: Sequence[Case]) -> dict[str, float]:
    """The scales that the runs tell, the others left out; kernels always, for every run has them."""
    logs, sure = _solve(cases, TIMES)
    if not sure["collectives"]:
        logs, sure = _solve(cases, ("kernels",))
    elif not sure["kernels"]:
        logs, sure = _solve(cases, ("collectives",))
    return {name: math.exp(log) for name, log in logs.items() if sure[name]}


def _solve(cases: Sequence[Case], names: Sequence[str]) -> tuple[dict[str, float], dict[str, bool]]:
    """Log scales by Gauss-Newton, and whether each is told."""
    import numpy as np

    logs = np.zeros(len(names))
    pull = np.eye(len(names)) / PULL**2
    normal = pull

    def residuals(at: object) -> np.ndarray:
        scales = {name: math.exp(log) for name, log in zip(names, np.asarray(at), strict=True)}
        return np.array([math.log(case.predict(scales) / case.step_s) for case in cases]) / NOISE

    for _ in range(ROUNDS):
        now = residuals(logs)
        slopes = np.stack(
            [(residuals(logs + STEP * unit) - now) / STEP for unit in np.eye(len(names))], axis=1
        )
        normal = slopes.T @ slopes + pull
        change = np.linalg.solve(normal, -(slopes.T @ now) - pull @ logs)
        logs = logs + np.clip(change, -1.0, 1.0)
        if np.abs(change).max() < 1e-4:
            break
    errors = np.sqrt(np.diag(np.linalg.inv(normal)))
    return (
        {name: float(log) for name, log in zip(names, logs, strict=True)},
        {name: bool(error < UNSURE) for name, error in zip(names, errors, strict=True)},
    )
