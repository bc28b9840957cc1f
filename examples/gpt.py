"""GPT-2 and GPT-3: LayerNorm before each half of a block, learned positions, fused QKV, GELU.

Dims of the published models are in `gpt2.py` and `gpt3_175b.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    """Dims of a GPT model."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    positions: int
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.hidden, 3 * c.hidden)
        self.out = nn.Linear(c.hidden, c.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers, four times as wide inside."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.up = nn.Linear(c.hidden, 4 * c.hidden)
        self.down = nn.Linear(4 * c.hidden, c.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each on a normalised residual."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.hidden)
        self.attention = Attention(c)
        self.norm2 = nn.LayerNorm(c.hidden)
        self.mlp = MLP(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Token ids (batch, length) -> logits (batch, length, vocab); the head shares the embedding."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.tokens = nn.Embedding(c.vocab, c.hidden)
        self.positions = nn.Embedding(c.positions, c.hidden)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens is (batch, length)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(logits: torch.Tensor, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next token; the last position has none."""
    targets = F.pad(inputs[0], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
