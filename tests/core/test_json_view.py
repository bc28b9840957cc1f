"""The JSON documents: the contract's keys, plain values, nothing that JSON cannot say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tpplan.report.json_view import infeasible_document, plan_document

from .sample_plan import ALL_PLANS, GIB, gpt3_175b, llama3_8b, llama3_70b_on_rtx4090


def keys(words: str) -> set[str]:
    return set(words.split())


TOP = keys(
    "version tpplan_version model cluster job plan predicted search reasons alternatives warnings stages "
    "splits parameters modules communications waterfall pareto sizes changes"
)
PLAN = keys(
    "mesh rank_order zero_stage micro_batch num_microbatches schedule virtual_stages sequence_parallel "
    "recompute layers_per_stage shard_group"
)
PREDICTED = keys(
    "step_time_s step_time_interval_s tokens_per_s_per_device model_flops_utilization "
    "peak_memory_bytes memory_by_kind_bytes device_memory_bytes exposed_communication_s "
    "bubble_fraction origin device_hours_per_million_tokens usd_per_million_tokens"
)
SEARCH = keys("wall_s meshes_considered meshes_pruned pruned_by lower_bound_s gap solver complete")
ALTERNATIVE = keys(
    "mesh rank_order zero_stage micro_batch num_microbatches recompute step_time_s peak_memory_bytes "
    "reason seeded_as shard_group"
)
STAGE = keys(
    "index blocks first_layer layers forward_s backward_s in_flight memory memory_by_kind_bytes "
    "peak_memory_bytes chunk_layers"
)
SPLIT = keys("block module op axis dim words source")
COMMUNICATION = keys("label collective axis group_size bytes seconds exposed_s count level origin")


@pytest.mark.parametrize("make", ALL_PLANS.values(), ids=ALL_PLANS)
def test_the_keys_are_a_contract(make) -> None:
    """Keys may be added, and are never renamed or dropped."""
    document = plan_document(make(), wall_s=1.5)
    assert set(document) >= TOP
    assert set(document["plan"]) >= PLAN
    assert set(document["plan"]["mesh"]) == {"pp", "dp", "cp", "ep", "tp"}
    assert set(document["predicted"]) >= PREDICTED
    assert set(document["search"]) >= SEARCH
    assert all(set(item) >= ALTERNATIVE for item in document["alternatives"])
    assert all(set(item) >= STAGE for item in document["stages"])
    assert all(set(item) >= SPLIT for item in document["splits"])
    assert all(set(item) >= COMMUNICATION for item in document["communications"])


@pytest.mark.parametrize("make", ALL_PLANS.values(), ids=ALL_PLANS)
def test_the_document_is_json_and_nothing_more(make) -> None:
    document = plan_document(make(), wall_s=1.5)
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_values_are_the_plans() -> None:
    plan = gpt3_175b()
    document = plan_document(plan, wall_s=2.25)
    assert document["plan"] == {
        "mesh": {"pp": 8, "dp": 16, "cp": 1, "ep": 1, "tp": 8},
        "rank_order": ["pp", "dp", "cp", "ep", "tp"],
        "zero_stage": 1,
        "shard_group": None,
        "micro_batch": 1,
        "num_microbatches": 96,
        "schedule": "interleaved-1f1b",
        "virtual_stages": 4,
        "sequence_parallel": True,
        "recompute": "mixed",
        "layers_per_stage": [12] * 8,
    }
    assert document["search"]["wall_s"] == 2.25
    assert document["search"]["pruned_by"] == {"roofline above the incumbent": 288, "memory": 83}
    assert document["predicted"]["step_time_interval_s"] == [15.4, 17.6]
    assert document["predicted"]["origin"] == "modelled"
    assert document["stages"][0]["blocks"][1] == {"block": "GPTBlock", "count": 8, "recompute": "selective"}
    assert document["stages"][0]["memory_by_kind_bytes"]["gradients"] == 10.4 * GIB
    assert document["communications"][0]["collective"] == "reduce-scatter"
    assert sum(part["seconds"] for part in document["waterfall"]) == pytest.approx(plan.predicted.step_time_s)


def test_numbers_that_are_not_finite_become_null() -> None:
    plan = llama3_8b()
    odd = replace(plan, search=replace(plan.search, lower_bound_s=float("nan"), gap=float("inf")))
    search = plan_document(odd, wall_s=0.0)["search"]
    assert search["lower_bound_s"] is None
    assert search["gap"] is None


def test_the_infeasible_document() -> None:
    answer = llama3_70b_on_rtx4090()
    document = infeasible_document(answer)
    assert document == {
        "infeasible": {
            "reason": answer.reason,
            "short_by_bytes": answer.short_by_bytes,
            "nearest_fix": answer.nearest_fix,
            "closest": {"pp": 1, "dp": 1, "cp": 1, "ep": 1, "tp": 8},
            "fixes": [],
        }
    }
    assert json.loads(json.dumps(document, allow_nan=False)) == document
