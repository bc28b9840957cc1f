"""Attention whose heads share a key is split by heads, with conversions on borders of modules alone.

A small DeepSeek-V3: latent attention (one rotary key for all heads), a dense layer, then layers of experts
that are picked within groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import tpplan
from torch import nn
from tpplan.planner.borders import Borders
from tpplan.planner.cost import Estimate, Origin, Work
from tpplan.planner.graph import Edge, Graph
from tpplan.planner.layer_kinds import of_kind, where_read
from tpplan.planner.layout import PARTIAL, REPLICATE, Shard, conversion, gradient_needed
from tpplan.planner.options import job_from_options
from tpplan.planner.plan import Plan
from tpplan.planner.planning import plan_graph
from tpplan.planner.routed import routing_module, routing_modules
from tpplan.planner.solve.axis import Axis, AxisProblem, AxisSolution
from tpplan.planner.solve.intra_op import traced_sizes
from tpplan.planner.suggest import load_graph
from tpplan.planner.terms import hand_on_terms
from tpplan.runtime.names import matches

transformers = pytest.importorskip("transformers")

VOCAB, SEQ = 128, 16
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
DEEPSEEK = SIZES | {
    "moe_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16,
    "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "use_cache": False, "experts_implementation": "grouped_mm",
}  # fmt: skip


def traced(build: Callable[[], nn.Module]) -> Graph:
    def inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    return load_graph(build(), seq_len=SEQ, dtype="bf16", example_inputs=inputs, cache=False)


@cache
def deepseek() -> Graph:
    config = transformers.DeepseekV3Config(**DEEPSEEK)
    return traced(lambda: transformers.DeepseekV3ForCausalLM(config).float())


@cache
def llama(kv_heads: int) -> Graph:
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "use_cache": False}
    config = transformers.LlamaConfig(**SIZES, **heads)
    return traced(lambda: transformers.LlamaForCausalLM(config).float())


def split(graph: Graph, ways: int) -> AxisSolution:
    """Along tp, one sample on a rank, where computing takes long and communicating hardly any time."""

    def kernel_time(work: Work) -> Estimate:
        return Estimate(seconds=work.flops, origin=Origin.MODELLED)

    def collective_time(*_: object) -> Estimate:
        return Estimate(seconds=1.0, origin=Origin.MODELLED)

    axis = Axis(
        name="tp", degree=ways, kernel_time=kernel_time, collective_time=collective_time, overlap=0.0,
        fused=True, repeats_products=False, converts_parameters=False, routes_own_tokens=True,
        borders=Borders(graph),
    )  # fmt: skip
    return AxisProblem(graph, traced_sizes(graph, batch=1), axis).solve()[0]


def converted(graph: Graph, edge: Edge, solution: AxisSolution) -> bool:
    """Whether the tensor or its gradient takes a collective between its producer and some consumer."""
    made = solution.choices[edge.producer[:2]].writes[edge.producer[2]]
    for block, op, read in edge.consumers:
        choice = solution.choices[block, op]
        yielded = choice.read_gradients[read]
        backward = yielded is not None and conversion(yielded, gradient_needed(made)) is not None
        if backward or conversion(made, choice.reads[read]) is not None:
            return True
    return False


@pytest.mark.parametrize("graph", [deepseek, lambda: llama(1)], ids=["latent", "multi-query"])
def test_attention_with_a_shared_key_is_split_by_heads(graph: Callable[[], Graph]) -> None:
    solution = split(graph(), 2)
    for name, block in graph().blocks.items():
        for i, op in enumerate(block.ops):
            if op.family == "attention":
                written = solution.choices[name, i].writes[0]
                assert isinstance(written, Shard) and "heads" in written.dim


@pytest.mark.parametrize("graph", [deepseek, lambda: llama(1)], ids=["latent", "multi-query"])
def test_what_is_converted_is_converted_on_a_border(graph: Callable[[], Graph]) -> None:
    solution, borders = split(graph(), 2), Borders(graph())
    moved = [edge for edge in graph().edges if converted(graph(), edge, solution)]
    assert moved
    for edge in moved:
        block, op, read = edge.consumers[0]
        if graph().blocks[block].ops[op].reads[read].kind != "parameter":
            assert borders.stated_together(edge) or all(borders.stated_by(edge))


def test_the_rotary_key_hands_terms_on_to_the_projection_that_makes_it() -> None:
    graph, solution = deepseek(), split(deepseek(), 2)
    for name, block in graph.blocks.items():
        if not block.repeated:
            continue
        by_module = {op.module.rpartition(".")[2]: i for i, op in enumerate(block.ops)}
        latent = solution.choices[name, by_module["kv_a_layernorm"]]
        assert latent.reads == (REPLICATE,) * len(latent.reads)
        assert set(latent.read_gradients) == {PARTIAL}
        expand = next(
            i for i, op in enumerate(block.ops) if op.target == "aten.expand.default" and op.writes[0].grad
        )
        assert solution.choices[name, expand].read_gradients == (PARTIAL,)


def test_only_what_heads_share_hands_terms_on() -> None:
    assert not hand_on_terms(Borders(llama(4)), 2)
    assert not hand_on_terms(Borders(llama(2)), 2)
    modules = {
        deepseek().blocks[block].ops[op].module.rpartition(".")[2]
        for block, op in hand_on_terms(Borders(deepseek()), 2)
    }
    assert modules == {"self_attn", "kv_a_layernorm"}
    assert hand_on_terms(Borders(llama(1)), 2)


def test_who_picks_experts_within_groups_is_found() -> None:
    assert [routing_module(block) for block in deepseek().blocks.values()] == [
        None, None, "model.layers.*.mlp", None
    ]  # fmt: skip


def test_names_say_which_kind_of_layer() -> None:
    graph = deepseek()
    _, dense, sparse, _ = graph.blocks
    assert of_kind(graph, dense, "model.layers.*.mlp") == "model.layers.{0}.mlp"
    assert routing_modules(graph) == ("model.layers.{1-3}.mlp",)
    assert of_kind(llama(4), "layer", "model.layers.*.mlp") == "model.layers.*.mlp"
    handed = [e for e in graph.edges if graph.boundary.get(e.producer[0]) == e.producer[1:]]
    read = {e.producer[0]: where_read(graph, e, e.consumers[0]) for e in handed if e.block == sparse}
    assert read == {
        dense: "model.layers.{1}.input_layernorm",
        sparse: "model.layers.{2-3}.input_layernorm",
    }


@pytest.mark.parametrize(
    ("pattern", "indices"), [("{0}", [0]), ("{1-3,7}", [1, 2, 3, 7]), ("{10-11}", [10, 11]), ("*", range(12))]
)
def test_a_name_matches_the_layers_it_lists(pattern: str, indices: list[int]) -> None:
    found = [i for i in range(12) if matches(f"model.layers.{pattern}.mlp", f"model.layers.{i}.mlp")]
    assert found == list(indices)


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_a_cast_weight_is_read_as_it_is_stored(axis: str) -> None:
    """The router's is cast before it is multiplied with; nothing converts what the cast makes."""
    job = job_from_options(global_batch=8, seq_len=SEQ, dtype="bf16", devices=8, framework="tpplan")
    plan = plan_graph(
        deepseek(), tpplan.load_topology("hgx-h800", nodes=1), job, pins={axis: 2}, source="deepseek"
    )
    assert isinstance(plan, Plan)
    (router,) = (p for p in plan.parameters if p.fqn.endswith("mlp.gate.weight"))
    assert dict(router.placements)[axis] == "R"
