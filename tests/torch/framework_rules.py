"""What each framework's own checks ask of a plan, written down from its sources and not from the planner.

In: a plan and the sizes of its model. Out: sentences, one for each rule that the plan breaks; none is a legal
plan. Sources, by framework:

- Megatron-LM: `megatron/training/arguments.py`, `megatron/core/transformer/transformer_config.py`,
  `tensor_parallel/utils.py: divide`, `pipeline_parallel/schedules.py`
- torchtitan and torch: `models/llama3/infra/parallelize.py` (a key/value head per rank),
  `torch/distributed/pipelining/schedules.py`
- DeepSpeed: `runtime/pipe/engine.py` (ZeRO-2 and 3 do not run in a pipeline), `module_inject/auto_tp.py`,
  `runtime/config.py` (the batch is micro batch x accumulation x replicas)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tpplan.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder's sizes; `experts` is 0 for a dense one."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    layers: int
    experts: int
    seq_len: int


Broken = Iterator[str]


def broken(plan: Plan, sizes: Sizes) -> list[str]:
    """The rules of the plan's framework that it breaks, and those that hold everywhere."""
    return [*everywhere(plan, sizes), *RULES[plan.job.framework](plan, sizes)]


def everywhere(plan: Plan, sizes: Sizes) -> Broken:
    """Devices, batch and layers add up; every layer lies on one stage, in order, and none twice."""
    mesh = plan.mesh
    if mesh.pp * mesh.dp * mesh.cp * mesh.ep * mesh.tp != plan.cluster.devices:
        yield f"{mesh} is not {plan.cluster.devices} devices"
    if plan.micro_batch * plan.num_microbatches * mesh.dp * mesh.ep != plan.job.global_batch:
        yield f"{plan.micro_batch} x {plan.num_microbatches} x {mesh} is no batch of {plan.job.global_batch}"
    pieces = [count for stage in plan.stages for count in (stage.chunk_layers or (stage.layers,))]
    if sum(pieces) != sizes.layers or [stage.index for stage in plan.stages] != list(range(len(plan.stages))):
        yield f"stages hold {pieces} of {sizes.layers} layers"
    if mesh.pp * plan.virtual_stages > max(sizes.layers, 1):
        yield f"{mesh.pp} x {plan.virtual_stages} stages for {sizes.layers} layers"
    if sizes.heads % mesh.tp and mesh.tp > 1:
        yield f"{sizes.heads} heads on tp={mesh.tp}"
    if plan.sequence_parallel and sizes.seq_len % mesh.tp:
        yield f"a sequence of {sizes.seq_len} over tp={mesh.tp}"
    if mesh.cp > 1 and sizes.seq_len % (2 * mesh.cp * (mesh.tp if plan.sequence_parallel else 1)):
        yield f"a sequence of {sizes.seq_len} over cp={mesh.cp}, tp={mesh.tp}"
    if mesh.ep > 1 and (not sizes.experts or sizes.experts % mesh.ep):
        yield f"{sizes.experts} experts over ep={mesh.ep}"


def megatron(plan: Plan, sizes: Sizes) -> Broken:
    """Heads, groups of heads and ffn divide by tp; interleaving takes whole rounds of microbatches."""
    mesh = plan.mesh
    if sizes.kv_heads % mesh.tp and mesh.tp % sizes.kv_heads:
        yield f"{sizes.kv_heads} query groups on tp={mesh.tp}"
    if sizes.ffn % mesh.tp:
        yield f"ffn_hidden_size {sizes.ffn} on tp={mesh.tp}"
    if plan.zero_stage > 1:
        yield f"the distributed optimizer is ZeRO-1, not {plan.zero_stage}"
    if plan.virtual_stages > 1 and plan.num_microbatches % mesh.pp:
        yield f"{plan.num_microbatches} microbatches interleaved over pp={mesh.pp}"
    if sizes.experts and mesh.tp > 1 and not plan.sequence_parallel:
        yield "experts beside tp without sequence parallelism"


def torch_native(plan: Plan, sizes: Sizes) -> Broken:
    """Every rank has whole key/value heads; a pipeline has a microbatch for every stage."""
    mesh = plan.mesh
    if sizes.kv_heads % mesh.tp:
        yield f"{sizes.kv_heads} key/value heads on tp={mesh.tp}"
    if mesh.pp > 1 and plan.schedule in ("gpipe", "1f1b") and plan.num_microbatches < mesh.pp:
        yield f"{plan.num_microbatches} microbatches for {mesh.pp} stages"
    rounds = max(1, plan.num_microbatches // mesh.pp)
    if plan.schedule == "interleaved" and plan.num_microbatches % rounds:
        yield f"{plan.num_microbatches} microbatches in {rounds} rounds"


def deepspeed(plan: Plan, sizes: Sizes) -> Broken:
    """ZeRO-2 and 3 without a pipeline; whole key/value heads."""
    if plan.mesh.pp > 1 and plan.zero_stage > 1:
        yield f"ZeRO-{plan.zero_stage} in a pipeline"
    if plan.mesh.tp > 1 and plan.zero_stage > 2:
        yield "ZeRO-3 beside tp"
    if plan.mesh.pp > 1 and plan.mesh.tp > 1:
        yield "a pipeline of tensor groups"
    if sizes.kv_heads % plan.mesh.tp:
        yield f"{sizes.kv_heads} key/value heads on tp={plan.mesh.tp}"


def own(plan: Plan, sizes: Sizes) -> Broken:
    """Beside tp and cp the runtime routes each rank's own part of the sequences to experts."""
    mesh = plan.mesh
    if sizes.experts and sizes.seq_len % (mesh.tp * mesh.cp):
        yield f"experts on parts of a sequence of {sizes.seq_len} over tp={mesh.tp}, cp={mesh.cp}"
    if sizes.experts and sizes.experts % (mesh.ep * mesh.tp) and sizes.ffn % mesh.tp:
        yield f"{sizes.experts} experts of width {sizes.ffn} over ep={mesh.ep}, tp={mesh.tp}"


RULES: dict[str, Callable[[Plan, Sizes], Broken]] = {
    "megatron": megatron, "torch": torch_native, "deepspeed": deepspeed, "tpplan": own,
}  # fmt: skip
