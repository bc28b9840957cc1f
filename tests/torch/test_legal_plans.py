"""Whatever the sizes of a model and a cluster, a plan that is suggested is one its framework accepts.

Random decoders (heads, key/value heads, ffn, vocabulary, layers), clusters, batches and pins; the plan is
held against `framework_rules`, which knows nothing of the planner, against the exporter of its framework and
against the runtime's own check. A refusal with a reason is an answer too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from tpplan.planner.errors import OptionError
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.options import job_from_options
from tpplan.planner.plan import Plan
from tpplan.planner.planning import plan_graph
from tpplan.planner.trace import trace_source
from tpplan.report.exporters import export
from tpplan.runtime.check import check
from tpplan.topologies import load

from .framework_rules import Sizes, broken

SEARCH_S = 0.5
"""Longest search for one request: a plan cut short must be legal too."""
EXPORTERS = {"megatron": "megatron", "torch": "torchtitan", "deepspeed": "deepspeed"}


class Layer(nn.Module):
    """Grouped-query attention and an MLP, or experts under a grouped product."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, groups = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, groups), nn.Linear(width, groups)
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, sizes.ffn), nn.Linear(sizes.ffn, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            part.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)
            for part in (self.q(y), self.k(y), self.v(y))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """An embedding, layers and an untied head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.heads * sizes.head_dim
        self.embedding = nn.Embedding(sizes.vocab, width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(width, sizes.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@cache
def graph_of(sizes: Sizes) -> Graph:
    with torch.device("meta"):
        model = Decoder(sizes)
    inputs = (torch.zeros(2, sizes.seq_len, dtype=torch.long, device="meta"),)
    return build(trace_source(model, seq_len=sizes.seq_len, example_inputs=inputs))


HEADS = st.sampled_from(
    [(1, 1), (2, 1), (3, 3), (4, 2), (6, 3), (7, 1), (8, 2), (8, 8), (12, 3), (16, 2), (28, 4)]
)
SIZES = HEADS.flatmap(
    lambda heads: st.builds(
        Sizes,
        heads=st.just(heads[0]),
        kv_heads=st.just(heads[1]),
        head_dim=st.sampled_from([8, 64]),
        ffn=st.sampled_from([96, 100, 256, 18944, 29568]),
        vocab=st.sampled_from([1000, 50257, 151669]),
        layers=st.integers(3, 9),
        experts=st.just(0),
        seq_len=st.sampled_from([1, 30, 1000, 1024, 4096]),
    )
)
REQUESTS = st.fixed_dictionaries(
    {
        "sizes": SIZES,
        "cluster": st.sampled_from(["dgx-h100:1", "dgx-h100:3", "dgx-a100-80:2", "dgx-h100:8"]),
        "framework": st.sampled_from(["tpplan", "megatron", "torch", "deepspeed"]),
        "batch": st.sampled_from([1, 2, 3, 4, 6, 8, 24, 64, 192, 1024]),
        "pins": st.sampled_from([{}, {}, {"tp": 2}, {"tp": 4}, {"tp": 8}, {"pp": 2}, {"pp": 3}]),
    }
)


def suggested(request: dict) -> Plan | None:
    """The plan, or None where the request is refused with a reason."""
    topology, sizes = load(request["cluster"]), request["sizes"]
    job = job_from_options(
        global_batch=request["batch"],
        seq_len=sizes.seq_len,
        framework=request["framework"],
        devices=topology.devices,
        device=topology.device,
    )
    try:
        found = plan_graph(graph_of(sizes), topology, job, pins=request["pins"], time_limit_s=SEARCH_S)
    except OptionError:
        return None
    return found if isinstance(found, Plan) else None


def hold(request: dict) -> None:
    plan = suggested(request)
    if plan is None:
        return
    assert broken(plan, request["sizes"]) == [], plan.mesh
    if plan.job.framework in EXPORTERS:
        export(plan, EXPORTERS[plan.job.framework])
    else:
        check(plan, nn.Module(), {parameter.fqn: parameter for parameter in plan.parameters})


@pytest.mark.parametrize("virtual_stages", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_no_layer_is_lost_between_virtual_stages(virtual_stages: int):
    """80 layers over 16 ranks are five each: no two equal pieces, and yet every layer has its place."""
    sizes = Sizes(
        heads=4, kv_heads=4, head_dim=8, ffn=64, vocab=64, layers=80, experts=0, seq_len=16,
    )  # fmt: skip
    pins = {
        "pp": 16, "dp": 1, "tp": 1, "zero": 0, "micro_batch": 1, "recompute": "none",
        "schedule": "interleaved", "virtual_stages": virtual_stages,
    }  # fmt: skip
    request = {"sizes": sizes, "cluster": "dgx-h100:2", "framework": "megatron", "batch": 32, "pins": pins}
    plan = suggested(request)
    assert plan is not None
    assert broken(plan, sizes) == []


COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "phases": (Phase.generate,),
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=20, **COMMON)
@given(request=REQUESTS)
def test_suggested_plans_are_legal(request: dict):
    hold(request)


@pytest.mark.slow
@settings(max_examples=400, **COMMON)
@given(request=REQUESTS)
def test_many_suggested_plans_are_legal(request: dict):
    hold(request)
