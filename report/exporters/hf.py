"""Hugging Face transformers: the `tp_plan` of a model, module pattern to style.

Styles as in transformers 5 (`ALL_PARALLEL_STYLES`). A weight is `[out, in]`: its first dim split
is `colwise`, its second `rowwise`; an embedding is `[rows, hidden]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...planner.plan import ParameterPlacement, Plan
from .. import words
from . import facts
from .registry import Exported, cannot, exporter

NAME = "hf"


@exporter(NAME, "tp_plan of transformers, by module pattern")
def export(plan: Plan) -> Exported:
    """`tp_plan.json`, for `from_pretrained(..., tp_plan=json.load(...))` under torchrun."""
    if plan.mesh.tp == 1 and plan.mesh.ep == 1:
        raise cannot(
            NAME,
            "a tp_plan splits modules over tensor-parallel ranks, and the plan has tp=1",
            "export to accelerate or torchrun, or plan with tp set",
        )
    styles = dict(_styles(plan))
    return Exported(
        files={"tp_plan.json": json.dumps(styles, indent=2) + "\n"},
        deviations=tuple(_deviations(plan, styles)),
    )


def _styles(plan: Plan) -> Iterator[tuple[str, str]]:
    for parameter in plan.parameters:
        module, _, leaf = parameter.fqn.rpartition(".")
        style = _style(plan, module, parameter)
        if leaf != "bias" and style:
            yield module, style


def _style(plan: Plan, module: str, parameter: ParameterPlacement) -> str | None:
    """The style of one weight; None: whole on every rank."""
    placements = dict(parameter.placements)
    if placements.get("ep", "R").startswith("S("):
        return "grouped_gemm"
    cut = placements.get("tp", "R")
    if not cut.startswith("S("):
        return "sequence_parallel" if _along_sequence(plan, module) else None
    axis = int(cut.rsplit("@", 1)[1])
    if len(parameter.shape) == 3:
        return "packed_colwise" if axis == 1 else "rowwise"
    if _is_embedding(plan, module):
        return "embedding_rowwise" if axis == 0 else "embedding_colwise"
    if axis == 1:
        return "rowwise"
    return "colwise_gather_output" if "vocab" in parameter.dims else "colwise"


def _is_embedding(plan: Plan, module: str) -> bool:
    return any(split.module == module and split.op == "embedding" for split in plan.splits)


def _along_sequence(plan: Plan, module: str) -> bool:
    """Whether a module with whole weights works on a part of the sequence."""
    return any(s.module == module and s.axis == "tp" and s.dim == "sequence" for s in plan.splits)


def _deviations(plan: Plan, styles: dict[str, str]) -> Iterator[str]:
    mesh = plan.mesh
    if mesh.pp > 1:
        yield (
            f"a tp_plan has no pipeline: pp={mesh.pp} is lost, every rank holds all layers: "
            + facts.more_memory(plan, facts.part_bytes(plan, "parameters") * (mesh.pp - 1))
        )
    if mesh.batch_ways > 1:
        yield (
            f"dp={mesh.batch_ways} with {words.zero(plan.zero_stage)} is the launcher's to give "
            "(see `tpplan export --to accelerate`)"
        )
    yield "module names are the planned model's: they must be those of the transformers model"
    head = [name for name, style in styles.items() if style == "colwise_gather_output"]
    if head:
        yield f"the output of {head[0]} is gathered; the plan keeps logits split over vocab for the loss"
    if plan.recompute != "none":
        yield f"{plan.recompute} recomputation is the model's gradient_checkpointing_enable()"
