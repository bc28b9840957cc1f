"""What autograd keeps: against real runs on the CPU, and against what fused kernels keep by hand."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tpplan.planner.graph import DTYPE_BYTES, Node, TracedGraph
from tpplan.planner.trace import trace_source
from tpplan.planner.trace.source import python_file

EXAMPLES = Path(__file__).parents[2] / "examples"
WIDTH = 8


def saved_bytes(graph: TracedGraph) -> int:
    """Bytes that the traced graph says are kept."""
    kept = (saved for node in graph.nodes for saved in node.saved)
    return sum(prod(saved.shape) * DTYPE_BYTES[saved.dtype] for saved in kept)


def real_saved_bytes(model: nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    """Bytes of the storages that a real forward pass to the loss keeps, parameters and buffers aside."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss()
    result.backward()
    return sum(storage.nbytes() for storage in kept.values())


def mean_loss(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    """The mean of the outputs."""
    return outputs.mean()


class Convolutions(nn.Module):
    """Convolution, batch norm, pooling, an in-place activation and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, 3, height, width)."""
        x = self.act(self.norm(self.stem(x)))
        x = self.pool(x + torch.sigmoid(self.body(x)))
        return self.head(x.mean((2, 3)))


class Shuffled(nn.Module):
    """Views, gathers, a sort, a softmax and a product with a detached value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, WIDTH)."""
        left, right = self.linear(x).chunk(2, dim=-1)
        top = right.softmax(-1).topk(4, dim=-1)
        picked = left.gather(1, top.indices).exp() * top.values
        ordered = picked[torch.arange(x.shape[0]).flip(0)]
        return ordered.cumsum(1).tanh() * (self.scale * left).detach()[:, :4]


def gpt() -> tuple[nn.Module, tuple, Callable]:
    """A small GPT without dropout, with tied embedding and head."""
    with python_file(EXAMPLES / "gpt.py") as module:
        config = module.Config(layers=2, hidden=32, heads=4, vocab=64, positions=16)
        return module.GPT(config), (torch.randint(0, 64, (2, 16)),), module.loss


CASES = {
    "gpt": gpt,
    "convolutions": lambda: (Convolutions(), (torch.randn(2, 3, 8, 8),), mean_loss),
    "shuffled": lambda: (Shuffled(), (torch.randn(3, WIDTH),), mean_loss),
    "gru": lambda: (
        nn.GRU(WIDTH, 4, batch_first=True),
        (torch.randn(2, 5, WIDTH),),
        lambda y, _: y[0].mean(),
    ),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_kept_bytes_are_those_of_a_real_run(case: str, dtype: str):
    torch.manual_seed(0)
    model, inputs, loss = CASES[case]()
    graph = trace_source(model, example_inputs=inputs, loss=loss, seq_len=16, dtype=dtype)
    assert graph.warnings == ()
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
        inputs = tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs)
    assert saved_bytes(graph) == real_saved_bytes(model, lambda: loss(model(*inputs), inputs))


# ---------------------------------------------------------------------------- one op at a time


class Apply(nn.Module):
    """A function of an input and a parameter of the same shape."""

    def __init__(self, function: Callable, *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x has the shape of the parameter."""
        return self.function(x * 2 + self.weight)


def node(function: Callable, *shape: int, op: str, **options: Any) -> tuple[Node, TracedGraph]:
    """The node of an op in the graph of a function."""
    graph = trace_source(Apply(function, *shape), example_inputs=(torch.ones(shape),), seq_len=1, **options)
    return next(node for node in graph.nodes if node.target.startswith(f"aten.{op}.")), graph


def kept(node: Node) -> list[tuple[bool, tuple[int, ...], str]]:
    """(is a graph value, shape, dtype) of what a node keeps, in a fixed order."""
    return sorted((saved.value is not None, saved.shape, saved.dtype) for saved in node.saved)


def test_rms_norm_keeps_its_input_and_one_number_a_row():
    norm, _ = node(lambda x: F.rms_norm(x, (WIDTH,)), 2, 4, WIDTH, op="rms_norm")
    assert kept(norm) == [(False, (2, 4), "float32"), (True, (2, 4, WIDTH), "bfloat16")]


def test_dropout_keeps_a_mask_of_bytes():
    dropout, _ = node(lambda x: F.dropout(x, 0.1), 2, WIDTH, op="dropout")
    assert kept(dropout) == [(False, (2, WIDTH), "bool")]
    dropout, _ = node(lambda x: F.dropout(x, 0.0), 2, WIDTH, op="dropout")
    assert kept(dropout) == []


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_keeps_no_scores(dropout: float):
    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout, is_causal=True)

    attention, _ = node(attend, 2, 3, 16, WIDTH, op="scaled_dot_product_attention")
    assert kept(attention) == [
        (False, (2, 3, 16), "float32"),
        (True, (2, 3, 16, WIDTH), "bfloat16"),  # queries, keys and values are one storage here
        (True, (2, 3, 16, WIDTH), "bfloat16"),
    ]


def test_grouped_attention_keeps_the_few_keys_and_values():
    def attend(x: torch.Tensor) -> torch.Tensor:
        few = x[:, :2].exp()
        return F.scaled_dot_product_attention(x, few, few, enable_gqa=True)

    attention, _ = node(attend, 2, 4, 16, WIDTH, op="scaled_dot_product_attention")
    shapes = sorted(saved.shape for saved in attention.saved if saved.value is not None)
    assert shapes == [(2, 4, 16, WIDTH), (2, 4, 16, WIDTH)]  # exp keeps its output: counted there


def test_a_storage_is_counted_once_at_its_first_keeper():
    exponential, graph = node(lambda x: x.exp().sin().sum() + x.exp().cos().sum(), 2, WIDTH, op="exp")
    assert [saved.value for saved in exponential.saved] == list(exponential.outputs)
    names = [saved.value for each in graph.nodes for saved in each.saved if saved.value]
    assert len(names) == len(set(names)) == 2


def test_a_view_is_kept_as_the_value_it_views():
    def square_of_half(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1)[:4].square()

    square, graph = node(square_of_half, 2, WIDTH, op="square")
    (saved,) = square.saved
    assert saved.shape == (2, WIDTH)
    assert saved.value in next(each for each in graph.nodes if each.target == "aten.add.Tensor").outputs


def test_nothing_is_kept_where_no_gradient_flows():
    mask, graph = node(lambda x: x * (x.detach() > 0).float().exp(), 2, WIDTH, op="exp")
    assert (mask.saved, mask.differentiable) == ((), False)
    assert graph.nodes[-1].differentiable


@torch.library.custom_op("tpplan_test::only_meta", mutates_args=())
def only_meta(x: torch.Tensor) -> torch.Tensor:
    """An op that can be traced but refuses to run on fake CPU tensors."""
    return x.clone()


@only_meta.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "meta":
        raise RuntimeError("meta only")
    return torch.empty_like(x)


def test_an_op_that_cannot_run_is_assumed_to_keep_its_inputs():
    graph = trace_source(Apply(only_meta, 2, WIDTH), example_inputs=(torch.ones(2, WIDTH),), seq_len=1)
    custom = next(each for each in graph.nodes if "only_meta" in each.target)
    assert [(saved.value, saved.shape) for saved in custom.saved] == [(next(custom.refs()), (2, WIDTH))]
    assert custom.differentiable
    assert graph.warnings == (
        "kept activations of tpplan_test.only_meta.default are assumed to be all their floating-point inputs",
    )
