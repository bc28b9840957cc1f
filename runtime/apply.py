"""From a plan to a `Parallel`: one ordered list.

In: the user's model, the plan, example inputs of one microbatch. Out: the model in place, on its
mesh. Raises `PlanError` for what cannot be executed, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from ..planner.plan import Plan
from .batch import Call, call_of, map_tensors
from .check import check, differences
from .context import SEQUENCE_DIM, names_of
from .data import DTYPES, shard_data
from .forward import LossFunction, StageForward, WholeForward, local_shape
from .layouts import placement
from .mesh import Meshes, device_mesh
from .modules import install_reshards, shard_parameters
from .names import aliases, placements_by_name
from .ops import Mode, mode_for, run_in
from .parallel import Parallel
from .recompute import recompute
from .routed import install_routing
from .schedule import Pipeline
from .stages import StageCut, StageLayers, cut_out, find_border, layers_in, list_path, stage_cuts
from .ties import find_ties
from .weights import Weights, agree


@dataclass(slots=True, kw_only=True)
class _Stage:
    """One stage on its way."""

    cut: StageCut
    model: nn.Module
    layers: list[nn.Module]


def apply(
    model: nn.Module, plan: Plan, inputs: Any, *, loss: LossFunction, device: torch.device, seed: int
) -> Parallel:
    """Put `model` onto the plan's mesh. Collective; `inputs` has at least one microbatch of samples."""
    planned = placements_by_name(plan, model)
    check(plan, model, planned)
    mesh = device_mesh(plan.mesh, device.type, shard_group=plan.shard_group)
    agree(model, device)  # before anything is cut: rank 0's values are everybody's
    weights = Weights(model, seed=seed)
    names = aliases(model)
    call = map_tensors(call_of(inputs), lambda tensor: tensor[: plan.micro_batch])

    stages, hidden = _stages(model, plan, mesh, call)  # first: what is not kept is never materialised
    mode = mode_for(mesh.activations, experts=plan.mesh.ep > 1)
    for stage in stages:
        # tensor splits before data: FSDP shards what tensor parallelism leaves to each rank
        shard_parameters(stage.model, planned, mesh, values=weights.value, device=device)
        install_reshards(stage.model, plan, mesh)
        install_routing(stage.model, plan, mesh.activations)
        # recompute inside data: a layer's parameters are gathered once for running it again
        _recompute(stage, plan, mode)
    forwards = _forwards(stages, plan, mesh, mode, loss)
    for stage in stages:
        shard_data(
            stage.model, stage.layers, mesh, zero_stage=plan.zero_stage, dtype=plan.job.dtype,
            pipelined=plan.mesh.pp > 1,
        )  # fmt: skip
    pipeline = _pipeline(stages, forwards, plan, mesh, hidden, device)
    ties = find_ties([s.model for s in stages], names, plan.mesh, dist.get_rank()) if pipeline else []
    return Parallel(
        plan=plan,
        mesh=mesh,
        device=device,
        stages=[stage.model for stage in stages],
        whole=forwards[0] if isinstance(forwards[0], WholeForward) else None,
        pipeline=pipeline,
        ties=ties,
        differences=differences(plan),
    )


def _stages(
    model: nn.Module, plan: Plan, mesh: Meshes, call: Call
) -> tuple[list[_Stage], torch.Tensor | None]:
    """This rank's stages, and the activation between stages on meta; the model itself without a pipeline."""
    cuts = stage_cuts(plan, mesh.root.get_local_rank("pp"))
    path = list_path(plan)
    if plan.mesh.pp == 1 or path is None:
        return [_Stage(cut=cuts[0], model=model, layers=layers_in(model, plan))], None
    border = find_border(model, path, call)
    models = [cut_out(model, path, cut, border) for cut in cuts]
    return [
        _Stage(cut=cut, model=stage, layers=layers_in(stage, plan))
        for cut, stage in zip(cuts, models, strict=True)
    ], border.hidden


def _recompute(stage: _Stage, plan: Plan, within: Mode) -> None:
    if plan.recompute == "none":
        return
    for layer, mode in zip(stage.layers or [stage.model], stage.cut.modes, strict=True):
        layer.forward = run_in(within, layer.forward)  # backward runs it again, outside the model's forward
        recompute(layer, mode)


def _forwards(
    stages: Sequence[_Stage], plan: Plan, mesh: Meshes, mode: Mode, loss: LossFunction
) -> list[WholeForward | StageForward]:
    """Give each stage's model its new forward."""
    made: list[WholeForward | StageForward] = []
    for stage in stages:
        forward = stage.model.forward
        if plan.mesh.pp == 1:
            made.append(WholeForward(forward, loss, mode=mode))
        else:
            border = border_placements(plan, mesh)
            made.append(
                StageForward(forward, loss, stage.cut, mode=mode, mesh=mesh.activations, border=border)
            )
        stage.model.forward = made[-1]
    return made


def border_placements(plan: Plan, mesh: Meshes) -> list[Placement]:
    """How the activation between layers lies: a part of the sequence along cp, and along tp as planned."""
    along = {"cp": Shard(SEQUENCE_DIM), "tp": _along_tp(plan)}
    return [along[name] for name in names_of(mesh.activations)]


def _along_tp(plan: Plan) -> Placement:
    """As the layers' first module reads it, if split."""
    prefix = tuple(entry.module for entry in plan.layer_lists)
    for layout in plan.modules:
        if layout.axis == "tp" and layout.inputs and layout.module.startswith(prefix):
            first = layout.inputs[0]
            return placement(first) if first.startswith(("S(batch)", "S(sequence)")) else Replicate()
    return Replicate()


def _pipeline(
    stages: Sequence[_Stage],
    forwards: Sequence[WholeForward | StageForward],
    plan: Plan,
    mesh: Meshes,
    hidden: torch.Tensor | None,
    device: torch.device,
) -> Pipeline | None:
    if hidden is None:
        return None
    parts = []
    for stage, forward in zip(stages, forwards, strict=True):
        layers = stage.model.get_submodule(list_path(plan) or "")
        assert isinstance(forward, StageForward) and isinstance(layers, StageLayers)
        forward.install(layers)
        parts.append((stage.model, forward, stage.cut.index))
    shape = local_shape(hidden, border_placements(plan, mesh), mesh.activations)
    local = torch.empty(shape, dtype=DTYPES[plan.job.dtype] or hidden.dtype, device="meta")
    return Pipeline(parts, plan, mesh.root, hidden=local, device=device)
