"""The page's words and numbers, one function a section; text is plain, the template escapes it."""

from __future__ import annotations

import shlex
from typing import Any

from ...planner.cost import Origin
from ...planner.plan import Alternative, Plan, Stage
from .. import words
from ..explain import explain
from ..points import choices as choices_of

AXIS_NAMES = {
    "pp": "pipeline stages",
    "dp": "data-parallel replicas",
    "cp": "context parallel",
    "ep": "expert parallel",
    "tp": "tensor parallel",
}
KINDS = (
    "parameters", "gradients", "optimizer", "activations", "working", "logits", "buffers", "reserve",
    "context",
)  # fmt: skip
"""Kinds of memory in the order of their colours; another kind takes the last colour."""
SECONDS_PER_HOUR = 3600
SUM_TOLERANCE = 1e-6
"""Relative difference between the parts' sum and the step time that rounding explains."""


def title(plan: Plan) -> dict[str, str]:
    """What is planned, and for which hardware."""
    cluster = plan.cluster
    return {
        "model": plan.model.name,
        "size": f"{words.count(plan.model.parameters)} parameters",
        "hardware": f"{cluster.devices:,} x {cluster.device}",
        "cluster": f"{cluster.topology}, {words.plural(cluster.nodes, 'node')}",
    }


def verdict(plan: Plan) -> dict[str, Any]:
    """The choice, its four figures, and the reasons."""
    predicted = plan.predicted
    low, high = predicted.step_time_interval_s
    unit = "tokens" if plan.model.tokens_per_sample > 1 else "samples"
    used = predicted.peak_memory_bytes / predicted.device_memory_bytes
    return {
        "axes": [
            {"axis": axis, "size": size, "name": AXIS_NAMES[axis]}
            for axis, size in plan.mesh.sizes.items()
            if size > 1
        ]
        or [{"axis": "1", "size": "device", "name": "nothing is split"}],
        "choices": choices(plan),
        "figures": [
            (
                "Step",
                words.duration(predicted.step_time_s),
                f"{words.duration(low)} to {words.duration(high)}",
            ),
            (
                "Throughput",
                words.digits(predicted.tokens_per_s_per_device),
                f"{unit} a second and device",
            ),
            ("Model FLOPs", words.percent(predicted.model_flops_utilization), "of the device's peak (MFU)"),
            (
                "Memory",
                f"{words.gib(predicted.peak_memory_bytes)} GiB",
                f"{words.percent(used)} of {words.gib(predicted.device_memory_bytes)} GiB, fullest device",
            ),
        ],
        "reasons": plan.reasons,
    }


def choices(plan: Plan) -> list[str]:
    """What was chosen besides the mesh, a few words each."""
    parts = [
        words.zero(plan.zero_stage, plan.shard_group),
        words.batches(plan.micro_batch, plan.num_microbatches),
        words.recompute(plan.recompute),
    ]
    if plan.mesh.pp > 1:
        parts.insert(0, words.schedule(plan.schedule, plan.virtual_stages))
    if plan.sequence_parallel:
        parts.append("sequence parallel")
    return parts


# --------------------------------------------------------------------------- time


def waterfall(plan: Plan) -> list[dict[str, Any]]:
    """One bar a part, each starting where the last one ended; percent of the step."""
    step_s = plan.predicted.step_time_s
    rows, begin_s = [], 0.0
    for part in plan.predicted.waterfall:
        rows.append(_bar(part.label, begin_s, part.seconds, step_s, str(part.origin)))
        begin_s += part.seconds
    if abs(step_s - begin_s) > SUM_TOLERANCE * abs(step_s):
        rows.append(_bar("not attributed", begin_s, step_s - begin_s, step_s, ""))
    return rows


def _bar(label: str, begin_s: float, seconds: float, step_s: float, origin: str) -> dict[str, Any]:
    return {
        "label": label,
        "begin": words.percentage(begin_s, step_s),
        "width": words.percentage(seconds, step_s),
        "ms": words.milliseconds(seconds),
        "share": words.percent(seconds / step_s),
        "origin": origin,
    }


# --------------------------------------------------------------------------- memory


def memory(plan: Plan) -> dict[str, Any]:
    """One stacked bar a stage, on a scale that holds the device and the fullest stage."""
    device = plan.predicted.device_memory_bytes
    has = [stage.device_memory_bytes or device for stage in plan.stages]
    scale = max(*has, *(stage.peak_memory_bytes for stage in plan.stages))
    used = {part.kind for stage in plan.stages for part in stage.memory if part.bytes > 0}
    return {
        "device": words.gib(device),
        "limit": words.percentage(device, scale),
        "stages": [_stage(stage, scale, own) for stage, own in zip(plan.stages, has, strict=True)],
        "kinds": [(kind, color(kind)) for kind in (*KINDS, *sorted(used - set(KINDS))) if kind in used],
    }


def _stage(stage: Stage, scale: float, device: float) -> dict[str, Any]:
    parts = [
        {
            "kind": part.kind,
            "color": color(part.kind),
            "width": words.percentage(part.bytes, scale),
            "gib": words.gib(part.bytes),
        }
        for part in stage.memory
        if part.bytes > 0
    ]
    return {
        "index": stage.index,
        "layers": words.plural(stage.layers, "layer") + (f" on {stage.device}" if stage.device else ""),
        "blocks": ", ".join(f"{number} {name} ({mode})" for name, number, mode in stage.blocks),
        "in_flight": f"{stage.in_flight} in flight",
        "parts": parts,
        "peak": words.gib(stage.peak_memory_bytes),
        "peak_at": words.percentage(stage.peak_memory_bytes, scale),
        "used": words.percent(stage.peak_memory_bytes / device),
        "over": stage.peak_memory_bytes > device,
    }


def color(kind: str) -> int:
    """Index of a kind's colour."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


# --------------------------------------------------------------------------- communication


def communications(plan: Plan) -> list[dict[str, str]]:
    """Every collective of a step, the most exposed first."""
    ordered = sorted(
        plan.communications, key=lambda c: (c.exposed_s * c.count, c.seconds * c.count), reverse=True
    )
    return [
        {
            "label": comm.label,
            "collective": str(comm.collective),
            "over": f"{comm.axis} {comm.group_size}, {comm.level}",
            "size": words.size(comm.bytes),
            "count": words.digits(comm.count) if comm.count % 1 else f"{comm.count:,.0f}",
            "total": words.milliseconds(comm.seconds * comm.count),
            "exposed": words.milliseconds(comm.exposed_s * comm.count),
            "origin": str(comm.origin),
        }
        for comm in ordered
    ]


# --------------------------------------------------------------------------- what else was tried


def explored(plan: Plan) -> dict[str, Any]:
    """The runners-up, and what the search did."""
    search = plan.search
    return {
        "rows": [_alternative(alternative, plan) for alternative in plan.alternatives],
        "facts": [
            ("Looked at", words.plural(search.meshes_considered, "mesh", "meshes")),
            ("Ruled out by bounds", words.plural(search.meshes_pruned, "candidate")),
            ("of which", "\n".join(f"{number:,} {bound}" for bound, number in search.pruned_by)),
            ("No plan below", words.duration(search.lower_bound_s)),
            ("This one is within", f"{search.gap * 100:.2f} % of that"),
            ("Solver", search.solver),
            (
                "Search",
                "complete" if search.complete else "stopped early: a better plan may exist",
            ),
        ],
    }


def _alternative(alternative: Alternative, plan: Plan) -> dict[str, str]:
    slower = alternative.step_time_s / plan.predicted.step_time_s - 1
    return {
        "mesh": str(alternative.mesh),
        "name": alternative.seeded_as or "",
        "rest": choices_of(alternative),
        "step": words.duration(alternative.step_time_s),
        "slower": f"{slower * 100:+.1f} %",
        "memory": words.gib(alternative.peak_memory_bytes),
        "reason": alternative.reason,
    }


def changes(plan: Plan) -> dict[str, Any]:
    """What would change the plan: what it says itself, and, where it was asked, what other searches found."""
    told = {paragraph.title: paragraph.sentences for paragraph in explain(plan)}
    return {
        "now": told.get("What would change it", ()),
        "asked": [change.sentence for change in plan.changes],
        "sizes": told.get("Other sizes of the cluster", ()),
        "tradeoffs": told.get("What else there is to choose", ()),
    }


# --------------------------------------------------------------------------- trust, and how to run it


def assumptions(plan: Plan) -> dict[str, Any]:
    """What was assumed, and how much of the step time was measured."""
    job, cluster = plan.job, plan.cluster
    seconds = {origin: 0.0 for origin in Origin}
    for part in plan.predicted.waterfall:
        seconds[part.origin] += part.seconds
    total_s = sum(seconds.values())
    rows = [
        ("Job", f"{job.mode} for {job.objective}, global batch {job.global_batch:,}"),
        ("Sequence", f"{job.seq_len:,} tokens" if plan.model.tokens_per_sample > 1 else "none"),
        ("Numbers", f"{job.dtype}, optimizer {job.optimizer}"),
        ("Framework profile", job.framework),
        ("Model", f"{plan.model.source} (graph {plan.model.graph_hash[:12]})"),
        ("Topology", f"{cluster.topology} (hash {cluster.topology_hash[:12]})"),
        ("Made by", f"tpplan {plan.tpplan_version}"),
    ]
    if cluster.price_per_device_hour is not None:
        dollars = (
            cluster.price_per_device_hour * cluster.devices * plan.predicted.step_time_s / SECONDS_PER_HOUR
        )
        rows.append(
            (
                "Price",
                f"${words.digits(dollars)} a step, at ${cluster.price_per_device_hour:,.2f} a device-hour",
            )
        )
    rows += [("Rests on", "\n".join(plan.assumptions))] if plan.assumptions else []
    return {
        "rows": rows,
        "origins": [
            {
                "origin": str(origin),
                "width": words.percentage(s, total_s),
                "share": words.percent(s / total_s),
            }
            for origin, s in seconds.items()
            if s > 0
        ],
        "exposed": words.duration(plan.predicted.exposed_communication_s),
        "bubble": words.percent(plan.predicted.bubble_fraction),
    }


def commands(plan: Plan, plan_file: str) -> list[tuple[str, str]]:
    """(what it does, the command) to make the plan again, check it, explain it and run it."""
    job, cluster = plan.job, plan.cluster
    topology = cluster.topology if ":" in cluster.topology else f"{cluster.topology}:{cluster.nodes}"
    same = [
        plan.model.source, "--topology", topology, "--global-batch", str(job.global_batch), "--seq-len",
        str(job.seq_len), "--dtype", job.dtype, "--optimizer", job.optimizer, "--framework", job.framework,
    ]  # fmt: skip
    return [
        ("Find this plan again", shlex.join(["tpplan", "suggest", *same, "-o", plan_file])),
        (
            "Change a choice and see what it costs",
            shlex.join(["tpplan", "estimate", *same, "--set", pins(plan)]),
        ),
        ("What each axis does, and why", shlex.join(["tpplan", "explain", plan_file])),
        ("Run your training script with it", shlex.join(["tpplan", "run", plan_file, "train.py"])),
        (
            "Or have the script written",
            shlex.join(["tpplan", "export", plan_file, "--to", "torchrun", "-o", "launch"]),
        ),
        (
            "Run it with Megatron-LM",
            shlex.join(["tpplan", "export", plan_file, "--to", "megatron", "-o", "launch"]),
        ),
    ]


def pins(plan: Plan) -> str:
    """The plan's choices as `--set` takes them."""
    chosen = {axis: size for axis, size in plan.mesh.sizes.items() if size > 1 or axis in ("pp", "dp", "tp")}
    chosen |= {"zero": plan.zero_stage, "micro_batch": plan.micro_batch}
    return ",".join(f"{key}={value}" for key, value in chosen.items())
