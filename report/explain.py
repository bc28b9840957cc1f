"""A plan in a page of prose: what each axis does for this model, why these sizes, what would change it.

In: a `Plan`. Out: titled paragraphs, each a tuple of sentences. Everything is read from the plan:
its splits, stages, collectives, reasons and runners-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..planner.cost import Communication
from ..planner.plan import Alternative, ClusterSize, Plan
from . import words
from .points import choices

TIGHT = 0.95
"""Share of a device's memory above which memory is called what binds."""
COMPUTE = ("forward compute", "backward compute")
"""Parts of the waterfall that no layout of the devices removes."""
DIMS_NAMED = 6
"""Split dims named in a sentence before the rest are counted."""
SHARDED = {
    0: "Every copy keeps all of its parameters, gradients and optimizer state (no ZeRO).",
    1: "ZeRO-1 shards the optimizer state over the copies.",
    2: "ZeRO-2 shards optimizer state and gradients over the copies.",
    3: "ZeRO-3 shards parameters too, over the copies, and gathers them when they are used.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """A title and what is said under it."""

    title: str
    sentences: tuple[str, ...]


def explain(plan: Plan) -> tuple[Paragraph, ...]:
    """The whole page, in reading order."""
    data = _replicas if plan.serving else _data
    stages = _served_stages if plan.serving else _pipeline
    axes = (("pp", stages), ("tp", _tensor), ("ep", _expert), ("cp", _context), ("dp", data))
    made = [
        Paragraph(title=_axis_title(plan, axis), sentences=tuple(tell(plan)))
        for axis, tell in axes
        if plan.mesh.size(axis) > 1
    ]
    rest = [
        ("Axes left at 1", _unused(plan)),
        ("Keys and values", _cache(plan)) if plan.serving else ("Recomputation", _recompute(plan)),
        ("Why these sizes", iter(plan.reasons)),
        ("What would change it", _changes(plan)),
        ("Asked again under other conditions", (change.sentence for change in plan.changes)),
        ("Other sizes of the cluster", sizes(plan)),
        ("What else there is to choose", tradeoffs(plan)),
    ]
    made += [Paragraph(title=title, sentences=told) for title, found in rest if (told := tuple(found))]
    return tuple(made)


def _axis_title(plan: Plan, axis: str) -> str:
    names = {
        "pp": "pipeline stages",
        "tp": "tensor parallel",
        "ep": "expert parallel",
        "cp": "context parallel",
        "dp": "replicas" if plan.serving else "data parallel",
    }
    return f"{axis}={plan.mesh.size(axis)}: {names[axis]}"


# --------------------------------------------------------------------------- axes


def _pipeline(plan: Plan) -> Iterator[str]:
    layers = plan.layers_per_stage
    even = f"{layers[0]} each" if len(set(layers)) == 1 else ", ".join(map(str, layers))
    yield f"The {plan.model.layers} layers are cut into {plan.mesh.pp} stages ({even}), one a device."
    if plan.virtual_stages > 1:
        yield (
            f"A stage is {plan.virtual_stages} pieces from different depths of the model ({plan.schedule}), "
            "which lets a rank start sooner and wait less."
        )
    yield (
        f"{words.plural(plan.num_microbatches, 'microbatch', 'microbatches')} follow each other through the "
        f"stages; filling and draining leave a bubble of {words.percent(plan.predicted.bubble_fraction)}."
    )
    yield from _talk(plan, "pp")


def _served_stages(plan: Plan) -> Iterator[str]:
    yield f"The {plan.model.layers} layers of a replica are cut into {plan.mesh.pp} stages, one a device."
    yield (
        f"{words.plural(plan.num_microbatches, 'group')} of {plan.micro_batch} sequences take turns, so that "
        "every stage is busy; each token passes all stages."
    )
    yield from _talk(plan, "pp")


def _tensor(plan: Plan) -> Iterator[str]:
    size = plan.mesh.tp
    yield f"Every layer is computed by {size} devices together, each with 1/{size} of the split weights."
    yield from _dims(plan, "tp")
    if plan.sequence_parallel:
        yield "Between these, norms and residuals are split over the sequence: activations shrink too."
    yield from _talk(plan, "tp")


def _expert(plan: Plan) -> Iterator[str]:
    size = plan.mesh.ep
    yield f"Experts (or table rows) are spread over {size} devices; tokens travel to the ones they need."
    yield from _dims(plan, "ep")
    yield from _talk(plan, "ep")


def _context(plan: Plan) -> Iterator[str]:
    parts = plan.mesh.cp
    yield f"Sequences of {plan.job.seq_len:,} tokens are cut into {parts}; only attention sees them whole."
    yield from _talk(plan, "cp")


def _data(plan: Plan) -> Iterator[str]:
    share = plan.job.global_batch // plan.mesh.batch_ways
    yield (
        f"{plan.mesh.dp} copies of the model each take {words.plural(share, 'sample')} of the "
        f"{plan.job.global_batch:,} of a step, in {words.batches(plan.micro_batch, plan.num_microbatches)}."
    )
    yield SHARDED[plan.zero_stage]
    yield from _talk(plan, "dp")


def _replicas(plan: Plan) -> Iterator[str]:
    serving = plan.serving
    assert serving is not None
    yield (
        f"{serving.replicas} copies of the model each serve up to {serving.sequences_per_replica:,} of "
        f"{serving.concurrency:,} sequences. They never talk: a balancer in front of them is enough."
    )


def _dims(plan: Plan, axis: str) -> Iterator[str]:
    """Which dims are split over an axis, each with an op it is split in."""
    first: dict[str, str] = {}
    for split in plan.splits:
        if split.axis == axis and split.dim and split.dim not in ("batch", "sequence"):
            first.setdefault(split.dim, split.module)
    if first:
        told = words.listed([f"{dim} (as in {module})" for dim, module in first.items()], limit=DIMS_NAMED)
        yield f"Split are: {told}."


def _talk(plan: Plan, axis: str) -> Iterator[str]:
    """What the axis costs in collectives, and over which links."""
    comms = [comm for comm in plan.communications if axis in comm.axis.split("+")]
    if not comms:
        yield "It needs no communication."
        return
    kinds = words.listed(dict.fromkeys(str(comm.collective) for comm in comms))
    times = sum(comm.count for comm in comms)
    yield (
        f"It costs {words.plural(round(times), 'collective')} a {_unit(plan)} on each device ({kinds}) over "
        f"{_links(plan, comms)}: {words.duration(_total(comms))}, of which "
        f"{words.duration(sum(c.exposed_s * c.count for c in comms))} is not hidden by computation."
    )


def _unit(plan: Plan) -> str:
    return "token" if plan.serving else "step"


def _total(comms: Sequence[Communication]) -> float:
    return sum(comm.seconds * comm.count for comm in comms)


def _links(plan: Plan, comms: Sequence[Communication]) -> str:
    known = {link.level: f"{link.kind} ({words.rate(link.bytes_per_s)})" for link in plan.cluster.links}
    return words.listed(dict.fromkeys(known.get(comm.level, comm.level) for comm in comms))


def _unused(plan: Plan) -> Iterator[str]:
    """For each axis left at one, the best runner-up that uses it."""
    for axis in ("pp", "tp", "ep", "cp"):
        if plan.mesh.size(axis) > 1:
            continue
        rivals = [a for a in plan.alternatives if a.mesh.size(axis) > 1]
        if rivals:
            best = min(rivals, key=lambda a: a.step_time_s)
            yield f"{axis}: the best plan found with it is {_rival(plan, best)}"


def _rival(plan: Plan, rival: Alternative) -> str:
    slower = rival.step_time_s / plan.predicted.step_time_s - 1
    name = f"{rival.seeded_as}, " if rival.seeded_as else ""
    return f"{name}{rival.mesh}, {words.duration(rival.step_time_s)} ({slower * 100:+.1f} %): {rival.reason}."


# --------------------------------------------------------------------------- the rest


def _cache(plan: Plan) -> Iterator[str]:
    serving = plan.serving
    assert serving is not None
    length = serving.prompt_len + serving.output_len
    yield (
        f"A token's keys and values take {words.size(serving.cache_bytes_per_token)} of the fullest device, "
        f"a sequence of {length:,} tokens {words.size(serving.cache_bytes_per_token * length)}."
    )
    yield (
        f"{words.size(serving.cache_budget_bytes)} are left for them beside weights and activations: room "
        f"for {serving.max_concurrency:,} sequences on all replicas, or as many as the engine runs at once."
    )


def _recompute(plan: Plan) -> Iterator[str]:
    spent = sum(part.seconds for part in plan.predicted.waterfall if "recompute" in part.label)
    modes: dict[str, int] = {}
    for stage in plan.stages:
        for _, number, mode in stage.blocks:
            modes[mode] = modes.get(mode, 0) + number
    told = ", ".join(f"{mode} in {number} blocks" for mode, number in modes.items() if mode != "none")
    if told:
        cost = f"; it costs {words.duration(spent)} a step" if spent else ""
        yield f"Activations that do not fit are computed again in backward: {told}{cost}."
    elif plan.recompute == "none":
        yield "None: all activations fit until backward needs them."


def sizes(plan: Plan) -> Iterator[str]:
    """One sentence for each number of devices that was compared."""
    for size in plan.sizes:
        yield (
            f"{words.plural(size.devices, 'device')}: {words.duration(size.step_time_s)} a step, "
            f"{words.gib(size.peak_memory_bytes)} GiB, {_price(size)} per million tokens."
        )


def _price(size: ClusterSize) -> str:
    """Of a million tokens: dollars, or device-hours where the cluster has no price."""
    cost = size.usd_per_million_tokens
    return f"{size.device_hours_per_million_tokens:.3g} device-hours" if cost is None else f"${cost:.3g}"


def tradeoffs(plan: Plan) -> Iterator[str]:
    """One sentence for each plan that none beats in time, memory, devices and cost at once."""
    for other in plan.pareto:
        if other.size is None:
            continue
        yield (
            f"{words.duration(other.step_time_s)} a step, {words.gib(other.peak_memory_bytes)} GiB, "
            f"{words.plural(other.size.devices, 'device')}, {_price(other.size)} per million tokens: "
            f"{other.mesh}, {choices(other)} ({other.reason}; within {other.gap:.2%} of the best for that)."
        )


def _changes(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    free = predicted.device_memory_bytes - predicted.peak_memory_bytes
    share = predicted.peak_memory_bytes / predicted.device_memory_bytes
    binds = (
        "Memory binds: with more of it, less would be split or recomputed"
        if share > TIGHT
        else "Memory does not bind: more of it would change little"
    )
    device = words.gib(predicted.device_memory_bytes)
    yield f"{words.gib(free)} GiB of {device} are free on the fullest device. {binds}."
    others = [part for part in predicted.waterfall if part.label not in COMPUTE]
    if others and not plan.serving:
        largest = max(others, key=lambda part: part.seconds)
        yield (
            f"Besides compute, most of the step goes to {largest.label}: without it the step would be "
            f"{words.percent(largest.seconds / predicted.step_time_s)} shorter."
        )
    if plan.alternatives:
        nearest = min(plan.alternatives, key=lambda a: a.step_time_s)
        yield f"The nearest rival is {_rival(plan, nearest)}"
