"""The intra-op solver: Megatron's splits emerge, and brute force finds nothing better.

The brute force prices every combination of choices through `block_costs`, which knows nothing of
the choice graph that the solver builds.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from tpplan.planner.estimate import collectives
from tpplan.planner.estimate.compute import kernel_time
from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.layout import Collective
from tpplan.planner.mesh import Mesh
from tpplan.planner.solve.axis import Axis, AxisProblem, AxisSolution
from tpplan.planner.solve.block_cost import block_costs
from tpplan.planner.solve.intra_op import IntraOp, Prices, Splits, after, traced_sizes
from tpplan.planner.solve.op_times import OpTimes
from tpplan.planner.topology import Topology
from tpplan.planner.trace import trace_source
from tpplan.topologies import load

EXAMPLES = Path(__file__).parents[2] / "examples"
FRAMEWORK = FRAMEWORKS["tpplan"]
ALL_REDUCES = {Collective.ALL_REDUCE: 1.0, Collective.REDUCE_SCATTER: 0.5, Collective.ALL_GATHER: 0.5}
"""A reduce-scatter or an all-gather moves half of what an all-reduce moves."""


def axis_on(topology: Topology, degree: int) -> Axis:
    """The tensor axis over neighbouring devices, priced as `intra_op` does."""
    model, span = collectives.model(topology), topology.span(size=degree, stride=1)
    return Axis(
        name="tp",
        degree=degree,
        kernel_time=lambda work: kernel_time(work, topology.device),
        collective_time=lambda c, n: model.time(c, n, span),
        overlap=0.0,
        fused=FRAMEWORK.fuses_pointwise,
    )


def unsplit(graph: Graph, axis: Axis) -> AxisSolution:
    """The expert axis of a dense model: one rank."""
    sizes = traced_sizes(graph, batch=1)
    assert sizes is not None
    lone = Axis(
        name="ep",
        degree=1,
        kernel_time=axis.kernel_time,
        collective_time=axis.collective_time,
        overlap=0.0,
        fused=axis.fused,
    )
    return AxisProblem(graph, sizes, lone).only()


def total_s(graph: Graph, axis: Axis, solution: AxisSolution, ep: AxisSolution) -> float:
    """Seconds of one microbatch through the whole model under given choices."""
    sizes = traced_sizes(graph, batch=1)
    assert sizes is not None
    splits = Splits(ep=ep, tp=solution, before_ep=sizes, before_tp=sizes, local=after(graph, sizes, solution))
    times = OpTimes(axis.kernel_time, fused=FRAMEWORK.fuses_pointwise)
    costs = block_costs(graph, splits, (axis, axis), ("node", "node"), FRAMEWORK, times)
    return sum(
        graph.blocks[name].count
        * (c.forward_s + c.backward_s + sum(x.seconds * x.count for x in (*c.forward_comm, *c.backward_comm)))
        for name, c in costs.items()
    )


def brute_force(graph: Graph, axis: Axis) -> float:
    """The least cost over every combination of choices that the layouts allow."""
    sizes = traced_sizes(graph, batch=1)
    assert sizes is not None
    problem, ep = AxisProblem(graph, sizes, axis), unsplit(graph, axis)
    best = math.inf
    for combination in product(*problem.choices.values()):
        chosen = dict(zip(problem.choices, combination, strict=True))
        stored = {
            read.tensor: choice.reads[i]
            for key, choice in chosen.items()
            for i, read in enumerate(problem.ops[key].reads)
            if read.kind == "parameter"
        }
        solution = AxisSolution(
            axis="tp", degree=axis.degree, choices=chosen, parameters=stored, assignment=None
        )
        try:
            best = min(best, total_s(graph, axis, solution, ep))
        except ValueError:  # a layout that no conversion reaches
            continue
    return best


class CutMlp(nn.Module):
    """The MLP half of a block."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, sequence, hidden)."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class CutAttention(nn.Module):
    """The attention half of a block, heads as an axis of their own so that nothing is a view."""

    def __init__(self, hidden: int, heads: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.ParameterList([nn.Parameter(torch.empty(heads, hidden, depth)) for _ in range(3)])
        self.out = nn.Parameter(torch.empty(heads, depth, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, sequence, hidden)."""
        y = self.norm(x)
        q, k, v = (torch.einsum("bsk,hkd->bhsd", y, w) for w in self.qkv)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.einsum("bhsd,hdk->bsk", y, self.out)


def small_graph(module: nn.Module, hidden: int, sequence: int) -> Graph:
    """The graph of a module on (batch, sequence, hidden) inputs."""

    def inputs(batch: int, seq: int) -> tuple[torch.Tensor]:
        return (torch.empty(batch, seq, hidden, requires_grad=True),)

    return build(trace_source(module, seq_len=sequence, example_inputs=inputs))


@pytest.mark.parametrize("topology", ["dgx-h100", "dgx-a100-80", "8x-l40s"])
@pytest.mark.parametrize("shape", [(1024, 4096, 2048), (2050, 514, 512), (96, 9600, 4096)])
def test_brute_force_finds_nothing_better_for_an_mlp(topology: str, shape: tuple[int, int, int]) -> None:
    hidden, ffn, sequence = shape
    check_against_brute_force(small_graph(CutMlp(hidden, ffn), hidden, sequence), load(topology))


@pytest.mark.parametrize("topology", ["dgx-h100", "8x-l40s"])
def test_brute_force_finds_nothing_better_for_attention(topology: str) -> None:
    check_against_brute_force(small_graph(CutAttention(512, 6, 65), 512, 1022), load(topology))


def check_against_brute_force(graph: Graph, topology: Topology) -> None:
    axis = axis_on(topology, 2)
    sizes = traced_sizes(graph, batch=1)
    assert sizes is not None
    best = brute_force(graph, axis)
    for reduce in (True, False):
        (solution,) = AxisProblem(graph, sizes, axis).solve(reduce=reduce)
        assert solution.assignment is not None
        assert solution.assignment.cost == pytest.approx(best, rel=1e-9)
        assert total_s(graph, axis, solution, unsplit(graph, axis)) == pytest.approx(best, rel=1e-9)


@pytest.fixture(scope="module")
def gpt() -> Graph:
    """GPT-3 175B, traced on meta."""
    return build(trace_source(str(EXAMPLES / "gpt3_175b.py"), seq_len=2048))


@pytest.mark.parametrize("reduce", [True, False], ids=["presolved", "ilp"])
def test_the_ilp_finds_megatron(gpt: Graph, reduce: bool) -> None:
    """Column then row over ffn, attention over heads, vocabulary-parallel head: nobody told it."""
    sizes = traced_sizes(gpt, batch=1)
    assert sizes is not None
    (solution,) = AxisProblem(gpt, sizes, axis_on(load("dgx-a100-80"), 8)).solve(reduce=reduce)

    def split_of(module: str) -> str:
        for (block, i), choice in solution.choices.items():
            op = gpt.blocks[block].ops[i]
            if op.module == module and op.family == "gemm":
                assert op.gemm is not None and choice.label is not None
                side = "column" if choice.label in op.gemm.n else "row"
                return f"{next(d.name for d in op.dims if d.label == choice.label)} {side}"
        raise AssertionError(module)

    assert split_of("layers.*.mlp.up") == "ffn column"
    assert split_of("layers.*.mlp.down") == "ffn row"
    assert split_of("layers.*.attention.qkv") == "heads column"
    assert split_of("layers.*.attention.out") == "heads row"
    assert split_of("head") == "vocab column"


def test_two_all_reduces_forward_and_two_backward(gpt: Graph) -> None:
    topology = load("dgx-a100-80")
    prices = Prices(kernel_time=kernel_time, collective_time=collectives.model(topology).time)
    fastest, *_ = IntraOp(gpt, topology, FRAMEWORK, prices)(Mesh(tp=8), 1)
    layer = fastest.blocks["layer"]
    residual_bytes = 2048 * 12288 * 2
    for communications in (layer.forward_comm, layer.backward_comm):
        steady = [c for c in communications if c.count >= 1]
        assert all(c.bytes == residual_bytes for c in steady)
        assert sum(ALL_REDUCES[c.collective] * c.count for c in steady) == pytest.approx(2.0)


def test_norm_weights_are_synchronised_when_the_residual_is_split(gpt: Graph) -> None:
    topology = load("dgx-a100-80")
    prices = Prices(kernel_time=kernel_time, collective_time=collectives.model(topology).time)
    fastest, *_ = IntraOp(gpt, topology, FRAMEWORK, prices)(Mesh(tp=8), 1)
    assert fastest.sequence_parallel
    replicated = [g for g in fastest.blocks["layer"].parameters if g.replicated_over_tp]
    assert sum(g.numel for g in replicated) == 4 * 12288, "weights and biases of the two norms, no more"


class TiedHead(nn.Module):
    """An embedding whose table is the head as well."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids is (batch, sequence); returns the loss of predicting them."""
        logits = torch.nn.functional.linear(self.tokens(ids), self.tokens.weight)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("shape", [(4096, 1024, 64), (50_304, 256, 16), (2050, 514, 4096)])
def test_a_table_read_twice_pays_for_its_own_conversions(shape: tuple[int, int, int]) -> None:
    """The objective and `block_costs` agree where a parameter is stored once and read in two layouts."""
    vocab, hidden, sequence = shape

    def inputs(batch: int, seq: int) -> tuple[torch.Tensor]:
        return (torch.zeros(batch, seq, dtype=torch.long),)

    graph = build(trace_source(TiedHead(vocab, hidden), seq_len=sequence, example_inputs=inputs))
    axis = axis_on(load("dgx-h100"), 2)
    sizes = traced_sizes(graph, batch=1)
    (solution,) = AxisProblem(graph, sizes, axis).solve()
    assert solution.assignment is not None
    assert total_s(graph, axis, solution, unsplit(graph, axis)) == pytest.approx(
        solution.assignment.cost, rel=1e-9
    )
