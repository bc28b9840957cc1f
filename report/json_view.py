"""A plan, or the answer that nothing fits, as the JSON document of the command line.

In: a `Plan` or `Infeasible`. Out: plain dicts, lists, strings and finite numbers, ready for
`json.dumps`. Keys are a contract: they may be added to, never renamed. Times are seconds, sizes
bytes; a number that is not finite becomes null.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ..planner.plan import Alternative, Infeasible, Plan


def plan_document(plan: Plan, *, wall_s: float | None) -> dict[str, Any]:
    """The document of a plan that took `wall_s` seconds to find or to estimate; None: read from a file."""
    return _plain(
        {
            "version": plan.version,
            "tpplan_version": plan.tpplan_version,
            "model": asdict(plan.model),
            "cluster": asdict(plan.cluster),
            "job": asdict(plan.job),
            "plan": _layout(plan),
            "predicted": _predicted(plan),
            "serving": asdict(plan.serving) if plan.serving else None,
            "search": {"wall_s": wall_s, **asdict(plan.search), "pruned_by": dict(plan.search.pruned_by)},
            "reasons": plan.reasons,
            "alternatives": [_alternative(alternative) for alternative in plan.alternatives],
            "warnings": plan.warnings,
            "pareto": [_alternative(alternative) for alternative in plan.pareto],
            "sizes": [asdict(size) for size in plan.sizes],
            "changes": [asdict(change) for change in plan.changes],
            "stages": [_stage(asdict(stage)) for stage in plan.stages],
            "splits": [asdict(split) for split in plan.splits],
            "parameters": [{**asdict(p), "placements": dict(p.placements)} for p in plan.parameters],
            "modules": [asdict(module) for module in plan.modules],
            "communications": [asdict(communication) for communication in plan.communications],
            "waterfall": [asdict(part) for part in plan.predicted.waterfall],
        }
    )


def infeasible_document(infeasible: Infeasible) -> dict[str, Any]:
    """The document of the answer that nothing fits (exit code 3)."""
    return _plain({"infeasible": asdict(infeasible)})


def _layout(plan: Plan) -> dict[str, Any]:
    return {
        "mesh": plan.mesh.sizes,
        "rank_order": plan.rank_order,
        "zero_stage": plan.zero_stage,
        "shard_group": plan.shard_group,
        "micro_batch": plan.micro_batch,
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages,
        "sequence_parallel": plan.sequence_parallel,
        "recompute": plan.recompute,
        "layers_per_stage": plan.layers_per_stage,
    }


def _predicted(plan: Plan) -> dict[str, Any]:
    """The prediction without its waterfall, which has a key of its own."""
    kept = {name: value for name, value in asdict(plan.predicted).items() if name != "waterfall"}
    return kept | {
        "device_hours_per_million_tokens": plan.device_hours_per_million_tokens,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
    }


def _alternative(alternative: Alternative) -> dict[str, Any]:
    mesh = alternative.mesh
    return {**asdict(alternative), "mesh": mesh.sizes, "rank_order": mesh.order}


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    """Lists of tuples by name: blocks with what each entry is, memory by kind."""
    blocks = [dict(zip(("block", "count", "recompute"), block, strict=True)) for block in stage["blocks"]]
    memory = {part["kind"]: part["bytes"] for part in stage["memory"]}
    return {**stage, "blocks": blocks, "memory_by_kind_bytes": memory}


def _plain(value: Any) -> Any:
    """Tuples as lists, enumerations as their words, numbers that are not finite as None."""
    match value:
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case str():
            return str(value)
        case float():
            return float(value) if math.isfinite(value) else None
    return value
