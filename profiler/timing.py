"""Repeat until the spread is small.

In: a function that runs `n` executions and returns their seconds, and how all ranks agree on a number.
Out: a `Sample`. All ranks make the same number of calls, because every decision rests on agreed numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles

from .settings import Sample, Settings

MOST_EXECUTIONS = 10_000
"""In one batch; below a microsecond each, the clock itself is what is measured."""

Run = Callable[[int], float]
Agree = Callable[[float], float]


def sample(run: Run, settings: Settings, *, agree: Agree = lambda seconds: seconds) -> Sample:
    """Seconds of one execution of what `run(n)` runs `n` times. The first batch only warms up."""
    count = _executions(run, settings, agree)
    fewest, most = settings.batches
    times: list[float] = []
    while len(times) < most:
        times.append(agree(run(count) / count))
        if len(times) >= fewest and spread(times) <= settings.spread:
            break
        if len(times) >= 3 and sum(times) * count > most * max(settings.batch_s, settings.longest_s):
            break
    return Sample(seconds=median(times), spread=spread(times), batches=len(times))


def spread(times: Sequence[float]) -> float:
    """Half the interquartile range over the median; robust against a few interrupted batches."""
    low, _, high = quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / median(times)


def _executions(run: Run, settings: Settings, agree: Agree) -> int:
    """How many executions make a batch, found while warming up."""
    count = 1
    while True:
        seconds = agree(run(count))
        if seconds >= settings.batch_s or count >= MOST_EXECUTIONS:
            return count
        wanted = count * settings.batch_s / max(seconds, 1e-9) * 1.2
        count = min(MOST_EXECUTIONS, max(2 * count, int(wanted)))
