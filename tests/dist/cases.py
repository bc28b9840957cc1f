"""Small models of the examples, their plans, and what one process computes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import gpt
import llama
import mixtral_8x7b as mixtral
import mlp
import recommender
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


def small_mixtral() -> nn.Module:
    return mixtral.Mixtral(
        mixtral.Config(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=128, experts=4)
    )


def small_recommender() -> nn.Module:
    return recommender.Recommender(tables=(512, 40, 24), dim=16, hidden=32)


def small_mlp() -> nn.Module:
    return mlp.Classifier(inputs=24, hidden=64, classes=10)


BUILD = {
    "llama": small_llama, "gpt": small_gpt, "mixtral": small_mixtral, "recommender": small_recommender,
    "mlp": small_mlp,
}  # fmt: skip
LOSS = {"llama": llama.loss, "gpt": gpt.loss, "mixtral": mixtral.loss, "recommender": None, "mlp": None}


def built(name: str) -> nn.Module:
    torch.manual_seed(1)
    return BUILD[name]()


def inputs(name: str, batch: int = BATCH, seed: int = 0) -> Any:
    """One global batch."""
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    if name == "recommender":
        ids = torch.stack([whole(rows, batch) for rows in (512, 40, 24)], dim=1)
        dense = torch.randn(batch, recommender.DENSE_FEATURES, generator=generator)
        return {"dense": dense, "ids": ids, "clicks": whole(2, batch).float()}
    if name == "mlp":
        return {"x": torch.randn(batch, 24, generator=generator), "labels": whole(10, batch)}
    return (whole(128, batch, SEQ),)


def loss_of(name: str, model: nn.Module, batch: Any) -> torch.Tensor:
    """What one process computes."""
    if isinstance(batch, dict):
        return model(**batch)
    return LOSS[name](model(*batch), batch)


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
    loss = loss_of(name, model, inputs(name))
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
