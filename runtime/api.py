"""`auto_parallelize`: plan if need be, then apply.

In: a model, example inputs, a topology or a plan, on every rank of an initialised process group (or
under torchrun, which it then initialises from). Out: a `Parallel`. Rank 0 plans; every rank checks
that it runs the same plan.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..planner.errors import OptionError, PlanError
from ..planner.plan import Infeasible, Plan
from ..planner.plan_file import from_yaml, to_yaml
from .apply import apply
from .batch import call_of
from .forward import LossFunction, own_loss
from .parallel import Parallel
from .weights import load_whole

Planner = Callable[..., Plan | Infeasible]
"""`planner.suggest.suggest`."""


def auto_parallelize(
    model: nn.Module,
    example_inputs: Any,
    topology: Any = None,
    *,
    plan: Plan | None = None,
    planner: Planner | None = None,
    global_batch: int | None = None,
    loss_fn: LossFunction | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    seed: int = 0,
    **options: Any,
) -> Parallel:
    """Apply `plan` to `model`, or first make one for `topology`.

    Args:
        model: on a real device (rank 0's weights count) or on meta (each module initialises itself).
        example_inputs: a tuple of arguments or a dict of keyword arguments with at least one
            microbatch of samples; also what is traced when there is no plan.
        topology: a bundled name, a YAML file or a `Topology`, with as many devices as there are ranks.
        plan: what to apply; then nothing is planned.
        planner: makes the plan: `tpplan.suggest` (the public function fills it in).
        global_batch: samples of a step; default: as many as the example inputs have.
        loss_fn: a function of (outputs, inputs); default: the model returns its loss.
        state_dict: whole weights in the model's own names, on every rank; default: the model's own.
        seed: for modules on meta.
        options: further options of the planner.

    Raises:
        PlanError: the plan is for another model or number of ranks, cannot be executed, or differs
            between ranks. OptionError: neither plan nor topology, or nothing fits.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    device = _device()
    if plan is None:
        plan = _planned(model, example_inputs, topology, planner, global_batch, loss_fn, options)
    _agree_on(plan)
    if state_dict is not None:
        load_whole(model, state_dict)
    return apply(model, plan, example_inputs, loss=loss_fn or own_loss, device=device, seed=seed)


def _device() -> torch.device:
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    device = torch.device(
        "cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count()))
    )
    torch.cuda.set_device(device)
    return device


def _planned(
    model: nn.Module,
    inputs: Any,
    topology: Any,
    planner: Planner | None,
    global_batch: int | None,
    loss_fn: LossFunction | None,
    options: dict[str, Any],
) -> Plan:
    """Rank 0's plan, on every rank; its mistakes are raised on every rank."""
    if planner is None or topology is None:
        raise OptionError("no plan and no topology to plan for: give plan= or topology=")
    answer: list[str | Exception] = [""]
    if dist.get_rank() == 0:
        call = call_of(inputs)
        samples = global_batch or next(
            x.shape[0] for x in (*call.args, *call.kwargs.values()) if hasattr(x, "shape")
        )
        try:
            found = planner(model, inputs, topology, global_batch=samples, loss=loss_fn, **options)
            answer = [
                to_yaml(found)
                if isinstance(found, Plan)
                else OptionError(f"{found.reason}; {found.nearest_fix}")
            ]
        except Exception as error:  # every rank must learn of it, or the others wait for ever
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return from_yaml(answer[0], source="the plan of rank 0")


def _agree_on(plan: Plan) -> None:
    """Raise `PlanError` on every rank unless all have the same plan."""
    digest = hashlib.sha256(to_yaml(plan).encode()).hexdigest()
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, digest)
    other = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
    if other:
        raise PlanError(f"rank {other[0]} has another plan than rank 0")
