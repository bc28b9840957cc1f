"""The stage ILP, the dynamic programme and the closed form against plain enumeration."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from tpplan.planner.cost import Recompute
from tpplan.planner.solve.brackets import bound_s, bracket, least_capacity_bytes
from tpplan.planner.solve.intervals import BlockClass, StageProblem, rank_bytes, rank_seconds
from tpplan.planner.solve.solver import Status
from tpplan.planner.solve.stages import least_total, shortest, solve_stages

NONE, SELECTIVE, FULL = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL


def random_class(draw: random.Random, *, modes: int) -> BlockClass:
    """More recomputation takes longer and saves less; working memory is arbitrary."""
    seconds, saved = draw.uniform(1, 4), draw.uniform(2, 8)
    names = (NONE, SELECTIVE, FULL)[:modes]
    return BlockClass(
        seconds={mode: seconds * (1 + 0.15 * i * draw.uniform(0.5, 2)) for i, mode in enumerate(names)},
        static_bytes=draw.uniform(0, 3),
        saved_bytes={mode: saved * (1, 0.6, 0.1)[i] for i, mode in enumerate(names)},
        transient_bytes={mode: draw.uniform(0, 3) for mode in names},
    )


def random_problem(seed: int) -> StageProblem:
    """Up to seven blocks of three classes on up to three ranks, memory from ample to impossible."""
    draw = random.Random(seed)
    middle = draw.choice([("l",) * draw.randint(2, 5), ("l", "k") * draw.randint(1, 2)])
    stages = draw.randint(1, min(3, len(middle)))
    return StageProblem(
        chain=("e", *middle, "h"),
        layer_classes=frozenset({"l", "k"}),
        classes={
            "e": random_class(draw, modes=1),
            "l": random_class(draw, modes=3),
            "k": random_class(draw, modes=2),
            "h": random_class(draw, modes=2),
        },
        stages=stages,
        microbatches=draw.choice([1, 2, 5, 16]),
        in_flight=tuple(float(stages - rank) for rank in range(stages)),
        capacity_bytes=draw.uniform(10, 60),
        stage_s=draw.choice([0.0, 0.2]),
    )


def by_enumeration(problem: StageProblem) -> float:
    """The best objective over every cut and every mode of every block."""
    best, end = math.inf, len(problem.chain)
    for inner in combinations(range(1, end), problem.stages - 1):
        times: list[float] = []
        for rank, (start, stop) in enumerate(pairwise((0, *inner, end))):
            blocks = problem.chain[start:stop]
            if not any(name in problem.layer_classes for name in blocks):
                break
            options = product(*(problem.classes[name].seconds for name in blocks))
            picks = [tuple((name, 1, q) for name, q in zip(blocks, modes, strict=True)) for modes in options]
            fits = [p for p in picks if rank_bytes(problem, rank, p) <= problem.capacity_bytes]
            if not fits:
                break
            times.append(min(rank_seconds(problem, p) for p in fits))
        if len(times) == problem.stages:
            best = min(best, (problem.microbatches - 1) * max(times) + sum(times))
    return best


@pytest.mark.parametrize("block", range(25))
def test_ilp_and_dynamic_programme_find_what_enumeration_finds(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        problem = random_problem(seed)
        expected = by_enumeration(problem)
        for plan in (solve_stages(problem), shortest(problem)):
            if math.isinf(expected):
                assert plan.status is Status.INFEASIBLE, seed
                continue
            assert plan.status is Status.OPTIMAL, seed
            assert plan.objective_s == pytest.approx(expected, rel=1e-9), seed
            assert plan.bound_s <= expected * (1 + 1e-9), seed
            for rank, modes in enumerate(plan.ranks):
                assert rank_bytes(problem, rank, modes) <= problem.capacity_bytes * (1 + 1e-12)
        assert bound_s(problem) <= expected * (1 + 1e-12), seed
        assert bracket(problem).bound_s <= expected * (1 + 1e-12), seed


def test_cbc_agrees() -> None:
    problem = random_problem(4)
    assert solve_stages(problem, solver="cbc").objective_s == pytest.approx(by_enumeration(problem), rel=1e-9)


def even(layers: int, stages: int, **changes: object) -> StageProblem:
    """A deep chain of equal layers between a light embedding and a heavy head."""
    cheap = BlockClass(seconds={NONE: 0.1}, static_bytes=1, saved_bytes={NONE: 0}, transient_bytes={NONE: 0})
    layer = BlockClass(
        seconds={NONE: 1.0, FULL: 1.3}, static_bytes=1, saved_bytes={NONE: 1.0, FULL: 0.1},
        transient_bytes={NONE: 0, FULL: 1},
    )  # fmt: skip
    problem = StageProblem(
        chain=("e", *("l",) * layers, "h"),
        layer_classes=frozenset({"l"}),
        classes={"e": cheap, "l": layer, "h": replace(cheap, seconds={NONE: 1.5})},
        stages=stages,
        microbatches=64,
        in_flight=tuple(float(stages - rank) for rank in range(stages)),
        capacity_bytes=1e6,
    )
    return replace(problem, **changes)


def layers_of(problem: StageProblem) -> list[int]:
    """Layers per rank of the ILP's answer."""
    return [sum(n for name, n, _ in modes if name == "l") for modes in solve_stages(problem).ranks]


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert layers_of(even(31, 4)) == [8, 8, 8, 7]


def test_early_stages_recompute_first_because_they_hold_more_microbatches() -> None:
    plan = solve_stages(even(32, 4, capacity_bytes=30.0))
    recomputed = [sum(n for _, n, mode in modes if mode is FULL) for modes in plan.ranks]
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] > 0 == recomputed[-1]


def test_size_does_not_grow_with_depth() -> None:
    assert sum(layers_of(even(126, 16, capacity_bytes=60.0))) == 126


def test_virtual_stages_need_as_many_layers_on_every_rank() -> None:
    assert min(layers_of(even(9, 3, virtual_stages=3))) == 3


def test_least_capacity_is_where_it_starts_to_fit() -> None:
    problem = even(8, 2, capacity_bytes=1.0)
    least = least_capacity_bytes(problem)
    assert shortest(problem).status is Status.INFEASIBLE
    assert shortest(replace(problem, capacity_bytes=least)).status is Status.OPTIMAL
    assert shortest(replace(problem, capacity_bytes=least * 0.997)).status is Status.INFEASIBLE


def test_what_costs_no_time_is_not_recomputed_without_need() -> None:
    """Selective recomputation is free here and saves memory that is not short."""
    free = BlockClass(
        seconds={Recompute.NONE: 1.0, Recompute.SELECTIVE: 1.0, Recompute.FULL: 2.0},
        static_bytes=1.0,
        saved_bytes={Recompute.NONE: 4.0, Recompute.SELECTIVE: 2.0, Recompute.FULL: 1.0},
        transient_bytes={Recompute.NONE: 0.0, Recompute.SELECTIVE: 0.0, Recompute.FULL: 0.0},
    )
    for capacity, mode in ((100.0, Recompute.NONE), (13.0, Recompute.SELECTIVE)):
        problem = StageProblem(
            chain=("layer",) * 4, layer_classes=frozenset({"layer"}), classes={"layer": free}, stages=1,
            microbatches=1, in_flight=(1.0,), capacity_bytes=capacity,
        )  # fmt: skip
        assert shortest(problem).ranks == ((("layer", 4, mode),),)


def test_a_path_has_an_arc_of_every_rank() -> None:
    problem = next(p for p in map(random_problem, range(200)) if p.stages == 3)
    end = len(problem.chain)
    assert least_total(problem, {(0, 0, 2): 1.0, (2, 2, end): 1.0}, math.inf) is None
    assert least_total(problem, {(0, 0, 2): 1.0, (1, 2, end): 1.0}, math.inf) is None
    whole = least_total(problem, {(0, 0, 2): 1.0, (1, 2, 3): 1.0, (2, 3, end): 1.0}, math.inf)
    assert whole is not None and whole[1] == (0, 2, 3, end)
