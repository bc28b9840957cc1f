"""Small models of the examples, their plans, and what one process computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
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
from tpplan.planner.plan import Plan
from tpplan.planner.topology import Topology

SEQ = 16
BATCH = 8


def small_llama() -> nn.Module:
    return llama.Llama(llama.Config(layers=4, hidden=32, heads=8, kv_heads=4, ffn=64, vocab=128))


def small_gpt() -> nn.Module:
    return gpt.GPT(gpt.Config(layers=4, hidden=32, heads=4, vocab=128, positions=64))


def small_mixtral() -> nn.Module:
    return mixtral.Mixtral(
        mixtral.Config(layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=128, experts=4)
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


def slow_devices(count: int, bytes_per_s: float) -> Topology:
    """One node of devices so slow that splitting a model of a few thousand weights pays."""
    node = tpplan.load_topology("cpu-gloo", nodes=1)
    device = replace(
        node.device,
        peak_flops=dict.fromkeys(node.device.peak_flops, 1e6),
        memory_bytes_per_s=1e8,
        kernel_latency_s=0.0,
    )
    links = replace(
        node.levels[0], size=count, bytes_per_s=bytes_per_s, latency_s=1e-9, efficiency=1.0, curves=()
    )
    return replace(node, device=device, levels=(links,))


@functools.cache
def planned(name: str, *, bytes_per_s: float = 1e9, **pins: int) -> Plan:
    """The planner's own plan, for a pinned mesh."""
    devices = math.prod(pins.get(axis, 1) for axis in ("pp", "dp", "ep", "tp"))
    grouped = name == "mixtral"  # whose grouped products are traced on meta, in bf16 only
    plan = tpplan.suggest(
        built(name),
        lambda batch, seq: inputs(name, batch),
        slow_devices(devices, bytes_per_s),
        global_batch=BATCH,
        seq_len=SEQ,
        dtype="bf16" if grouped else "fp32",
        pins={"recompute": "none", **pins},
        loss=LOSS[name],
    )
    assert isinstance(plan, Plan), plan
    return replace(plan, job=replace(plan.job, dtype="fp32"))


def staged(plan: Plan, schedule: str, layers: Sequence[int], virtual_stages: int = 1) -> Plan:
    """The same plan cut into pipeline stages of so many layers, by pipeline rank and virtual stage."""
    pp = len(layers) // virtual_stages
    whole = plan.stages[0]
    chunks = [tuple(layers[r * virtual_stages : (r + 1) * virtual_stages]) for r in range(pp)]
    stages = tuple(
        replace(
            whole, index=r, layers=sum(own), chunk_layers=own if virtual_stages > 1 else (),
            blocks=(("layer", sum(own), "none"),),
        )
        for r, own in enumerate(chunks)
    )  # fmt: skip
    return replace(
        plan, mesh=replace(plan.mesh, pp=pp), schedule=schedule, virtual_stages=virtual_stages, stages=stages
    )


def stepped(plan: Plan, *, dp: int = 1, zero: int = 0, microbatches: int = 1) -> Plan:
    """The same plan on so many data ranks, in so many microbatches."""
    mesh = replace(plan.mesh, dp=dp)
    return replace(
        plan, mesh=mesh, zero_stage=zero, num_microbatches=microbatches,
        micro_batch=BATCH // (microbatches * mesh.batch_ways),
    )  # fmt: skip


def recomputed(plan: Plan, mode: str) -> Plan:
    """The same plan with every layer recomputed."""
    stages = tuple(
        replace(stage, blocks=tuple((b, n, mode if b == "layer" else "none") for b, n, _ in stage.blocks))
        for stage in plan.stages
    )
    return replace(plan, recompute=mode, stages=stages)


STEPS = 3
MAX_NORM = 0.5


def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW; with its usual eps the first steps would magnify rounding where gradients nearly vanish."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2)


def trained(name: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One process: losses of three clipped AdamW steps, the first gradients, the last parameters."""
    model = built(name)
    optimizer = optimizer_of(model.parameters())
    losses, first = [], {}
    for step in range(STEPS):
        loss = loss_of(name, model, inputs(name, seed=step))
        loss.backward()
        if not step:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, {n: p.detach() for n, p in model.named_parameters()}
