"""torchtitan: a configuration module, `--module torchtitan_plan --config planned`.

torchtitan's configurations are Python: a registry function returns a `Trainer.Config`, and
`--module` names where it is found (torchtitan/config, August 2026). The module made here takes one of
torchtitan's own configurations for the model and sets what the plan decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...planner.plan import Plan
from ...planner.schedule import Schedule
from .. import words
from . import facts
from .registry import Exported, cannot, exporter
from .shell import head, torchrun, world_check

NAME = "torchtitan"
SCHEDULES = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZBV: "ZBVZeroBubble",
    Schedule.DUALPIPEV: "DualPipeV",
}
POLICIES = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
ORDER = ("pp", "dp", "cp", "ep", "tp")
OPTIMIZERS = ("adamw",)


@exporter(NAME, "a configuration module of torchtitan, and how to launch it")
def export(plan: Plan) -> Exported:
    """`torchtitan_plan.py` and `run_torchtitan.sh`."""
    if plan.job.dtype == "fp16":
        raise cannot(NAME, "it does not train in fp16", "plan with dtype bf16 or fp32")
    return Exported(
        files={"torchtitan_plan.py": _module(plan), "run_torchtitan.sh": _script(plan)},
        deviations=tuple(_deviations(plan)),
    )


def _module(plan: Plan) -> str:
    lines = [
        f'"""{facts.headline(plan).replace(chr(92), "/").replace(chr(34), chr(39))}."""',
        "",
        "import os",
        "from importlib import import_module",
        "",
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
        "",
        'MODULE = os.environ.get("TITAN_MODULE", "llama3")',
        'CONFIG = os.environ.get("TITAN_CONFIG", "llama3_8b")',
        "",
        "",
        "def planned():",
        '    """The configuration that TITAN_MODULE and TITAN_CONFIG name, parallelised as planned."""',
        '    config = getattr(import_module(f"torchtitan.models.{MODULE}.config_registry"), CONFIG)()',
        *(f"    config.{name} = {value}" for name, value in settings(plan)),
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def settings(plan: Plan) -> Iterator[tuple[str, str]]:
    """(dotted field of `Trainer.Config`, Python literal) of everything that the plan decides."""
    yield from _parallelism(plan)
    yield from _training(plan)
    yield "activation_checkpoint", POLICIES[_policy(plan)]


def _parallelism(plan: Plan) -> Iterator[tuple[str, str]]:
    mesh = plan.mesh
    shards = (plan.shard_group or mesh.batch_ways) if plan.zero_stage else 1
    replicas = mesh.batch_ways // shards
    values = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if plan.zero_stage == 3 else "never",
        "tensor_parallel_degree": mesh.tp,
        "enable_sequence_parallel": facts.activation_split(plan) is not None,
        "context_parallel_degree": mesh.cp,
        "expert_parallel_degree": mesh.ep,
        "pipeline_parallel_degree": mesh.pp,
    }
    if mesh.pp > 1:
        values["pipeline_parallel_schedule"] = _schedule(plan)
        values["num_pp_microbatches"] = plan.num_microbatches
        values["module_fqns_per_model_part"] = _parts(plan)
    for name, value in values.items():
        yield f"parallelism.{name}", repr(value)


def _schedule(plan: Plan) -> str:
    known = {str(schedule): name for schedule, name in SCHEDULES.items()}
    return known.get(plan.schedule, SCHEDULES[Schedule.ONE_F_ONE_B])


def _parts(plan: Plan) -> list[list[str]]:
    """Module names of every stage in model order, as torchtitan's decoders call them."""
    parts, first = [], 0
    for number in facts.chunks(plan):
        parts.append([f"layers.{index}" for index in range(first, first + number)])
        first += number
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "lm_head"]]


def _training(plan: Plan) -> Iterator[tuple[str, str]]:
    """torchtitan counts tokens; what the microbatches leave is gradient accumulation."""
    tokens = plan.job.seq_len
    yield "training.num_tokens_per_microbatch_per_dp_rank", repr(plan.micro_batch * tokens)
    yield "training.num_tokens_per_train_step", repr(plan.job.global_batch * tokens)
    yield "training.max_context_length", repr(tokens)
    mixed = "bfloat16" if plan.job.dtype == "bf16" else "float32"
    yield "training.mixed_precision_param", repr(mixed)
    if plan.mesh.pp > 1:
        yield "training.disable_cuda_graphs", "True"


def _policy(plan: Plan) -> str:
    """One mode for all layers: the one that saves most memory among those used."""
    counts = facts.recompute_counts(plan)
    return next((mode for mode in ("full", "selective") if counts[mode]), "none")


def _script(plan: Plan) -> str:
    run = torchrun(['-m torchtitan.train --module torchtitan_plan --config planned "$@"'])
    note = "TITAN_MODULE and TITAN_CONFIG name torchtitan's own configuration of this model"
    path = 'export PYTHONPATH="$(dirname "$0"):${PYTHONPATH:-}"\n'
    return head(plan, note) + world_check(plan) + path + run


# --------------------------------------------------------------------------- deviations


def _deviations(plan: Plan) -> Iterator[str]:
    if plan.zero_stage == 1:
        yield (
            "torchtitan has no ZeRO-1: parameters and gradients are sharded too, parameters gathered once "
            "a step (less memory), gradients reduced after every gradient-accumulation pass: "
            f"{facts.gradient_sync_each_microbatch(plan)}"
        )
    if plan.mesh.pp > 1 and plan.schedule not in list(SCHEDULES):
        yield f"the schedule {plan.schedule} becomes 1F1B: {facts.other_schedule(plan, Schedule.ONE_F_ONE_B)}"
    yield from facts.layout_deviations(plan, "torchtitan")
    policy, counts = _policy(plan), facts.recompute_counts(plan)
    if policy != "none" and counts[policy] < counts.total():
        yield (
            f"{policy} recomputation in {counts[policy]} of {counts.total()} layers becomes {policy} in all: "
            f"{facts.recompute_everywhere(plan, policy)}"
        )
    if plan.job.optimizer not in OPTIMIZERS:
        yield f"the optimizer stays torchtitan's own, not {plan.job.optimizer}: other state memory"
    order = facts.real_order(plan)
    if order != tuple(axis for axis in ORDER if axis in order):
        laid = " > ".join(order)
        yield f"ranks are laid out as pp > dp > cp > tp, not as {laid}: groups lie on other links"
    if plan.mesh.ep > 1 and plan.mesh.cp * plan.mesh.tp > 1:
        yield "experts are spread over neighbouring ranks of cp and tp first, then of dp, unlike in the plan"
    if plan.model.tokens_per_sample <= 1:
        yield "torchtitan counts tokens: a sample of this model is taken as one"
    if plan.job.dtype == "bf16":
        yield "parameters are kept in fp32 and cast to bf16 to compute" + _master_copy(plan)


def _master_copy(plan: Plan) -> str:
    """How much the fp32 copy of the sharded parameters needs."""
    ways = facts.sharding_ways(plan) if plan.zero_stage else 1
    held = facts.part_bytes(plan, "parameters") * (ways if plan.zero_stage == 3 else 1)
    return f": {words.size(2 * held / ways)} a device, instead of the optimizer's master copy"
