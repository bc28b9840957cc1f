"""Why a plan won, why another lost, and what would make an impossible job fit - in words.

Reasons are computed from the differences of the predictions, never from rules of thumb. Infeasible
jobs are explained by the candidate that comes closest and by the nearest change that fits: more
nodes (doubled, then halved back), or an optimizer with less state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..cost import Recompute
from ..estimate.step import Setting, spans
from ..mesh import Mesh
from ..plan import Infeasible
from ..problem import Candidate, Pins, Priced, Pricing, SearchProblem
from ..profile import OPTIMIZERS
from .price import Costed, idealised, is_communication, price
from .solver import Status
from .space import candidates
from .stages import least_capacity_bytes, shortest

GIB = 2**30
CLOSEST_TRIES = 6
"""Candidates whose memory is worked out exactly when nothing fits, the least demanding first."""
MAX_NODE_DOUBLINGS = 10
"""More than a thousand times the cluster is no longer a helpful suggestion."""
SMALL_SHARE = 0.02
"""Differences below this share of the whole difference are not worth a word."""
LEAN_OPTIMIZERS = ("adafactor", "sgd")
"""Tried, in this order, when the optimizer's state may be what does not fit."""


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
        return "as fast, but the less simple plan"
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
    capacity = least_capacity_bytes(problem) + costed.prefetch_bytes
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
        level = topology.levels[topology.span(size=mesh.tp, stride=mesh.stride("tp")).outermost]
        exposed = sum(p.seconds for p in best.prediction.waterfall if p.label == "tp communication")
        yield (
            f"tp={mesh.tp} stays on the {level.name} level ({level.kind}) and costs "
            f"{seconds_in_words(exposed)} of exposed communication per step."
        )
    if mesh.pp > 1:
        bubble = best.prediction.bubble_fraction
        virtual = f", {c.virtual_stages} virtual stages each" if c.virtual_stages > 1 else ""
        yield (
            f"pp={mesh.pp} cuts the chain into {mesh.pp} stages{virtual}; "
            f"{c.microbatches} microbatches leave a bubble of {bubble:.1%}."
        )
    replicas = mesh.dp * mesh.cp * mesh.ep
    if replicas > 1:
        what = {
            0: "whole on each (ZeRO-0)",
            1: "with optimizer state sharded (ZeRO-1)",
            2: "with optimizer state and gradients sharded (ZeRO-2)",
            3: "with parameters, gradients and optimizer state sharded (ZeRO-3)",
        }[c.zero_stage]
        yield f"Dense parameters lie on {replicas} data-parallel ranks {what}."
    peak = best.prediction.peak_memory_bytes
    if best.recompute == str(Recompute.NONE):
        yield f"Nothing is recomputed: the fullest device needs {gib(peak)} of {gib(memory)}."
    else:
        blocks = sum(n for s in best.stages for _, n, mode in s.blocks if mode != str(Recompute.NONE))
        yield (
            f"{blocks} of {len(problem.chain)} blocks are recomputed so that the fullest device needs "
            f"{gib(peak)} of {gib(memory)}."
        )


# --------------------------------------------------------------------------- nothing fits


def infeasible(
    problem: SearchProblem, pricing: Pricing, pins: Pins, short: Sequence[Candidate]
) -> Infeasible:
    """Which limit binds, by how much, and the nearest change that helps."""
    if not short:
        return _indivisible(problem, pins)
    memory = problem.topology.device.memory_bytes
    closest = min(
        (_exact(problem, pricing, c) for c in _least_demanding(problem, pricing, short)[:CLOSEST_TRIES]),
        key=lambda costed: (needed_bytes(costed), costed.candidate.key),
    )
    needed = needed_bytes(closest)
    return Infeasible(
        reason=(
            f"no plan fits {problem.topology.devices} x {problem.topology.device.name}: the closest "
            f"({closest.candidate}) needs {gib(needed)} per device and there are {gib(memory)}"
        ),
        short_by_bytes=needed - memory,
        nearest_fix=_nearest_fix(problem, pricing, pins),
        closest=closest.candidate.mesh.sizes,
    )


def _indivisible(problem: SearchProblem, pins: Pins) -> Infeasible:
    batch, devices = problem.job.global_batch, problem.topology.devices
    pinned = ", ".join(f"{name}={value}" for name, value in pins.items())
    under = f" with {pinned}" if pins else ""
    above = math.lcm(batch, devices)
    return Infeasible(
        reason=(
            f"no mesh of {devices} devices divides the global batch of {batch} and the model's sizes"
            f" (tp in {problem.tp_sizes}, ep in {problem.ep_sizes}, at most {problem.layers} stages){under}"
        ),
        short_by_bytes=0.0,
        nearest_fix=(
            f"drop {pinned}" if pins else f"use a global batch that {devices} divides, such as {above}"
        ),
    )


def _costed(problem: SearchProblem, pricing: Pricing, candidate: Candidate, solution) -> Costed:
    setting = Setting(
        candidate=candidate,
        topology=problem.topology,
        framework=problem.framework,
        optimizer=problem.optimizer,
        pricing=pricing,
        span=spans(problem.topology),
    )
    return Costed(problem=problem, setting=setting, intra=solution)


def _exact(problem: SearchProblem, pricing: Pricing, candidate: Candidate) -> Costed:
    """Costs of the leanest intra-op solution; ideal ones where the model cannot be split this way.

    Memory depends on the slice (tp, ep, cp) alone, so that other cluster sizes can be asked as well.
    """
    mesh = candidate.mesh
    slice_mesh = Mesh(tp=mesh.tp, ep=mesh.ep, cp=mesh.cp, order=mesh.order)
    solutions = pricing.intra(slice_mesh, candidate.micro_batch) or (idealised(problem, candidate),)
    every = [_costed(problem, pricing, candidate, solution) for solution in solutions]
    return min(every, key=needed_bytes)


def _least_demanding(problem: SearchProblem, pricing: Pricing, short: Sequence[Candidate]) -> list[Candidate]:
    """The smallest microbatch of every mesh and the plain schedule, by ideal memory."""
    leanest: dict[tuple, Candidate] = {}
    for c in short:
        key = (*c.mesh.sizes.values(), c.zero_stage)
        old = leanest.get(key)
        if old is None or (c.micro_batch, c.virtual_stages) < (old.micro_batch, old.virtual_stages):
            leanest[key] = c

    def states_bytes(c: Candidate) -> tuple:
        costed = _costed(problem, pricing, c, idealised(problem, c))
        stay = sum(costed.states[name].total for name in problem.chain) / c.mesh.pp
        return (stay, c.key)

    return sorted(leanest.values(), key=states_bytes)


def _nearest_fix(problem: SearchProblem, pricing: Pricing, pins: Pins) -> str:
    if pins and (fit := _first_fit(problem, pricing)):
        pinned = ", ".join(f"{name}={value}" for name, value in pins.items())
        return f"drop {pinned}: {_fit_in_words(fit)}"
    fixes = []
    for name in LEAN_OPTIMIZERS:
        leaner = replace(problem, optimizer=OPTIMIZERS[name])
        if OPTIMIZERS[name].state_bytes < problem.optimizer.state_bytes and (
            fit := _first_fit(leaner, pricing)
        ):
            fixes.append(f"use optimizer {name}: {_fit_in_words(fit)}")
            break
    nodes = _enough_nodes(problem, pricing)
    if nodes is not None:
        larger, fit = nodes
        fixes.insert(0, f"use at least {larger.devices} devices ({larger.nodes} nodes): {_fit_in_words(fit)}")
    return "; or ".join(fixes) or "use devices with more memory, a smaller model or shorter sequences"


def _fit_in_words(fit: Priced) -> str:
    peak, has = fit.prediction.peak_memory_bytes, fit.prediction.device_memory_bytes
    how = "without" if fit.recompute == str(Recompute.NONE) else f"with {fit.recompute}"
    return f"{fit.candidate} {how} recomputation then needs {gib(peak)} of {gib(has)}"


def _first_fit(problem: SearchProblem, pricing: Pricing) -> Priced | None:
    """Some plan that fits, among the least demanding ones."""
    every = list(candidates(problem, {}))
    for candidate in _least_demanding(problem, pricing, every)[:CLOSEST_TRIES]:
        if candidate.mesh.tp * candidate.mesh.ep * candidate.mesh.cp > problem.topology.devices:
            continue
        costed = _exact(problem, pricing, candidate)
        plan = shortest(costed.stage_problem)
        if plan.status is not Status.INFEASIBLE:
            return price(costed, plan, bound=0.0)
    return None


def _enough_nodes(problem: SearchProblem, pricing: Pricing):
    """The smallest number of nodes found, by doubling and then bisecting, and a plan that fits it."""
    per_node = problem.topology.devices_per_node
    single = len(problem.topology.levels) == 1

    def grown(nodes: int):
        if single:
            return replace(problem, topology=problem.topology.with_nodes(nodes * per_node))
        return replace(problem, topology=problem.topology.with_nodes(nodes))

    low = 1 if single else problem.topology.nodes
    high, found = low, None
    for _ in range(MAX_NODE_DOUBLINGS):
        high *= 2
        if found := _first_fit(grown(high), pricing):
            break
        low = high
    if found is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if fit := _first_fit(grown(middle), pricing):
            high, found = middle, fit
        else:
            low = middle
    return grown(high).topology, found
