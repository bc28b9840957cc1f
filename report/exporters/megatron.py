"""Megatron-LM: the parallel, batch and recompute arguments of `pretrain_gpt.py` and its kin.

Names as in megatron/training/arguments.py of August 2026. The model's own shape (hidden size, heads, data,
learning rate) stays with the user's launch script, which adds `"${MEGATRON_ARGS[@]}"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ...planner.plan import Plan
from ...planner.schedule import Schedule
from .. import words
from . import facts
from .registry import Exported, cannot, exporter
from .shell import Flag, array, head, world_check

NAME = "megatron"
VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this times tp (its default)."""
ORDER = ("pp", "dp", "ep", "cp", "tp")
PP_INSIDE_ORDER = ("dp", "ep", "cp", "pp", "tp")
"""The order of `--use-tp-pp-dp-mapping`."""
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
SELECTIVE_MODULES = ("core_attn", "layernorm")
"""What Megatron can run again cheaply; nearest to keeping matrix products and attention."""
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


@exporter(NAME, "arguments of Megatron-LM as a bash array")
def export(plan: Plan) -> Exported:
    """`megatron_args.sh`, to be sourced by a launch script."""
    _check(plan)
    parts = (_parallel, _pipeline, _batch, _zero, _recompute, _numbers)
    flags = [flag for part in parts for flag in part(plan)]
    text = (
        head(plan, 'source this file, then: torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" ...')
        + world_check(plan)
        + array("MEGATRON_ARGS", flags)
    )
    return Exported(files={"megatron_args.sh": text}, deviations=tuple(_deviations(plan)))


def _check(plan: Plan) -> None:
    if plan.job.optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise cannot(NAME, f"it has no optimizer {plan.job.optimizer!r}", f"plan with one of {known}")


def _parallel(plan: Plan) -> Iterator[Flag]:
    mesh = plan.mesh
    yield "--tensor-model-parallel-size", str(mesh.tp)
    yield "--pipeline-model-parallel-size", str(mesh.pp)
    yield "--context-parallel-size", str(mesh.cp)
    if mesh.ep > 1:
        yield "--expert-model-parallel-size", str(mesh.ep)
        yield "--expert-tensor-parallel-size", str(mesh.tp)
        yield "--moe-token-dispatcher-type", "alltoall"
    if facts.activation_split(plan) and mesh.tp > 1:
        yield ("--sequence-parallel",)
    if _pp_inside(plan):
        yield ("--use-tp-pp-dp-mapping",)


def _pp_inside(plan: Plan) -> bool:
    order = facts.real_order(plan)
    return not _follows(order, ORDER) and _follows(order, PP_INSIDE_ORDER)


def _follows(order: tuple[str, ...], whole: tuple[str, ...]) -> bool:
    return order == tuple(axis for axis in whole if axis in order)


def _pipeline(plan: Plan) -> Iterator[Flag]:
    yield "--num-layers", str(plan.model.layers)
    if plan.mesh.pp == 1:
        return
    if not facts.is_even(plan):
        yield "--pipeline-model-parallel-layout", layout(facts.chunks(plan))
    elif plan.virtual_stages > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(plan.virtual_stages)


def layout(chunks: tuple[int, ...]) -> str:
    """Megatron's layout string, `Et*6|t*5|t*5L`: embedding first, loss last, `|` between stages."""
    last = len(chunks) - 1
    cells = [
        "E" * (index == 0) + _layers(number) + "L" * (index == last) for index, number in enumerate(chunks)
    ]
    return "|".join(cells)


def _layers(number: int) -> str:
    return f"t*{number}" if number > 1 else "t" * number


def _batch(plan: Plan) -> Iterator[Flag]:
    yield "--micro-batch-size", str(plan.micro_batch)
    yield "--global-batch-size", str(plan.job.global_batch)
    yield "--seq-length", str(plan.job.seq_len)
    yield "--make-vocab-size-divisible-by", str(VOCABULARY_MULTIPLE)


def _zero(plan: Plan) -> Iterator[Flag]:
    if plan.zero_stage == 0:
        yield ("--overlap-grad-reduce",)
        return
    yield ("--use-distributed-optimizer",)
    yield ("--overlap-grad-reduce",)
    yield ("--overlap-param-gather",)
    if plan.zero_stage in SHARDING:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", SHARDING[plan.zero_stage]
        yield ("--no-gradient-accumulation-fusion",)
        yield "--ckpt-format", "fsdp_dtensor"


def _recompute(plan: Plan) -> Iterator[Flag]:
    counts = facts.recompute_counts(plan)
    if counts["full"]:
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block"
        yield "--recompute-num-layers", str(_full_per_chunk(plan))
    elif counts["selective"]:
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", *SELECTIVE_MODULES


def _full_per_chunk(plan: Plan) -> int:
    """Recomputed layers of each virtual stage: enough for the stage that has most."""
    most = 0
    for stage in plan.stages:
        held = sum(number for _, number, mode in stage.blocks if mode != "none")
        most = max(most, -(-min(held, stage.layers) // plan.virtual_stages))
    return most


def _numbers(plan: Plan) -> Iterator[Flag]:
    if plan.job.dtype in ("bf16", "fp16"):
        yield (f"--{plan.job.dtype}",)
    yield "--optimizer", OPTIMIZERS[plan.job.optimizer]


# --------------------------------------------------------------------------- deviations


def _deviations(plan: Plan) -> Iterator[str]:
    yield from _order(plan)
    yield from _schedule(plan)
    yield from _modes(plan)
    yield from _vocabulary(plan)
    yield from facts.layout_deviations(plan, "Megatron")
    yield from _whole_ops(plan)


def _order(plan: Plan) -> Iterator[str]:
    order = facts.real_order(plan)
    if not (_follows(order, ORDER) or _follows(order, PP_INSIDE_ORDER)):
        yield (
            f"ranks are laid out as {' > '.join(order)} (slowest first), Megatron lays them out as "
            f"{' > '.join(axis for axis in ORDER if axis in order)}: groups lie on other links than planned"
        )


def _schedule(plan: Plan) -> Iterator[str]:
    """Megatron runs 1F1B, interleaved when there are virtual stages."""
    runs = Schedule.INTERLEAVED if plan.virtual_stages > 1 else Schedule.ONE_F_ONE_B
    if plan.mesh.pp > 1 and plan.schedule != runs:
        yield (
            f"Megatron runs {runs}, not {plan.schedule}: "
            f"{facts.other_schedule(plan, runs, plan.virtual_stages)}"
        )


def _modes(plan: Plan) -> Iterator[str]:
    counts = facts.recompute_counts(plan)
    used = {mode: number for mode, number in counts.items() if number}
    if counts["full"] and len(used) > 1:
        told = ", ".join(f"{mode} in {number}" for mode, number in sorted(used.items()))
        yield (
            f"the plan's recomputation ({told} layers) becomes full recomputation of the first "
            f"{_full_per_chunk(plan)} layers of every virtual stage: "
            f"{facts.recompute_everywhere(plan, 'full')} at most"
        )
    elif counts["selective"]:
        if counts["none"]:
            yield (
                f"selective recomputation in {counts['selective']} of {counts.total()} layers becomes "
                f"selective in all: {facts.recompute_everywhere(plan, 'selective')}"
            )
        yield (
            "the plan's selective recomputation runs again all but matrix products and attention; "
            f"Megatron's runs again {' and '.join(SELECTIVE_MODULES)}, so activations of the MLP stay: "
            "expect more activation memory than predicted"
        )


def _vocabulary(plan: Plan) -> Iterator[str]:
    vocabulary = facts.vocabulary(plan)
    multiple = VOCABULARY_MULTIPLE * plan.mesh.tp
    if vocabulary and vocabulary % multiple:
        padded = -(-vocabulary // multiple) * multiple
        yield (
            f"the vocabulary of {vocabulary:,} is padded to {padded:,} (a multiple of {multiple:,}): "
            f"{padded / vocabulary - 1:.2%} more work in embedding and head"
        )


def _whole_ops(plan: Plan) -> Iterator[str]:
    """Megatron splits every linear layer of a block; the plan may have left one whole."""
    whole = sorted({s.module for s in plan.splits if s.axis == "tp" and s.op == "linear" and s.dim is None})
    blocks = [module for module, _ in groupby(whole)]
    if blocks and plan.mesh.tp > 1:
        yield f"the plan leaves {words.listed(blocks)} whole on every rank of tp; Megatron splits what it can"
