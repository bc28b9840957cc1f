"""Choices that someone made against the best plan that a search found: one line, or a JSON object."""

from __future__ import annotations

from typing import Any

from ..planner.plan import Plan
from . import words

SAME_WITHIN = 5e-4
"""Step times that differ by less than this fraction read the same in tenths of a percent."""


def best_document(best: Plan) -> dict[str, Any]:
    """The best plan in short; seconds."""
    return {
        "mesh": best.mesh.sizes,
        "zero_stage": best.zero_stage,
        "micro_batch": best.micro_batch,
        "recompute": best.recompute,
        "step_time_s": best.predicted.step_time_s,
    }


def against_best(mine: Plan | None, best: Plan) -> str:
    """How a checked plan (None: it does not fit) does against the best one."""
    sharded = words.zero(best.zero_stage, best.shard_group)
    found = f"{best.mesh}, {sharded}, {words.duration(best.predicted.step_time_s)} a step"
    if mine is None:
        return f"A plan that fits: {found}."
    ratio = mine.predicted.step_time_s / best.predicted.step_time_s
    if ratio < 1 + SAME_WITHIN:
        return "No better plan was found."
    return f"The best plan found: {found}; yours takes {ratio - 1:.1%} longer."
