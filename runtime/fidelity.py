"""Planned and executed collectives side by side, exactly, on every rank.

In: a plan and what all ranks executed in one step (`executed.record`). Out: one row per planned label and
one for everything that no label covers. A row agrees when every rank ran it exactly as often, and with
exactly as many bytes, as the plan says, or as follows from the plan by a stated rule (`expected`,
`expected_data`, `expected_rows`). Nothing may be missing, and nothing may run that is not expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..planner.cost import Recompute
from ..planner.layout import Collective
from ..planner.plan import Plan
from ..planner.schedule import stages_of
from .amounts import NOTHING, Amount, Expected, Key
from .attention import LABEL as OPERANDS
from .check import unstated
from .data import SPARSE_LABEL
from .exchange import ROWS_LABEL
from .executed import Executed, axes_of
from .expected import NUMBER_BYTES, STAGES, expected
from .expected_data import DATA, DATA_AXES, wraps
from .expected_rows import LABELS as ROWS_LABELS
from .expected_rows import rows
from .gradients import REPLICATED_LABEL
from .labels import GRADIENT, LOSS_LABEL
from .loss import LABEL as INSIDE_LOSS

ROUNDING = 1e-9
"""Relative: bytes of plans are floats. A byte in a gigabyte is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of collective of one step; amounts are of the rank that moves most."""

    label: str
    collective: Collective
    axis: str
    planned_count: float
    executed_count: int
    planned_bytes: float
    """All executions together."""
    executed_bytes: float
    agrees: bool
    """Whether every rank ran exactly what it had to, and the plan's row is what its parameters make of it."""
    as_often: bool
    """The same of counts alone: a plan for another dtype or size has other bytes."""
    rule: str
    """In words, by what rule what runs differs from what is priced."""
    announced: bool
    """Whether it is one of the conversions that `check.differences` leaves to DTensor."""


def compare(plan: Plan, executed: Sequence[Sequence[Executed]]) -> tuple[Row, ...]:
    """Rows for what all ranks ran, in the order of ranks."""
    stages = [plan.mesh.coordinates(rank)["pp"] for rank in range(len(executed))]
    found = [_sums(plan, rank) for rank in executed]
    wanted: list[dict[Key, Expected]] = [expected(plan, stage) for stage in stages]
    for stage in dict.fromkeys(stages):
        here = [rank for rank, at in enumerate(stages) if at == stage]
        for rank, exchanges in zip(here, rows(plan, stage, [executed[r] for r in here]), strict=True):
            wanted[rank] |= {key: needed for key, (needed, _) in exchanges.items()}
            found[rank] |= {key: done for key, (_, done) in exchanges.items()}
    checks = [
        _checked(plan, stage, needed, done) for stage, needed, done in zip(stages, wanted, found, strict=True)
    ]
    excused = _left_to_dtensor(plan)
    keys = dict.fromkeys(key for check in checks for key in check)
    return tuple(_row(key, [c[key] for c in checks if key in c], excused) for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Check:
    """One kind of collective on one rank."""

    expected: Expected
    done: Amount
    as_often: bool
    agrees: bool


def _row(key: Key, checks: Sequence[_Check], excused: frozenset[str]) -> Row:
    label, collective, axis = key
    busiest = max(checks, key=lambda check: (check.done.bytes, check.expected.planned.bytes))
    left = axis == "tp" and bool(excused)
    unplanned = left and not busiest.expected.planned.count and label.endswith(GRADIENT)
    return Row(
        label=label or "no label",
        collective=collective,
        axis=axis,
        planned_count=busiest.expected.planned.count,
        executed_count=int(busiest.done.count),
        planned_bytes=busiest.expected.planned.bytes,
        executed_bytes=busiest.done.bytes,
        agrees=all(check.agrees for check in checks),
        as_often=all(check.as_often for check in checks),
        rule=busiest.expected.rule,
        announced=left and (label in excused or unplanned),
    )


def _checked(
    plan: Plan, stage: int, wanted: Mapping[Key, Expected], found: Mapping[Key, Amount]
) -> dict[Key, _Check]:
    checks = {}
    for key in dict.fromkeys((*wanted, *found)):
        needed, done = wanted.get(key, Expected(planned=NOTHING, runs=NOTHING)), found.get(key, NOTHING)
        runs = needed.runs
        if key[0] == LOSS_LABEL:
            runs = _with_rows_of_loss(plan, stage, key, runs, done)
        routed = key[0].startswith(ROWS_LABEL)  # the router says how many bytes run, the plan how often
        as_often = done.count == runs.count == (needed.planned if routed else runs).count
        same = math.isclose(done.bytes, runs.bytes, rel_tol=ROUNDING)
        checks[key] = _Check(
            expected=needed, done=done, as_often=as_often, agrees=as_often and same and needed.sound
        )
    return checks


def _with_rows_of_loss(plan: Plan, stage: int, key: Key, runs: Amount, done: Amount) -> Amount:
    """Where ranks of cp or tp each have rows of the logits, they add up one number for every microbatch, and
    once more where the whole model is run again, its loss with it."""
    whole_again = not plan.layer_lists and plan.recompute == Recompute.FULL
    times = plan.num_microbatches * (2 if whole_again else 1)
    more = runs + Amount(times, NUMBER_BYTES * times)
    split = key[2] in ("cp", "tp") and done.count == more.count
    return more if split and _holds_loss(plan, stage) else runs


def _holds_loss(plan: Plan, rank: int) -> bool:
    mesh, v = plan.mesh, plan.virtual_stages
    return mesh.pp == 1 or mesh.pp * v - 1 in stages_of(
        plan.schedule, pp=mesh.pp, virtual_stages=v, rank=rank
    )


def _sums(plan: Plan, executed: Sequence[Executed]) -> dict[Key, Amount]:
    """What a rank ran, but for rows of experts and tables."""
    found: dict[Key, Amount] = {}
    for e in executed:
        key = _key(plan, e)
        if key is not None:
            found[key] = found.get(key, NOTHING) + Amount(1, e.bytes)
    return found


def _key(plan: Plan, e: Executed) -> Key | None:
    """What it is compared as; None for what is no communication, and for rows (see `expected_rows`)."""
    axis = axes_of(e.ranks, plan.mesh)
    if not axis or e.label in ROWS_LABELS:
        return None
    if e.collective is Collective.SEND_RECV:
        return None if e.bytes <= NUMBER_BYTES else (STAGES, e.collective, axis)
    if e.label == SPARSE_LABEL or (not e.label and set(axis.split("+")) <= set(DATA_AXES)):
        return DATA, e.collective, axis
    if not e.label and axis == "tp" and e.collective is Collective.ALL_REDUCE and wraps(plan):
        return REPLICATED_LABEL, e.collective, axis
    return e.label, e.collective, axis


def _left_to_dtensor(plan: Plan) -> frozenset[str]:
    """Labels along tp that DTensor decides on, in plans that convert between operations."""
    labels = unstated(plan)
    if not labels:
        return frozenset()
    after_dtensor = {r.label for r in plan.reshards if r.side == "input"}
    return frozenset({*labels, *after_dtensor, "no label", "", INSIDE_LOSS, OPERANDS, REPLICATED_LABEL})
