"""Llama 3: RMSNorm before each half of a block, rotary positions, grouped KV heads, SwiGLU.

Dims of the published models are in `llama3_8b.py`, `llama3_70b.py` and `llama3_405b.py`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    """Dims of a Llama model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 128_256
    rope_theta: float = 500_000.0


def rotary(x: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, (length, head_dim) each, for x (batch, length, hidden)."""
    length, device = x.shape[1], x.device
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels by its position's angle; x is (batch, heads, length, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key and value head."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.hidden // c.heads
        self.q = nn.Linear(c.hidden, c.heads * self.head_dim, bias=False)
        self.k = nn.Linear(c.hidden, c.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(c.hidden, c.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(c.heads * self.head_dim, c.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(c.hidden, c.ffn, bias=False)
        self.up = nn.Linear(c.hidden, c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each on a normalised residual."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(c.hidden, eps=1e-5)
        self.attention = Attention(c)
        self.norm2 = nn.RMSNorm(c.hidden, eps=1e-5)
        self.mlp = MLP(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Token ids (batch, length) -> logits (batch, length, vocab)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.RMSNorm(c.hidden, eps=1e-5)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens is (batch, length)."""
        c = self.config
        x = self.embedding(tokens)
        cos, sin = rotary(x, c.hidden // c.heads, c.rope_theta)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def example_inputs(batch: int, seq: int = 8192) -> tuple[torch.Tensor]:
    """Random token ids."""
    return (torch.randint(0, 128_256, (batch, seq)),)


def loss(logits: torch.Tensor, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next token; the last position has none."""
    targets = F.pad(inputs[0], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
