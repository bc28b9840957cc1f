"""Models too large for this machine, made narrow under the same plan and run on real ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import cases
import llama
import pytest
import torch
import tpplan
import zoo
from torch import nn
from tpplan.planner.errors import OptionError
from tpplan.planner.plan import Plan
from tpplan.runtime import verify
from tpplan.runtime.narrow import Narrow, narrowed

LAYERS, VOCAB, SEQ = 4, 16_000, 1024


def large_llama() -> nn.Module:
    """140 million parameters."""
    return llama.Llama(llama.Config(layers=LAYERS, hidden=2048, heads=16, kv_heads=8, ffn=4096, vocab=VOCAB))


def large_hf_llama() -> nn.Module:
    """The same widths, built by a Hugging Face config."""
    config = zoo.transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=2048, intermediate_size=4096, num_hidden_layers=LAYERS,
        num_attention_heads=16, num_key_value_heads=8, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return zoo.transformers.LlamaForCausalLM(config)


def tokens(batch: int, seq: int) -> tuple[torch.Tensor]:
    """Ids of the large model's vocabulary."""
    return (torch.randint(0, VOCAB, (batch, seq)),)


def labelled(batch: int, seq: int) -> dict[str, torch.Tensor]:
    """The same as a Hugging Face model reads it."""
    (ids,) = tokens(batch, seq)
    return {"input_ids": ids, "labels": ids.clone()}


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "example": (large_llama, tokens, llama.loss),
    "hugging face": (large_hf_llama, labelled, None),
}


@functools.cache
def planned(name: str, **pins: int | str) -> Plan:
    """A plan for the large model, in bf16."""
    build, inputs, loss = MODELS[name]
    with torch.device("meta"):
        model = build()
    devices = math.prod(int(pins.get(axis, 1)) for axis in ("pp", "dp", "tp"))
    plan = tpplan.suggest(
        model, inputs, cases.slow_devices(devices, 1e9), global_batch=32, seq_len=SEQ, pins=pins, loss=loss
    )
    assert isinstance(plan, Plan), plan
    return plan


@pytest.mark.parametrize("name", MODELS)
def test_a_large_model_is_verified_at_narrow_widths(name: str) -> None:
    plan = planned(name, dp=2, tp=2, pp=2, zero=1, micro_batch=1, schedule="1f1b")
    build, inputs, loss = MODELS[name]
    verdict = verify.verify_built(build, inputs, verify.reduced(plan, 4), loss=loss, planned=plan)
    assert verdict.equal
    assert [row for row in verdict.collectives if not row.agrees and not row.announced] == []
    assert verdict.ranks == 4 and "widths divided by" in verdict.width
    assert any(row.axis == "tp" and row.executed_count for row in verdict.collectives)


def narrow_of(plan: Plan) -> Narrow:
    with torch.device("meta"):
        found = narrowed(large_llama(), plan)
    assert isinstance(found, Narrow), found
    return found


def test_only_widths_shrink_and_by_one_number() -> None:
    plan = planned("example", dp=2, tp=2, pp=2, zero=1, micro_batch=1, schedule="1f1b")
    found = narrow_of(plan)
    c, n = found.config, found.divisor
    assert (c.hidden * n, c.ffn * n, c.vocab * n) == (2048, 4096, VOCAB)
    assert (c.layers, c.heads, c.kv_heads) == (LAYERS, 16, 8)
    assert [p.placements for p in found.plan.parameters] == [p.placements for p in plan.parameters]
    for small, large in zip(found.plan.parameters, plan.parameters, strict=True):
        for factors, size, before in zip(small.dim_sizes, small.shape, large.dim_sizes, strict=True):
            assert math.prod(factors) == size and factors[:-1] == before[:-1]
    assert found.plan.num_microbatches == 2 < plan.num_microbatches


def test_ids_are_taken_into_the_smaller_vocabulary_and_what_is_ignored_stays_so() -> None:
    found = narrow_of(planned("example", dp=2, tp=2, pp=2, zero=1, micro_batch=1, schedule="1f1b"))
    assert found.vocab is not None
    batch = found.batch({"ids": torch.tensor([1, VOCAB - 1, -100]), "dense": torch.tensor([1e9])})
    assert batch["ids"].tolist() == [1, (VOCAB - 1) % found.vocab, -100] and batch["dense"].item() == 1e9


def test_a_large_model_without_a_config_is_refused_with_the_reason() -> None:
    plan = planned("example", dp=2, tp=2, pp=2, zero=1, micro_batch=1, schedule="1f1b")

    def build() -> nn.Module:
        model = large_llama()
        del model.config
        return model

    with pytest.raises(OptionError, match="full width \\(Llama has no config"):
        verify.verify_built(build, tokens, replace(plan, mesh=plan.mesh), loss=llama.loss, planned=plan)
