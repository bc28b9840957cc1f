"""Llama 3.1 405B: 126 layers, hidden 16384, 128 heads, 8 KV heads, ffn 53248, vocabulary 128256."""

from llama import Config, Llama, example_inputs, loss

__all__ = ["build_model", "example_inputs", "loss"]


def build_model() -> Llama:
    """405.9 billion parameters."""
    return Llama(Config(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248))
