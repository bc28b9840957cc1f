"""Plain-torch decoders with the dims of a published run: what the accuracy benchmark traces.

In: `Dims`. Out: an `nn.Module` on the meta device (`build_model`), its example inputs and its loss.
Only shapes matter. One decoder covers the rows: GPT (LayerNorm, learned positions, GELU, biases,
dropout), Llama (RMSNorm, rotary, SwiGLU, grouped KV heads), mixtures of experts with optional shared
experts and leading dense layers, and multi-head latent attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Everything that determines the graph."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq_len: int
    gated: bool
    """SwiGLU instead of GELU."""
    positions: str
    """`learned`, `rotary`, or `none` (added inside attention, as ALiBi)."""
    layer_norm: bool
    """LayerNorm instead of RMSNorm."""
    bias: bool
    tied: bool
    dropout: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Width of the experts that every token uses; 0 for none."""
    dense_layers: int = 0
    """Leading layers without experts, in a mixture of experts."""
    query_rank: int = 0
    """Latent attention: rank of the query projection; 0 for a full one."""
    kv_rank: int = 0
    """Latent attention: rank shared by keys and values; 0 for ordinary attention."""
    rope_dim: int = 0
    """Latent attention: positional channels of a head, beyond its `head_dim`."""


def norm(d: Dims, width: int) -> nn.Module:
    """The model's kind of normalisation."""
    return nn.LayerNorm(width) if d.layer_norm else nn.RMSNorm(width, eps=1e-5)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels by its position's angle; x is (batch, heads, length, channels)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def angles(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, (length, width) each."""
    frequency = 1e4 ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which groups of query heads may share a key and value head."""

    def __init__(self, d: Dims) -> None:
        super().__init__()
        self.d = d
        self.q = nn.Linear(d.hidden, d.heads * d.head_dim, bias=d.bias)
        self.k = nn.Linear(d.hidden, d.kv_heads * d.head_dim, bias=d.bias)
        self.v = nn.Linear(d.hidden, d.kv_heads * d.head_dim, bias=d.bias)
        self.out = nn.Linear(d.heads * d.head_dim, d.hidden, bias=d.bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        d = self.d
        q, k, v = (f(x).unflatten(-1, (-1, d.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if d.positions == "rotary":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=d.kv_heads != d.heads)
        return self.out(y.transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, d: Dims) -> None:
        super().__init__()
        self.heads = d.heads
        self.qkv = nn.Linear(d.hidden, 3 * d.hidden, bias=d.bias)
        self.out = nn.Linear(d.hidden, d.hidden, bias=d.bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, keys and values from low-rank projections."""

    def __init__(self, d: Dims) -> None:
        super().__init__()
        self.d = d
        width = d.head_dim + d.rope_dim
        self.q_down = nn.Linear(d.hidden, d.query_rank, bias=False)
        self.q_norm = norm(d, d.query_rank)
        self.q_up = nn.Linear(d.query_rank, d.heads * width, bias=False)
        self.kv_down = nn.Linear(d.hidden, d.kv_rank, bias=False)
        self.k_rope = nn.Linear(d.hidden, d.rope_dim, bias=False)
        self.kv_norm = norm(d, d.kv_rank)
        self.k_up = nn.Linear(d.kv_rank, d.heads * d.head_dim, bias=False)
        self.v_up = nn.Linear(d.kv_rank, d.heads * d.head_dim, bias=False)
        self.out = nn.Linear(d.heads * d.head_dim, d.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        d = self.d
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (d.heads, -1)).transpose(1, 2)
        q = torch.cat((q[..., : d.head_dim], rotate(q[..., d.head_dim :], cos, sin)), dim=-1)
        latent = self.kv_norm(self.kv_down(x))
        k = self.k_up(latent).unflatten(-1, (d.heads, -1)).transpose(1, 2)
        v = self.v_up(latent).unflatten(-1, (d.heads, -1)).transpose(1, 2)
        shared = rotate(self.k_rope(x).unsqueeze(1), cos, sin)
        k = torch.cat((k, shared.expand(-1, d.heads, -1, -1)), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU, or two layers with GELU between."""

    def __init__(self, d: Dims, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(d.hidden, width, bias=d.bias)
        self.gate = nn.Linear(d.hidden, width, bias=d.bias) if d.gated else None
        self.down = nn.Linear(width, d.hidden, bias=d.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        up = self.up(x)
        inner = F.gelu(up, approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * up
        return self.down(inner)


class Experts(nn.Module):
    """SwiGLU experts of which a router picks a few for each token, and perhaps one for all tokens."""

    def __init__(self, d: Dims) -> None:
        super().__init__()
        self.d = d
        self.router = nn.Linear(d.hidden, d.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(d.experts, d.hidden, d.expert_ffn))
        self.up = nn.Parameter(torch.empty(d.experts, d.hidden, d.expert_ffn))
        self.down = nn.Parameter(torch.empty(d.experts, d.expert_ffn, d.hidden))
        self.shared = MLP(d, d.shared_ffn) if d.shared_ffn else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        d = self.d
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).topk(d.experts_per_token, dim=-1)
        weights = scores.float().softmax(dim=-1).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // d.experts_per_token]
        counts = torch.histc(chosen.flatten().float(), bins=d.experts, min=0, max=d.experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        inner = F.silu(F.grouped_mm(rows, self.gate, offs=ends)) * F.grouped_mm(rows, self.up, offs=ends)
        y = F.grouped_mm(inner, self.down, offs=ends)[order.argsort()]
        y = (y.unflatten(0, (-1, d.experts_per_token)) * weights.unsqueeze(-1)).sum(dim=1).view_as(x)
        return y if self.shared is None else y + self.shared(x)


class Block(nn.Module):
    """Attention and MLP (or experts), each on a normalised residual."""

    def __init__(self, d: Dims, *, sparse: bool) -> None:
        super().__init__()
        plain = d.layer_norm and d.heads == d.kv_heads and d.heads * d.head_dim == d.hidden
        kind = LatentAttention if d.kv_rank else FusedAttention if plain else Attention
        self.norm1 = norm(d, d.hidden)
        self.attention = kind(d)
        self.norm2 = norm(d, d.hidden)
        self.mlp = Experts(d) if sparse else MLP(d, d.ffn)
        self.dropout = nn.Dropout(d.dropout) if d.dropout else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """Token ids (batch, length) -> logits (batch, length, vocab)."""

    def __init__(self, d: Dims) -> None:
        super().__init__()
        self.d = d
        self.tokens = nn.Embedding(d.vocab, d.hidden)
        self.learned = nn.Embedding(d.seq_len, d.hidden) if d.positions == "learned" else None
        self.layers = nn.ModuleList(
            Block(d, sparse=bool(d.experts) and i >= d.dense_layers) for i in range(d.layers)
        )
        self.norm = norm(d, d.hidden)
        self.head = nn.Linear(d.hidden, d.vocab, bias=False)
        if d.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens is (batch, length)."""
        x = self.tokens(tokens)
        if self.learned is not None:
            x = x + self.learned(torch.arange(tokens.shape[1], device=tokens.device))
        cos, sin = angles(x, self.d.rope_dim or self.d.head_dim)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def build_model(d: Dims) -> Decoder:
    """The model, without memory for its weights."""
    with torch.device("meta"):
        return Decoder(d)


def example_inputs(d: Dims, batch: int) -> tuple[torch.Tensor]:
    """Token ids, shapes only."""
    return (torch.zeros((batch, d.seq_len), dtype=torch.int64, device="meta"),)


def loss(logits: torch.Tensor, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next token; the last position has none."""
    targets = F.pad(inputs[0], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
