"""Repeat until the spread is small.

In: functions that run `n` executions and return their seconds, and how all ranks agree on a number. Out: a
`Sample` for each. All ranks make the same number of calls, because every decision rests on agreed numbers.

Measurements that will be compared (the sizes of one curve) are taken in turns, a batch of each and then
again: whatever else the machine does for a while, it does to all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import NamedTuple

from .settings import Sample, Settings

MOST_EXECUTIONS = 10_000
"""In one batch; below a microsecond each, the clock itself is what is measured."""
FEWEST_BATCHES = 3
"""Before a measurement that takes too long may end."""

Run = Callable[[int], float]
Agree = Callable[[float], float]


class Batch(NamedTuple):
    """How many executions make a batch, and the seconds of one execution while finding out."""

    executions: int
    seconds: float


def alone(seconds: float) -> float:
    """The agreement of a single process."""
    return seconds


def sample(run: Run, settings: Settings, *, agree: Agree = alone) -> Sample:
    """Seconds of one execution of what `run(n)` runs `n` times. The first batch only warms up."""
    return in_turns({"": run}, {"": warm_up(run, settings, agree)}, settings, agree=agree)[""]


def in_turns(
    runs: Mapping[str, Run], batches: Mapping[str, Batch], settings: Settings, *, agree: Agree = alone
) -> dict[str, Sample]:
    """A sample of each run, by key: of the rank whose own is the longest, where ranks run by themselves.

    A run that is settled goes on as long as others of its turn do, unless it has taken `enough_s`; all end
    when they have taken that much by the clock on the wall, which a busy machine makes longer.
    """
    fewest, most = settings.batches
    started_s, limit_s = time.perf_counter(), len(runs) * settings.enough_s
    times: dict[str, list[float]] = {key: [] for key in runs}
    for turn in range(most):
        for key, run in runs.items():
            executions, seconds = batches[key]
            if turn < FEWEST_BATCHES or turn * executions * seconds < settings.enough_s:
                times[key].append(run(executions) / executions)
        if turn + 1 >= fewest and agree(max(map(spread, times.values()))) <= settings.spread:
            break
        if turn + 1 >= FEWEST_BATCHES and agree(time.perf_counter() - started_s) > limit_s:
            break
    return {
        key: Sample(seconds=agree(quartiles(found)[0]), spread=agree(spread(found)), batches=len(found))
        for key, found in times.items()
    }


def spread(times: Sequence[float]) -> float:
    """Half the interquartile range over the median; robust against a few interrupted batches."""
    low, middle, high = quartiles(times)
    return (high - low) / 2 / middle


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """The values below which a quarter, a half and three quarters of `times` lie."""
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return low, middle, high


def warm_up(run: Run, settings: Settings, agree: Agree = alone) -> Batch:
    """How many executions make a batch of `batch_s`.

    The first execution loads code and makes buffers: it is not counted, else a batch would be as short as
    that one was long.
    """
    run(1)
    count = 1
    while True:
        seconds = agree(run(count))
        if seconds >= settings.batch_s or count >= MOST_EXECUTIONS:
            return Batch(count, seconds / count)
        wanted = count * settings.batch_s / max(seconds, 1e-9) * 1.2
        count = min(MOST_EXECUTIONS, max(2 * count, int(wanted)))
