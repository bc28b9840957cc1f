"""The collectives of a step beside the plan's, exactly, and whether anything wrong would have been noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cases
import mutations
import zoo
from pool import RankPool
from tpplan.planner.plan import Plan
from tpplan.runtime.api import auto_parallelize
from tpplan.runtime.check import unstated
from tpplan.runtime.executed import Executed, record
from tpplan.runtime.fidelity import compare


def step(name: str, plan: Plan) -> list[Executed]:
    """One clipped step on one rank."""
    parallel = auto_parallelize(zoo.built(name), zoo.inputs(name), plan=plan, loss_fn=zoo.MODELS[name].loss)
    with record() as executed:
        parallel.train_step(zoo.inputs(name))
        parallel.clip_grad_norm_(cases.MAX_NORM)
    return executed


def disagreements(
    name: str, plan: Plan, executed: Sequence[Sequence[Executed]], pool: RankPool
) -> Sequence[object]:
    """Rows that differ; where none does, what `mutations` could change unnoticed.

    `executed` is of fp32. A model that is planned in 16 bits runs another step in them: bytes are the plan's.
    """
    dtype = zoo.MODELS[name].dtype
    if dtype != plan.job.dtype:
        plan = replace(plan, job=replace(plan.job, dtype=dtype))
        executed = pool.run(step, name, plan)
    left = [f"left to DTensor: {label}" for label in unstated(plan)]
    wrong = [row for row in compare(plan, executed) if not row.agrees]
    return left or wrong or mutations.unnoticed(plan, executed)
