"""nanotron: the `parallelism`, `tokens` and `optimizer` sections of its YAML.

Keys as in nanotron's `ParallelismArgs`, `TokensArgs` and `OptimizerArgs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from ...planner.plan import Plan
from ...planner.schedule import Schedule
from .. import words
from . import facts
from .registry import Exported, cannot, exporter

NAME = "nanotron"
ENGINES = {Schedule.ONE_F_ONE_B: "1f1b", Schedule.GPIPE: "afab"}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
ORDER = ("pp", "dp", "cp", "ep", "tp")


@exporter(NAME, "sections of nanotron's YAML")
def export(plan: Plan) -> Exported:
    """`nanotron.yaml`: merge it into a configuration that names model, data and learning rate."""
    if plan.job.dtype not in DTYPES:
        raise cannot(NAME, f"it does not train in {plan.job.dtype}", "plan with dtype bf16")
    text = f"# {facts.headline(plan)}\n" + yaml.safe_dump(_config(plan), sort_keys=False)
    return Exported(files={"nanotron.yaml": text}, deviations=tuple(_deviations(plan)))


def _config(plan: Plan) -> dict[str, Any]:
    mesh = plan.mesh
    return {
        "parallelism": {
            "dp": mesh.batch_ways,
            "pp": mesh.pp,
            "tp": mesh.tp,
            "context_parallel_size": mesh.cp,
            "expert_parallel_size": mesh.ep,
            "pp_engine": _engine(plan),
            "tp_mode": "REDUCE_SCATTER" if facts.activation_split(plan) else "ALL_REDUCE",
            "tp_linear_async_communication": facts.activation_split(plan) is not None,
            "recompute_layer": facts.recompute_counts(plan)["full"] > 0,
        },
        "tokens": {
            "micro_batch_size": plan.micro_batch,
            "batch_accumulation_per_replica": plan.num_microbatches,
            "sequence_length": plan.job.seq_len,
        },
        "model": {"dtype": DTYPES[plan.job.dtype], "make_vocab_size_divisible_by": mesh.tp},
        "optimizer": {"zero_stage": min(plan.zero_stage, 1), "accumulate_grad_in_fp32": True},
    }


def _engine(plan: Plan) -> str:
    known = {str(schedule): engine for schedule, engine in ENGINES.items()}
    return known.get(plan.schedule, ENGINES[Schedule.ONE_F_ONE_B])


def _deviations(plan: Plan) -> Iterator[str]:
    if plan.zero_stage > 1:
        lost = facts.unsharded_gradients if plan.zero_stage == 2 else facts.unsharded_parameters
        planned = words.zero(plan.zero_stage)
        yield f"nanotron shards at most the optimizer state, the plan has {planned}: {lost(plan)}"
    if plan.mesh.pp > 1:
        if plan.schedule not in list(ENGINES):
            cost = facts.other_schedule(plan, Schedule.ONE_F_ONE_B)
            yield f"nanotron runs 1f1b, not {plan.schedule}: {cost}"
        if not facts.is_even(plan):
            chunks = ", ".join(map(str, facts.chunks(plan)))
            yield f"nanotron cuts stages by its own costs: the planned {chunks} layers cannot be given"
    yield from facts.layout_deviations(plan, "nanotron")
    counts = facts.recompute_counts(plan)
    if counts["full"] and counts["full"] < counts.total():
        yield f"every layer is recomputed, not {counts['full']}: {facts.recompute_everywhere(plan, 'full')}"
    if counts["selective"]:
        yield (
            f"nanotron has no selective recomputation: {counts['selective']} layers keep all activations, "
            "so they need more memory than predicted"
        )
    yield f"the optimizer ({plan.job.optimizer}) and its learning rate are the configuration's to give"
