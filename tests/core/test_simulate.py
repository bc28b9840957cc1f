"""The event simulator against hand-made numbers, closed forms and bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.errors import OptionError
from tpplan.planner.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
    Timeline,
    actions,
    bubble_fraction,
    illegality,
    in_flight,
    step_bound,
    step_estimate,
)
from tpplan.planner.simulate import simulate

SIZES = [
    (name, pp, virtual_stages, microbatches)
    for name in Schedule
    for pp in (1, 2, 3, 4, 8)
    for virtual_stages in (1, 2, 3)
    for microbatches in (1, 2, 3, 4, 8, 16)
    if illegality(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches) is None
]
EXACT = [size for size in SIZES if size[0] in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)]
"""Schedules whose estimate is exact for even stages, transfers and all."""


def run_even(
    name: str, pp: int, virtual_stages: int, microbatches: int, *, backward_s: float = 2.0, p2p_s: float = 0.0
) -> Timeline:
    stages = pp * virtual_stages
    order = actions(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    return simulate(order, forward_s=[1.0] * stages, backward_s=[backward_s] * stages, p2p_s=p2p_s)


@pytest.mark.parametrize(("name", "pp", "virtual_stages", "microbatches"), SIZES)
def test_even_stages_have_the_known_bubble_and_hold_the_known_activations(
    name: str, pp: int, virtual_stages: int, microbatches: int
) -> None:
    timeline = run_even(name, pp, virtual_stages, microbatches)
    expected = bubble_fraction(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    assert timeline.bubble_fraction == pytest.approx(expected, abs=1e-12)
    assert timeline.in_flight == tuple(
        in_flight(name, pp, virtual_stages, microbatches, rank) for rank in range(pp)
    )


def test_zero_bubble_has_a_third_of_the_bubble() -> None:
    plain, zero = run_even("1f1b", 8, 1, 32), run_even("zb-h1", 8, 1, 32)
    assert sum(zero.idle_s) == pytest.approx(sum(plain.idle_s) / 3)
    assert max(zero.in_flight) == max(plain.in_flight)


@pytest.mark.parametrize(("name", "pp", "virtual_stages", "microbatches"), EXACT)
@pytest.mark.parametrize(("backward_s", "p2p_s"), [(1.0, 0.0), (3.0, 0.1), (2.0, 1.5)])
def test_the_estimate_is_exact_for_even_stages(
    name: str, pp: int, virtual_stages: int, microbatches: int, backward_s: float, p2p_s: float
) -> None:
    timeline = run_even(name, pp, virtual_stages, microbatches, backward_s=backward_s, p2p_s=p2p_s)
    stages = pp * virtual_stages
    estimate = step_estimate(
        name,
        forward_s=[1.0] * stages,
        backward_s=[backward_s] * stages,
        microbatches=microbatches,
        p2p_s=p2p_s,
        virtual_stages=virtual_stages,
    )
    assert estimate == pytest.approx(timeline.makespan_s, rel=1e-12)


def test_uneven_stages_wait_for_the_heaviest() -> None:
    """Stages of 1, 2, 2 and 3 layers: rank 3 works without a break between its first and last action."""
    timeline = simulate(
        actions("1f1b", pp=4, microbatches=16), forward_s=[1, 2, 2, 3], backward_s=[2, 4, 4, 6]
    )
    assert timeline.makespan_s == 16 * 9 + (1 + 2 + 2) + (2 + 4 + 4)
    assert timeline.busy_s == (48, 96, 96, 144)
    assert timeline.idle_s == (111, 63, 63, 15)
    assert timeline.bubble_fraction == (111 + 63 + 63 + 15) / (4 * 159)
    assert all(a.end_s == b.start_s for a, b in pairwise(timeline.spans[3]))


def test_spans_of_two_ranks_by_hand() -> None:
    """The second rank starts when the first output has arrived; the first works on meanwhile."""
    timeline = simulate(actions("1f1b", pp=2, microbatches=2), forward_s=[1, 1], backward_s=[2, 2], p2p_s=0.5)
    assert [(span.start_s, span.end_s, str(span.action)) for span in timeline.spans[0]] == [
        (0, 1, "F0.0"), (1, 2, "F0.1"), (5, 7, "B0.0"), (8, 10, "B0.1"),
    ]  # fmt: skip
    assert [(span.start_s, span.end_s, str(span.action)) for span in timeline.spans[1]] == [
        (1.5, 2.5, "F1.0"), (2.5, 4.5, "B1.0"), (4.5, 5.5, "F1.1"), (5.5, 7.5, "B1.1"),
    ]  # fmt: skip


def test_memory_over_time_by_hand() -> None:
    timeline = simulate(actions("1f1b", pp=2, microbatches=2), forward_s=[1, 1], backward_s=[2, 2])
    first, second = timeline.memory([10, 7])
    assert first == ((0, 10), (1, 20), (6, 10), (9, 0))
    assert second == ((1, 7), (4, 0), (4, 7), (7, 0))
    assert timeline.peak_bytes([10, 7]) == (20, 7)


def test_uneven_virtual_stages_hold_their_own_bytes() -> None:
    """Rank 0 of the V runs F0 F0 F0, F3 I3 W3 twice, then F0 I0 W0: it holds 4 of stage 0 at its peak."""
    timeline = run_even("zbv", 2, 2, 4)
    assert [level for _, level in timeline.memory([100, 0, 0, 1])[0]][:9] == [
        100, 200, 300, 301, 300, 301, 300, 400, 300,
    ]  # fmt: skip
    assert timeline.peak_bytes([100, 0, 0, 1])[0] == 400


# --------------------------------------------------------------------------- broken schedules


def test_a_deadlock_names_who_waits_for_whom() -> None:
    crossed = [
        [Action(FORWARD, 0, 0), Action(BACKWARD, 0, 0), Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1)],
        [Action(FORWARD, 1, 0), Action(FORWARD, 1, 1), Action(BACKWARD, 1, 0), Action(BACKWARD, 1, 1)],
    ]
    with pytest.raises(OptionError) as caught:
        simulate(crossed, forward_s=[1, 1], backward_s=[1, 1])
    assert str(caught.value) == (
        "the schedule deadlocks: rank 0 at B0.0 waits for B1.0, on rank 1;"
        " rank 1 at F1.1 waits for F0.1, on rank 0"
    )


def test_a_missing_action_is_named() -> None:
    lone = [[Action(FORWARD, 0, 0)], [Action(FORWARD, 1, 0), Action(BACKWARD, 1, 0), Action(FORWARD, 1, 1)]]
    with pytest.raises(OptionError, match=r"rank 1 at F1.1 waits for F0.1, which no rank runs"):
        simulate(lone, forward_s=[1, 1], backward_s=[1, 1])


@pytest.mark.parametrize(
    ("order", "times", "said"),
    [
        ([[Action(FORWARD, 0, 0)], []], [1], "rank 1 nothing to do"),
        ([[Action(FORWARD, 0, 0)], [Action(BACKWARD, 0, 0)]], [1], "stage 0 on ranks 0 and 1"),
        ([[Action(FORWARD, 0, 0), Action(FORWARD, 0, 0)]], [1], "F0.0 more than once"),
        ([[Action(FORWARD, 0, 0)]], [1, 1], "1 stages, but forward_s has 2 times"),
        ([[Action(FORWARD, 0, 0)]], [-1], "must not be negative"),
    ],
)
def test_impossible_input_is_named(order: list[list[Action]], times: list[float], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        simulate(order, forward_s=times, backward_s=times)


# --------------------------------------------------------------------------- properties


@st.composite
def pipelines(draw: st.DrawFn, spread: float = 1.0) -> tuple[str, dict]:
    """A legal schedule with stage times in [1 - spread, 1 + spread] and its keyword arguments."""
    name = draw(st.sampled_from(sorted(Schedule)))
    pp = draw(st.integers(2 if name == Schedule.INTERLEAVED else 1, 6))
    virtual_stages = {
        Schedule.INTERLEAVED: draw(st.integers(2, 3)),
        Schedule.ZBV: 2,
        Schedule.DUALPIPEV: 2,
    }.get(name, 1)
    groups = draw(st.integers(1, 4))
    in_v = dict.fromkeys((Schedule.ZBV, Schedule.DUALPIPEV), 2 * pp + groups)
    microbatches = {Schedule.INTERLEAVED: groups * pp, **in_v}.get(name, draw(st.integers(1, 20)))
    seconds = st.lists(
        st.floats(1 - spread, 1 + spread), min_size=pp * virtual_stages, max_size=pp * virtual_stages
    )
    forward_s = draw(seconds)
    times = {
        "forward_s": forward_s,
        "backward_s": [2 * a * b for a, b in zip(forward_s, draw(seconds), strict=True)],
        "p2p_s": draw(st.floats(0, 0.2)),
        "weight_share": draw(st.floats(0.3, 0.6)),
    }
    return name, times | {"virtual_stages": virtual_stages, "microbatches": microbatches}


def run(name: str, sizes: dict) -> Timeline:
    times = {key: sizes[key] for key in ("forward_s", "backward_s", "p2p_s", "weight_share")}
    virtual_stages, microbatches = sizes["virtual_stages"], sizes["microbatches"]
    pp = len(times["forward_s"]) // virtual_stages
    return simulate(actions(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches), **times)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(pipelines())
def test_no_simulation_beats_the_bound(pipeline: tuple[str, dict]) -> None:
    name, sizes = pipeline
    assert step_bound(name, **sizes) <= run(name, sizes).makespan_s * (1 + 1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(pipelines(spread=0.1))
def test_the_estimate_is_within_a_few_percent(pipeline: tuple[str, dict]) -> None:
    name, sizes = pipeline
    assert step_estimate(name, **sizes) == pytest.approx(run(name, sizes).makespan_s, rel=0.08)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(pipelines())
def test_actions_run_in_causal_order(pipeline: tuple[str, dict]) -> None:
    """Every action starts after what it needs has arrived, and ranks do one thing at a time."""
    name, sizes = pipeline
    timeline = run(name, sizes)
    last = len(sizes["forward_s"]) - 1
    end_s = {
        (span.action.kind, span.action.stage, span.action.microbatch): (span.end_s, rank)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
    }
    for rank, spans in enumerate(timeline.spans):
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
        for span in spans:
            for needed in needs(span.action, last):
                done_s, where = next(end_s[key] for key in needed if key in end_s)
                assert span.start_s >= done_s + (sizes["p2p_s"] if where != rank else 0.0)


def needs(action: Action, last: int) -> Sequence[Sequence[tuple]]:
    """What an action waits for, written out anew; each entry lists the kinds that may provide it."""
    stage, i = action.stage, action.microbatch
    gradient = [[(BACKWARD, stage + 1, i), (BACKWARD_INPUT, stage + 1, i)]] if stage < last else []
    return {
        FORWARD: [[(FORWARD, stage - 1, i)]] if stage else [],
        BACKWARD: [[(FORWARD, stage, i)], *gradient],
        BACKWARD_INPUT: [[(FORWARD, stage, i)], *gradient],
        BACKWARD_WEIGHT: [[(BACKWARD_INPUT, stage, i)]],
    }[action.kind]


@pytest.mark.parametrize(
    ("name", "pp", "virtual_stages", "microbatches", "limit_s"),
    [("1f1b", 16, 1, 64, 0.05), ("interleaved", 16, 4, 128, 0.3)],
)
def test_simulation_is_fast(
    name: str,
    pp: int,
    virtual_stages: int,
    microbatches: int,
    limit_s: float,
    on_this_machine: Callable[[float], float],
) -> None:
    """The best of several runs, in processor time, so that a busy machine does not fail it."""
    taken_s = []
    for _ in range(5):
        start_s = time.process_time()
        run_even(name, pp, virtual_stages, microbatches)
        taken_s.append(time.process_time() - start_s)
    assert min(taken_s) < on_this_machine(limit_s)


def test_the_same_input_gives_the_same_timeline() -> None:
    assert run_even("zbv", 4, 2, 16, p2p_s=0.1) == run_even("zbv", 4, 2, 16, p2p_s=0.1)
