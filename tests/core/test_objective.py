"""Objectives that choose the size of the cluster, and what would change an answer, on made-up planners."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tpplan.planner.errors import OptionError
from tpplan.planner.mesh import Mesh
from tpplan.planner.objective import part_sizes, plan_for, smallest_fit
from tpplan.planner.plan import Infeasible, Plan
from tpplan.planner.sensitivity import sensitivity, slower
from tpplan.planner.topology import CollectiveCurve, Topology

from .sample_plan import llama3_8b
from .test_search import NET_BYTES_PER_S, topology

NOTHING = Infeasible(reason="too small", short_by_bytes=1.0, nearest_fix="more")


def cluster(nodes: int = 16) -> Topology:
    return topology(nodes, memory=80e9)


def planned(on: Topology, *, step_s: float, price: float | None = None) -> Plan:
    """A plan on that many devices that takes `step_s` for a million tokens."""
    plan = llama3_8b()
    return replace(
        plan,
        mesh=Mesh(dp=on.devices),
        cluster=replace(plan.cluster, devices=on.devices, nodes=on.nodes, price_per_device_hour=price),
        predicted=replace(
            plan.predicted, step_time_s=step_s, tokens_per_s_per_device=1e6 / step_s / on.devices
        ),
    )


def fits_from(least: int, *, price: float | None = None):
    """A planner that needs `least` devices and loses a tenth of a step's speed whenever they double."""

    def plan_on(on: Topology) -> Plan | Infeasible:
        if on.devices < least:
            return NOTHING
        if on.devices == 3:
            raise OptionError("3 devices do not divide the batch")
        return planned(on, step_s=100 / on.devices**0.85, price=price)

    return plan_on


def test_parts_are_of_one_node_then_whole_nodes():
    assert [t.devices for t in part_sizes(cluster(4))] == [1, 2, 4, 8, 16]
    assert [t.devices for t in part_sizes(cluster(8), threes=True)] == [1, 2, 4, 8, 16, 24, 32, 48]


@pytest.mark.parametrize("least", [1, 2, 5, 8, 9, 40, 128])
def test_the_fewest_devices_that_fit(least: int):
    whole, plan_on = cluster(), fits_from(least)
    sizes = [t.devices for t in part_sizes(whole, threes=True)] + [128]
    found = plan_for("memory", whole, plan_on)
    assert isinstance(found, Plan)
    assert found.cluster.devices == min(n for n in sizes if n >= least)
    assert "fewest that fit" in found.reasons[0]
    assert [size.devices for size in found.sizes] == sorted({found.cluster.devices, 128})


def test_the_cheapest_tokens_take_few_devices_where_speed_is_lost():
    found = plan_for("cost", cluster(), fits_from(4, price=3.6))
    assert isinstance(found, Plan) and found.cluster.devices == 4
    step = 100 / 4**0.85
    assert found.usd_per_million_tokens == pytest.approx(3.6 * 4 * step / 3600)
    assert f"${3.6 * 4 * step / 3600:.4g} per million" in found.reasons[0]
    costs = [size.usd_per_million_tokens for size in found.sizes]
    assert costs == sorted(costs) and [size.devices for size in found.sizes] == [4, 8, 16, 32, 64, 128]


def test_without_a_price_device_hours_are_compared():
    found = plan_for("cost", cluster(), fits_from(4))
    assert isinstance(found, Plan) and found.usd_per_million_tokens is None
    assert "names no price" in found.reasons[0]


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_the_fastest_step_takes_all_devices(objective: str):
    found = plan_for(objective, cluster(), fits_from(4))
    assert isinstance(found, Plan) and found.cluster.devices == 128


@pytest.mark.parametrize("objective", ["throughput", "memory", "cost"])
def test_what_fits_nowhere_is_infeasible(objective: str):
    assert plan_for(objective, cluster(), fits_from(1000)) is NOTHING


# --------------------------------------------------------------------------- what would change it


def test_slower_links_take_longer_and_keep_their_latency():
    curve = CollectiveCurve(collective="all_reduce", ranks=16, points=((1e6, 1e-3),), source="test")
    whole = cluster()
    outer = replace(whole.levels[-1], curves=(curve,))
    halved = slower(replace(whole, levels=(whole.levels[0], outer)), 0.5).levels[-1]
    assert halved.bytes_per_s == outer.bytes_per_s / 2 and halved.latency_s == outer.latency_s
    assert halved.curves[0].points == ((1e6, 2e-3),)


def test_the_bandwidth_at_which_the_plan_changes():
    """A planner that changes its mind below 10 of 32 GB/s, gains 5% from memory, and fits on 8."""
    whole = cluster()

    def plan_on(on: Topology) -> Plan | Infeasible:
        if on.devices < 8:
            return NOTHING
        step = 95.0 if on.device.memory_bytes > whole.device.memory_bytes else 100.0
        plan = planned(on, step_s=step)
        return replace(plan, zero_stage=3) if on.levels[-1].bytes_per_s < 10e9 else plan

    plan = plan_on(whole)
    assert isinstance(plan, Plan)
    bandwidth, memory, devices = sensitivity(plan, whole, plan_on)
    assert 10e9 <= bandwidth.value <= 10e9 * 2 ** (1 / 8)
    assert "ZeRO-3" in bandwidth.sentence and "now 32 GB/s" in bandwidth.sentence
    assert memory.value == pytest.approx(0.05) and "save 5.0%" in memory.sentence
    assert devices.value == 8


def test_a_plan_that_never_changes_says_how_far_it_was_tried():
    whole = cluster()
    plan = planned(whole, step_s=1.0)
    bandwidth, memory, _ = sensitivity(plan, whole, lambda on: planned(whole, step_s=1.0))
    assert bandwidth.value == NET_BYTES_PER_S / 64 and "stays the same" in bandwidth.sentence
    assert "save nothing" in memory.sentence


def test_one_node_has_no_links_between_nodes():
    whole = cluster(1)
    plan = planned(whole, step_s=1.0)
    changes = sensitivity(plan, whole, lambda on: planned(on, step_s=1.0))
    assert [change.what for change in changes] == ["memory", "devices"]


def test_the_smallest_fit_is_the_whole_where_nothing_smaller_fits():
    whole = cluster(2)
    plan = planned(whole, step_s=1.0)
    assert smallest_fit(whole, fits_from(16), whole=plan) is plan
