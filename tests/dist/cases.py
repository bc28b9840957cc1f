"""Small models of the examples, their plans, and what one process computes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import gpt
import llama
import torch
import tpplan
from torch import nn
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import Plan

SEQ = 16
BATCH = 8


def small_llama() -> nn.Module:
    return llama.Llama(llama.Config(layers=4, hidden=32, heads=8, kv_heads=4, ffn=64, vocab=128))


def small_gpt() -> nn.Module:
    return gpt.GPT(gpt.Config(layers=4, hidden=32, heads=4, vocab=128, positions=64))


BUILD = {"llama": small_llama, "gpt": small_gpt}
LOSS = {"llama": llama.loss, "gpt": gpt.loss}


def built(name: str) -> nn.Module:
    torch.manual_seed(1)
    return BUILD[name]()


def inputs(name: str, batch: int = BATCH, seed: int = 0) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 128, (batch, SEQ), generator=generator),)


@functools.cache
def plan_for(name: str, **sizes: Any) -> Plan:
    """The planner's own plan for a small model with the mesh pinned, splits as on a large one."""
    from tpplan.planner.suggest import suggest

    devices = 1
    for axis in ("pp", "dp", "ep", "tp"):
        devices *= sizes.get(axis, 1)
    plan = suggest(
        built(name), lambda batch, seq: inputs(name, batch), f"cpu-gloo:{devices // 2}",
        global_batch=BATCH, seq_len=SEQ, dtype="fp32", pins=sizes, loss=LOSS[name], cache=False,
    )  # fmt: skip
    assert isinstance(plan, Plan), plan
    return plan


def reference(name: str, steps: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process."""
    model = built(name)
    batch = inputs(name)
    loss = LOSS[name](model(*batch), batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
