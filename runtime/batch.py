"""A global batch cut into what each rank runs.

In: the model's inputs for one step, a tuple of arguments or a dict of keyword arguments whose tensors
have the samples in dim 0, the same on all ranks. Out: this data rank's samples, one microbatch each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..planner.errors import OptionError
from ..planner.plan import Plan

Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of one forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> Inputs:
        """As the user gave them: what a loss function is called with."""
        return self.kwargs or self.args


def call_of(inputs: Any) -> Call:
    """A tuple as arguments, a dict as keyword arguments, anything else as the only argument."""
    if isinstance(inputs, dict):
        return Call((), inputs)
    return Call(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


def map_tensors(call: Call, function: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """`function` of every tensor in the arguments."""
    args, kwargs = tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, (call.args, call.kwargs)
    )
    return Call(args, kwargs)


def microbatches(batch: Any, plan: Plan, *, data_rank: int, device: torch.device) -> list[Call]:
    """This data rank's samples, in microbatches.

    Raises `OptionError` when the batch does not have the plan's number of samples.
    """
    call = call_of(batch)
    samples = plan.micro_batch * plan.num_microbatches * plan.mesh.batch_ways
    for leaf in tree_leaves((call.args, call.kwargs)):
        if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or leaf.shape[0] != samples):
            raise OptionError(
                f"the batch has a tensor of shape {tuple(leaf.shape)}; the plan has {samples} samples a step"
            )
    first = data_rank * plan.micro_batch * plan.num_microbatches
    return [
        _rows(call, first + i * plan.micro_batch, plan.micro_batch, device)
        for i in range(plan.num_microbatches)
    ]


def _rows(call: Call, first: int, count: int, device: torch.device) -> Call:
    return map_tensors(call, lambda tensor: tensor.narrow(0, first, count).to(device))
