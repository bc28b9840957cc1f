"""Two plans side by side: what was chosen, where the time goes, what the memory holds.

In: two `Plan`s. Out: a `Comparison`: rows of (name, left, right), choices as text, time in seconds,
memory in bytes, in the order of the left plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..planner.mesh import AXES
from ..planner.plan import Plan
from . import words

HASH_SHOWN = 12
"""Characters of a hash that a reader compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs between two plans, and what does not."""

    choices: tuple[tuple[str, str, str], ...]
    time_s: tuple[tuple[str, float, float], ...]
    """Parts of the step; they add up to the totals."""
    memory_bytes: tuple[tuple[str, float, float], ...]
    """Kinds on the fullest device."""
    step_time_s: tuple[float, float]
    peak_memory_bytes: tuple[float, float]
    warnings: tuple[str, ...]
    """Why the two may not be comparable."""


def compare(left: Plan, right: Plan) -> Comparison:
    """The two plans, row by row."""
    return Comparison(
        choices=tuple(
            (name, first, second)
            for (name, first), (_, second) in zip(_choices(left), _choices(right), strict=True)
        ),
        time_s=_joined(_parts(left), _parts(right)),
        memory_bytes=_joined(left.predicted.memory_by_kind_bytes, right.predicted.memory_by_kind_bytes),
        step_time_s=(left.predicted.step_time_s, right.predicted.step_time_s),
        peak_memory_bytes=(left.predicted.peak_memory_bytes, right.predicted.peak_memory_bytes),
        warnings=tuple(_warnings(left, right)),
    )


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain JSON: rows as objects with `left` and `right`."""
    document = asdict(comparison)
    for name in ("choices", "time_s", "memory_bytes"):
        document[name] = [dict(zip(("name", "left", "right"), row, strict=True)) for row in document[name]]
    return document


def _choices(plan: Plan) -> list[tuple[str, str]]:
    layers = dict.fromkeys(plan.layers_per_stage)
    return [
        *((axis, str(plan.mesh.size(axis))) for axis in AXES),
        ("rank order", " > ".join(axis for axis in plan.mesh.order if plan.mesh.size(axis) > 1)),
        ("ZeRO", words.zero(plan.zero_stage, plan.shard_group).removeprefix("ZeRO-")),
        ("microbatch", str(plan.micro_batch)),
        ("microbatches", str(plan.num_microbatches)),
        ("schedule", words.schedule(plan.schedule, plan.virtual_stages)),
        ("layers a stage", words.listed(map(str, layers), limit=8)),
        ("recompute", plan.recompute),
        ("sequence parallel", "yes" if plan.sequence_parallel else "no"),
    ]


def _parts(plan: Plan) -> dict[str, float]:
    parts: dict[str, float] = {}
    for part in plan.predicted.waterfall:
        parts[part.label] = parts.get(part.label, 0.0) + part.seconds
    return parts


def _joined(left: dict[str, float], right: dict[str, float]) -> tuple[tuple[str, float, float], ...]:
    """Rows of both, in the left one's order; what a side lacks is 0. Rows of zeros are left out."""
    names = dict.fromkeys((*left, *right))
    rows = ((name, left.get(name, 0.0), right.get(name, 0.0)) for name in names)
    return tuple(row for row in rows if row[1] or row[2])


def _warnings(left: Plan, right: Plan) -> Iterable[str]:
    pairs = {
        "models": (_model(left), _model(right)),
        "clusters": (_cluster(left), _cluster(right)),
        "jobs": (_job(left), _job(right)),
    }
    for what, (first, second) in pairs.items():
        if first != second:
            yield f"the plans are for different {what}: {first} and {second}"


def _model(plan: Plan) -> str:
    return f"{plan.model.name} (graph {plan.model.graph_hash[:HASH_SHOWN]})"


def _cluster(plan: Plan) -> str:
    cluster = plan.cluster
    return f"{cluster.devices} x {cluster.device} (topology {cluster.topology_hash[:HASH_SHOWN]})"


def _job(plan: Plan) -> str:
    job = plan.job
    return (
        f"{job.mode} for {job.objective}, batch {job.global_batch:,} of {job.seq_len:,} in {job.dtype} "
        f"with {job.optimizer} as {job.framework} runs it"
    )
