"""DeepSpeed: its JSON configuration, and the pipeline's cut where there is one.

Keys as in DeepSpeed 0.19 (`deepspeed.runtime.config`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...planner.plan import Plan
from ...planner.schedule import Schedule
from .. import words
from . import facts
from .registry import Exported, cannot, exporter

NAME = "deepspeed"
HIGHEST_ZERO_WITH_PIPELINE = 1
"""DeepSpeed's pipeline engine refuses ZeRO-2 and 3."""
HIGHEST_ZERO_WITH_TP = 2
"""Automatic tensor parallelism in training runs with ZeRO-0 to 2."""


@exporter(NAME, "DeepSpeed JSON")
def export(plan: Plan) -> Exported:
    """`ds_config.json`; how many stages the pipeline has is said in the model's own code."""
    _check(plan)
    return Exported(
        files={"ds_config.json": json.dumps(_config(plan), indent=2) + "\n"},
        deviations=tuple(_deviations(plan)),
    )


def _check(plan: Plan) -> None:
    mesh, zero = plan.mesh, plan.zero_stage
    if mesh.pp > 1 and zero > HIGHEST_ZERO_WITH_PIPELINE:
        raise cannot(NAME, f"its pipeline does not run with {words.zero(zero)}", "plan with zero=1 or pp=1")
    if mesh.tp > 1 and zero > HIGHEST_ZERO_WITH_TP:
        raise cannot(NAME, "its tensor parallelism does not run with ZeRO-3", "plan with zero=2 or tp=1")
    if mesh.pp > 1 and mesh.tp > 1:
        raise cannot(NAME, "it has no pipeline with tensor parallelism of its own", "plan with pp=1 or tp=1")


def _config(plan: Plan) -> dict[str, Any]:
    mesh = plan.mesh
    config: dict[str, Any] = {
        "train_batch_size": plan.job.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": _zero(plan),
    }
    if plan.job.dtype in ("bf16", "fp16"):
        config[plan.job.dtype] = {"enabled": True}
    if mesh.tp > 1:
        config["tensor_parallel"] = {"autotp_size": mesh.tp}
    if mesh.cp > 1:
        config["sequence_parallel_size"] = mesh.cp
    if facts.recompute_counts(plan)["none"] < plan.model.layers:
        config["activation_checkpointing"] = {"partition_activations": False}
    return config


def _zero(plan: Plan) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.zero_stage > 0:
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    if plan.zero_stage > 1:
        zero["reduce_scatter"] = True
    return zero


def _deviations(plan: Plan) -> Iterator[str]:
    yield from _pipeline(plan)
    mesh, counts = plan.mesh, facts.recompute_counts(plan)
    if mesh.ep > 1:
        yield f"the JSON has no word for expert parallelism: give ep_size={mesh.ep} to the model's MoE layers"
    if some := counts["selective"] + counts["full"]:
        yield (
            f"the JSON cannot say which layers recompute: wrap {some} of {counts.total()} layers yourself; "
            f"{facts.recompute_everywhere(plan, 'full')} if all are"
        )
    if facts.activation_split(plan) and mesh.tp > 1:
        yield (
            "automatic tensor parallelism does not split activations over the sequence: norms and residuals "
            f"are whole on every rank of tp={mesh.tp}, so activations need more memory than predicted"
        )
    if plan.zero_stage > 1 and plan.num_microbatches > 1:
        yield ("gradients are reduced after every microbatch: " + facts.gradient_sync_each_microbatch(plan))
    yield f"the optimizer ({plan.job.optimizer}) and its learning rate are the training script's to give"


def _pipeline(plan: Plan) -> Iterator[str]:
    if plan.mesh.pp == 1:
        return
    chunks = ", ".join(map(str, facts.chunks(plan)))
    yield (
        f"the JSON has no word for stages: build PipelineModule with num_stages={plan.mesh.pp} and "
        f"a partition that gives {chunks} layers"
    )
    if plan.schedule != Schedule.ONE_F_ONE_B:
        cost = facts.other_schedule(plan, Schedule.ONE_F_ONE_B)
        yield f"DeepSpeed runs 1f1b, not {plan.schedule}: {cost}"
