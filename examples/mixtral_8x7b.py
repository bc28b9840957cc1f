"""Mixtral 8x7B: 32 layers, hidden 4096, 32 heads, 8 KV heads, 8 experts of ffn 14336, 2 for each token.

The experts are one three-dimensional weight; tokens are sorted by expert, so that one grouped matrix
product runs all experts on their own tokens and every shape is known before the routing is.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from llama import Attention, rotary
from llama import Config as LlamaConfig
from torch import nn


@dataclass
class Config(LlamaConfig):
    """Dims of a Mixtral model: Llama's, with experts."""

    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 32_000
    experts: int = 8
    experts_per_token: int = 2
    rope_theta: float = 1_000_000.0


class MoE(nn.Module):
    """SwiGLU experts, of which a router picks a few for each token."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.experts = c.experts
        self.experts_per_token = c.experts_per_token
        self.router = nn.Linear(c.hidden, c.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(c.experts, c.hidden, c.ffn))
        self.up = nn.Parameter(torch.empty(c.experts, c.hidden, c.ffn))
        self.down = nn.Parameter(torch.empty(c.experts, c.ffn, c.hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).topk(self.experts_per_token, dim=-1)
        weights = scores.float().softmax(dim=-1).to(x.dtype)

        order = chosen.flatten().argsort(stable=True)
        sorted_tokens = tokens[order // self.experts_per_token]
        y = self.run_experts(sorted_tokens, self.group_ends(chosen))
        y = y[order.argsort()]  # back to the tokens' own order

        y = y.unflatten(0, (-1, self.experts_per_token)) * weights.unsqueeze(-1)
        return y.sum(dim=1).view_as(x)

    def group_ends(self, chosen: torch.Tensor) -> torch.Tensor:
        """Where each expert's rows end once the rows are sorted by expert."""
        counts = torch.histc(chosen.flatten().float(), bins=self.experts, min=0, max=self.experts - 1)
        return counts.cumsum(0).to(torch.int32)

    def run_experts(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Each expert on its own rows of x."""
        hidden = F.silu(F.grouped_mm(x, self.gate, offs=ends)) * F.grouped_mm(x, self.up, offs=ends)
        return F.grouped_mm(hidden, self.down, offs=ends)


class Block(nn.Module):
    """Attention and experts, each on a normalised residual."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(c.hidden, eps=1e-5)
        self.attention = Attention(c)
        self.norm2 = nn.RMSNorm(c.hidden, eps=1e-5)
        self.moe = MoE(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x is (batch, length, hidden)."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.moe(self.norm2(x))


class Mixtral(nn.Module):
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


def build_model() -> Mixtral:
    """46.7 billion parameters, of which a token uses 12.9."""
    return Mixtral(Config())


def example_inputs(batch: int, seq: int = 4096) -> tuple[torch.Tensor]:
    """Random token ids."""
    return (torch.randint(0, Config.vocab, (batch, seq)),)


def loss(logits: torch.Tensor, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next token; the last position has none."""
    targets = F.pad(inputs[0], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
