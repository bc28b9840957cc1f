"""What a rank holds at the fullest moment of a step of training, beside what its stage's plan says.

Counted tensor by tensor (`runtime.peak`), so that it is the same in every run. The plan's numbers are those
without the allocator's reserve and the context.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from combinations import QUICK, Combination
from held import ranks_of
from torch.utils._pytree import tree_leaves
from tpplan.planner.plan import Plan, Stage
from tpplan.runtime.parallel import Parallel
from tpplan.runtime.peak import track
from zoo import MODELS

BAND = 0.05
"""Measured over predicted, beyond or below 1."""
NOT_ALLOCATED = ("reserve", "context")
BESIDE_THE_TRACE = ("llama-hf", "llama-tied", "gpt2-hf")
"""torch.export of these writes a mask and copies of keys and values that an ordinary run does without."""
FURTHER_OFF = (("t5", "selective"), ("vit", "selective"), ("vit", "full"))
"""(model, recomputation) over `tp` or `pp`: 0.92 to 1.08 of what is planned. The images that a vit keeps are
the batch's own, which is not counted; the rest is not explained."""


def fullest(parallel: Parallel, optimizer: torch.optim.Optimizer, batch: Any) -> int:
    """Bytes at the fullest moment of one forward and backward, parameters and optimizer state included."""
    gc.collect()
    states = [list(parallel.state_dict().values()), *optimizer.state.values()]
    present = [x for x in tree_leaves(states) if isinstance(x, torch.Tensor)]
    with track(present, batch=batch) as peak:
        parallel.train_step(batch)
    return peak.peak_bytes


def is_followed(combination: Combination) -> bool:
    """Whether its fullest moment is held to the plan's: in every run of the suite, save as stated above."""
    cut = max(combination.pp, combination.tp) > 1
    off = cut and (combination.model, combination.recompute) in FURTHER_OFF
    is_run_as_planned = MODELS[combination.model].dtype == "fp32"  # others: in 16 bits, run in 32
    is_as_traced = combination.model not in BESIDE_THE_TRACE
    return combination in QUICK and is_run_as_planned and is_as_traced and not off


def planned(stage: Stage) -> float:
    """Bytes of a rank of `stage` at its fullest moment."""
    return sum(part.bytes for part in stage.memory if part.kind not in NOT_ALLOCATED)


def outside_band(plan: Plan, found: Sequence[int]) -> list[str]:
    """In words, the stages whose fullest rank lies further from the plan than `BAND`."""
    ratios = [max(found[rank] for rank in ranks_of(plan, s.index)) / planned(s) for s in plan.stages]
    return [f"stage {i}: {r:.3f} of what is planned" for i, r in enumerate(ratios) if abs(r - 1) > BAND]
