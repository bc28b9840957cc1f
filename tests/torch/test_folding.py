"""Folding is exact: a model planned by block classes costs what it costs layer by layer.

Random stacks of layers are traced twice, cut to a prefix as always and whole with every layer a class of
its own. The splits chosen for the folded model, laid over the whole one, must cost the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from tpplan.planner import trace as tracer
from tpplan.planner.cost import Estimate, Origin
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph, Repeat, TracedGraph
from tpplan.planner.solve.axis import Axis, AxisProblem, AxisSolution
from tpplan.planner.solve.intra_op import traced_sizes
from tpplan.planner.trace.repeats import structural_key

WIDTH, LENGTH = 16, 8


class Layer(nn.Module):
    """A residual layer with some freedom."""

    def __init__(
        self,
        ffn: int = 32,
        activation: str = "relu",
        attends: bool = False,
        bias: bool = True,
        eps: float = 1e-5,
        scale: float = 1.0,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.up, self.down = nn.Linear(WIDTH, ffn, bias=bias), nn.Linear(ffn, WIDTH, bias=bias)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH) if attends else None
        self.activation, self.scale = activation, scale
        self.up.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.qkv is not None:
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(y).chunk(3, dim=-1))
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.scale * self.down(getattr(F, self.activation)(self.up(y)))


class Stack(nn.Module):
    """An embedding, layers, and a head with its loss."""

    def __init__(self, layers: list[dict]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, WIDTH)
        self.layers = nn.ModuleList(Layer(**options) for options in layers)
        self.head = nn.Linear(WIDTH, 48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def example_inputs(batch: int, seq: int) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, seq, dtype=torch.long),)


def trace(layers: list[dict]) -> TracedGraph:
    with torch.device("meta"):
        model = Stack(layers)
    return tracer.trace_source(model, seq_len=LENGTH, example_inputs=example_inputs, dtype="fp32")


def trace_whole(layers: list[dict]) -> TracedGraph:
    """Every layer traced, and every layer a class of its own."""
    with patch.object(tracer, "find_cuts", lambda _: ()):
        traced = trace(layers)
    every = Repeat(path="layers", traced=len(layers), classes=tuple(range(len(layers))))
    return replace(traced, repeats=(every,))


def axis(degree: int) -> Axis:
    """A tensor axis with prices that make every byte and FLOP count."""
    return Axis(
        name="tp",
        degree=degree,
        kernel_time=lambda work: Estimate(
            seconds=1 + work.flops / 7 + work.bytes / 3, origin=Origin.MODELLED
        ),
        collective_time=lambda _, nbytes: Estimate(seconds=5 + nbytes / 2, origin=Origin.MODELLED),
        overlap=0.0,
        fused=True,
    )


def cost(
    graph: Graph, degree: int, fixed: AxisSolution | None = None, like: Graph | None = None
) -> AxisSolution:
    """The best splits; with `fixed`, a solution of `like`, its choices laid over `graph`."""
    sizes = traced_sizes(graph, batch=2)
    assert sizes is not None
    problem = AxisProblem(graph, sizes, axis(degree))
    if fixed is not None and like is not None:
        for block, model in zip(graph.chain, like.chain, strict=True):
            ops = graph.blocks[block].ops
            assert [op.target for op in ops] == [op.target for op in like.blocks[model].ops]
            for i in range(len(ops)):
                wanted = fixed.choices[model, i]
                same = (
                    c for c in problem.choices[block, i] if (c.kind, c.label) == (wanted.kind, wanted.label)
                )
                problem.choices[block, i] = (next(same),)
    (found,) = problem.solve(seconds_per_byte=(0.01,))
    return found


KINDS = st.fixed_dictionaries(
    {
        "ffn": st.sampled_from([32, 64]),
        "activation": st.sampled_from(["relu", "gelu"]),
        "attends": st.booleans(),
        "bias": st.booleans(),
    }
)
STACKS = st.lists(KINDS, min_size=1, max_size=3, unique_by=str).flatmap(
    lambda kinds: st.lists(st.sampled_from(kinds), min_size=2 * len(kinds) + 1, max_size=8)
)


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(layers=STACKS, degree=st.sampled_from([2, 4]))
def test_folded_and_unfolded_models_cost_the_same(layers: list[dict], degree: int):
    folded, whole = build(trace(layers)), build(trace_whole(layers))
    kinds = Counter(map(str, layers))
    assert sum(block.repeated for block in folded.blocks.values()) == len(kinds)
    assert Counter(folded.chain)["layer"] == kinds[str(layers[0])]
    best = cost(folded, degree)
    same = cost(whole, degree, fixed=best, like=folded)
    assert best.assignment is not None and same.assignment is not None
    assert abs(best.assignment.cost - same.assignment.cost) <= 1e-9 * same.assignment.cost
    free = cost(whole, degree)
    assert free.assignment is not None
    assert free.assignment.cost <= best.assignment.cost * (1 + 1e-9), "layers may differ only when unfolded"


ONE_CHANGE = st.sampled_from(
    [{"ffn": 64}, {"activation": "gelu"}, {"attends": True}, {"bias": False}, {"eps": 1e-6}, {"scale": 0.5},
     {"frozen": True}]
)  # fmt: skip


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(change=ONE_CHANGE, count=st.integers(4, 7), data=st.data())
def test_layers_that_differ_in_one_attribute_are_never_merged(change: dict, count: int, data: st.DataObject):
    odd = data.draw(st.integers(0, count - 1))
    layers = [change if i == odd else {} for i in range(count)]
    (repeat,) = trace(layers).repeats or (Repeat(path="layers", traced=count, classes=tuple(range(count))),)
    assert [i for i, kind in enumerate(repeat.classes) if kind == repeat.classes[odd]] == [odd]
    assert structural_key(Layer()) == structural_key(Layer()) != structural_key(Layer(**change))
