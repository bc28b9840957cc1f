"""Why a plan won and why another lost, in words.

Reasons are computed from the differences of the predictions, never from rules of thumb.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..cost import Recompute
from ..problem import Priced, SearchProblem
from .brackets import least_capacity_bytes
from .costed import Costed
from .placement import WORTH
from .price import is_communication, price
from .stages import shortest

GIB = 2**30
ROUNDING = 1e-6
"""Differences below this share of a step are none."""
SMALL_SHARE = 0.02
"""Differences below this share of the whole difference are not worth a word."""


def seconds_in_words(seconds: float) -> str:
    """`3.21 s`, `45.3 ms` or `12.0 us`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def gib(nbytes: float) -> str:
    """`12.3 GiB`."""
    return f"{nbytes / GIB:.1f} GiB"


# --------------------------------------------------------------------------- runners-up


def why_it_lost(best: Priced, other: Priced) -> str:
    """The difference in step time, and the parts that make most of it."""
    difference = other.step_time_s - best.step_time_s
    if difference <= 0:
        gain = -difference / best.step_time_s
        if gain < ROUNDING:
            return "as fast, but the less simple plan"
        return f"faster by {gain:.2%}: too little for an unusual order of ranks or idle devices"
    ours = {part.label: part.seconds for part in best.prediction.waterfall}
    theirs = {part.label: part.seconds for part in other.prediction.waterfall}
    changes = {label: theirs.get(label, 0.0) - ours.get(label, 0.0) for label in ours | theirs}
    worse = sorted(
        (label for label in changes if changes[label] > SMALL_SHARE * difference), key=lambda n: -changes[n]
    )
    better = min(changes, key=changes.__getitem__)
    words = [f"{seconds_in_words(changes[label])} more {_noun(label)}" for label in worse[:2]]
    if changes[better] < -SMALL_SHARE * difference:
        words.append(f"although {seconds_in_words(-changes[better])} less {_noun(better)}")
    share = difference / best.step_time_s
    return f"slower by {seconds_in_words(difference)} ({share:+.1%}): {', '.join(words)}"


def _noun(label: str) -> str:
    return f"exposed {label}" if is_communication(label) else label


def needed_bytes(costed: Costed) -> float:
    """The least device memory with which this candidate would fit, upper band."""
    problem = costed.stage_problem
    framework = costed.problem.framework
    capacity = least_capacity_bytes(problem) + costed.buffer_bytes + costed.dummy_bytes
    return capacity * framework.allocator_reserve[1] + framework.context_bytes


def enlarged_to_fit(costed: Costed) -> tuple[float, Priced]:
    """(device memory that is just enough, the plan on devices that have it)."""
    enough = replace(costed.stage_problem, capacity_bytes=least_capacity_bytes(costed.stage_problem))
    return needed_bytes(costed), price(costed, shortest(enough), bound=0.0)


def why_it_does_not_fit(needed: float, available: float) -> str:
    """How much memory is missing."""
    return f"needs {gib(needed)} per device, {gib(needed - available)} more than the device has"


# --------------------------------------------------------------------------- the winner


def reasons(problem: SearchProblem, best: Priced) -> tuple[str, ...]:
    """Why these sizes, one sentence each, most important first."""
    return tuple(_reasons(problem, best))


def _reasons(problem: SearchProblem, best: Priced) -> Iterator[str]:
    c, mesh, topology = best.candidate, best.candidate.mesh, problem.topology
    memory = topology.device.memory_bytes
    sparse = sum(problem.blocks[n].sparse_numel * problem.blocks[n].element_bytes for n in problem.chain)
    if mesh.ep > 1:
        yield (
            f"ep={mesh.ep} splits {gib(sparse)} of sparse parameters (experts, tables)"
            f"{', more than a device holds' if sparse > memory else ''}; dense ones are replicated over it."
        )
    if mesh.tp > 1:
        outermost = topology.span(size=mesh.tp, stride=mesh.stride("tp")).outermost
        level = topology.levels[outermost]
        crosses = outermost > 0 and outermost == len(topology.levels) - 1
        exposed = sum(p.seconds for p in best.prediction.waterfall if p.label == "tp communication")
        yield (
            f"tp={mesh.tp} {'crosses nodes, over' if crosses else 'stays on'} the {level.name} level "
            f"({level.kind}) and costs "
            f"{seconds_in_words(exposed)} of exposed communication per step."
        )
    if mesh.pp > 1:
        bubble = best.prediction.bubble_fraction
        virtual = f", {c.virtual_stages} virtual stages each" if c.virtual_stages > 1 else ""
        yield (
            f"pp={mesh.pp} cuts the chain into {mesh.pp} stages{virtual}; "
            f"{c.microbatches} microbatches leave a bubble of {bubble:.1%}."
        )
    if mesh.order != problem.order:
        order = " > ".join(axis for axis in mesh.order if mesh.size(axis) > 1)
        yield (
            f"Ranks are laid out as {order}, so that stages are neighbours: "
            f"that gains more than {WORTH:.0%} over the usual order."
        )
    replicas = mesh.dp * mesh.cp * mesh.ep
    if replicas > 1:
        what = {
            0: "whole on each (ZeRO-0)",
            1: "with optimizer state sharded (ZeRO-1)",
            2: "with optimizer state and gradients sharded (ZeRO-2)",
            3: "with parameters, gradients and optimizer state sharded (ZeRO-3)",
        }[c.zero_stage]
        group = f" in groups of {c.shard_group}, the groups being copies" if c.shard_group else ""
        yield f"Dense parameters lie on {replicas} data-parallel ranks {what}{group}."
    peak = best.prediction.peak_memory_bytes
    if best.recompute == str(Recompute.NONE):
        yield f"Nothing is recomputed: the fullest device needs {gib(peak)} of {gib(memory)}."
    else:
        blocks = sum(n for s in best.stages for _, n, mode in s.blocks if mode != str(Recompute.NONE))
        yield (
            f"{blocks} of {len(problem.chain)} blocks are recomputed so that the fullest device needs "
            f"{gib(peak)} of {gib(memory)}."
        )
