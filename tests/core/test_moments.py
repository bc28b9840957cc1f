"""The fullest moment of a step, with numbers a reader can recompute."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tpplan.planner.cost import BlockCost, Live, Recompute
from tpplan.planner.estimate.as_run import as_run
from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.estimate.live import live
from tpplan.planner.estimate.moments import (
    ACTIONS,
    Acting,
    Moments,
    Piece,
    Reduced,
    Run,
    follow,
    fullest,
    in_one_part,
    moments,
    most_waiting,
)
from tpplan.planner.graph import Block, Graph, Operand, SavedTensor
from tpplan.planner.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    SPLIT_BACKWARD,
    Schedule,
    actions,
    illegality,
    in_flight,
    stages_of,
)
from tpplan.planner.solve.rerun import Kept

from .test_estimator_properties import op

VIRTUAL = {Schedule.INTERLEAVED: 2, Schedule.ZBV: 2, Schedule.DUALPIPEV: 2}
SHAPES = [
    (name, pp, VIRTUAL.get(name, 1), m)
    for name in Schedule
    for pp in (2, 4)
    for m in (2, 4, 8, 32)
    if not illegality(name, pp=pp, virtual_stages=VIRTUAL.get(name, 1), microbatches=m)
]


def run(count: int = 1, mode: Recompute = Recompute.NONE, **fields: float | bool) -> Run:
    """Blocks that keep 100 bytes (10 recomputed), 20 alive beside them in backward; 1000 of gradients."""
    cost = BlockCost(
        name="b", forward_s=1, backward_s=2, saved_bytes={Recompute.NONE: 100.0, Recompute.FULL: 10.0},
        live=Live(
            forward=5, whole_forward=40, backward=20, first_backward=30, input_gradients=50, waiting=60,
            weight_gradient=400,
        ),
    )  # fmt: skip
    sizes = {"gradients": 1000.0, "reduced": 1000.0} | fields
    return Run(cost=cost, mode=mode, count=count, **sizes)  # pyright: ignore[reportArgumentType]


# --------------------------------------------------------------------------- which moments there are


@pytest.mark.parametrize(("name", "pp", "v", "m"), SHAPES)
def test_a_rank_holds_at_the_most_what_its_schedule_says(name: Schedule, pp: int, v: int, m: int) -> None:
    """Those being run count too; the first stage's input gradients are not run apart."""
    for rank in range(pp):
        found = moments(name, pp, v, m, rank)
        most = (1 + (found.held + found.waiting).sum(axis=1).max()) / v
        assert most <= in_flight(name, pp, v, m, rank)
        assert most == in_flight(name, pp, v, m, rank) or (rank == 0 and name in SPLIT_BACKWARD)


@pytest.mark.parametrize(("name", "pp", "v", "m"), SHAPES)
def test_moments_are_those_that_a_rank_comes_by_one_after_the_other(
    name: Schedule, pp: int, v: int, m: int
) -> None:
    """Counted by hand, action by action."""
    for rank, order in enumerate(actions(name, pp=pp, virtual_stages=v, microbatches=m)):
        stages = stages_of(name, pp=pp, virtual_stages=v, rank=rank)
        found, held, waiting, done = follow(order, stages), [0] * v, [0] * v, [0] * v
        rows = iter(zip(found.which, found.held, found.waiting, found.gradients, found.over, strict=True))
        for action in order:
            piece, kind = stages.index(action.stage), action.kind
            if action.stage == 0 and kind is BACKWARD_INPUT:
                continue
            kind = BACKWARD if action.stage == 0 and kind is BACKWARD_WEIGHT else kind
            held[piece] -= kind in (BACKWARD, BACKWARD_INPUT)
            waiting[piece] -= kind is BACKWARD_WEIGHT
            which, *row = next(rows)
            assert found.acting[which] == (kind, piece, done[piece] > 0, action.microbatch == m - 1)
            others = [n if i != piece else 0 for i, n in enumerate(done)]
            gradients, over = [0 < n < m for n in others], [n == m for n in others]
            assert [list(each) for each in row] == [held, waiting, gradients, over]
            held[piece] += kind is FORWARD
            waiting[piece] += kind is BACKWARD_INPUT
            done[piece] += kind in (BACKWARD, BACKWARD_WEIGHT)
        assert next(rows, None) is None


@pytest.mark.parametrize(("name", "pp", "v", "m"), SHAPES)
def test_more_microbatches_than_are_followed_show_nothing_new(
    name: Schedule, pp: int, v: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [Piece(runs=(run(2, gradients=size),), handed=7.0) for size in (50.0, 5000.0)[:v]]
    few = [fullest(pieces, moments(name, pp, v, m, rank)) for rank in range(pp)]
    monkeypatch.setattr("tpplan.planner.estimate.moments.ROUNDS", m)
    assert [fullest(pieces, moments.__wrapped__(name, pp, v, m, rank)) for rank in range(pp)] == few


def test_one_stage_has_a_first_a_middle_and_a_last_microbatch() -> None:
    backwards = [acting for acting in moments("none", 1, 1, 100, 0).acting if acting.kind is BACKWARD]
    assert [(acting.done, acting.last) for acting in backwards] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert all(acting.last for acting in moments("none", 1, 1, 1, 0).acting)


def test_zero_bubble_leaves_weights_waiting() -> None:
    """zb-h1: rank r lags r microbatches behind; one more is between its parts as it runs."""
    assert most_waiting("zb-h1", 4, 1, 8) == 4
    assert most_waiting("1f1b", 4, 1, 8) == 1


@pytest.mark.parametrize("name", SPLIT_BACKWARD)
def test_backward_in_one_part_takes_the_place_of_its_first(name: Schedule) -> None:
    v = VIRTUAL.get(name, 1)
    (_, order) = actions(name, pp=2, virtual_stages=v, microbatches=4)
    stages = frozenset(action.stage for action in order)
    joined = list(in_one_part(order, stages))
    kinds = Counter(action.kind for action in joined)
    assert kinds == {FORWARD: 4 * v, BACKWARD: 4 * v}
    first = [(a.stage, a.microbatch) for a in order if a.kind in (BACKWARD, BACKWARD_INPUT)]
    assert [(a.stage, a.microbatch) for a in joined if a.kind is BACKWARD] == first
    assert list(in_one_part(order, frozenset())) == list(order)


# --------------------------------------------------------------------------- what they take


def moment(kind=BACKWARD, *, held=0, waiting=0, done=False, last=False) -> Moments:
    """The only one there is, of a rank with one piece."""
    return Moments(
        acting=(Acting(kind, 0, done, last),),
        which=np.array([0]),
        held=np.array([[held]]),
        waiting=np.array([[waiting]]),
        gradients=np.array([[False]]),
        over=np.array([[False]]),
    )


def test_the_first_backward_has_all_activations_or_all_gradients() -> None:
    """Two blocks. At the last one nothing is freed; at the first its activations gave way to gradients."""
    few = Piece(runs=(run(2, gradients=10.0),), handed=0.0)
    found = fullest([few], moment(held=1))
    assert (found.activations, found.gradients, found.working) == (200 + 200, 0, 30)
    many = Piece(runs=(run(2),), handed=0.0)
    found = fullest([many], moment(held=1))
    assert (found.activations, found.gradients, found.working) == (200 + 100, 1000, 30)


def test_later_backwards_find_all_gradients() -> None:
    found = fullest([Piece(runs=(run(2),), handed=7.0)], moment(held=1, done=True))
    assert (found.activations, found.gradients, found.working) == (400, 2000, 20)
    assert found.buffers == 7 + 2 * 7, "an output for the one in flight; its own, and the gradient received"


def test_recomputation_brings_back_one_block_at_a_time() -> None:
    found = fullest([Piece(runs=(run(3, Recompute.FULL),), handed=0.0)], moment(held=1, done=True))
    assert (found.activations, found.working) == (30 + 30, 90 + 20)


def test_forward_under_recomputation_keeps_only_what_enters() -> None:
    piece = Piece(runs=(run(3, Recompute.FULL),), handed=0.0)
    assert fullest([piece], moment(FORWARD)).total == 30 + 40 - 10


def test_backward_in_two_parts_keeps_everything_and_what_weights_wait_for() -> None:
    piece = Piece(runs=(run(2),), handed=7.0)
    inputs = fullest([piece], moment(BACKWARD_INPUT, waiting=1, done=True))
    assert (inputs.activations, inputs.working) == (2 * 200, 50)
    assert inputs.buffers == 120 + 60 + 2 * 7, "one that waits, half of this one, and what is handed over"
    weights = fullest([piece], moment(BACKWARD_WEIGHT, done=True))
    assert (weights.activations, weights.working, weights.buffers) == (200, 400, 120 + 7)


def sharded(count: int, **fields: float | bool) -> Run:
    return run(count, reduced=250.0, reducing=1000.0, copy=600.0, **fields)


def test_gradients_reduced_in_every_backward_are_shards_between() -> None:
    """At the second layer from behind: shards of both; beside them the first one's buffer."""
    piece = Piece(runs=(sharded(2),), handed=0.0, reduces=Reduced.EACH)
    found = fullest([piece], moment(done=True))
    assert (found.activations, found.working) == (0, 0), "the last to be reduced, whole and in a buffer"
    assert found.gradients == 1000 + 250 + 250
    assert found.buffers == 1000, "which the one before it has left"


def test_the_last_backward_gives_up_copies() -> None:
    piece = Piece(runs=(sharded(2),), handed=0.0, reduces=Reduced.LAST)
    found = [each for each in ACTIONS[BACKWARD](piece, True, True) if each.activations < 200]
    first, *_, done = found
    assert (first.activations, first.gradients, first.working) == (100, 1000 + 250, 20)
    assert first.buffers == 1000 - 600, "the second layer's gradients are being reduced, its copies are gone"
    assert (done.activations, done.gradients, done.buffers) == (0, 250 + 250, -2 * 600)


def test_what_is_no_layer_is_reduced_last_and_its_buffer_stays() -> None:
    piece = Piece(runs=(sharded(1, root=True),), handed=0.0, reduces=Reduced.EACH)
    first, later = (fullest([piece], moment(done=done)) for done in (False, True))
    assert (first.gradients, first.buffers) == (1000, 1000)
    assert (later.gradients, later.buffers) == (1000 + 250, 1000)


def test_buffers_without_layers_stay_through_forward() -> None:
    """That of the gathered parameters; from the second microbatch on that of the first one's gradients."""
    piece = Piece(runs=(sharded(1, root=True),), handed=0.0, reduces=Reduced.EACH, gathering=600.0)
    first, later = (fullest([piece], moment(FORWARD, done=done)) for done in (False, True))
    assert (first.buffers, later.buffers) == (600, 600 + 1000)


# --------------------------------------------------------------------------- one block, op by op

SIZES = {"b": 8, "i": 4, "o": 16}
X = Operand(tensor="x", axes=(("b",), ("i",)), dtype="float32", kind="activation", grad=True)
Y = replace(X, tensor="y", axes=(("b",), ("o",)))
W = replace(X, tensor="w", axes=(("o",), ("i",)), kind="parameter")


def linear(read: Operand, write: Operand, weight: Operand = W):
    kept = SavedTensor(operand=0, labels=(), element_bytes=4, elements=32)
    return replace(op("gemm", (read, weight), write, SIZES), saved=(kept,))


def test_a_product_makes_both_gradients_beside_the_one_that_came() -> None:
    """x: 8 x 4, y: 8 x 16, w: 16 x 4, 4 bytes each; x is kept."""
    x, y, w = 128, 512, 256
    found = live((linear(X, Y),), (SIZES,), {(0, 0): 128.0}, "y")
    assert found.forward == y
    assert found.backward == found.first_backward == y + x + w
    assert found.input_gradients == y + x
    assert (found.waiting, found.weight_gradient) == (y, w)


def test_an_addition_hands_its_gradient_on() -> None:
    """z = x + f(x): z's gradient is the residual's too, until f's is added to it."""
    h = replace(X, tensor="h")
    z = replace(X, tensor="z")
    square = replace(W, axes=(("i",), ("j",)), tensor="v")
    sizes = SIZES | {"j": 4}
    product = linear(X, h, square)
    add = replace(op("pointwise", (X, h), z, sizes), target="aten.add.Tensor")
    found = live((product, add), (sizes, sizes), {(0, 0): 128.0}, "z")
    assert found.backward == 128 + 128 + 64, "of z (x and h share it) and of x by the product, of the weight"
    assert found.input_gradients == 128 * 3, "z's waits for the weight: it cannot be added to"


def test_a_tensor_that_is_gone_makes_room() -> None:
    """Two products: what the second kept is gone when the first's gradients are made."""
    z, v = replace(Y, tensor="z"), replace(W, tensor="v", axes=(("p",), ("o",)))
    z = replace(z, axes=(("b",), ("p",)))
    sizes = SIZES | {"p": 1}
    second = replace(
        linear(Y, z, v), saved=(SavedTensor(operand=0, labels=(), element_bytes=4, elements=128),)
    )
    found = live((linear(X, Y), second), (sizes, sizes), {(0, 0): 128.0, (1, 0): 512.0}, "z")
    assert found.backward == max(32 + 512 + 64, 512 + 128 + 256 - 512)
    assert found.first_backward == max(32 + 512 + 64, 64 + 512 + 128 + 256 - 512)


# --------------------------------------------------------------------------- what is kept


def test_selective_recomputation_keeps_results_of_products_and_collectives() -> None:
    """x -> relu -> product -> square; they keep x, relu's result, a byte an element."""
    hidden, made, done = (replace(X, tensor=name) for name in ("hidden", "made", "done"))
    own = SavedTensor(operand=None, labels=(), element_bytes=1, elements=32)
    ops = (
        op("pointwise", (X,), hidden, SIZES),
        linear(hidden, made, replace(W, axes=(("i",), ("i",)))),
        replace(op("pointwise", (made,), done, SIZES), saved=(own,)),
    )
    kept = Kept(
        ops=ops, local=(SIZES,) * 3, kept={(0, 0): 128.0, (1, 0): 128.0, (2, 0): 32.0},
        forward_times=(1.0, 1.0, 1.0), input_bytes=128.0, collected_bytes=64.0, fused=False, stops_early=True,
    )  # fmt: skip
    dropped, again = kept.heavy_results()
    assert dropped == (128 + 128 + 32) - (128 + 128 + 64), "x, the product's result, what was gathered"
    assert again == {0, 2}


def test_on_a_cpu_rms_norm_keeps_what_it_divides() -> None:
    norm = replace(op("memory", (X,), Y, SIZES), target="aten.rms_norm.default")
    block = Block(name="b", ops=(norm,), count=1, repeated=True, parameters=(), module="b")
    graph = Graph(
        name="g", content_hash="", batch=1, seq_len=1, dtype="fp32", blocks={"b": block}, chain=("b",),
        edges=(), boundary={}, parameters=0, trainable_parameters=0, table_fqns=frozenset(), unknown=(),
        warnings=(),
    )  # fmt: skip
    framework = FRAMEWORKS["tpplan"]
    assert as_run(graph, framework, precision="fp32", architecture="hopper") == graph
    (run_there,) = as_run(graph, framework, precision="fp32", architecture="cpu").blocks["b"].ops
    assert run_there.saved[1:] == (
        SavedTensor(operand=None, labels=("b", "i"), element_bytes=4, elements=32),
    )
