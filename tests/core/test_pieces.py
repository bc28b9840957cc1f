"""Several pieces a rank: how layers are dealt, and that prices are what the event simulator says."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.estimate.step import Setting, pipeline_s, spans
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import Infeasible
from tpplan.planner.problem import Candidate
from tpplan.planner.schedule import actions, bubble_fraction, fill_ways
from tpplan.planner.simulate import simulate
from tpplan.planner.solve.costed import Costed
from tpplan.planner.solve.fullest import dealt
from tpplan.planner.solve.pieces import can_deal, lacking, piece_layers
from tpplan.planner.solve.price import price
from tpplan.planner.solve.search import search
from tpplan.planner.solve.simulated import ROUNDS, piece_seconds, simulated_s
from tpplan.planner.solve.stages import shortest

from .test_search import LLAMA_8B, LLAMA_405B, Transformer, solved, topology


def test_layers_are_dealt_in_equal_pieces_but_for_the_ends():
    assert lacking(96, 8, 12, "interleaved") == (0,) * 8
    assert lacking(126, 16, 4, "interleaved") == (1, *(0,) * 14, 1), "Llama 3 405B"
    assert lacking(126, 16, 8, "interleaved") == (1, *(0,) * 14, 1)
    assert lacking(125, 16, 4, "interleaved") is None
    assert piece_layers(7, 4, last_rank=False) == (1, 2, 2, 2)
    assert piece_layers(7, 4, last_rank=True) == (2, 2, 2, 1)


def test_no_piece_is_without_a_layer():
    problem = Transformer(**LLAMA_405B).problem(topology(2, memory=80e9), batch=64)
    assert can_deal(problem, 16, 4, "interleaved")
    assert not can_deal(problem, 16, 8, "interleaved"), "7 layers in 8 pieces"


@pytest.mark.parametrize(("pp", "rounds"), list(product((2, 3, 5), (2, 3))))
def test_the_fill_ways_of_each_schedule_are_those_of_its_bubble(pp: int, rounds: int):
    """pipeline = (m - 1/w) t + pp t / w, so that the bubble's share is (pp - 1) / (w m + pp - 1)."""
    m = rounds * pp
    for name, v in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 3),
        ("zb-h1", 1),
        ("zbv", 2),
        ("dualpipev", 2),
    ):
        closed = pipeline_s([1.0] * pp, microbatches=m, virtual_stages=fill_ways(name, v))
        expected = bubble_fraction(name, pp=pp, virtual_stages=v, microbatches=m)
        assert 1 - m / closed == pytest.approx(expected), name


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "dualpipev", "gpipe"])
def test_a_pinned_schedule_is_priced_as_it_is_simulated(schedule: str):
    pins = {"pp": 4, "schedule": schedule, "micro_batch": 1, "tp": 2}
    found = solved(Transformer(**LLAMA_8B), topology(2, memory=200e9), batch=64, pins=pins)
    best = found.best
    assert best.candidate.schedule == schedule
    assert found.summary.lower_bound_s <= best.step_time_s
    assert found.summary.gap < 0.03
    assert sum(stage.layers for stage in best.stages) == 32
    if schedule in ("zbv", "dualpipev"):
        assert [name for name, *_ in best.stages[0].blocks] == ["embedding", "layer", "head"]
        assert {stage.in_flight for stage in best.stages} == {4 if schedule == "zbv" else 5}


@pytest.mark.parametrize(("v", "m"), [(1, 64), (2, 64), (4, 32), (4, 8)])
def test_the_steady_state_is_not_simulated_twice(v: int, m: int):
    """Simulating `ROUNDS` microbatches a rank and going on at the slowest rank's pace is exact."""
    model, cluster = Transformer(**(LLAMA_8B | {"layers": 32})), topology(2, memory=400e9)
    problem, pricing = model.problem(cluster, batch=4 * m), model.pricing(cluster)
    schedule = "1f1b" if v == 1 else "interleaved"
    candidate = Candidate(
        mesh=Mesh(pp=4, dp=4),
        micro_batch=1,
        microbatches=m,
        zero_stage=1,
        schedule=schedule,
        virtual_stages=v,
    )
    setting = Setting(
        candidate=candidate, topology=cluster, framework=problem.framework, optimizer=problem.optimizer,
        pricing=pricing, span=spans(cluster),
    )  # fmt: skip
    (solution,) = pricing.intra(candidate.mesh, 1)
    costed = Costed(problem=problem, setting=setting, intra=solution)
    plan = shortest(costed.stage_problem)
    times = [
        [piece_seconds(costed, blocks) for blocks in dealt(costed, modes, last_rank=rank == 3)]
        for rank, modes in enumerate(plan.ranks)
    ]
    forward = [times[stage % 4][stage // 4][0] for stage in range(4 * v)]
    backward = [times[stage % 4][stage // 4][1] for stage in range(4 * v)]
    whole = simulate(
        actions(schedule, pp=4, virtual_stages=v, microbatches=m), forward_s=forward, backward_s=backward
    )
    told = simulated_s(costed, plan)
    assert told == pytest.approx(whole.makespan_s, rel=2e-3)
    assert m > ROUNDS * 4 or told == pytest.approx(whole.makespan_s, rel=1e-12)
    closed = price(costed, plan, bound=0.0)
    both = price(costed, plan, bound=0.0, simulated_s=told)
    assert both.step_time_s >= closed.step_time_s
    assert closed.step_time_s == pytest.approx(both.step_time_s, rel=0.03), "equal pieces: nearly exact"


def test_a_schedule_that_cannot_be_is_said_to_be_infeasible():
    model, cluster = Transformer(**(LLAMA_8B | {"layers": 5})), topology(1, memory=80e9)
    pins = {"pp": 4, "schedule": "interleaved", "virtual_stages": 2}
    assert isinstance(search(model.problem(cluster, batch=8), model.pricing(cluster), pins=pins), Infeasible)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    forward=st.lists(st.floats(0.1, 3), min_size=1, max_size=6),
    ratio=st.floats(0.5, 4),
    microbatches=st.integers(1, 14),
)
def test_in_1f1b_the_closed_form_is_never_below_the_simulator(
    forward: list[float], ratio: float, microbatches: int
):
    """While backward takes as many times as long as forward on every rank, as layers of one kind do.

    Each rank's fill counts at its own pace, so that uneven stages are told too slow, never too fast.
    """
    backward = [seconds * ratio for seconds in forward]
    run = simulate(
        actions("1f1b", pp=len(forward), microbatches=microbatches), forward_s=forward, backward_s=backward
    )
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    closed = pipeline_s(whole, microbatches=microbatches)
    assert run.makespan_s <= closed * (1 + 1e-9)
    assert run.makespan_s >= microbatches * max(whole) * (1 - 1e-9)
