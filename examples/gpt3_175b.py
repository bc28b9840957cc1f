"""GPT-3 175B: 96 layers, hidden 12288, 96 heads, vocabulary 51200 (padded), 2048 positions."""

import torch
from gpt import GPT, Config, loss

__all__ = ["build_model", "example_inputs", "loss"]

VOCAB = 51_200


def build_model() -> GPT:
    """174.6 billion parameters, the head shares the embedding."""
    return GPT(Config(layers=96, hidden=12288, heads=96, vocab=VOCAB, positions=2048))


def example_inputs(batch: int, seq: int = 2048) -> tuple[torch.Tensor]:
    """Random token ids; at most 2048 a sequence."""
    return (torch.randint(0, VOCAB, (batch, seq)),)
