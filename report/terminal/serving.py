"""What is told differently of a plan for serving: its step is a token, its mesh a number of replicas."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from ...planner.mesh import Mesh
from ...planner.plan import Plan, Serving
from .. import words
from .tables import grid, literal, number, table
from .tables import words as column


def serving_verdict(plan: Plan, serving: Serving) -> RenderableType:
    """Replicas and sequences; speed and memory; the first reason."""
    rows = [("Plan", _layout(plan, serving)), ("Cost", _cost(plan, serving))]
    return grid([*rows, *(("Why", literal(reason)) for reason in plan.reasons[:1])])


def slower_servers(plan: Plan) -> RenderableType | None:
    """One row an alternative, best first."""
    if not plan.alternatives:
        return None
    made = table(
        column("Plan", ratio=4),
        number("Tokens/s"),
        number("Between"),
        number("GiB"),
        column("Why it lost", ratio=6),
        expand=True,
    )
    for other in plan.alternatives:
        made.add_row(
            literal(replicas(other.mesh)),
            words.digits(other.tokens_per_s or 0.0),
            words.duration(other.step_time_s),
            words.gib(other.peak_memory_bytes),
            literal(other.reason),
        )
    return made


def serving_certificate(plan: Plan) -> RenderableType:
    """What was tried and what the prediction assumes."""
    job, search = plan.job, plan.search
    rows = {
        "Searched": f"{words.plural(search.meshes_considered, 'replica size')}, all priced",
        "Assumed": f"{job.seq_len:,} tokens read and {job.output_len:,} made a sequence, {job.dtype}, "
        f"served for {job.objective}; " + "; ".join(plan.assumptions),
        "Trust": "modelled, but for what the topology says was measured",
        "For": f"model graph {plan.model.graph_hash[:12]}, topology {plan.cluster.topology_hash[:12]}, "
        f"by tpplan {plan.tpplan_version}",
    }
    return grid((word, literal(meaning)) for word, meaning in rows.items())


def replicas(mesh: Mesh) -> str:
    """`8 replicas of 1 device`, `2 replicas of tp4`."""
    axes = " x ".join(f"{axis}{mesh.size(axis)}" for axis in ("pp", "ep", "tp") if mesh.size(axis) > 1)
    return f"{words.plural(mesh.dp, 'replica')} of {axes or '1 device'}"


def _layout(plan: Plan, serving: Serving) -> Text:
    return literal(replicas(plan.mesh), "bold cyan").append(
        f", {words.plural(serving.sequences_per_replica, 'sequence')} at once on each "
        f"(room for {serving.max_concurrency // serving.replicas:,} of "
        f"{serving.prompt_len + serving.output_len:,} tokens)",
        "default",
    )


def _cost(plan: Plan, serving: Serving) -> Text:
    predicted = plan.predicted
    low, high = predicted.step_time_interval_s
    return literal(f"{words.digits(serving.tokens_per_s)} tokens/s", "bold cyan").append(
        f" ({words.digits(predicted.tokens_per_s_per_device)} a device), "
        f"{words.duration(serving.token_time_s)} between tokens [{words.duration(low)} to "
        f"{words.duration(high)}], first token {words.duration(serving.prefill_s)} after a prompt that does "
        f"not wait, {words.gib(predicted.peak_memory_bytes)} of "
        f"{words.gib(predicted.device_memory_bytes)} GiB",
        "default",
    )
