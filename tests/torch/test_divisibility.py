"""What does not divide is refused or named: heads, key/value heads, vocabularies."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tpplan.planner.divisibility import check_tensor_size, padded, vocabulary_warnings
from tpplan.planner.errors import OptionError
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.planning import tensor_sizes
from tpplan.planner.trace import trace_source

HEAD_DIM = 8


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        width = heads * HEAD_DIM
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, kv_heads * HEAD_DIM) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, heads: int, kv_heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, heads * HEAD_DIM)
        self.layers = nn.ModuleList(Attention(heads, kv_heads) for _ in range(3))
        self.head = nn.Linear(heads * HEAD_DIM, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def example_inputs(batch: int, seq: int) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, seq, dtype=torch.long),)


@cache
def graph(heads: int, kv_heads: int, vocabulary: int = 512) -> Graph:
    with torch.device("meta"):
        model = Model(heads, kv_heads, vocabulary)
    return build(trace_source(model, seq_len=16, example_inputs=example_inputs))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "sizes"),
    [
        (28, 4, 8, (1, 2, 4)),  # Qwen2 7B: 28 heads do not divide by 8
        (64, 8, 4, (1, 2, 4)),  # never 3 of 4 devices
        (28, 28, 8, (1, 2, 4)),
        (16, 2, 8, (1, 2, 4, 8)),  # more ranks than key/value heads: each is held by several
        (7, 1, 8, (1,)),
    ],
)
def test_tensor_sizes_split_the_heads(heads: int, kv_heads: int, devices: int, sizes: tuple[int, ...]):
    assert tensor_sizes(graph(heads, kv_heads), devices) == sizes


def test_a_pinned_size_that_cannot_split_the_heads_names_the_nearest():
    with pytest.raises(
        OptionError, match=r"tp=8: the 28 heads in 4 key/value groups of layers\.\*.*tp=2 or 4 would"
    ):
        check_tensor_size(graph(28, 4), 8, (1, 2, 4))
    check_tensor_size(graph(28, 4), 4, (1, 2, 4))


@pytest.mark.parametrize(
    ("vocabulary", "tp", "wanted"), [(250_682, 8, 250_880), (151_669, 4, 152_064), (50_257, 8, 51_200)]
)
def test_padding_of_a_vocabulary(vocabulary: int, tp: int, wanted: int):
    assert padded(vocabulary, tp) == wanted


def test_a_vocabulary_that_does_not_divide_is_named_with_the_bytes_that_padding_takes():
    (warning,) = vocabulary_warnings(graph(8, 8, 1000), 16)
    assert warning.startswith("embedding.weight: a vocabulary of 1,000 does not divide by tp=16")
    assert "padded to 2,048" in warning
    assert f"for {1048 * 64 * 2:,} bytes more" in warning
    assert vocabulary_warnings(graph(8, 8, 1000), 8) == ()
    assert vocabulary_warnings(graph(8, 8, 1000), 1) == ()
