"""What the rules say of expert routing, by value: two ranks emulated in one process.

`make` puts rows into expert order, `keep` stays in it, `undo` leaves it. Split by token, each rank
routes its own tokens; split by expert, each rank computes the rows of its experts and leaves zeros
elsewhere, so that what leaves expert order is a partial sum.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph, Op
from tpplan.planner.layout import PARTIAL, Shard
from tpplan.planner.rules.choices import Choice, choices
from tpplan.planner.trace import trace_source

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 2


@pytest.fixture(scope="module")
def example() -> Iterator[object]:
    """The Mixtral example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import mixtral_8x7b

        yield mixtral_8x7b
    finally:
        sys.path.remove(str(EXAMPLES))


def small_moe(example) -> nn.Module:
    """Four experts, two for each token, real weights."""
    torch.manual_seed(0)
    config = example.Config(layers=1, hidden=32, heads=2, kv_heads=1, ffn=48, vocab=64, experts=4)
    return example.MoE(config)


def outcome(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of the input and of every weight, for a fixed loss."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    (y * torch.linspace(-1, 1, y.shape[-1])).sum().backward()
    return (y.detach(), x.grad, *(p.grad.clone() for p in module.parameters()))  # type: ignore[union-attr]


def test_split_by_token_each_rank_routes_its_own(example) -> None:
    module, x = small_moe(example), torch.randn(4, 6, 32)
    whole = outcome(module, x)
    ranks = [outcome(module, part) for part in x.chunk(RANKS)]
    for i in range(2):  # outputs and input gradients are shards of the batch
        torch.testing.assert_close(torch.cat([r[i] for r in ranks]), whole[i])
    for i in range(2, len(whole)):  # weight gradients are partial
        torch.testing.assert_close(sum(r[i] for r in ranks), whole[i])


def test_split_by_expert_leaves_partial_sums(example) -> None:
    module, x = small_moe(example), torch.randn(4, 6, 32)
    whole = outcome(module, x)
    ranks = []
    for rank in range(RANKS):
        held = small_moe(example)
        held.load_state_dict(module.state_dict())
        others = [e for e in range(4) if e // (4 // RANKS) != rank]
        with torch.no_grad():
            for name in ("gate", "up", "down"):
                held.get_parameter(name)[others] = 0
        ranks.append(outcome(held, x))
    torch.testing.assert_close(sum(r[0] for r in ranks), whole[0])
    torch.testing.assert_close(sum(r[1] for r in ranks), whole[1])
    names = [name for name, _ in module.named_parameters()]
    for i, name in enumerate(names, start=2):
        if name == "router.weight":
            torch.testing.assert_close(sum(r[i] for r in ranks), whole[i])
            continue
        mine = [r[i].chunk(RANKS)[rank] for rank, r in enumerate(ranks)]  # shards of the expert dim
        torch.testing.assert_close(torch.cat(mine), whole[i])


@pytest.fixture(scope="module")
def graph(example) -> Graph:
    """The graph of one layer of experts, traced in bf16 on meta."""
    module = small_moe(example)
    inputs = lambda batch, seq: (torch.empty(batch, seq, 32),)  # noqa: E731
    return build(trace_source(module, seq_len=8, example_inputs=inputs))


def choices_of(graph: Graph, op: Op, axis: str) -> dict[str, Choice]:
    sizes = {dim.label: float(dim.size) for dim in op.dims}
    found = choices(op, axis=axis, degree=RANKS, sizes=sizes, tables=frozenset())
    return {choice.kind: choice for choice in found}


@pytest.mark.parametrize("axis", ["ep", "tp"])
def test_the_rules_say_the_same(graph: Graph, axis: str) -> None:
    ops = graph.blocks["model"].ops
    rows = Shard(0, "experts")
    stages = {
        op.sort: choices_of(graph, op, axis).get("experts") for op in ops if op.sort in ("make", "undo")
    }
    assert stages["make"] is not None and stages["make"].writes == (rows,)
    assert stages["undo"] is not None and stages["undo"].writes == (PARTIAL,)
    products = [op for op in ops if op.experts]
    assert len(products) == 3
    for op in products:
        by_expert = choices_of(graph, op, axis)["experts"]
        assert by_expert.reads[:2] == (rows, rows)
        assert by_expert.writes == (rows,)
