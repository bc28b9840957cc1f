"""The whole search against enumeration of every decision, on random small problems.

Enumerated are: every mesh on all devices or some of them, order of its axes, microbatch, ZeRO stage and
sharding group, schedule with its pieces, intra-op solution, cut of the chain, and recompute mode of every
block. Each is priced from the seconds and bytes of single blocks: neither brackets nor dynamic programme nor
bounds take part. Prices of unusual layouts carry what these have to gain.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.cost import IntraSolution, Recompute
from tpplan.planner.estimate.step import Setting, once_per_step, spans
from tpplan.planner.mesh import DEFAULT_ORDER, Mesh
from tpplan.planner.plan import Infeasible
from tpplan.planner.problem import Outcome, Pricing, SearchProblem
from tpplan.planner.schedule import fill_ways
from tpplan.planner.solve.balance import balanced
from tpplan.planner.solve.costed import Costed
from tpplan.planner.solve.ideal import Roofline, Unsplit, idealised
from tpplan.planner.solve.intervals import Modes, rank_bytes
from tpplan.planner.solve.price import price
from tpplan.planner.solve.search import search
from tpplan.planner.solve.simulated import simulated_s
from tpplan.planner.solve.solver import Status
from tpplan.planner.solve.space import candidates
from tpplan.planner.solve.stages import shortest

from .test_search import Transformer, topology

ILP_GAP = 2e-4
"""The winner's stages are proven to 1e-4, and times within 1e-6 are equals."""


@dataclass(frozen=True)
class Small:
    """A problem small enough to enumerate."""

    model: Transformer
    problem: SearchProblem
    pricing: Pricing


def small_problem(seed: int, *, most_layers: int = 4, batches: tuple[int, ...] = (2, 4, 6)) -> Small:
    draw = random.Random(seed)
    model = Transformer(
        layers=draw.randint(2, most_layers), hidden=draw.choice([1024, 2048, 4096]), ffn=8192, vocab=32000,
        seq=2048,
        kv=draw.choice([1, 2, 4]), experts=draw.choice([0, 0, 2]),
    )  # fmt: skip
    cluster = topology(draw.choice([1, 2]), memory=draw.choice([3e9, 5e9, 9e9, 40e9]), per_node=2)
    problem = model.problem(cluster, batch=draw.choice(batches))
    problem = replace(
        problem, framework=replace(problem.framework, name=draw.choice(["fake", "torch", "tpplan"]))
    )
    return Small(model=model, problem=problem, pricing=model.pricing(cluster))


def every_mesh(problem: SearchProblem) -> Iterator[Mesh]:
    """Every mesh of whole nodes or of devices of one node, with the pipeline outermost or inside dp."""
    cluster, node = problem.topology, problem.topology.devices_per_node
    sizes = range(1, cluster.devices + 1)
    for pp, dp, ep, tp in product(sizes, sizes, problem.ep_sizes, problem.tp_sizes):
        devices = pp * dp * ep * tp
        whole = devices <= cluster.devices and (devices < node or devices % node == 0)
        if not whole or problem.job.global_batch % (dp * ep) or pp > problem.layers:
            continue
        mesh = Mesh(pp=pp, dp=dp, ep=ep, tp=tp)
        yield mesh
        if problem.framework.name == "tpplan" and pp > 1 and dp > 1:
            yield replace(mesh, order=("dp", "pp", "cp", "ep", "tp"))


def is_searched(problem: SearchProblem, mesh: Mesh) -> bool:
    """Whether the search covers a mesh: for models with experts, the own framework's tp is only tried."""
    return mesh.tp == 1 or problem.framework.name != "tpplan" or max(problem.ep_sizes) == 1


def weight(problem: SearchProblem, mesh: Mesh) -> float:
    """What the seconds of a mesh count: unusual layouts have to gain 1%."""
    usual = mesh.order == DEFAULT_ORDER and mesh.devices == problem.topology.devices
    return 1.0 if usual else 1 / 0.99


def settings_of(small: Small, pins: dict) -> Iterator[Setting]:
    """Every candidate with the devices it uses."""
    problem = small.problem
    for mesh in every_mesh(problem):
        used = problem.topology.part(mesh.devices)
        for candidate in candidates(problem, pins, among=[mesh]):
            yield Setting(
                candidate=candidate, topology=used, framework=problem.framework,
                optimizer=problem.optimizer, pricing=small.pricing, span=spans(used),
            )  # fmt: skip


def every_price(small: Small, pins: dict, *, searched: bool = True) -> Iterator[float]:
    """The closed-form step time of everything that fits, weighted; or of what is not searched in full."""
    for setting in settings_of(small, pins):
        if is_searched(small.problem, setting.mesh) != searched:
            continue
        for solution in small.pricing.intra(setting.mesh, setting.candidate.micro_batch):
            costed = Costed(problem=small.problem, setting=setting, intra=solution)
            for seconds in prices_of(costed):
                yield weight(small.problem, setting.mesh) * seconds


def answer_s(small: Small, found: Outcome) -> float:
    """The step time of the answer, weighted."""
    return weight(small.problem, found.best.candidate.mesh) * found.best.step_time_s


def prices_of(costed: Costed) -> Iterator[float]:
    candidate, chain = costed.candidate, costed.stage_problem.chain
    ways = fill_ways(candidate.schedule, candidate.virtual_stages)
    overhead = costed.problem.framework.step_overhead_s
    for cuts in combinations(range(1, len(chain)), candidate.mesh.pp - 1):
        ends = tuple(pairwise((0, *cuts, len(chain))))
        if not all(legal(costed, chain[a:b], rank) for rank, (a, b) in enumerate(ends)):
            continue
        ranks = [fitting(costed, chain[a:b], rank) for rank, (a, b) in enumerate(ends)]
        for picked in product(*ranks):
            busy, once = [seconds for seconds, _ in picked], max(once for _, once in picked)
            pipeline = (candidate.microbatches - 1 / ways) * max(busy) + sum(busy) / ways
            yield pipeline + once + overhead


def legal(costed: Costed, blocks: tuple[str, ...], rank: int) -> bool:
    """Every rank has layers, as many for each of its pieces but for the chain's two ends."""
    v, layers = costed.candidate.virtual_stages, blocks.count("layer")
    if v == 1:
        return layers >= 1
    missing = -costed.problem.layers % v
    short = (rank == 0 and missing >= 1) + (rank == costed.candidate.mesh.pp - 1 and missing == 2)
    return layers >= v and (layers + short) % v == 0


def fitting(costed: Costed, blocks: tuple[str, ...], rank: int) -> list[tuple[float, float]]:
    """(seconds of a microbatch, seconds once per step) of every choice of modes that fits."""
    found = []
    for modes in every_mode(costed, blocks):
        if rank_bytes(costed.stage_problem, rank, modes) > costed.stage_problem.capacity_bytes:
            continue
        forward = sum(n * costed.times[name].forward_s for name, n, _ in modes)
        backward = sum(n * costed.times[name].backward_s(mode) for name, n, mode in modes)
        counts = {name: blocks.count(name) for name in dict.fromkeys(blocks)}
        once = once_per_step(
            costed.parameters(counts), costed.setting, blocks=len(blocks), forward_s=forward,
            backward_s=backward,
        )  # fmt: skip
        found.append((forward + backward + 2 * costed.handover_s, once.seconds))
    return found


def every_mode(costed: Costed, blocks: tuple[str, ...]) -> Iterator[Modes]:
    """Modes of every block; blocks of a class are alike, so that only their number in each mode counts."""
    layers = blocks.count("layer")
    rest = tuple((name, 1, Recompute.NONE) for name in blocks if name != "layer")
    for picked in combinations_with_replacement(Recompute, layers):
        runs = tuple((mode, picked.count(mode)) for mode in dict.fromkeys(picked))
        yield (*rest, *(("layer", n, mode) for mode, n in runs))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_no_decision_makes_the_step_faster(seed: int) -> None:
    """1F1B, where the event simulator adds nothing to the closed form: the answer is the optimum."""
    small, pins = small_problem(seed), {"virtual_stages": 1}
    best = min(every_price(small, pins), default=math.inf)
    found = search(small.problem, small.pricing, pins=pins)
    step = answer_s(small, found) if isinstance(found, Outcome) else math.inf
    assert step <= best * (1 + ILP_GAP)
    assert step >= min([best, *every_price(small, pins, searched=False)]) * (1 - ILP_GAP)
    if isinstance(found, Outcome):
        assert found.summary.lower_bound_s <= best * (1 + 1e-9)
        assert found.summary.complete


@settings(max_examples=500, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_no_mesh_is_faster(seed: int) -> None:
    """The mesh search alone: every candidate priced by the stage solver, and every bound of it below that."""
    small = small_problem(seed, most_layers=3, batches=(2, 4))
    asked = [s for s in settings_of(small, {}) if is_searched(small.problem, s.mesh)]
    devices = small.problem.topology.devices
    prices = [p for setting in asked if setting.mesh.devices == devices for p in solved(small, setting)]
    prices = prices or [p for setting in asked for p in solved(small, setting)]
    found = search(small.problem, small.pricing)
    if not prices:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Outcome)
    assert found.summary.lower_bound_s <= min(prices) * (1 + 1e-9)
    assert answer_s(small, found) <= min(prices) * (1 + ILP_GAP), "simulated, or not the best by closed form"


def solved(small: Small, setting: Setting) -> Iterator[float]:
    """The simulated price of a candidate's exact stages under every intra-op solution, weighted."""
    problem, candidate = small.problem, setting.candidate
    unsplit = Unsplit(small.pricing)
    roofline = Roofline(problem, unsplit)
    ideal = Costed(
        problem=problem,
        setting=setting,
        intra=idealised(problem, candidate.mesh, candidate.micro_batch, unsplit),
    ).bound_s
    for solution in small.pricing.intra(candidate.mesh, candidate.micro_batch):
        costed = Costed(problem=problem, setting=setting, intra=solution)
        plan = shortest(costed.stage_problem)
        if plan.status is not Status.INFEASIBLE:
            plan = balanced(costed, plan)
            simulated = simulated_s(costed, plan) if candidate.mesh.pp > 1 else 0.0
            step = price(costed, plan, bound=0.0, simulated_s=simulated).step_time_s
            assert roofline.mesh_s(candidate.mesh) <= roofline.candidate_s(candidate) * (1 + 1e-12)
            assert roofline.candidate_s(candidate) <= ideal * (1 + 1e-12) <= step * (1 + 1e-9)
            assert costed.bound_s <= step * (1 + 1e-12)
            yield step * weight(problem, candidate.mesh)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_the_certificate_holds_over_the_whole_space(seed: int) -> None:
    """With all schedules: nothing is below the lower bound, and the answer is within its gap."""
    small = small_problem(seed)
    prices = list(every_price(small, {}))
    found = search(small.problem, small.pricing)
    if isinstance(found, Infeasible):
        assert not prices
        return
    assert found.summary.lower_bound_s <= min(prices) * (1 + 1e-9)
    assert answer_s(small, found) >= min([*prices, *every_price(small, {}, searched=False)]) * (1 - 1e-9)
    assert answer_s(small, found) * (1 - found.summary.gap) <= min(prices) * (1 + 1e-9)


# --------------------------------------------------------------------------- folding


def unfolded(small: Small) -> Small:
    """The same model with every layer a class of its own: nothing is known to be repeated."""
    names = [f"layer{i}" for i in range(small.model.layers)]
    facts = small.problem.blocks

    def own(table: dict, key: str) -> dict:
        kept = {name: value for name, value in table.items() if name != key}
        return kept | {name: replace(table[key], name=name) for name in names}

    def intra(mesh: Mesh, micro_batch: int) -> tuple[IntraSolution, ...]:
        found = small.pricing.intra(mesh, micro_batch)
        return tuple(replace(solution, blocks=own(solution.blocks, "layer")) for solution in found)

    problem = replace(
        small.problem,
        chain=("embedding", *names, "head"),
        layer_classes=frozenset(names),
        blocks=own(facts, "layer"),
    )
    return Small(model=small.model, problem=problem, pricing=replace(small.pricing, intra=intra))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_folding_changes_nothing(seed: int) -> None:
    folded = small_problem(seed)
    plain = unfolded(folded)
    for pins in ({"pp": 1}, {"schedule": "1f1b"}):
        first = search(folded.problem, folded.pricing, pins=pins)
        second = search(plain.problem, plain.pricing, pins=pins)
        assert isinstance(first, Outcome) == isinstance(second, Outcome)
        if isinstance(first, Outcome) and isinstance(second, Outcome):
            assert first.best.step_time_s == pytest.approx(second.best.step_time_s, rel=ILP_GAP)
