"""What several targets need to know of a plan, and what it costs to leave it.

Costs follow from the plan's own prediction: its waterfall, its stages' times and memory, and its
list of collectives. Seconds and bytes are per step and per device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ...planner.errors import PlanError
from ...planner.plan import Plan
from ...planner.schedule import V_SHAPED, Schedule, illegality, step_estimate
from .. import words

GIB = 2**30


# --------------------------------------------------------------------------- layers


def chunks(plan: Plan) -> tuple[int, ...]:
    """Repeated layers of every virtual stage, in model order.

    Raises PlanError if the plan does not say how a stage's layers are dealt to its virtual stages.
    """
    dealt = [_dealt(plan, stage.layers, stage.chunk_layers) for stage in plan.stages]
    rounds = []
    for turn in range(plan.virtual_stages):
        row = [chunk[turn] for chunk in dealt]
        back_up = plan.schedule in V_SHAPED and turn % 2
        rounds.extend(reversed(row) if back_up else row)
    return tuple(rounds)


def _dealt(plan: Plan, layers: int, chunk_layers: tuple[int, ...]) -> tuple[int, ...]:
    if chunk_layers:
        return chunk_layers
    if layers % plan.virtual_stages:
        raise PlanError(
            f"the plan has {plan.virtual_stages} virtual stages but does not say how a stage's "
            f"{layers} layers are dealt to them (chunk_layers)"
        )
    return (layers // plan.virtual_stages,) * plan.virtual_stages


def is_even(plan: Plan) -> bool:
    """Whether all virtual stages hold equally many layers."""
    return len(set(chunks(plan))) == 1


def recompute_counts(plan: Plan) -> Counter[str]:
    """How many repeated layers run each recompute mode."""
    totals: Counter[str] = Counter()
    for stage in plan.stages:
        totals.update({name: 0 for name, _, _ in stage.blocks})
        for name, number, _ in stage.blocks:
            totals[name] += number
    repeated = {name for name, number in totals.items() if number > 1} or set(totals)
    modes: Counter[str] = Counter()
    for stage in plan.stages:
        for name, number, mode in stage.blocks:
            if name in repeated:
                modes[mode] += number
    return modes


def vocabulary(plan: Plan) -> int | None:
    """Rows of the largest parameter that has a `vocab` dim; None without one."""
    sizes = [
        size
        for parameter in plan.parameters
        for size, dim in zip(parameter.shape, parameter.dims, strict=False)
        if dim == "vocab"
    ]
    return max(sizes, default=None)


def activation_split(plan: Plan) -> str | None:
    """The dim along which activations between layers are split over tp: `sequence`, `batch`, or None.

    Splitting either moves the same bytes; frameworks know the one over the sequence.
    """
    if plan.sequence_parallel:
        return "sequence"
    splits = [split for split in plan.splits if split.axis == "tp" and "norm" in split.op]
    return "batch" if splits and all(split.dim == "batch" for split in splits) else None


def embedding_splits(plan: Plan) -> tuple[str, ...]:
    """Dims over which embedding tables are split on tp."""
    found = [s.dim for s in plan.splits if s.axis == "tp" and s.op == "embedding" and s.dim]
    return tuple(dict.fromkeys(found))


def layout_deviations(plan: Plan, target: str) -> Iterator[str]:
    """Where a target's fixed tensor-parallel layout (vocabulary, sequence) is not the planned one."""
    if plan.mesh.tp == 1:
        return
    if activation_split(plan) == "batch":
        yield (
            f"activations between layers are split over the batch; {target} splits them over the sequence: "
            "the same bytes, moved by the same collectives"
        )
    for dim in embedding_splits(plan):
        if dim != "vocab":
            yield f"the embedding is split over {dim}; {target} splits it over the vocabulary"


# --------------------------------------------------------------------------- sizes


def real_order(plan: Plan) -> tuple[str, ...]:
    """The axes larger than one, from the slowest to the fastest."""
    return tuple(axis for axis in plan.mesh.order if plan.mesh.size(axis) > 1)


def sharding_ways(plan: Plan) -> int:
    """Over how many ranks ZeRO shards what dense parameters need."""
    return plan.mesh.dp * plan.mesh.ep * plan.mesh.cp


def part_bytes(plan: Plan, kind: str) -> float:
    """Bytes of one kind of memory on the stage that has most of it."""
    return max(sum(part.bytes for part in stage.memory if part.kind == kind) for stage in plan.stages)


# --------------------------------------------------------------------------- what leaving the plan costs


def more_memory(plan: Plan, extra_bytes: float) -> str:
    """`about 12.3 GiB more a device, and 1.0 GiB are free: it does not fit`."""
    free = plan.predicted.device_memory_bytes - plan.predicted.peak_memory_bytes
    fits = "it fits" if extra_bytes <= free else "it does not fit"
    return f"about {words.gib(extra_bytes)} GiB more a device, {words.gib(max(free, 0))} are free: {fits}"


def unsharded_gradients(plan: Plan) -> str:
    """What keeping gradients whole costs a plan that shards them (ZeRO-2 and 3)."""
    return more_memory(plan, part_bytes(plan, "gradients") * (sharding_ways(plan) - 1))


def unsharded_parameters(plan: Plan) -> str:
    """What keeping parameters and gradients whole costs a plan that shards both (ZeRO-3)."""
    kept = part_bytes(plan, "gradients") + part_bytes(plan, "parameters")
    return more_memory(plan, kept * (sharding_ways(plan) - 1))


def gradient_sync_each_microbatch(plan: Plan) -> str:
    """What reducing gradients after every microbatch costs, against once a step."""
    syncs = [c for c in plan.communications if "gradients" in c.label and "dp" in c.axis]
    once = sum(comm.seconds * comm.count for comm in syncs)
    extra = once * (plan.num_microbatches - 1)
    return f"at most {words.duration(extra)} more a step, if nothing hides it"


def recompute_everywhere(plan: Plan, mode: str) -> str:
    """What running `mode` in every layer costs a plan that runs it in some."""
    counts = recompute_counts(plan)
    some = counts.total() - counts["none"]
    spent = sum(part.seconds for part in plan.predicted.waterfall if "recompute" in part.label)
    if not some or not spent:
        return f"{mode} recomputation in {words.plural(counts['none'], 'more layer')}"
    extra = spent * (counts.total() / some - 1)
    return f"about {words.duration(extra)} more a step, and less memory"


def other_schedule(plan: Plan, name: str, virtual_stages: int = 1) -> str:
    """What running another pipeline schedule costs, in closed form, from the plan's stage times."""
    planned = _pipeline_s(plan, plan.schedule, plan.virtual_stages)
    other = _pipeline_s(plan, name, virtual_stages)
    if planned is None or other is None:
        return "its cost cannot be told from the plan"
    difference = other - planned
    more = "more" if difference >= 0 else "less"
    return f"about {words.duration(abs(difference))} {more} a step"


def _pipeline_s(plan: Plan, name: str, virtual_stages: int) -> float | None:
    """The pipeline's time, stages cut evenly into virtual ones; None where the schedule cannot be."""
    pp = plan.mesh.pp
    if name not in list(Schedule) or illegality(
        name, pp=pp, virtual_stages=virtual_stages, microbatches=plan.num_microbatches
    ):
        return None
    hops = [comm.seconds for comm in plan.communications if comm.axis == "pp"]
    return step_estimate(
        name,
        forward_s=[stage.forward_s / virtual_stages for stage in plan.stages] * virtual_stages,
        backward_s=[stage.backward_s / virtual_stages for stage in plan.stages] * virtual_stages,
        microbatches=plan.num_microbatches,
        p2p_s=max(hops, default=0.0),
        virtual_stages=virtual_stages,
    )


def headline(plan: Plan) -> str:
    """One line for a file's head: what is planned, for what."""
    model, cluster = plan.model, plan.cluster
    hardware = f"{cluster.devices} x {one_line(cluster.device)}"
    if plan.serving:
        return (
            f"{one_line(model.name)} on {hardware}: {plan.mesh}, {plan.serving.concurrency:,} sequences at "
            f"once, predicted {words.digits(plan.serving.tokens_per_s)} tokens/s "
            f"(tpplan {plan.tpplan_version})"
        )
    return (
        f"{one_line(model.name)} on {hardware}: {plan.mesh}, "
        f"{words.zero(plan.zero_stage, plan.shard_group)}, "
        f"{words.batches(plan.micro_batch, plan.num_microbatches)}, predicted "
        f"{words.duration(plan.predicted.step_time_s)} a step (tpplan {plan.tpplan_version})"
    )


def one_line(text: str) -> str:
    """`text` without line breaks or control characters, so that it can stand in a comment."""
    return "".join(character if character.isprintable() else "?" for character in text)


def nodes_and_devices(plan: Plan) -> tuple[int, int]:
    """(nodes, processes per node)."""
    per_node = math.gcd(plan.cluster.devices_per_node, plan.cluster.devices)
    return plan.cluster.devices // per_node, per_node
