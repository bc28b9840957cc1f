"""ZeRO over groups smaller than the data-parallel ranks, other groups holding copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tpplan.planner.estimate.memory import block_states
from tpplan.planner.layout import Collective
from tpplan.planner.options import pins_of
from tpplan.planner.plan import Infeasible
from tpplan.planner.problem import Outcome, SearchProblem
from tpplan.planner.solve.search import search
from tpplan.planner.solve.space import candidates
from tpplan.report.exporters import export

from .sample_plan import llama3_8b
from .test_memory import ADAMW, DENSE, FRAMEWORK, MESH, block
from .test_search import LLAMA_8B, Transformer, topology

MODEL, CLUSTER = Transformer(**LLAMA_8B), topology(4, memory=80e9)


def problem(framework: str = "torch") -> SearchProblem:
    asked = MODEL.problem(CLUSTER, batch=64)
    return replace(asked, framework=replace(asked.framework, name=framework))


def searched(**pins: int | str) -> Outcome:
    found = search(problem(), MODEL.pricing(CLUSTER), pins={"tp": 1, "pp": 1, "micro_batch": 1, **pins})
    assert isinstance(found, Outcome), found
    return found


def test_states_are_divided_by_the_group():
    states = {"mesh": MESH, "zero": 3, "framework": FRAMEWORK, "optimizer": ADAMW}
    whole = block_states(block(DENSE), **states)
    grouped = block_states(block(DENSE), **states, shard_group=2)
    replicas = MESH.dp * MESH.cp * MESH.ep
    assert grouped.parameters == pytest.approx(whole.parameters * replicas / 2)
    assert grouped.optimizer == pytest.approx(whole.optimizer * replicas / 2)


def test_gathers_stay_in_the_group_and_copies_are_summed_once():
    best = searched(zero=3, shard_group=8).best
    assert best.candidate.shard_group == 8
    m = best.candidate.microbatches
    by_kind = {}
    for c in best.communications:
        if c.axis == "dp" and c.label != "gradient norm":
            by_kind.setdefault(c.collective, []).append(c)
    assert {(c.group_size, c.level) for c in by_kind[Collective.ALL_GATHER]} == {(8, "node")}
    assert {c.group_size for c in by_kind[Collective.REDUCE_SCATTER]} == {8}
    (copies,) = by_kind[Collective.ALL_REDUCE]
    assert (copies.group_size, copies.count, copies.level) == (4, 1, "cluster")
    layer = next(c for c in by_kind[Collective.ALL_GATHER] if c.label.startswith("layer"))
    assert layer.count == 32 * m, "every layer, every microbatch"
    assert copies.bytes == pytest.approx(sum(g.numel for g in parameters()) * 4 / 8)


def parameters():
    (solution,) = MODEL.pricing(CLUSTER).intra(searched(zero=3).best.candidate.mesh, 1)
    counts = problem().counts
    return [g for name, n in counts.items() for g in solution.blocks[name].parameters for _ in range(n)]


def test_a_group_trades_memory_for_slow_links():
    whole, grouped = searched(zero=3).best, searched(zero=3, shard_group=8).best
    assert whole.candidate.shard_group is None, "a ZeRO stage alone means all ranks"
    gathered = [
        sum(c.seconds * c.count for c in best.communications if c.collective is Collective.ALL_GATHER)
        for best in (grouped, whole)
    ]
    assert gathered[0] < gathered[1], "on the node's links, not the network's"
    held = [best.prediction.memory_by_kind_bytes["optimizer"] for best in (grouped, whole)]
    assert held[0] == pytest.approx(4 * held[1])


def test_a_group_of_all_ranks_is_no_group():
    assert searched(zero=3, shard_group=32).best == searched(zero=3).best


def test_groups_fill_a_node_and_only_frameworks_that_have_them_get_them():
    found = {(c.mesh.tp, c.shard_group) for c in candidates(problem(), {}) if c.shard_group}
    assert found == {(1, 8), (2, 4), (4, 2)}
    assert not [c for c in candidates(problem("fake"), {}) if c.shard_group]
    assert {c.zero_stage for c in candidates(problem(), {}) if c.shard_group} == {3}


def test_the_expert_plan_is_seeded():
    found = search(problem(), MODEL.pricing(CLUSTER))
    assert isinstance(found, Outcome)
    named = {name for a in found.alternatives if a.seeded_as for name in a.seeded_as.split(", ")}
    assert "HSDP" in named or found.best.candidate.shard_group
    for a in found.alternatives:
        assert a.step_time_s >= found.best.step_time_s or "more than the device has" in a.reason


def test_groups_that_do_not_divide_are_infeasible():
    found = search(
        problem(), MODEL.pricing(CLUSTER), pins={"tp": 1, "dp": 8, "pp": 1, "shard_group": 5, "zero": 3}
    )
    assert isinstance(found, Infeasible)


def test_a_plan_pins_its_group_and_exports_say_what_becomes_of_it():
    plan = replace(llama3_8b(), zero_stage=3)
    assert pins_of(plan)["shard_group"] == plan.mesh.dp
    grouped = replace(plan, shard_group=4)
    assert pins_of(grouped)["shard_group"] == 4
    told = export(grouped, "accelerate").deviations
    assert any("HSDP" in deviation for deviation in told)
    titan = "".join(export(grouped, "torchtitan").files.values())
    assert "data_parallel_shard_degree = 4" in titan
    assert f"data_parallel_replicate_degree = {plan.mesh.dp // 4}" in titan
