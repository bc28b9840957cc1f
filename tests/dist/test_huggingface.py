"""Unmodified Hugging Face models under plans of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
import tpplan
from pool import RankPool
from torch import nn
from tpplan.planner.plan import Plan
from tpplan.runtime.gather import whole

transformers = pytest.importorskip("transformers")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).float()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=32, n_layer=4, n_head=4, n_positions=64, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).float()


BUILD = {"llama": llama, "gpt2": gpt2}


def inputs(batch: int, seq: int = cases.SEQ) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 128, (batch, seq), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone()}


def step(name: str, plan: Plan) -> tuple[float, dict[str, Any]]:
    parallel = tpplan.auto_parallelize(BUILD[name](), inputs(cases.BATCH), plan=plan)
    loss = parallel.train_step(inputs(cases.BATCH)).item()
    return loss, {n: whole(p.grad).clone() for n, p in parallel.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "pins"),
    [("llama", {"tp": 2, "pp": 2}), ("gpt2", {"tp": 2}), ("gpt2", {"pp": 2, "dp": 2, "tp": 1})],
)
def test_a_step_equals_one_process(name: str, pins: dict[str, int], ranks: Callable[[int], RankPool]) -> None:
    plan = tpplan.suggest(
        BUILD[name](), inputs, cases.slow_devices(2 if len(pins) == 1 else 4, 1e9), global_batch=cases.BATCH,
        seq_len=cases.SEQ, dtype="fp32", pins={"recompute": "none", **pins},
    )  # fmt: skip
    assert isinstance(plan, Plan)
    results = ranks(plan.mesh.devices).run(step, name, plan)
    model = BUILD[name]()
    expected = model(**inputs(cases.BATCH)).loss
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    seen = set()
    for loss, found in results:
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for n in gradients.keys() & found.keys():
            seen.add(n)
            assert (found[n] - gradients[n]).norm() < 1e-5 * gradients[n].norm(), n
    assert seen == set(gradients)
