"""What ranks hold after a step of training, beside what their stage's plan says.

Under ZeRO a stage's ranks hold shards, which differ in size where a dim does not divide: then their sum is
the plan's, and every rank's is where all divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from tpplan.planner.plan import Plan, Stage
from tpplan.runtime.parallel import Parallel

COUNTER = "step"
"""AdamW's own count of steps for each parameter: on the host, whatever the device."""
MOMENTS_BYTES = 8
MASTER_BYTES = 2
"""Bytes for each parameter: of AdamW's two moments, and beyond 16 bits where a plan is for 16-bit weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes on one rank, between steps."""

    parameters: int
    gradients: int
    optimizer: int


def held(parallel: Parallel, optimizer: torch.optim.Optimizer) -> Held:
    """After the optimizer's step, before gradients are given up."""
    parameters = list(parallel.parameters())
    states = (s for p in parameters for key, s in optimizer.state[p].items() if key != COUNTER)
    return Held(
        parameters=_bytes(parameters),
        gradients=_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer=_bytes(states),
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    own = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in own)


def planned(plan: Plan, stage: Stage, *, dtype: str) -> dict[str, float]:
    """The same for a rank of `stage`: the plan's optimizer state, and as many elements of the two others.

    The plan's own `parameters` and `gradients` are those of the fullest moment of a step.
    """
    per_element = MOMENTS_BYTES + (0 if dtype == "fp32" else MASTER_BYTES)
    (state,) = (part.bytes for part in stage.memory if part.kind == "optimizer")
    elements = state / per_element
    return {"parameters": 4 * elements, "gradients": 4 * elements, "optimizer": MOMENTS_BYTES * elements}


def ranks_of(plan: Plan, stage: int) -> list[int]:
    """Ranks that hold one pipeline stage."""
    mesh = plan.mesh
    return [group[stage] for group in mesh.groups("pp")] if mesh.pp > 1 else list(range(mesh.devices))


def disagreements(plan: Plan, found: Sequence[Held], *, dtype: str) -> list[str]:
    """In words, where the ranks of a stage together hold another number of bytes than planned."""
    wrong = []
    for stage in plan.stages:
        ranks = ranks_of(plan, stage.index)
        for kind, each in planned(plan, stage, dtype=dtype).items():
            total = sum(getattr(found[rank], kind) for rank in ranks)
            if total != round(each * len(ranks), 3):
                wrong.append(f"stage {stage.index}: {kind} {total:,} B, planned {each * len(ranks):,.1f} B")
    return wrong
