"""Llama 3 8B: 32 layers, hidden 4096, 32 heads, 8 KV heads, ffn 14336, vocabulary 128256."""

from llama import Config, Llama, example_inputs, loss

__all__ = ["build_model", "example_inputs", "loss"]


def build_model() -> Llama:
    """8.03 billion parameters."""
    return Llama(Config(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336))
