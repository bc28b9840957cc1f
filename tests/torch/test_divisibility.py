"""What does not divide is refused or named: heads, key/value heads, vocabularies."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tpplan.planner.context import obstacle
from tpplan.planner.divisibility import (
    check_tensor_size,
    framework_splits,
    padded,
    sequence_multiple,
    vocabulary_warnings,
    whole_groups,
)
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
        (1, 1, 8, (1,)),
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "framework", "sizes"),
    [
        (16, 2, "torch", (1, 2)),  # a view of local key/value heads fails on four ranks
        (16, 2, "deepspeed", (1, 2)),
        (16, 2, "megatron", (1, 2, 4, 8)),  # copies the two to all ranks
        (12, 3, "megatron", (1,)),  # three groups: neither two nor four ranks share them evenly
        (28, 4, "megatron", (1, 2, 4)),
        (7, 1, "megatron", (1,)),
    ],
)
def test_frameworks_split_heads_as_their_own_checks_allow(
    heads: int, kv_heads: int, framework: str, sizes: tuple[int, ...]
):
    assert tensor_sizes(graph(heads, kv_heads), 8, framework) == sizes
    for tp in {2, 4, 8} - set(sizes):
        with pytest.raises(OptionError, match=f"tp={tp}: .*[= ]{sizes[-1]} would"):
            check_tensor_size(graph(heads, kv_heads), tp, sizes, framework)


class Mlp(nn.Module):
    """Layers whose inner width is 100."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 100), nn.GELU(), nn.Linear(100, 64))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.mean()


def test_megatron_splits_mlps_evenly():
    with torch.device("meta"):
        traced = trace_source(
            Mlp(), seq_len=16, example_inputs=lambda batch, seq: (torch.zeros(batch, seq, 64),)
        )
    mlp = build(traced)
    assert [tp for tp in (1, 2, 4, 8) if framework_splits(mlp, tp, "megatron")] == [1, 2, 4]
    assert framework_splits(mlp, 8, "torch")


@pytest.mark.parametrize(
    ("cp", "tp", "halves", "multiple"),
    [(1, 1, True, 1), (4, 1, True, 8), (4, 8, True, 32), (1, 8, True, 8), (4, 3, True, 24), (4, 1, False, 4)],
)
def test_sequences_are_a_multiple_of_what_splits_them(cp: int, tp: int, halves: bool, multiple: int):
    assert sequence_multiple(cp=cp, tp=tp, halves=halves) == multiple


def test_a_sequence_that_ranks_cannot_share_evenly_is_refused():
    """16 tokens in 16 pieces, but not in an early and a late half for each of 16 ranks."""
    assert obstacle(graph(8, 8), 8, "megatron") is None
    assert obstacle(graph(8, 8), 16, "megatron") == "sequences of 16 tokens are no multiple of 32"
    assert obstacle(graph(8, 8), 16, "tpplan") is None


@pytest.mark.parametrize(
    ("width", "group", "degrees"),
    [(29568, 128, (1,)), (29568, 64, (1, 2)), (18944, 128, (1, 2, 4)), (14336, 128, (1, 2, 4, 8))],
)
def test_quantised_groups_stay_whole(width: int, group: int, degrees: tuple[int, ...]):
    assert whole_groups(width, group, (1, 2, 4, 8)) == degrees
