"""accelerate: the YAML of `accelerate launch --config_file`, with FSDP2.

Keys as in accelerate 1.15 (`ClusterConfig`, `ParallelismConfig`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from ...planner.plan import Plan
from . import facts
from .registry import Exported, cannot, exporter

NAME = "accelerate"
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}


@exporter(NAME, "FSDP2 YAML of accelerate launch")
def export(plan: Plan) -> Exported:
    """`accelerate.yaml`."""
    _check(plan)
    note = (
        f"# {facts.headline(plan)}\n# accelerate launch --config_file accelerate.yaml "
        f"--gradient_accumulation_steps {plan.num_microbatches} train.py\n"
    )
    text = note + yaml.safe_dump(_config(plan), sort_keys=False)
    return Exported(files={"accelerate.yaml": text}, deviations=tuple(_deviations(plan)))


def _check(plan: Plan) -> None:
    mesh = plan.mesh
    if mesh.pp > 1:
        raise cannot(NAME, f"it trains without a pipeline, the plan has pp={mesh.pp}", "plan with pp=1")
    if mesh.ep > 1:
        raise cannot(NAME, f"it has no expert parallelism, the plan has ep={mesh.ep}", "plan with ep=1")
    if plan.zero_stage == 0 and mesh.tp * mesh.cp > 1:
        raise cannot(NAME, "it does not combine replicas with tp or cp", "plan with zero=2 or zero=3")


def _config(plan: Plan) -> dict[str, Any]:
    nodes, _ = facts.nodes_and_devices(plan)
    sharded = plan.zero_stage > 0
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "mixed_precision": PRECISIONS[plan.job.dtype],
        "num_machines": nodes,
        "num_processes": plan.mesh.devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "c10d" if nodes > 1 else "static",
        "same_network": True,
        "use_cpu": False,
    }
    if sharded:
        config["fsdp_config"] = _fsdp(plan)
    if plan.mesh.tp * plan.mesh.cp > 1:
        config["parallelism_config"] = _parallelism(plan)
    return config


def _fsdp(plan: Plan) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.zero_stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": plan.recompute != "none",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
    }


def _parallelism(plan: Plan) -> dict[str, int]:
    mesh = plan.mesh
    sizes = {"dp_replicate_size": 1, "dp_shard_size": mesh.dp, "tp_size": mesh.tp, "cp_size": mesh.cp}
    return {f"parallelism_config_{name}": size for name, size in sizes.items()}


def _deviations(plan: Plan) -> Iterator[str]:
    if plan.zero_stage == 1:
        yield (
            "FSDP2 has no ZeRO-1: parameters and gradients are sharded too, parameters gathered once a step "
            f"(less memory); gradients reduced after every microbatch cost "
            f"{facts.gradient_sync_each_microbatch(plan)}"
        )
    counts = facts.recompute_counts(plan)
    if plan.recompute != "none" and counts["full"] < counts.total():
        yield (
            "activation checkpointing is all or nothing: every layer is recomputed in full, "
            f"{facts.recompute_everywhere(plan, 'full')}"
        )
    if plan.mesh.tp > 1:
        yield "tensor parallelism follows the model's own tp_plan; the target hf writes the planned one"
    if facts.activation_split(plan) and plan.mesh.tp > 1:
        yield "activations are split over the sequence only where that tp_plan says so"
    yield (
        f"the microbatch of {plan.micro_batch}, the global batch of {plan.job.global_batch} and the "
        f"optimizer ({plan.job.optimizer}) are the training script's to give"
    )
    if plan.mesh.tp * plan.mesh.cp > 1 and facts.real_order(plan) not in _orders():
        yield f"ranks are laid out as dp > cp > tp, not as {' > '.join(facts.real_order(plan))}"


def _orders() -> set[tuple[str, ...]]:
    """The orders in which accelerate lays ranks out."""
    return {("dp", "cp", "tp"), ("dp", "tp"), ("dp", "cp"), ("cp", "tp"), ("tp",), ("cp",)}
