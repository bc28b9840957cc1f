"""Llama 3 70B: 80 layers, hidden 8192, 64 heads, 8 KV heads, ffn 28672, vocabulary 128256."""

from llama import Config, Llama, example_inputs, loss

__all__ = ["build_model", "example_inputs", "loss"]


def build_model() -> Llama:
    """70.6 billion parameters."""
    return Llama(Config(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672))
