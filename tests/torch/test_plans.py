"""Whole plans: what an expert would nod at, and what must hold of any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from tpplan.planner.plan import Infeasible, Plan
from tpplan.planner.plan_file import from_yaml, to_yaml
from tpplan.planner.suggest import suggest

EXAMPLES = Path(__file__).parents[2] / "examples"

JOBS = {
    "llama3_8b": {"topology": "dgx-h100:8", "seq_len": 8192, "global_batch": 512},
    "gpt3_175b": {"topology": "dgx-a100-80:128", "seq_len": 2048, "global_batch": 1536},
    "llama3_70b": {"topology": "dgx-a100-80:16", "seq_len": 8192, "global_batch": 256},
    "mixtral_8x7b": {"topology": "dgx-h100:8", "seq_len": 4096, "global_batch": 1024},
    "recommender": {"topology": "dgx-h100:8"},
    "llama3_405b": {"topology": "dgx-a100-80:128", "seq_len": 8192, "framework": "megatron"},
    "gpt2": {"topology": "dgx-a100-80", "seq_len": 1024, "global_batch": 64},
    "mlp": {"topology": "dgx-h100"},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traced graphs, shared by the tests of this file."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def plans(cache: Path) -> dict[str, Plan]:
    """One plan per job, made when first asked for."""

    class Plans(dict[str, Plan]):
        def __missing__(self, name: str) -> Plan:
            found = suggest(str(EXAMPLES / f"{name}.py"), cache_dir=cache, **JOBS[name])
            assert isinstance(found, Plan), found
            self[name] = found
            return found

    return Plans()


@pytest.mark.parametrize("name", JOBS)
def test_what_holds_of_every_plan(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    predicted = plan.predicted
    assert plan.mesh.devices == plan.cluster.devices
    assert plan.job.global_batch == plan.mesh.batch_ways * plan.micro_batch * plan.num_microbatches
    assert sum(plan.layers_per_stage) == plan.model.layers
    assert predicted.peak_memory_bytes <= predicted.device_memory_bytes
    assert sum(part.seconds for part in predicted.waterfall) == pytest.approx(predicted.step_time_s)
    assert predicted.step_time_interval_s[0] <= predicted.step_time_s <= predicted.step_time_interval_s[1]
    assert plan.search.lower_bound_s <= predicted.step_time_s * (1 + 1e-9)
    assert 0 <= plan.search.gap <= 0.01
    assert 0 < predicted.model_flops_utilization < 0.9 or name in ("recommender", "mlp")
    assert from_yaml(to_yaml(plan), source="test") == plan


@pytest.mark.parametrize("name", JOBS)
def test_no_expert_plan_is_predicted_faster(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    fitting = [a for a in plan.alternatives if a.peak_memory_bytes <= plan.predicted.device_memory_bytes]
    assert all(a.step_time_s >= plan.predicted.step_time_s for a in fitting)
    assert plan.alternatives, "expert plans are always priced; the winner may itself be one"


def test_gpt3_is_not_data_parallel_alone(plans: dict[str, Plan]) -> None:
    mesh = plans["gpt3_175b"].mesh
    assert mesh.tp > 1
    assert mesh.pp > 1


@pytest.mark.parametrize("name", ["gpt3_175b", "llama3_70b", "llama3_405b"])
def test_tensor_groups_stay_behind_nvlink(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    assert plan.cluster.devices_per_node % plan.mesh.tp == 0
    assert {c.level for c in plan.communications if c.axis == "tp"} <= {"node"}


def test_megatron_is_described_in_words(plans: dict[str, Plan]) -> None:
    words = {(s.module, s.axis): s.words for s in plans["gpt3_175b"].splits}
    assert words["layers.*.mlp.up", "tp"] == "ffn split over tp, column"
    assert words["layers.*.mlp.down", "tp"].startswith("reduced over ffn, row -> ")
    assert words["layers.*.attention", "tp"] == "heads split over tp"


def test_the_embedding_table_is_split_by_rows_and_says_why(plans: dict[str, Plan]) -> None:
    plan = plans["recommender"]
    table = next(p for p in plan.parameters if p.fqn == "tables.0.weight")
    assert ("ep", "S(vocab)@0") in table.placements
    assert any(
        "tables.0.weight is 381.5 GiB, more than one" in r and "vocab over ep" in r for r in plan.reasons
    )


def test_experts_lie_on_the_expert_axis(plans: dict[str, Plan]) -> None:
    plan = plans["mixtral_8x7b"]
    assert plan.mesh.ep > 1
    weights = [p for p in plan.parameters if ".moe." in p.fqn and len(p.shape) == 3]
    assert all(("ep", "S(experts)@0") in p.placements for p in weights)
    exchanged = [c for c in plan.communications if c.axis == "ep" and str(c.collective) == "all-to-all"]
    assert exchanged


def test_70b_does_not_train_on_eight_4090(cache: Path) -> None:
    found = suggest(str(EXAMPLES / "llama3_70b.py"), topology="8x-rtx4090", cache_dir=cache)
    assert isinstance(found, Infeasible)
    assert found.short_by_bytes > 100 * 2**30
    assert "GiB" in found.reason
    assert "devices" in found.nearest_fix


def test_the_same_inputs_give_the_same_bytes(plans: dict[str, Plan], cache: Path) -> None:
    again = suggest(str(EXAMPLES / "llama3_8b.py"), cache_dir=cache, **JOBS["llama3_8b"])
    fresh = suggest(str(EXAMPLES / "llama3_8b.py"), cache=False, **JOBS["llama3_8b"])
    assert isinstance(again, Plan) and isinstance(fresh, Plan)
    assert to_yaml(again) == to_yaml(plans["llama3_8b"]) == to_yaml(fresh)


def test_pins_are_kept(cache: Path) -> None:
    pins = {"tp": 8, "pp": 2, "dp": 4, "zero": 1, "micro_batch": 1}
    found = suggest(str(EXAMPLES / "llama3_8b.py"), cache_dir=cache, pins=pins, **JOBS["llama3_8b"])
    assert isinstance(found, Plan)
    assert (found.mesh.tp, found.mesh.pp, found.mesh.dp) == (8, 2, 4)
    assert (found.zero_stage, found.micro_batch) == (1, 1)


def test_a_module_from_python_is_planned(cache: Path) -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    found = suggest(
        model,
        lambda batch, seq: (torch.empty(batch, seq, 256),),
        "dgx-h100",
        seq_len=128,
        global_batch=64,
        cache_dir=cache,
    )
    assert isinstance(found, Plan)
    assert found.model.parameters == sum(p.numel() for p in model.parameters())
