"""Small models of every kind that plans are run with, and their plans under chosen meshes.

Each is built under a fixed seed; its graph is traced once and planned as often as needed, with this
project's own planner on devices so slow that splitting a few thousand weights pays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tpplan.planner.graph import Graph
from tpplan.planner.options import job_from_options
from tpplan.planner.plan import Plan
from tpplan.planner.planning import plan_graph
from tpplan.planner.suggest import load_graph

transformers = pytest.importorskip("transformers")

SEQ, BATCH = cases.SEQ, cases.BATCH
VOCAB = 128


class Convolutions(nn.Module):
    """Two convolutions, pooling, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.hidden = nn.Linear(32 * 16, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Images (batch, 3, 8, 8) and their classes -> the loss."""
        x = F.relu(self.second(F.relu(self.first(x))))
        return F.cross_entropy(self.head(F.relu(self.hidden(x.flatten(1)))), labels)


def hf_llama(*, tied: bool) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).float()


def multi_query() -> nn.Module:
    config = cases.llama.Config(layers=4, hidden=32, heads=4, kv_heads=1, ffn=64, vocab=VOCAB)
    return cases.llama.Llama(config)


def hf_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=64, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).float()


def hf_mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False, experts_implementation="grouped_mm",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).float()


def hf_deepseek() -> nn.Module:
    """Latent attention, one rotary key for all heads; a dense layer, then experts picked within groups."""
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=8, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, use_cache=False, experts_implementation="grouped_mm",
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).float()


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).float()


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=16,
        patch_size=4, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How a model is built and fed, and which splits it is tried with."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Any]
    loss: Callable[..., Tensor] | None = None
    dtype: str = "fp32"
    layers: int = 1
    """Of its one list of layers; 1 where a pipeline cannot cut it."""
    tp: tuple[int, ...] = (1, 2, 4)
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    tables: frozenset[str] = frozenset()
    """Tables that ep splits by rows; the planner does so with tables of millions of rows."""


def _tokens(generator: torch.Generator, batch: int) -> tuple[Tensor]:
    return (torch.randint(0, VOCAB, (batch, SEQ), generator=generator),)


def _labelled(generator: torch.Generator, batch: int) -> dict[str, Tensor]:
    (tokens,) = _tokens(generator, batch)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _sequences(generator: torch.Generator, batch: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(generator, batch)[0], "labels": _tokens(generator, batch)[0]}


def _images(name: str, size: int) -> Callable[[torch.Generator, int], dict[str, Tensor]]:
    def made(generator: torch.Generator, batch: int) -> dict[str, Tensor]:
        images = torch.randn(batch, 3, size, size, generator=generator)
        return {name: images, "labels": torch.randint(0, 10, (batch,), generator=generator)}

    return made


def _clicks(generator: torch.Generator, batch: int) -> dict[str, Tensor]:
    return cases.inputs("recommender", batch, seed=generator.initial_seed())


def _features(generator: torch.Generator, batch: int) -> dict[str, Tensor]:
    return cases.inputs("mlp", batch, seed=generator.initial_seed())


MODELS = {
    "gpt": Model(build=cases.small_gpt, inputs=_tokens, loss=cases.LOSS["gpt"], layers=4, cp=(1, 2)),
    "llama": Model(build=cases.small_llama, inputs=_tokens, loss=cases.LOSS["llama"], layers=4, cp=(1, 2)),
    "llama-hf": Model(
        build=functools.partial(hf_llama, tied=False), inputs=_labelled, layers=4, tp=(1, 2), cp=(1, 2)
    ),
    "llama-tied": Model(
        build=functools.partial(hf_llama, tied=True), inputs=_labelled, layers=4, tp=(1, 2), cp=(1, 2)
    ),
    "multi-query": Model(build=multi_query, inputs=_tokens, loss=cases.LOSS["llama"], layers=4),
    "gpt2-hf": Model(build=hf_gpt2, inputs=_labelled, layers=4, tp=(1, 2)),
    "mixtral": Model(
        build=cases.small_mixtral, inputs=_tokens, loss=cases.LOSS["mixtral"], dtype="bf16", layers=4,
        tp=(1, 2), cp=(1, 2), ep=(1, 2, 4),
    ),
    "mixtral-hf": Model(
        build=hf_mixtral, inputs=_labelled, dtype="bf16", layers=4, tp=(1, 2), cp=(1, 2), ep=(1, 2, 4)
    ),
    "deepseek-hf": Model(
        build=hf_deepseek, inputs=_labelled, dtype="bf16", layers=4, tp=(1, 2), ep=(1, 2, 4)
    ),
    "t5": Model(build=t5, inputs=_sequences, tp=(1, 2, 4)),
    "vit": Model(build=vit, inputs=_images("pixel_values", 16), layers=4),
    "cnn": Model(build=Convolutions, inputs=_images("x", 8)),
    "recommender": Model(
        build=cases.small_recommender, inputs=_clicks, tp=(1, 2), ep=(1, 2, 4),
        tables=frozenset({"tables.0.weight", "tables.1.weight"}),
    ),
    "mlp": Model(build=cases.small_mlp, tp=(1, 2, 4), inputs=_features),
}  # fmt: skip


def built(name: str) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(1)
    return MODELS[name].build()


def inputs(name: str, batch: int = BATCH, seed: int = 0) -> Any:
    """One global batch."""
    return MODELS[name].inputs(torch.Generator().manual_seed(seed), batch)


def loss_of(name: str, model: nn.Module, batch: Any) -> Tensor:
    """What one process computes."""
    loss = MODELS[name].loss
    outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
    if loss is not None:
        return loss(outputs, batch)
    return outputs if isinstance(outputs, Tensor) else outputs.loss


@functools.cache
def graph(name: str) -> Graph:
    """Traced once."""
    model = MODELS[name]
    traced = load_graph(
        built(name), seq_len=SEQ, dtype=model.dtype, example_inputs=lambda batch, seq: inputs(name, batch),
        loss=model.loss, cache=False,
    )  # fmt: skip
    return replace(traced, table_fqns=model.tables)


@functools.cache
def planned(name: str, **pins: int | str) -> Plan:
    """The planner's own plan for a pinned mesh; only the compute dtype is made fp32."""
    devices = math.prod(int(pins.get(axis, 1)) for axis in ("pp", "dp", "cp", "ep", "tp"))
    sparse = MODELS[name].ep != (1,)
    cluster = cases.slow_devices(devices, 1e12 if sparse and pins.get("tp", 1) == 1 else 1e9)
    job = job_from_options(
        global_batch=BATCH, seq_len=SEQ, dtype=MODELS[name].dtype, devices=devices, framework="tpplan"
    )
    plan = plan_graph(graph(name), cluster, job, pins={"recompute": "none", **pins}, source=name)
    assert isinstance(plan, Plan), plan
    return replace(plan, job=replace(plan.job, dtype="fp32"))
