"""What a serving engine adds to the arithmetic: launches, host work, batch and memory limits.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..profile import Framework

GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One way of serving."""

    name: str
    description: str
    kernel_latency_s: float
    """From the start of one kernel to that of the next where neither has much to do."""
    layer_host_s: float
    """Host time that launching a layer takes; the device computes meanwhile. 0 where graphs are replayed."""
    max_sequences: int
    """Most sequences that one replica runs at once."""
    memory_share: float
    """Share of the device's memory that the engine takes for everything."""
    context_bytes: float
    """Communicators and libraries outside the framework's allocator."""
    chunk_tokens: int
    """Most tokens of prompts in one pass: they size the activations."""
    source: str


ENGINES = {
    "vllm": Engine(
        name="vllm",
        description="vLLM: paged cache, chunked prompts, replayed CUDA graphs",
        kernel_latency_s=1.5e-6,
        layer_host_s=0.0,
        max_sequences=256,
        memory_share=0.9,
        context_bytes=0.35 * GIB,
        chunk_tokens=8192,
        source="kernel_latency_s: fitted to 26 vLLM runs on H100 (benchmarks/serving_runs.yaml), all else is "
        "not; max_sequences, memory_share, chunk_tokens: vLLM's defaults on 80 GB devices; context_bytes: "
        "0.35 GiB outside torch as logged in vllm-project/vllm issue 10517",
    ),
    "tgi": Engine(
        name="tgi",
        description="an engine whose host launches every kernel (text-generation-inference of 2023)",
        kernel_latency_s=3e-6,
        layer_host_s=0.58e-3,
        max_sequences=256,
        memory_share=0.95,
        context_bytes=0.35 * GIB,
        chunk_tokens=4096,
        source="layer_host_s: the 28 ms below which a 34B model does not fall on any number "
        "of H100 (huggingface/text-generation-inference issue 1315); the rest judgement",
    ),
}
"""Engines by name."""


def as_framework(engine: Engine) -> Framework:
    """The engine to the solver that splits ops: no gradients, nothing hidden, pointwise ops fused."""
    return Framework(
        name=engine.name,
        description=engine.description,
        gradient_bytes=0,
        sync_bytes=0,
        master_bytes=0,
        dp_overlap=0.0,
        gather_overlap=0.0,
        tp_overlap=0.0,
        saves_gathered_input=False,
        logits_bytes_per_element=0.0,
        allocator_reserve=(1.0, 1.0),
        context_bytes=engine.context_bytes,
        step_overhead_s=0.0,
        fuses_pointwise=True,
        source=engine.source,
    )
