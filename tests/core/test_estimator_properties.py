"""Estimators are pure: no size makes a cost negative, no omission makes it zero, more never makes it less."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.cost import BlockCost, Communication, Estimate, Origin, ParameterGroup, Recompute
from tpplan.planner.estimate import collectives
from tpplan.planner.estimate.compute import FAMILIES, kernel_time
from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.estimate.memory import (
    KINDS,
    Held,
    block_states,
    peak_bytes,
    stage_memory,
    transient_bytes,
    usable_bytes,
)
from tpplan.planner.estimate.op_work import backward_work, forward_work, saved_bytes
from tpplan.planner.estimate.overlap import exposed_s
from tpplan.planner.estimate.step import Setting, block_time, once_per_step, pipeline_s, send_recv, spans
from tpplan.planner.graph import Dim, Gemm, Op, Operand, SavedTensor
from tpplan.planner.layout import Collective
from tpplan.planner.mesh import Mesh
from tpplan.planner.problem import Candidate, Pricing
from tpplan.planner.profile import OPTIMIZERS
from tpplan.planner.solve.batch_slack import kernel_slack
from tpplan.topologies import load

CLUSTER = load("dgx-h100:4")
MODEL = collectives.model(CLUSTER)
SPAN = spans(CLUSTER)
LITTLE = 1 + 1e-9
"""Rounding."""
REPEATS = settings(max_examples=60)

SIZES = st.integers(1, 14).map(lambda n: 2**n)
BYTES = st.floats(0.0, 1e11)
FRAMEWORK = st.sampled_from(list(FRAMEWORKS.values()))
OPTIMIZER = st.sampled_from(list(OPTIMIZERS.values()))
ZERO = st.integers(0, 3)
MESHES = st.sampled_from(
    [
        Mesh(dp=32),
        Mesh(dp=4, tp=8),
        Mesh(pp=2, dp=4, tp=4),
        Mesh(pp=4, dp=2, ep=2, tp=2),
        Mesh(dp=4, cp=2, tp=4),
        Mesh(pp=8, dp=4),
    ]
)

# --------------------------------------------------------------------------- ops, built by hand

LABELS = ("b", "s", "k", "n")


def operand(name: str, *labels: str, kind: str = "activation") -> Operand:
    """A 16-bit tensor with one dim an axis, through which a gradient flows."""
    axes = tuple((label,) for label in labels)
    return Operand(tensor=name, axes=axes, dtype="bfloat16", kind=kind, grad=True)


def op(family: str, reads: tuple[Operand, ...], write: Operand, sizes: dict[str, int], **fields) -> Op:
    """An op that keeps its first operand for backward."""
    kept = tuple(label for axis in reads[0].axes for label in axis)
    elements = math.prod(sizes[label] for label in kept)
    given = {
        "target": "aten.made.by.hand",
        "linear": (),
        "inner": (),
        "gemm": None,
        "flops": (),
        "backward_flops": 2.0,
        "experts": None,
        "table": None,
        "sort": "",
        "causal": (),
        "saved": (SavedTensor(operand=0, labels=kept, element_bytes=2, elements=elements),),
        "module": "",
        "module_class": "",
        "source": "",
    }
    empty = dict.fromkeys(("sums", "local", "blocked", "fused_reads", "fused_writes"), frozenset())
    dims = tuple(Dim(label=label, name=label, size=size) for label, size in sizes.items())
    return Op(
        name=family, family=family, dims=dims, reads=reads, writes=(write,), **{**empty, **given, **fields}
    )


def grouped(sizes: dict[str, int]) -> Op:
    """Every row through the matrix of one of `e` experts."""
    x, y, weights = operand("x", "b", "s", "k"), operand("y", "b", "s", "n"), operand("w", "e", "k", "n")
    return op(
        "grouped_gemm",
        (x, replace(weights, kind="parameter")),
        y,
        sizes,
        gemm=Gemm(m=("b", "s"), n=("n",), k=("k",), batch=("e",)),
        flops=((2.0, LABELS),),
        experts="e",
    )


@st.composite
def ops(draw: st.DrawFn) -> tuple[Op, dict[str, float]]:
    """An op of any family that has a price, and its local extents."""
    sizes = {label: draw(SIZES) for label in (*LABELS, "e")}
    x, y = operand("x", "b", "s", "k"), operand("y", "b", "s", "n")
    weight = operand("w", "n", "k", kind="parameter")
    family = draw(st.sampled_from(("gemm", "grouped", "attention", "pointwise", "memory", "table")))
    flops = ((2.0, LABELS),)
    match family:
        case "gemm":
            found = op(
                "gemm", (x, weight), y, sizes, gemm=Gemm(m=("b", "s"), n=("n",), k=("k",)), flops=flops
            )
        case "grouped":
            found = grouped(sizes)
        case "attention":
            found = op("attention", (x, x, x), x, sizes, flops=flops)
        case "table":
            rows = (weight, operand("ids", "b", "s"))
            found = op("memory", rows, operand("y", "b", "s", "k"), sizes, table="n")
        case _:
            found = op(family, (x,), replace(x, tensor="y"), sizes)
    return found, {label: float(size) for label, size in sizes.items()}


def seconds(works) -> float:
    """All kernels one after the other."""
    return sum(kernel_time(work, CLUSTER.device).seconds for work in works)


@REPEATS
@given(ops())
def test_no_op_is_free_in_either_direction(case: tuple[Op, dict[str, float]]) -> None:
    made, sizes = case
    assert seconds(forward_work(made, sizes)) > 0
    assert seconds(backward_work(made, sizes)) > 0
    assert {work.family for work in (*forward_work(made, sizes), *backward_work(made, sizes))} <= set(
        FAMILIES
    )


@REPEATS
@given(ops(), st.sampled_from(LABELS))
def test_a_longer_dim_never_takes_less_time_or_memory(case: tuple[Op, dict[str, float]], label: str) -> None:
    made, sizes = case
    longer = sizes | {label: 2 * sizes[label]}
    for work in (forward_work, backward_work):
        assert seconds(work(made, sizes)) <= seconds(work(made, longer)) * LITTLE
    assert sum(saved_bytes(made, sizes)) <= sum(saved_bytes(made, longer))


@settings(max_examples=300)
@given(ops(), st.sampled_from((*LABELS, "e")), st.sampled_from((2, 3, 8)))
def test_a_part_of_the_work_takes_no_less_than_its_share(
    case: tuple[Op, dict[str, float]], label: str, ways: int
) -> None:
    """What bounds of all splits rest on (`Pricing.kernel_slack`), whichever dim is cut."""
    made, sizes = case
    part, slack = sizes | {label: sizes[label] / ways}, kernel_slack(CLUSTER)
    for work in (forward_work, backward_work):
        assert seconds(work(made, part)) * ways * LITTLE >= seconds(work(made, sizes)) * (1 - slack)


def test_sides_of_a_grouped_product_are_those_of_one_expert() -> None:
    """Rows are shared by the experts, in the gradient of the weights too, where they are summed over."""
    sizes = {"b": 4, "s": 1024, "k": 512, "n": 256, "e": 8}
    made = grouped(sizes)
    forward, *backward = (*forward_work(made, sizes), *backward_work(made, sizes))
    assert [(w.m, w.n, w.k, w.batch) for w in (forward, *backward)] == [
        (512, 256, 512, 8),
        (512, 512, 256, 8),
        (512, 256, 512, 8),
    ]
    sizes["s"] = 64
    assert [(w.m, w.n, w.k) for w in backward_work(made, sizes)] == [(32, 512, 256), (512, 256, 32)]


@REPEATS
@given(ops())
def test_half_a_batch_keeps_half_the_activations(case: tuple[Op, dict[str, float]]) -> None:
    made, sizes = case
    half = sizes | {"b": sizes["b"] / 2}
    whole, halved = (sum(saved_bytes(made, extents)) for extents in (sizes, half))
    assert whole > 0
    assert halved == (whole if made.table else whole / 2)  # what a lookup keeps here is its table


@REPEATS
@given(ops())
def test_pricing_an_op_changes_nothing_and_says_the_same_twice(case: tuple[Op, dict[str, float]]) -> None:
    made, sizes = case
    before = copy.deepcopy(case)
    assert forward_work(made, sizes) == forward_work(made, sizes)
    assert backward_work(made, sizes) == backward_work(made, sizes)
    assert (made, sizes) == before


# --------------------------------------------------------------------------- collectives


def test_every_collective_has_a_price() -> None:
    for collective in Collective:
        for size, stride in ((2, 1), (8, 1), (4, 8), (32, 1)):
            assert MODEL.time(collective, 1e6, CLUSTER.span(size=size, stride=stride)).seconds > 0


@REPEATS
@given(
    st.sampled_from((Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)),
    st.floats(1.0, 1e10),
    st.sampled_from((1, 2, 4, 8)),
)
def test_more_ranks_across_nodes_are_never_faster(collective: Collective, nbytes: float, inside: int) -> None:
    """Twice the nodes, as many members in each: each rank sends no less, over no more links."""
    times = []
    for nodes in (2, 4):
        members = replace(CLUSTER.span(size=32, stride=1), members=(inside, nodes))
        times.append(MODEL.time(collective, nbytes, members).seconds)
    assert times[0] <= times[1] * LITTLE


# --------------------------------------------------------------------------- memory


@st.composite
def costs(draw: st.DrawFn) -> BlockCost:
    """A block with any parameters and activations."""
    groups = tuple(
        ParameterGroup(
            numel=draw(st.floats(0.0, 1e10)),
            element_bytes=draw(st.sampled_from((2, 4))),
            sparse=draw(st.booleans()),
            trainable=draw(st.booleans()),
            tensors=draw(st.integers(1, 200)),
            replicated_over_tp=draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 3)))
    )
    everything = draw(st.floats(0.0, 1e10))
    share = sorted(draw(st.floats(0.0, 1.0)) for _ in range(2))
    saved = {
        Recompute.FULL: everything * share[0],
        Recompute.SELECTIVE: everything * share[1],
        Recompute.NONE: everything,
    }
    forward = draw(st.floats(1e-6, 1.0))
    return BlockCost(
        name="block",
        forward_s=forward,
        backward_s=2 * forward,
        saved_bytes=saved,
        recompute_s={Recompute.FULL: forward, Recompute.SELECTIVE: forward / 10},
        working_bytes=draw(st.floats(0.0, 1e9)),
        loss_bytes=draw(st.sampled_from((0.0, 1e9))),
        output_bytes=draw(st.floats(1.0, 1e9)),
        parameters=groups,
    )


def held_bytes(
    cost: BlockCost, *, zero: int, framework, optimizer, mesh: Mesh, in_flight: float = 2
) -> float:
    """All that a stage of four such blocks needs."""
    states = block_states(cost, mesh=mesh, zero=zero, framework=framework, optimizer=optimizer)
    held = [Held(cost=cost, states=states, mode=Recompute.NONE, count=4)]
    parts = stage_memory(held, in_flight=in_flight, buffer_bytes=states.gathered, framework=framework)
    assert [part.kind for part in parts] == list(KINDS)
    assert all(part.bytes >= 0 for part in parts)
    return peak_bytes(parts)


@REPEATS
@given(costs(), ZERO, FRAMEWORK, OPTIMIZER, MESHES, st.floats(1.0, 16.0))
def test_more_of_anything_is_never_less_memory(cost, zero, framework, optimizer, mesh, factor) -> None:
    def peak(block: BlockCost, in_flight: float = 2) -> float:
        return held_bytes(
            block, zero=zero, framework=framework, optimizer=optimizer, mesh=mesh, in_flight=in_flight
        )

    wider = tuple(replace(group, numel=factor * group.numel) for group in cost.parameters)
    saved = {mode: factor * nbytes for mode, nbytes in cost.saved_bytes.items()}
    assert peak(cost) <= peak(replace(cost, parameters=wider)) * LITTLE
    assert peak(cost) <= peak(replace(cost, saved_bytes=saved)) * LITTLE
    assert peak(cost) <= peak(replace(cost, working_bytes=factor * cost.working_bytes)) * LITTLE
    assert peak(cost) <= peak(cost, in_flight=2 * factor) * LITTLE


@REPEATS
@given(costs(), FRAMEWORK, OPTIMIZER, MESHES)
def test_more_sharding_never_keeps_more_states(cost, framework, optimizer, mesh) -> None:
    if mesh.pp > 1 and framework.keeps_gathered_in_pipeline:
        return  # there ZeRO-3 keeps whole copies beside the shards
    left_alone = framework.computes_with_copies and any(group.sparse for group in cost.parameters)
    totals = [
        block_states(cost, mesh=mesh, zero=zero, framework=framework, optimizer=optimizer).total
        for zero in range(left_alone, 4)  # without ZeRO sparse parameters are not copied
    ]
    assert all(more <= less * LITTLE for less, more in pairwise(totals))
    assert totals[-1] > 0 or not any(group.numel for group in cost.parameters)


@REPEATS
@given(costs(), ZERO, FRAMEWORK, OPTIMIZER, MESHES)
def test_recomputing_moves_memory_from_kept_to_transient(cost, zero, framework, optimizer, mesh) -> None:
    states = block_states(cost, mesh=mesh, zero=zero, framework=framework, optimizer=optimizer)
    transient = [
        transient_bytes(cost, states, mode) for mode in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    ]
    assert transient == sorted(transient)
    assert transient[0] >= states.gathered + states.reduced


@REPEATS
@given(FRAMEWORK)
def test_what_may_be_allocated_leaves_room_for_reserve_and_context(framework) -> None:
    room = usable_bytes(CLUSTER.device, framework)
    assert (
        room * framework.allocator_reserve[1] + framework.context_bytes
        <= CLUSTER.device.memory_bytes * LITTLE
    )


# --------------------------------------------------------------------------- time


def setting(mesh: Mesh, zero: int, framework, optimizer) -> Setting:
    """A candidate on the cluster, with its real prices."""
    schedule = "1f1b" if mesh.pp > 1 else "none"
    candidate = Candidate(
        mesh=mesh, micro_batch=1, microbatches=8, zero_stage=zero, schedule=schedule, virtual_stages=1
    )
    pricing = Pricing(
        intra=lambda mesh, micro_batch: (),
        collective_time=MODEL.time,
        kernel_time=kernel_time,
        batch_slack=0.0,
    )
    return Setting(
        candidate=candidate,
        topology=CLUSTER,
        framework=framework,
        optimizer=optimizer,
        pricing=pricing,
        span=SPAN,
    )


@REPEATS
@given(costs(), ZERO, FRAMEWORK, OPTIMIZER, MESHES, st.floats(1.0, 16.0))
def test_a_block_never_takes_less_than_its_compute_and_never_more_for_less(
    cost, zero, framework, optimizer, mesh, factor
) -> None:
    where = setting(mesh, zero, framework, optimizer)
    time = block_time(cost, where)
    parts = [*time.forward.values(), *(s for parts in time.backward.values() for s in parts.values())]
    assert all(s >= 0 for s in parts)
    assert time.forward_s >= cost.forward_s
    assert time.backward_s(Recompute.NONE) >= cost.backward_s
    assert time.backward_s(Recompute.FULL) >= time.backward_s(Recompute.NONE)
    wider = replace(cost, parameters=tuple(replace(g, numel=factor * g.numel) for g in cost.parameters))
    assert time.forward_s <= block_time(wider, where).forward_s * LITTLE
    assert all(0 <= c.exposed_s <= c.seconds * LITTLE for c in time.communications)
    assert all(c.seconds > 0 and c.bytes > 0 for c in time.communications)


@REPEATS
@given(costs(), ZERO, FRAMEWORK, MESHES, st.floats(1.0, 16.0))
def test_more_parameters_never_shorten_what_happens_once(cost, zero, framework, mesh, factor) -> None:
    where = setting(mesh, zero, framework, OPTIMIZERS["adamw"])

    def once(groups):
        return once_per_step(groups, where, blocks=4, forward_s=0.1, backward_s=0.2)

    wider = tuple(replace(group, numel=factor * group.numel) for group in cost.parameters)
    less, more = once(cost.parameters), once(wider)
    assert all(s >= 0 for s in less.parts.values())
    assert less.seconds <= more.seconds * LITTLE
    trained = any(group.trainable and group.numel >= 1 for group in cost.parameters)
    assert less.parts["optimizer"] > 0 or not trained


@REPEATS
@given(MESHES, BYTES, st.floats(1.0, 16.0))
def test_a_hand_over_costs_whenever_there_are_stages(mesh: Mesh, nbytes: float, factor: float) -> None:
    where = setting(mesh, 0, FRAMEWORKS["torch"], OPTIMIZERS["adamw"])
    less, more = (send_recv(where, size) for size in (nbytes + 1, (nbytes + 1) * factor))
    assert (less is None) == (more is None) == (mesh.pp == 1)
    if isinstance(less, Communication) and isinstance(more, Communication):
        assert 0 < less.seconds <= more.seconds * LITTLE


@REPEATS
@given(
    st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 1.0)), max_size=6),
    st.floats(0.0, 10.0),
    st.floats(0.0, 10.0),
)
def test_hiding_never_makes_time(comms: list[tuple[float, float]], compute_s: float, more_s: float) -> None:
    seen = exposed_s(comms, compute_s=compute_s)
    assert all(0 <= part <= whole * LITTLE for part, (whole, _) in zip(seen, comms, strict=True))
    assert sum(whole for whole, _ in comms) - sum(seen) <= compute_s * LITTLE + 1e-12
    later = sum(exposed_s(comms, compute_s=compute_s + more_s)) + compute_s + more_s
    assert sum(seen) + compute_s <= later * LITTLE + 1e-12


@REPEATS
@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8), st.integers(1, 64), st.integers(1, 6))
def test_a_pipeline_is_no_faster_than_its_slowest_stage(stages, microbatches, ways) -> None:
    step = pipeline_s(stages, microbatches=microbatches, virtual_stages=ways)
    assert step >= microbatches * max(stages) - 1e-9
    assert step <= pipeline_s(stages, microbatches=microbatches + 1, virtual_stages=ways) + 1e-9
    assert step <= pipeline_s([*stages, max(stages)], microbatches=microbatches, virtual_stages=ways) + 1e-9


@given(st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.sampled_from(list(Origin)), st.sampled_from(list(Origin)))
def test_sums_of_estimates_are_no_better_founded_than_their_parts(a, b, one, other) -> None:
    total = Estimate(a, one) + Estimate(b, other)
    assert total.seconds == a + b
    assert total.origin in (one, other)
    assert total.origin == (Estimate(b, other) + Estimate(a, one)).origin
