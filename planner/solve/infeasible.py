"""When nothing fits: which limit binds, by how much, and the nearest change that helps.

In: the problem, the cost models, the user's pins. Out: an `Infeasible`. The candidate that comes
closest is found among the leanest plan of every mesh (microbatch 1, everything sharded, any
recomputation). Changes tried: without the pins; more nodes, doubled and then halved back; an
optimizer with less state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..cost import IntraSolution, Recompute
from ..estimate.step import Setting, spans
from ..mesh import Mesh
from ..plan import Infeasible
from ..problem import Candidate, Pins, Priced, Pricing, SearchProblem, pins_in_words
from ..profile import OPTIMIZERS
from ..topology import Topology
from .costed import Costed
from .explain import gib, needed_bytes
from .ideal import idealised
from .placement import part_meshes, part_sizes
from .price import price
from .solver import Status
from .space import candidates
from .stages import shortest

CLOSEST_TRIES = 6
"""Meshes whose memory is worked out exactly, those with the least parameters and states first."""
FIXES_NAMED = 2
"""Fixes in the one-line answer; the rest follows in the list."""
DEVICE_CHANGE = 2.0
"""Other devices with so much memory rank like twice as many of these. A judgement."""
OPTIMIZER_CHANGE = 2.0
"""Another optimizer ranks like twice the cluster: it may need other learning rates. A judgement."""
MAX_NODE_DOUBLINGS = 10
"""More than a thousand times the cluster is no longer a helpful suggestion."""
LEANEST: Pins = {"micro_batch": 1, "zero": 3, "virtual_stages": 1}


def infeasible(problem: SearchProblem, pricing: Pricing, pins: Pins) -> Infeasible:
    """The answer to a problem that no plan fits."""
    closest = min(
        _leanest_plans(problem, pricing, pins),
        key=lambda costed: (needed_bytes(costed), costed.candidate.key),
        default=None,
    )
    if closest is None and any(candidates(problem, LEANEST | pins)):
        return _without_splits(problem, pins)
    if closest is None:
        sizes = part_sizes(problem.topology, every=True)
        parts = [mesh.devices for mesh in part_meshes(problem, pins, sizes=sizes)]
        if not parts:
            return _indivisible(problem, pins)
        return infeasible(replace(problem, topology=problem.topology.part(max(parts))), pricing, pins)
    memory, needed = problem.topology.device.memory_bytes, needed_bytes(closest)
    fixes = _fixes(problem, pricing, pins, more_memory=needed / memory)
    return Infeasible(
        reason=(
            f"no plan fits {problem.topology.devices} x {problem.topology.device.name}: the closest "
            f"({closest.candidate}) needs {gib(needed)} per device and there are {gib(memory)}"
        ),
        short_by_bytes=needed - memory,
        nearest_fix="; or ".join(fixes[:FIXES_NAMED]),
        closest=closest.candidate.mesh.sizes,
        fixes=fixes,
    )


def _without_splits(problem: SearchProblem, pins: Pins) -> Infeasible:
    """Meshes there are, but along none of them can the model's tensors be split."""
    fix = f"drop {pins_in_words(pins)}" if pins else "use another framework"
    under = f" with {pins_in_words(pins)}" if pins else ""
    return Infeasible(
        reason=(
            f"the model cannot be split{under} under {problem.job.framework}: some operation has no layout "
            "that goes with its neighbours', as far as layouts can be converted there"
        ),
        short_by_bytes=0.0,
        nearest_fix=fix,
        fixes=(fix,),
    )


def _indivisible(problem: SearchProblem, pins: Pins) -> Infeasible:
    batch, devices = problem.job.global_batch, problem.topology.devices
    under = f" with {pins_in_words(pins)}" if pins else ""
    divides = f"use a global batch that {devices} divides, such as {math.lcm(batch, devices)}"
    fix = f"drop {pins_in_words(pins)}, or {divides}" if pins else divides
    return Infeasible(
        reason=(
            f"no mesh of {devices} devices divides the global batch of {batch} and the model's sizes"
            f" (tp in {problem.tp_sizes}, ep in {problem.ep_sizes}, at most {problem.layers} stages){under}"
        ),
        short_by_bytes=0.0,
        nearest_fix=fix,
        fixes=(f"drop {pins_in_words(pins)}", divides) if pins else (divides,),
    )


# --------------------------------------------------------------------------- the leanest plans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A problem under which candidates are costed, with its spans remembered."""

    problem: SearchProblem
    setting: Setting
    recompute: Recompute | None

    def costed(self, candidate: Candidate, solution: IntraSolution) -> Costed:
        setting = replace(self.setting, candidate=candidate)
        return Costed(problem=self.problem, setting=setting, intra=solution, recompute=self.recompute)


def _leanest_plans(
    problem: SearchProblem, pricing: Pricing, pins: Pins, *, slice_devices: int | None = None
) -> Iterator[Costed]:
    """The least demanding plans, each under its leanest intra-op solution.

    Memory depends on the slice (tp, ep, cp) alone, so that larger clusters can be asked about as well,
    as long as a slice has at most `slice_devices`: those of the cluster that the costs are made for.
    """
    most = slice_devices or problem.topology.devices
    leanest = [_plain(c) for c in candidates(problem, LEANEST | pins) if _slice_size(c) <= most]
    if not leanest:
        return
    asked = _Asked(
        problem=problem,
        setting=Setting(
            candidate=leanest[0],
            topology=problem.topology,
            framework=problem.framework,
            optimizer=problem.optimizer,
            pricing=pricing,
            span=spans(problem.topology),
        ),
        recompute=Recompute(pins["recompute"]) if "recompute" in pins else None,
    )
    tries = CLOSEST_TRIES
    for candidate in sorted(leanest, key=lambda c: (_states_bytes(asked, c), c.key)):
        mesh = candidate.mesh
        slice_mesh = Mesh(tp=mesh.tp, ep=mesh.ep, cp=mesh.cp, order=mesh.order)
        solutions = pricing.intra(slice_mesh, candidate.micro_batch)
        if solutions:
            yield min((asked.costed(candidate, s) for s in solutions), key=needed_bytes)
            tries -= 1
        if not tries:
            return


def _slice_size(candidate: Candidate) -> int:
    return candidate.mesh.tp * candidate.mesh.ep * candidate.mesh.cp


def _plain(candidate: Candidate) -> Candidate:
    """Without replicas there is nothing to shard."""
    mesh = candidate.mesh
    shards = mesh.dp * mesh.cp * mesh.ep > 1
    return candidate if shards else replace(candidate, zero_stage=0, shard_group=None)


def _states_bytes(asked: _Asked, candidate: Candidate) -> float:
    costed = asked.costed(candidate, idealised(asked.problem, candidate.mesh, candidate.micro_batch))
    stay = sum(n * costed.states[name].total for name, n in asked.problem.counts.items())
    return stay / candidate.mesh.pp


# --------------------------------------------------------------------------- changes that help


def _fixes(problem: SearchProblem, pricing: Pricing, pins: Pins, *, more_memory: float) -> tuple[str, ...]:
    """What would make it fit, the nearest first; `more_memory`: times the memory of a device needed.

    Dropping choices costs nothing and comes first. The rest is ranked by how many times more of a
    resource it takes: devices, or memory of each, which takes other devices (`DEVICE_CHANGE`). An
    optimizer with less state trains differently and counts as `OPTIMIZER_CHANGE`.
    """
    if pins and (fit := _first_fit(problem, pricing)):
        dropped = [(1.0, f"drop {pins_in_words(pins)}: {_fit_in_words(fit)}")]
    else:
        dropped = []
    memory = problem.topology.device.memory_bytes
    fixes = [(DEVICE_CHANGE * more_memory, f"use devices with {gib(more_memory * memory)} of memory or more")]
    if nodes := _enough_nodes(problem, pricing):
        larger, fit = nodes
        count = f" ({larger.nodes} nodes)" if larger.nodes < larger.devices else ""
        more = larger.devices / problem.topology.devices
        fixes.append((more, f"use at least {larger.devices} devices{count}: {_fit_in_words(fit)}"))
    if lean := _lean_optimizer(problem, pricing):
        name, fit = lean
        fixes.append((OPTIMIZER_CHANGE, f"use optimizer {name}: {_fit_in_words(fit)}"))
    return tuple(text for _, text in (*dropped, *sorted(fixes)))


def _fit_in_words(fit: Priced) -> str:
    peak, has = fit.prediction.peak_memory_bytes, fit.prediction.device_memory_bytes
    how = {str(Recompute.NONE): "", str(Recompute.FULL): " with full recomputation"}
    mode = how.get(fit.recompute, " with some recomputation")
    return f"{fit.candidate}{mode} then needs {gib(peak)} of {gib(has)}"


def _first_fit(
    problem: SearchProblem, pricing: Pricing, *, slice_devices: int | None = None
) -> Priced | None:
    """Some plan that fits, among the least demanding ones."""
    for costed in _leanest_plans(problem, pricing, {}, slice_devices=slice_devices):
        plan = shortest(costed.stage_problem)
        if plan.status is not Status.INFEASIBLE:
            return price(costed, plan, bound=0.0)
    return None


def _lean_optimizer(problem: SearchProblem, pricing: Pricing) -> tuple[str, Priced] | None:
    """The optimizer with the most state, below the present one, with which a plan fits."""
    leaner = [
        o for o in OPTIMIZERS.values() if o.state_bytes < problem.optimizer.state_bytes and o.name != "none"
    ]
    for optimizer in sorted(leaner, key=lambda o: (-o.state_bytes, o.name)):
        if fit := _first_fit(replace(problem, optimizer=optimizer), pricing):
            return optimizer.name, fit
    return None


def _enough_nodes(problem: SearchProblem, pricing: Pricing) -> tuple[Topology, Priced] | None:
    """The fewest nodes found, by doubling and then bisecting, and a plan that fits them."""
    outermost = problem.topology.levels[-1].size

    def fit_on(size: int) -> Priced | None:
        larger = replace(problem, topology=problem.topology.with_nodes(size))
        return _first_fit(larger, pricing, slice_devices=problem.topology.devices)

    low, high, found = outermost, outermost, None
    for _ in range(MAX_NODE_DOUBLINGS):
        low, high = high, 2 * high
        if found := fit_on(high):
            break
    if found is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if fit := fit_on(middle):
            high, found = middle, fit
        else:
            low = middle
    return problem.topology.with_nodes(high), found
