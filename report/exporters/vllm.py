"""vLLM: the flags of `vllm serve` (a training plan maps only in part)."""

from __future__ import annotations

from collections.abc import Iterator

from ...planner.plan import Plan, Serving
from .registry import Exported, exporter
from .serving import deviations
from .shell import Flag, array, head

NAME = "vllm"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16"}


@exporter(NAME, "flags of vllm serve (of a training plan: tp, pp, ep)")
def export(plan: Plan) -> Exported:
    """`vllm_args.sh`."""
    text = head(plan, 'source this file, then: vllm serve MODEL "${VLLM_ARGS[@]}"')
    return Exported(
        files={"vllm_args.sh": text + array("VLLM_ARGS", _flags(plan))},
        deviations=(*deviations(plan, target="vLLM"), *_experts(plan)),
    )


def _flags(plan: Plan) -> Iterator[Flag]:
    yield "--tensor-parallel-size", str(plan.mesh.tp)
    yield "--pipeline-parallel-size", str(plan.mesh.pp)
    copies = plan.mesh.ep * (plan.mesh.dp if plan.serving else 1)
    if copies > 1:
        yield "--data-parallel-size", str(copies)
    if plan.mesh.ep > 1:
        yield ("--enable-expert-parallel",)
    yield "--dtype", DTYPES[plan.job.dtype]
    if plan.serving:
        yield from _serving(plan.serving, dtype=plan.job.dtype)
    elif plan.model.tokens_per_sample > 1:
        yield "--max-model-len", str(plan.job.seq_len)


def _serving(serving: Serving, *, dtype: str) -> Iterator[Flag]:
    if dtype == "fp8":
        yield "--quantization", "fp8"
    yield "--max-model-len", str(serving.prompt_len + serving.output_len)
    yield "--max-num-seqs", str(serving.sequences_per_replica)


def _experts(plan: Plan) -> Iterator[str]:
    """vLLM spreads experts over all ranks of tp and dp together."""
    mesh = plan.mesh
    if mesh.ep > 1 and mesh.tp > 1:
        yield (
            f"vLLM spreads whole experts over tp x dp = {mesh.tp * mesh.ep} ranks; the plan spreads them "
            f"over ep={mesh.ep} and cuts each over tp={mesh.tp}"
        )
