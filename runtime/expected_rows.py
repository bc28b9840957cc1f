"""Rows that go to experts and tables and back: what has to run for the counts that were really exchanged.

In: a plan, and what the ranks of one stage executed. Out: for each of them how much has to run. How many
rows go where is the router's choice, so a rank's bytes follow from the counts that it exchanged just before,
c rows sent and r received of w bytes each:

    some experts on each rank    out c w, back r w; their gradients r w and c w
    a part of each expert        every rank's rows padded to the most, n ranks: n max(c) w each way
    a table                      ids out, c w; vectors back, r w; the vectors' gradients c w

Over all ranks of a stage c and r have the same sum: their bytes, without padding, are the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..planner.layout import Collective
from ..planner.plan import Plan
from .amounts import NOTHING, Amount, Expected, Key
from .exchange import COUNTS_LABEL, IDS_LABEL, ROWS_LABEL
from .executed import Executed, axes_of
from .expected import planned
from .labels import GRADIENT

LABELS = (COUNTS_LABEL, IDS_LABEL, ROWS_LABEL)


@dataclass(frozen=True, slots=True)
class _Trip:
    """Rows out and back, after an exchange of counts."""

    counts: Executed
    out: Executed
    back: Executed

    @property
    def shared(self) -> bool:
        """Whether every rank holds a part of each expert."""
        return self.counts.collective is Collective.ALL_GATHER

    @property
    def rows(self) -> tuple[int, int]:
        """Out and back, as they have to be moved."""
        sent, *each = self.counts.rows
        padded = len(each) * max(each)
        return (padded, padded) if self.shared else (sent, sum(each))

    @property
    def even(self) -> tuple[int, int]:
        """What a plan counts on: without padding, as many back as out."""
        sent, *each = self.counts.rows
        rows = sum(each) if self.shared else sent
        return rows, rows


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank along one axis."""

    trips: tuple[_Trip, ...]
    """Of forwards."""
    again: tuple[_Trip, ...]
    """Of forwards that backward ran again."""
    gradients: tuple[Executed, ...]
    whole: bool
    """Whether what was recorded is trips and gradients, and nothing else."""


def _of(found: Sequence[Executed]) -> _Rank:
    """Take apart what ran, in order."""
    trips: tuple[list[_Trip], list[_Trip]] = [], []
    gradients: list[Executed] = []
    whole, i = True, 0
    while i < len(found):
        e, after = found[i], found[i + 1 : i + 3]
        if e.label == COUNTS_LABEL and len(after) == 2 and COUNTS_LABEL not in (a.label for a in after):
            trips[e.backward].append(_Trip(e, *after))
            i += 3
        else:
            gradients.append(e)
            whole &= e.label == ROWS_LABEL and e.backward
            i += 1
    return _Rank(tuple(trips[0]), tuple(trips[1]), tuple(gradients), whole)


def rows(plan: Plan, stage: int, ranks: Sequence[Sequence[Executed]]) -> list[dict[Key, Exchange]]:
    """For each rank of a stage what has to run, and what did."""
    priced = {key: amount for key, amount in planned(plan, stage).items() if key[0].startswith(ROWS_LABEL)}
    found = [[e for e in rank if e.label in LABELS and axes_of(e.ranks, plan.mesh)] for rank in ranks]
    axes = sorted({axes_of(e.ranks, plan.mesh) for rank in found for e in rank})
    every = [
        {axis: _of([e for e in rank if axes_of(e.ranks, plan.mesh) == axis]) for axis in axes}
        for rank in found
    ]
    total: dict[Key, Amount] = {}
    for rank in every:
        for key, amount in _moved(rank, again=False, even=True).items():
            total[key] = total.get(key, NOTHING) + amount
    return [_exchanges(rank, priced, total, len(ranks)) for rank in every]


Exchange = tuple[Expected, Amount]
"""What has to run, and what did."""


def _exchanges(
    rank: dict[str, _Rank], priced: dict[Key, Amount], total: dict[Key, Amount], ranks: int
) -> dict[Key, Exchange]:
    runs, done = _moved(rank, again=True, even=False), _done(rank)
    whole = all(along.whole for along in rank.values())

    def expected(key: Key) -> Expected:
        plan, even = priced.get(key, NOTHING), total.get(key, NOTHING)
        once = plan.bytes * (plan.count - plan.again) / plan.count if plan.count else 0.0
        return Expected(
            planned=plan,
            runs=runs.get(key, NOTHING),
            rule="as many rows as the router chose",
            sound=whole and math.isclose(once * ranks, even.bytes, rel_tol=1e-12),
        )

    return {key: (expected(key), done.get(key, NOTHING)) for key in dict.fromkeys((*priced, *runs, *done))}


UNDONE = {
    Collective.ALL_TO_ALL: Collective.ALL_TO_ALL,
    Collective.ALL_GATHER: Collective.REDUCE_SCATTER,
    Collective.REDUCE_SCATTER: Collective.ALL_GATHER,
}
"""The collective of the gradient."""


def _moved(rank: dict[str, _Rank], *, again: bool, even: bool) -> dict[Key, Amount]:
    """What follows from the counts; `even`: as plans count, without padding and as many back as out."""
    found: dict[Key, Amount] = {}

    def add(label: str, kind: Collective, axis: str, nbytes: int, reruns: bool = False) -> None:
        key = (label, kind, axis)
        found[key] = found.get(key, NOTHING) + Amount(1, nbytes, reruns)

    for axis, along in rank.items():
        for reruns, trips in ((False, along.trips), (True, along.again if again else ())):
            for trip in trips:
                out, back = trip.even if even else trip.rows
                add(ROWS_LABEL, trip.out.collective, axis, out * trip.out.row_bytes, reruns)
                add(ROWS_LABEL, trip.back.collective, axis, back * trip.back.row_bytes, reruns)
        for trip in along.trips:
            out, back = trip.even if even else trip.rows
            add(ROWS_LABEL + GRADIENT, UNDONE[trip.back.collective], axis, out * trip.back.row_bytes)
            if trip.out.label != IDS_LABEL:  # ids have no gradient
                add(ROWS_LABEL + GRADIENT, UNDONE[trip.out.collective], axis, back * trip.out.row_bytes)
    return found


def _done(rank: dict[str, _Rank]) -> dict[Key, Amount]:
    """What was recorded."""
    found: dict[Key, Amount] = {}
    for axis, along in rank.items():
        forward = [e for trip in (*along.trips, *along.again) for e in (trip.out, trip.back)]
        for label, executed in ((ROWS_LABEL, forward), (ROWS_LABEL + GRADIENT, along.gradients)):
            for e in executed:
                key = (label, e.collective, axis)
                found[key] = found.get(key, NOTHING) + Amount(1, e.bytes)
    return found
