"""What each rank has to run in a step, by the plan and by exact rules where it runs otherwise than priced.

In: a plan and a pipeline stage. Out: for each kind of collective how many are planned for a rank of that
stage, and how many have to run there, with how many bytes in all. The two differ by rule only:

    gradients and parameters    FSDP moves whole modules, shards padded (`expected_data`)
    sums over tp                FSDP adds up parameter by parameter, and in ZeRO-2 and 3 every microbatch
    between stages              a plan prices one border of a stage; a rank sends or receives at each
    tied parameters             the stage that owns one takes part too
    the printed loss            one number summed over all ranks, which no plan prices

Rows sent to experts and tables depend on the router: see `expected_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ..planner.layout import Collective
from ..planner.mesh import AXES
from ..planner.plan import Plan
from ..planner.schedule import V_SHAPED, stages_of
from .amounts import NOTHING, Amount, Expected, Key
from .check import is_routed
from .context import AXIS as CONTEXT
from .context import LABEL as KEYS_AND_VALUES
from .exchange import ROWS_LABEL
from .expected_data import DATA, FULL_BYTES, HALF_BYTES, data, held, is_data, local_numel, syncs, wraps
from .gradients import REPLICATED_LABEL
from .labels import GRADIENT, LOSS_LABEL
from .ties import LABEL as TIED_LABEL

STAGES = "activations between stages"
NUMBER_BYTES = 4
"""One number in fp32: a loss, and the greeting with which torch's first pipeline step begins."""


def planned(plan: Plan, stage: int) -> dict[Key, Amount]:
    """What the plan's own rows say of a rank of a stage; what runs without their labels as a whole."""
    found: dict[Key, Amount] = {}
    for c in plan.communications:
        count, again, nbytes = c.by_stage[stage] if c.by_stage else (c.count, c.again, c.bytes)
        if count:
            key = (_family(plan, c.label, c.axis), c.collective, c.axis)
            found[key] = found.get(key, NOTHING) + Amount(count, count * nbytes, again)
    return found


def _family(plan: Plan, label: str, axis: str) -> str:
    """Under which label a planned row runs."""
    ending = GRADIENT if label.endswith(GRADIENT) else ""
    if is_data(label):
        return DATA
    if is_routed(plan, label) or (axis == "ep" and label.startswith("inside ")):
        return ROWS_LABEL + ending
    if axis == CONTEXT and "->" in label:
        return KEYS_AND_VALUES + ending
    return label


def expected(plan: Plan, stage: int) -> dict[Key, Expected]:
    """Every kind of collective that a rank of a stage has to run, rows of experts and tables aside."""
    rows = planned(plan, stage)
    found = {
        key: Expected(planned=amount, runs=amount)
        for key, amount in rows.items()
        if not key[0].startswith(ROWS_LABEL)
    }
    found |= data(plan, stage, rows)
    for rule in (_between_stages, _summed_over_tp, _tied):
        found |= dict(rule(plan, stage, rows))
    return found | dict(_printed_loss(plan))


Rows = Mapping[Key, Amount]
Found = Iterator[tuple[Key, Expected]]


def _between_stages(plan: Plan, rank: int, rows: Rows) -> Found:
    key = (STAGES, Collective.SEND_RECV, "pp")
    if key not in rows:
        return
    count = messages(plan, rank)
    yield (
        key,
        Expected(
            planned=rows[key],
            runs=Amount(count, count * rows[key].bytes / rows[key].count),
            rule="a message at every border" if count != rows[key].count else "",
            sound=rows[key].count == 2 * plan.virtual_stages * plan.num_microbatches,
        ),
    )


def messages(plan: Plan, rank: int) -> int:
    """Sends and receives of a pipeline rank in a step."""
    mesh, v = plan.mesh, plan.virtual_stages
    rank_of = {
        stage: r
        for r in range(mesh.pp)
        for stage in stages_of(plan.schedule, pp=mesh.pp, virtual_stages=v, rank=r)
    }
    borders = [(rank_of[stage], rank_of[stage + 1]) for stage in range(mesh.pp * v - 1)]
    return 2 * plan.num_microbatches * sum((a == rank) != (b == rank) for a, b in borders)


def _summed_over_tp(plan: Plan, stage: int, rows: Rows) -> Found:
    """Parameters that tp ranks hold whole, and a term each of the gradient."""
    mine = [(p, n) for p, n in held(plan, stage) if p.summed_over_tp]
    key = (REPLICATED_LABEL, Collective.ALL_REDUCE, "tp")
    if plan.mesh.tp == 1 or not (mine or key in rows):
        return
    numel = sum(n * local_numel(plan, p) for p, n in mine)
    runs, rule = Amount(1, FULL_BYTES * numel), ""
    if wraps(plan):
        times = syncs(plan)
        runs = Amount(times * sum(n for _, n in mine), times * _summed_bytes(plan) * numel)
        rule = "FSDP adds up each parameter by itself" + (", with every microbatch" if times > 1 else "")
    amount = rows.get(key, NOTHING)
    yield key, Expected(planned=amount, runs=runs, rule=rule, sound=amount == Amount(1, FULL_BYTES * numel))


def _summed_bytes(plan: Plan) -> int:
    """Of an element that FSDP adds up over tp: fp32 once several microbatches were, else as computed."""
    accumulated = plan.num_microbatches > syncs(plan)
    return FULL_BYTES if accumulated or plan.job.dtype == "fp32" else HALF_BYTES


def _tied(plan: Plan, stage: int, rows: Rows) -> Found:
    """Stages that hold copies of a parameter sum its gradient; a rank that holds two adds them itself."""
    if plan.mesh.pp == 1 or plan.schedule in V_SHAPED:
        return
    classes = [{name for name, _, _ in s.blocks} for s in plan.stages]
    tied = [p for p in plan.parameters if sum(not here.isdisjoint(p.blocks) for here in classes) > 1]
    tied = [p for p in tied if len(p.blocks) > 1]
    if not tied:
        return
    key = (TIED_LABEL, Collective.ALL_REDUCE, "pp")
    ways = (
        (plan.shard_group or math.prod(plan.mesh.size(a) for a in ("dp", "cp", "ep")))
        if plan.zero_stage
        else 1
    )
    nbytes = FULL_BYTES * sum(local_numel(plan, p) for p in tied) / ways
    priced = max((planned(plan, s).get(key, NOTHING) for s in range(plan.mesh.pp)), key=lambda a: a.bytes)
    here = any(not classes[stage].isdisjoint(p.blocks) for p in tied)
    yield (
        key,
        Expected(
            planned=rows.get(key, NOTHING),
            runs=Amount(len(tied), nbytes) if here else NOTHING,
            rule="the stage that owns a tied parameter takes part" if here and key not in rows else "",
            sound=priced == Amount(1, nbytes),
        ),
    )


def _printed_loss(plan: Plan) -> Found:
    axis = "+".join(axis for axis in AXES if plan.mesh.size(axis) > 1)
    if axis:
        runs = Amount(1, NUMBER_BYTES)
        yield (
            (LOSS_LABEL, Collective.ALL_REDUCE, axis),
            Expected(planned=NOTHING, runs=runs, rule="the printed loss"),
        )
