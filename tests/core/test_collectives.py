"""Collective times: measured curves reproduced, public bus bandwidths met, and no free lunch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tpplan import topologies
from tpplan.planner.cost import Origin
from tpplan.planner.estimate import collectives
from tpplan.planner.estimate.collectives import ALGORITHMS, CollectiveModel, registry
from tpplan.planner.estimate.collectives.group import LAUNCH_S
from tpplan.planner.estimate.collectives.traffic import bus_factor
from tpplan.planner.layout import Collective
from tpplan.planner.topology import CollectiveCurve, Device, GroupSpan, Level, Topology

DEVICE = Device(
    name="toy",
    vendor="generic",
    memory_bytes=1,
    memory_bytes_per_s=1.0,
    peak_flops={"fp32": 1.0},
    efficiency={},
    kernel_latency_s=0.0,
    sources={},
)
NODE = Level(name="node", size=8, kind="nvlink", bytes_per_s=400e9, latency_s=1e-6, efficiency=0.75)
NETWORK = Level(name="cluster", size=16, kind="infiniband", bytes_per_s=25e9, latency_s=5e-6, efficiency=0.8)
TOY = Topology(name="toy", device=DEVICE, levels=(NODE, NETWORK))

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
)
GIB = 2.0**30


def span(*members: int) -> GroupSpan:
    return GroupSpan(members=members)


def seconds(topology: Topology, collective: Collective, nbytes: float, *members: int) -> float:
    return collectives.model(topology).time(collective, nbytes, span(*members)).seconds


def with_curve(
    collective: Collective, ranks: int, points: tuple[tuple[float, float], ...]
) -> CollectiveCurve:
    return CollectiveCurve(collective=collective, ranks=ranks, points=points, source="made up")


# --- by hand ---------------------------------------------------------------------------------


def test_large_all_gather_in_a_node_by_hand() -> None:
    expected = LAUNCH_S + 2.8 * 7 * 1e-6 + 7 / 8 * 1e11 / (400e9 * 0.75)
    assert seconds(TOY, ALL_GATHER, 1e11, 8, 1) == pytest.approx(expected)


def test_large_all_reduce_across_nodes_is_limited_by_all_nics_together() -> None:
    ring_s = 2 * 127 / 128 * 1e12 / (8 * 25e9 * 0.8)
    assert seconds(TOY, ALL_REDUCE, 1e12, 8, 16) == pytest.approx(ring_s, rel=0.01)


def test_groups_that_fill_nodes_in_part_reach_what_their_level_says() -> None:
    slow = replace(TOY, levels=(NODE, replace(NETWORK, partial_efficiency=0.2)))
    for inside, partial in ((1, False), (2, True), (4, True), (8, False)):
        usual, found = (seconds(topology, ALL_REDUCE, 1e12, inside, 16) for topology in (TOY, slow))
        assert found == pytest.approx(usual * (4 if partial else 1), rel=0.01)


def test_all_to_all_is_limited_by_each_devices_own_nic() -> None:
    nic_s = 15 / 16 * 1e12 / (25e9 * 0.8)
    assert seconds(TOY, Collective.ALL_TO_ALL, 1e12, 8, 16) == pytest.approx(nic_s / 0.886, rel=0.01)


def test_send_crosses_the_outermost_link_once() -> None:
    expected = LAUNCH_S + 2.8 * 5e-6 + 1e10 / (25e9 * 0.8)
    assert seconds(TOY, Collective.SEND_RECV, 1e10, 1, 2) == pytest.approx(expected)


def test_one_member_per_node_gets_one_nic() -> None:
    shared = seconds(TOY, ALL_REDUCE, 1e10, 8, 4)
    alone = seconds(TOY, ALL_REDUCE, 1e10, 1, 4)
    assert alone > 5 * shared


def test_two_halves_of_a_node_get_no_tree_of_two() -> None:
    """NCCL's two-node tree is for nodes: NVLink pairs joined by PCIe run two rings of 20 GB/s."""
    pairs = topologies.load("4x-a100-pairs")
    took = seconds(pairs, ALL_REDUCE, 2.0**32, 2, 2, 1)
    assert 1.5 * 2.0**32 / took == pytest.approx(2 * 31.5e9 * 0.63, rel=0.01)


def test_small_all_reduce_over_many_nodes_takes_the_tree() -> None:
    tree_s = LAUNCH_S + 2 * 4 * 5e-6 + 2 * 7 * 1e-6
    assert seconds(TOY, ALL_REDUCE, 8.0, 8, 16) == pytest.approx(tree_s, rel=0.01)


# --- measured curves -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dgx-a100-80", "dgx-h100", "dgx-b200", "gb200-nvl72"])
def test_every_measured_point_is_reproduced_exactly(name: str) -> None:
    topology = topologies.load(name)
    model = collectives.model(topology)
    outer = (1,) * (len(topology.levels) - 1)
    assert topology.levels[0].curves
    for curve in topology.levels[0].curves:
        for nbytes, measured_s in curve.points:
            estimate = model.time(Collective(curve.collective), nbytes, span(curve.ranks, *outer))
            assert (estimate.seconds, estimate.origin) == (measured_s, Origin.MEASURED)


def test_known_nccl_points_of_eight_h100() -> None:
    model = collectives.model(topologies.load("dgx-h100"))
    assert model.time(ALL_REDUCE, 2**29, span(8, 1)).seconds == pytest.approx(2111.1e-6)
    assert model.time(ALL_GATHER, 2**29, span(8, 1)).seconds == pytest.approx(1401.5e-6)
    assert model.time(ALL_REDUCE, 2**20, span(2, 1)).seconds == pytest.approx(14.7e-6)


def test_between_points_and_rank_counts_is_interpolated_and_beyond_is_modelled() -> None:
    model = collectives.model(topologies.load("dgx-h100"))
    two, three, four = (model.time(ALL_GATHER, 2**25, span(n, 1)) for n in (2, 3, 4))
    assert two.seconds < three.seconds < four.seconds
    assert (two.origin, three.origin) == (Origin.MEASURED, Origin.INTERPOLATED)
    assert model.time(ALL_REDUCE, 3e6, span(8, 1)).origin is Origin.INTERPOLATED
    assert model.time(ALL_REDUCE, 2.0**34, span(8, 1)).origin is Origin.MODELLED
    assert model.time(ALL_REDUCE, 2.0**25, span(8, 2)).origin is Origin.MODELLED


def test_halfway_in_the_logarithm_is_the_geometric_mean() -> None:
    curve = with_curve(ALL_GATHER, 4, ((1e4, 1e-5), (1e6, 1e-4)))
    topology = replace(TOY, levels=(replace(NODE, curves=(curve,)), NETWORK))
    assert seconds(topology, ALL_GATHER, 1e5, 4, 1) == pytest.approx(10**-4.5)


def test_more_ranks_than_measured_scale_by_traffic_and_add_hops() -> None:
    curve = with_curve(ALL_GATHER, 2, ((1e6, 1e-4),))
    topology = replace(TOY, levels=(replace(NODE, curves=(curve,)), NETWORK))
    assert seconds(topology, ALL_GATHER, 1e6, 8, 1) == pytest.approx(1e-4 * (7 / 8) / (1 / 2) + 6 * 1e-6)


def test_a_dip_in_the_measurement_does_not_make_a_larger_message_faster() -> None:
    curve = with_curve(ALL_REDUCE, 8, ((1e3, 2e-5), (2e3, 1e-5), (4e3, 3e-5)))
    topology = replace(TOY, levels=(replace(NODE, curves=(curve,)), NETWORK))
    assert seconds(topology, ALL_REDUCE, 2e3, 8, 1) == 2e-5


def test_halves_follow_an_all_reduce_measured_alone() -> None:
    slow, fast = with_curve(ALL_REDUCE, 8, ((1e6, 1e-2),)), with_curve(ALL_REDUCE, 8, ((1e9, 1e-9),))
    for curve, nbytes, expected in ((slow, 1e6, 5e-3), (fast, 1e9, 7 / 8 * 1e9 / 300e9)):
        model = collectives.model(replace(TOY, levels=(replace(NODE, curves=(curve,)), NETWORK)))
        for half in (ALL_GATHER, REDUCE_SCATTER):
            estimate = model.time(half, nbytes, span(8, 1))
            assert (estimate.seconds, estimate.origin) == (pytest.approx(expected), Origin.MODELLED)


def test_a_cluster_curve_prices_full_nodes_only() -> None:
    curve = with_curve(ALL_REDUCE, 32, ((1e6, 7e-3), (1e9, 8e-3)))
    topology = replace(TOY, levels=(NODE, replace(NETWORK, curves=(curve,))))
    model = collectives.model(topology)
    assert model.time(ALL_REDUCE, 1e9, span(8, 4)).seconds == 8e-3
    assert model.time(ALL_REDUCE, 1e9, span(1, 4)).origin is Origin.MODELLED


# --- public reports --------------------------------------------------------------------------

REPORTS = [
    # cluster, devices per node, nodes, bytes, all-reduce bus bandwidth in GB/s, tolerance, source
    ("dgx-h100", 8, 1, 2**34, 480.0, 0.10, "NVIDIA/dgxc-benchmarking nccl/README.md"),
    ("dgx-h100", 8, 2, 2**32, 430.0, 0.10, "NVIDIA/nccl#1221"),
    ("dgx-h100", 8, 4, 2**32, 320.0, 0.10, "NVIDIA/nccl#1221"),
    ("dgx-h100", 1, 2, 2**25, 41.5, 0.10, "NVIDIA/nccl-tests#232"),
    ("dgx-h100", 2, 2, 2**33, 148.0, 0.20, "all_reduce_perf log of 2 nodes x 2 H100"),
    ("dgx-h100", 2, 2, 2**24, 79.4, 0.30, "the same"),
    ("dgx-a100-80", 8, 1, 2**32, 232.5, 0.10, "NVIDIA/nccl-tests#175"),
    ("hgx-a100-4nic", 8, 3, 2**32, 84.8, 0.10, "NVIDIA/nccl-tests#119"),
    ("aws-p4d", 8, 1, 2**30, 230.8, 0.10, "NVIDIA/nccl#527"),
    ("aws-p4d", 8, 2, 2**30, 57.2, 0.10, "NVIDIA/nccl#527"),
    ("aws-p4d", 8, 3, 2**30, 31.8, 0.10, "NVIDIA/nccl#527"),
    ("aws-p4d", 8, 4, 2**30, 29.6, 0.10, "NVIDIA/nccl#527"),
]


@pytest.mark.parametrize(("name", "inside", "nodes", "nbytes", "busbw", "tolerance", "source"), REPORTS)
def test_public_bus_bandwidths_are_met(
    name: str, inside: int, nodes: int, nbytes: int, busbw: float, tolerance: float, source: str
) -> None:
    topology = topologies.load(name, nodes=nodes)
    ranks = inside * nodes
    found = (
        bus_factor(ALL_REDUCE, ranks) * nbytes / seconds(topology, ALL_REDUCE, nbytes, inside, nodes) / 1e9
    )
    assert found == pytest.approx(busbw, rel=tolerance), source


# --- properties ------------------------------------------------------------------------------

TOPOLOGIES = [
    TOY,
    topologies.load("dgx-h100", nodes=16),
    topologies.load("gb200-nvl72", nodes=4),
    topologies.load("4x-a100-pairs", nodes=4),
    topologies.load("8x-rtx4090", nodes=2),
    topologies.load("cpu-gloo", nodes=4),
]
COLLECTIVES = list(Collective)
BYTES = st.floats(1.0, 1e11)
Where = tuple[CollectiveModel, GroupSpan]


@st.composite
def placed(draw: st.DrawFn) -> Where:
    """A topology's model and a group of at least two ranks somewhere in it."""
    topology = draw(st.sampled_from(TOPOLOGIES))
    members = tuple(draw(st.integers(1, level.size)) for level in topology.levels)
    assume(max(members) > 1)
    return MODELS[topology.name], span(*members)


MODELS = {topology.name: collectives.model(topology) for topology in TOPOLOGIES}


@given(placed(), st.sampled_from(COLLECTIVES), BYTES, st.floats(1.0, 100.0))
def test_positive_and_never_faster_for_more_bytes(
    where: Where, collective: Collective, nbytes: float, factor: float
) -> None:
    model, group = where
    less, more = (model.time(collective, size, group).seconds for size in (nbytes, nbytes * factor))
    assert 0.0 < less <= more * (1 + 1e-12)


@given(placed(), BYTES)
def test_all_reduce_costs_no_more_than_its_halves(where: Where, nbytes: float) -> None:
    model, group = where
    whole, *halves = (model.time(c, nbytes, group).seconds for c in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER))
    assert whole <= 1.3 * sum(halves)


@given(placed(), st.sampled_from(COLLECTIVES), BYTES)
def test_what_must_cross_a_level_takes_its_time(where: Where, collective: Collective, nbytes: float) -> None:
    """Each unit's members together, all links at line rate, cannot carry what crosses into it any faster."""
    model, group = where
    took = model.time(collective, nbytes, group).seconds
    inside = math.prod(group.members[: group.outermost])
    members = group.members[group.outermost]
    level = model.topology.levels[group.outermost]
    if level.curves:
        return  # a measured switch may reduce on the way
    lanes = {Collective.ALL_TO_ALL: 1, Collective.SEND_RECV: 1}.get(collective, inside)
    least = (
        nbytes
        if collective in (Collective.SEND_RECV, Collective.BROADCAST)
        else nbytes * (members - 1) / members
    )
    assert took >= least / (lanes * level.bytes_per_s) * (1 - 1e-9)


@given(st.integers(2, 8), BYTES, st.sampled_from(COLLECTIVES))
def test_bus_bandwidth_in_one_level_stays_below_the_link(
    ranks: int, nbytes: float, collective: Collective
) -> None:
    took = seconds(TOY, collective, nbytes, ranks, 1)
    assert bus_factor(collective, ranks) * nbytes / took <= NODE.bytes_per_s


@given(
    st.sampled_from(COLLECTIVES), BYTES, st.integers(1, 8), st.integers(1, 16), st.sampled_from((0, 1)),
    st.sampled_from(("bytes_per_s", "latency_s")), st.floats(1.0, 50.0),
)  # fmt: skip
def test_a_worse_link_is_never_faster(
    collective: Collective, nbytes: float, inside: int, nodes: int, where: int, field: str, factor: float
) -> None:
    levels = list(TOY.levels)
    value = getattr(levels[where], field)
    levels[where] = replace(
        levels[where], **{field: value * factor if field == "latency_s" else value / factor}
    )
    worse = replace(TOY, levels=tuple(levels))
    before, after = (seconds(t, collective, nbytes, inside, nodes) for t in (TOY, worse))
    assert before <= after * (1 + 1e-12)


@pytest.mark.parametrize("collective", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, Collective.ALL_TO_ALL])
def test_large_messages_cost_more_over_more_nodes(collective: Collective) -> None:
    times = [seconds(TOY, collective, GIB, 8, nodes) for nodes in (1, 2, 4, 8, 16)]
    assert all(a < b for a, b in pairwise(times))


# --- edges -----------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_to_move_costs_nothing(collective: Collective) -> None:
    assert seconds(TOY, collective, 1e6, 1, 1) == 0.0
    assert seconds(TOY, collective, 0.0, 8, 1) == 0.0


def test_every_collective_has_an_algorithm() -> None:
    assert set(ALGORITHMS) == set(Collective)


def test_an_unknown_collective_raises_even_for_a_group_of_one() -> None:
    with pytest.raises(ValueError, match=r"no algorithm for 'all-scatter'.*all-reduce"):
        collectives.model(TOY).time("all-scatter", 1e6, span(1, 1))  # pyright: ignore[reportArgumentType]


def test_a_span_of_another_topology_raises() -> None:
    with pytest.raises(ValueError, match="2 levels of toy"):
        collectives.model(TOY).time(ALL_REDUCE, 1e6, span(8, 2, 2))


def test_the_registry_refuses_duplicates() -> None:
    entry = (ALL_REDUCE, "ring", ALGORITHMS[ALL_REDUCE]["ring"])
    with pytest.raises(ValueError, match="all-reduce already has an algorithm named 'ring'"):
        registry(entry, entry)


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ((with_curve(ALL_REDUCE, 8, ()),), "needs points"),
        ((with_curve(ALL_REDUCE, 1, ((1.0, 1.0),)),), "two ranks"),
        ((with_curve(ALL_REDUCE, 8, ((2.0, 1.0), (1.0, 1.0))),), "sizes must grow"),
        ((with_curve(ALL_REDUCE, 8, ((1.0, 1.0),)),) * 2, "two all-reduce curves"),
    ],
)
def test_impossible_curves_raise(curves: tuple[CollectiveCurve, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collectives.model(replace(TOY, levels=(replace(NODE, curves=curves), NETWORK)))


def test_equal_questions_get_equal_answers() -> None:
    model = collectives.model(TOY)
    assert model.time(ALL_REDUCE, 1e6, span(8, 2)) is model.time(ALL_REDUCE, 1e6, span(8, 2))
