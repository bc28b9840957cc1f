"""SGLang: the flags of `python -m sglang.launch_server` (a training plan maps only in part)."""

from __future__ import annotations

from collections.abc import Iterator

from ...planner.plan import Plan, Serving
from .registry import Exported, exporter
from .serving import deviations
from .shell import Flag, array, head

NAME = "sglang"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16"}


@exporter(NAME, "flags of sglang.launch_server (of a training plan: tp, pp, ep)")
def export(plan: Plan) -> Exported:
    """`sglang_args.sh`."""
    text = head(
        plan, 'source this file, then: python -m sglang.launch_server --model-path MODEL "${SGLANG_ARGS[@]}"'
    )
    return Exported(
        files={"sglang_args.sh": text + array("SGLANG_ARGS", _flags(plan))},
        deviations=(*deviations(plan, target="SGLang"), *_experts(plan)),
    )


def _flags(plan: Plan) -> Iterator[Flag]:
    """SGLang's ep lies inside its tp, so that a server for `ep` training ranks has tp * ep of them."""
    mesh = plan.mesh
    yield "--tp-size", str(mesh.tp * mesh.ep)
    yield "--pp-size", str(mesh.pp)
    if mesh.ep > 1:
        yield "--ep-size", str(mesh.ep)
        yield "--attn-dp-size", str(mesh.ep)
    elif plan.serving and mesh.dp > 1:
        yield "--dp-size", str(mesh.dp)
    yield "--dtype", DTYPES[plan.job.dtype]
    if plan.serving:
        yield from _serving(plan.serving, dtype=plan.job.dtype)
    elif plan.model.tokens_per_sample > 1:
        yield "--context-length", str(plan.job.seq_len)


def _serving(serving: Serving, *, dtype: str) -> Iterator[Flag]:
    if dtype == "fp8":
        yield "--quantization", "fp8"
    yield "--context-length", str(serving.prompt_len + serving.output_len)
    yield "--max-running-requests", str(serving.sequences_per_replica)


def _experts(plan: Plan) -> Iterator[str]:
    mesh = plan.mesh
    if mesh.ep > 1:
        yield (
            f"SGLang's tensor-parallel group holds its expert groups: tp={mesh.tp} x ep={mesh.ep} become "
            f"--tp-size {mesh.tp * mesh.ep} with attention data-parallel over {mesh.ep} of them"
        )
