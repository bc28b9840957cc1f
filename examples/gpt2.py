"""GPT-2 small: 12 layers, hidden 768, 12 heads, vocabulary 50257, 1024 positions, dropout 0.1."""

import torch
from gpt import GPT, Config, loss

__all__ = ["build_model", "example_inputs", "loss"]

VOCAB = 50_257


def build_model() -> GPT:
    """124 million parameters, the head shares the embedding."""
    return GPT(Config(layers=12, hidden=768, heads=12, vocab=VOCAB, positions=1024, dropout=0.1))


def example_inputs(batch: int, seq: int = 1024) -> tuple[torch.Tensor]:
    """Random token ids; at most 1024 a sequence."""
    return (torch.randint(0, VOCAB, (batch, seq)),)
