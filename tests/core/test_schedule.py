"""Schedules as data: orders, legality, activations held, bubbles."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tpplan.planner.errors import OptionError
from tpplan.planner.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Schedule,
    actions,
    bubble_fraction,
    illegality,
    in_flight,
    schedule_named,
    stages_of,
    step_bound,
    step_estimate,
)

SIZES = [
    (name, pp, virtual_stages, microbatches)
    for name in Schedule
    for pp in (1, 2, 3, 4, 8)
    for virtual_stages in (1, 2, 3)
    for microbatches in (1, 2, 3, 8, 16)
    if illegality(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches) is None
]


def words(order: tuple[Action, ...]) -> str:
    return " ".join(str(action) for action in order)


def test_orders_a_reader_can_check_by_hand() -> None:
    assert words(actions("gpipe", pp=2, microbatches=2)[1]) == "F1.0 F1.1 B1.0 B1.1"
    assert words(actions("1f1b", pp=2, microbatches=3)[0]) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert words(actions("1f1b", pp=2, microbatches=3)[1]) == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    assert words(actions("interleaved", pp=2, virtual_stages=2, microbatches=2)[1]) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"
    )
    assert words(actions("zb-h1", pp=2, microbatches=2)[1]) == "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1"
    assert words(actions("dualpipev", pp=1, virtual_stages=2, microbatches=2)[0]) == (
        "F0.0 F1.0 F0.1 B1.0 F1.1 B0.0 B1.1 I0.1 W0.1"
    )


def in_parts(order: tuple[Action, ...]) -> list[Action]:
    """Whole backwards as their two halves."""
    halves = (BACKWARD_INPUT, BACKWARD_WEIGHT)
    return [
        replace(action, kind=kind)
        for action in order
        for kind in (halves if action.kind is BACKWARD else (action.kind,))
    ]


@pytest.mark.parametrize(("name", "pp", "virtual_stages", "microbatches"), SIZES)
def test_every_microbatch_visits_every_stage_once(
    name: str, pp: int, virtual_stages: int, microbatches: int
) -> None:
    ranks = actions(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    split = name in (Schedule.ZB_H1, Schedule.ZBV, Schedule.DUALPIPEV)
    kinds = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if split else (FORWARD, BACKWARD)
    for rank, order in enumerate(map(in_parts, ranks) if name == Schedule.DUALPIPEV else ranks):
        held = stages_of(name, pp=pp, virtual_stages=virtual_stages, rank=rank)
        expected = [Action(k, s, i) for k in kinds for s in held for i in range(microbatches)]
        assert sorted(order, key=str) == sorted(expected, key=str)
        place = {action: n for n, action in enumerate(order)}
        for stage in held:
            for i in range(microbatches):
                turns = [place[Action(kind, stage, i)] for kind in kinds]
                assert turns == sorted(turns), "forward, then gradients"


@pytest.mark.parametrize(
    ("name", "pp", "virtual_stages", "microbatches", "said"),
    [
        ("interleaved", 4, 2, 6, "6 microbatches do not divide by pp=4; nearest: 4 or 8"),
        ("interleaved", 4, 2, 3, "nearest: 4"),
        ("interleaved", 4, 1, 8, "virtual_stages is 1"),
        ("interleaved", 1, 2, 8, "pp is 1"),
        ("1f1b", 4, 2, 8, "1f1b: virtual_stages is 2"),
        ("zbv", 4, 1, 8, "exactly 2 stages"),
        ("zbv", 4, 2, 7, "at least 8"),
        ("dualpipev", 4, 2, 7, "at least 8"),
        ("gpipe", 0, 1, 8, "pp is 0"),
        ("gpipe", 2, 1, 0, "microbatches is 0"),
        ("zb-h2", 2, 1, 8, "did you mean 'zb-h1'"),
    ],
)
def test_illegal_sizes_are_named(
    name: str, pp: int, virtual_stages: int, microbatches: int, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        actions(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(OptionError, match="known: gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev"):
        schedule_named("fastest")


def test_stage_times_must_fill_the_ranks() -> None:
    with pytest.raises(OptionError, match="3 forward and 3 backward"):
        step_bound("zbv", forward_s=[1] * 3, backward_s=[1] * 3, microbatches=8, virtual_stages=2)
    with pytest.raises(OptionError, match="2 forward and 1 backward"):
        step_estimate("1f1b", forward_s=[1, 1], backward_s=[1], microbatches=8)


@pytest.mark.parametrize(
    ("name", "pp", "virtual_stages", "microbatches", "held"),
    [
        ("gpipe", 4, 1, 8, (8, 8, 8, 8)),
        ("1f1b", 4, 1, 8, (4, 3, 2, 1)),
        ("1f1b", 4, 1, 2, (2, 2, 2, 1)),
        # A rank's share of the model is 1; rank 0 holds 1 + (p - 1) / (p v) of p whole ones.
        ("interleaved", 4, 2, 8, (5.5, 4.5, 3.5, 2.5)),
        ("interleaved", 4, 2, 4, (4, 4, 3.5, 2.5)),
        ("zb-h1", 4, 1, 8, (4, 4, 4, 4)),
        ("zbv", 4, 2, 8, (4, 4, 4, 4)),
        ("dualpipev", 4, 2, 8, (4.5, 4.5, 4.5, 4.5)),
    ],
)
def test_activations_held(
    name: str, pp: int, virtual_stages: int, microbatches: int, held: tuple[float, ...]
) -> None:
    assert tuple(in_flight(name, pp, virtual_stages, microbatches, rank) for rank in range(pp)) == held


def test_bubbles_of_even_stages() -> None:
    assert bubble_fraction("gpipe", pp=4, microbatches=8) == 3 / 11
    assert bubble_fraction("1f1b", pp=4, microbatches=8) == 3 / 11
    assert bubble_fraction("interleaved", pp=4, virtual_stages=2, microbatches=8) == 3 / 19
    assert bubble_fraction("zb-h1", pp=4, microbatches=8) == 3 / 27
    assert bubble_fraction("zbv", pp=4, virtual_stages=2, microbatches=8) == 3 / 51
    assert bubble_fraction("dualpipev", pp=4, virtual_stages=2, microbatches=8) == 3 / 51
    assert bubble_fraction("1f1b", pp=1, microbatches=8) == 0


def test_even_stages_by_hand() -> None:
    """(m + p - 1) (f + b), and with transfers 2 (p - 1) of them per p microbatches begun after the first."""
    even = {"forward_s": [1.0] * 4, "backward_s": [2.0] * 4}
    assert step_estimate("1f1b", **even, microbatches=8) == 33
    assert step_estimate("gpipe", **even, microbatches=8) == 33
    assert step_estimate("gpipe", **even, microbatches=8, p2p_s=0.25) == 33 + 6 * 0.25
    assert step_estimate("1f1b", **even, microbatches=9, p2p_s=0.25) == 36 + 3 * 6 * 0.25
    interleaved = {"forward_s": [1.0] * 8, "backward_s": [2.0] * 8, "virtual_stages": 2}
    assert step_estimate("interleaved", **interleaved, microbatches=8, p2p_s=0.25) == 57 + 14 * 0.25


def test_the_heaviest_stage_prices_uneven_ones() -> None:
    """Stages of 1, 2, 2 and 3 layers: m times the heaviest, plus one microbatch through the others."""
    uneven = {"forward_s": [1.0, 2.0, 2.0, 3.0], "backward_s": [2.0, 4.0, 4.0, 6.0]}
    assert step_estimate("1f1b", **uneven, microbatches=16) == 16 * 9 + (3 + 6 + 6)
