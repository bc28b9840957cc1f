"""What else there is to choose: the front against enumeration, on made-up planners."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan import cli
from tpplan.planner.mesh import Mesh
from tpplan.planner.pareto import MOST_CAPS, STEP, demands, front, pareto
from tpplan.planner.plan import Infeasible, Plan
from tpplan.planner.topology import Topology
from tpplan.report.explain import tradeoffs
from tpplan.report.json_view import plan_document

from .sample_plan import llama3_8b
from .test_search import topology

NOTHING = Infeasible(reason="too small", short_by_bytes=1.0, nearest_fix="more")
TOKENS = 1e6
SMALL = Path(__file__).parents[2] / "examples" / "gpt2.py"


@dataclass(frozen=True)
class Way:
    """A made-up plan: devices, bytes a device, seconds a step."""

    devices: int
    memory_bytes: float
    step_s: float


def made(way: Way, *, price: float | None = None) -> Plan:
    plan = llama3_8b()
    predicted = replace(
        plan.predicted,
        step_time_s=way.step_s,
        peak_memory_bytes=way.memory_bytes,
        tokens_per_s_per_device=TOKENS / way.step_s / way.devices,
    )
    cluster = replace(plan.cluster, devices=way.devices, price_per_device_hour=price)
    return replace(plan, mesh=Mesh(dp=way.devices), cluster=cluster, predicted=predicted)


def planner(ways: list[Way]):
    """The fastest way that fits, on exactly so many devices."""

    def plan_on(on: Topology) -> Plan | Infeasible:
        fits = [w for w in ways if w.devices == on.devices and w.memory_bytes <= on.device.memory_bytes]
        return made(min(fits, key=lambda w: w.step_s)) if fits else NOTHING

    return plan_on


def random_ways(seed: int) -> list[Way]:
    draw = random.Random(seed)
    return [
        Way(
            devices=draw.choice([2, 4, 8]),
            memory_bytes=draw.uniform(20e9, 80e9),
            step_s=draw.uniform(1, 4),
        )
        for _ in range(draw.randint(4, 30))
    ]


def on_all(ways: list[Way], whole: Topology) -> Plan | None:
    found = planner(ways)(whole)
    return found if isinstance(found, Plan) else None


@settings(max_examples=500, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_nothing_beats_the_front(seed: int) -> None:
    """No way on all devices needs less time and, beyond the step between caps, less memory."""
    ways, whole = random_ways(seed), topology(2, memory=80e9, per_node=4)
    plan = on_all(ways, whole)
    if plan is None:
        return
    found = pareto(plan, whole, planner(ways))
    if all(way.step_s >= plan.predicted.step_time_s for way in ways):
        assert found[0].reason == "the plan"
    here = [each for each in found if each.size.devices == whole.devices]
    lowest = plan.predicted.peak_memory_bytes * STEP**MOST_CAPS
    for way in ways:
        if way.devices == whole.devices and way.memory_bytes >= lowest:
            assert any(
                each.size.step_time_s <= way.step_s and each.size.peak_memory_bytes <= way.memory_bytes / STEP
                for each in found
            ), way
    assert here == sorted(here, key=lambda each: each.size.step_time_s)
    for one in here:
        for other in here:
            assert one is other or not (
                other.size.step_time_s <= one.size.step_time_s
                and other.size.peak_memory_bytes <= one.size.peak_memory_bytes
            )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_the_front_is_what_enumeration_leaves(seed: int) -> None:
    plans = [made(way) for way in random_ways(seed)]
    kept = [demands(plan) for plan in front(plans)]
    every = {demands(plan) for plan in plans}
    beaten = {
        one for one in every for other in every
        if other != one and all(a <= b for a, b in zip(other, one, strict=True))
    }  # fmt: skip
    assert kept == sorted(every - beaten)


def test_a_plan_for_fewer_devices_is_compared_with_those_for_all() -> None:
    """As the objective `cost` chooses it: plans on all devices are points too."""
    ways = [Way(8, 70e9, 1.0), Way(8, 40e9, 1.1), Way(4, 75e9, 1.9)]
    whole = topology(2, memory=80e9, per_node=4)
    found = pareto(made(ways[2]), whole, planner(ways))
    assert [(each.size.devices, each.size.step_time_s) for each in found] == [(8, 1.0), (8, 1.1), (4, 1.9)]


def test_each_says_what_it_trades() -> None:
    ways = [Way(16, 70e9, 1.0), Way(16, 40e9, 1.1), Way(8, 75e9, 1.5), Way(4, 76e9, 4.5)]
    whole = topology(4, memory=80e9, per_node=4)
    found = pareto(made(ways[0], price=2.0), whole, planner(ways))
    assert [each.reason for each in found] == [
        "the plan",
        "10.0% slower, 27.9 GiB less a device",
        "50.0% slower, 4.7 GiB more a device, 8 of 16 devices, 25.0% cheaper a token",
        "350.0% slower, 5.6 GiB more a device, 4 of 16 devices, 12.5% dearer a token",
    ]
    told = list(tradeoffs(replace(made(ways[0], price=2.0), pareto=found)))
    assert told[1].startswith("1.10 s a step, 37.3 GiB, 16 devices, ")


def test_it_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a real model: four devices, less memory step by step, and fewer of them."""
    pytest.importorskip("torch")
    arguments = ["suggest", str(SMALL), "-t", "dgx-h100:1", "--global-batch", "16", "--seq-len", "256", "-q"]
    assert cli.main([*arguments, "--pareto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["pareto"]
    assert found[0]["reason"] == "the plan"
    assert {each["size"]["devices"] for each in found} > {8}
    assert all(0 <= each["gap"] <= 0.01 for each in found)
    steps = [each["size"]["step_time_s"] for each in found]
    assert steps == sorted(steps)


def test_without_asking_there_is_none() -> None:
    assert plan_document(llama3_8b(), wall_s=0.0)["pareto"] == []
