"""Parameters become DTensors, planned conversions go onto module borders.

In: one stage's modules, the plan, the device mesh. Out: the same modules, in place: with tp > 1 every
parameter is a DTensor on the `tp` axis (whole ones too, so that norms and optimizers see one kind);
each rank holds only its part, on its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..planner.plan import ParameterPlacement, Plan
from .layouts import local_part, parameter_placement
from .mesh import Meshes
from .moves import install, says_something
from .names import matches
from .routed import inside_routing

Values = Callable[[str], torch.Tensor]
"""Whole values of a parameter by its name."""


def shard_parameters(
    model: nn.Module,
    planned: Mapping[str, ParameterPlacement],
    mesh: Meshes,
    *,
    values: Values,
    device: torch.device,
) -> None:
    """Replace every parameter by this rank's part of it; a tied one stays tied."""
    made: dict[int, nn.Parameter] = {}
    for name, module, key, parameter in list(owned_parameters(model)):
        if id(parameter) not in made:
            local = _part(values(name), planned[name], mesh, device)
            made[id(parameter)] = nn.Parameter(local, parameter.requires_grad)
        module._parameters[key] = made[id(parameter)]
    for module in model.modules():
        module._buffers = {key: b if b is None else b.to(device) for key, b in module._buffers.items()}  # pyright: ignore[reportIncompatibleVariableOverride]


def owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(full name, owner, name in the owner, parameter), tied ones once per name."""
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, module, key, parameter


def _part(
    whole: torch.Tensor, planned: ParameterPlacement, mesh: Meshes, device: torch.device
) -> torch.Tensor:
    """A DTensor on ep, and on tp if that cuts it too, for experts and tables; on tp for all others.

    Not where those axes have one rank each.
    """
    placed = {axis: parameter_placement(planned, axis) for axis in ("ep", "tp")}
    cut = {axis for axis in placed if not placed[axis].is_replicate()}
    sparse = "ep" in cut or ("tp" in cut and planned.is_expert)
    axes = tuple(axis for axis in placed if axis in cut or axis == ("ep" if sparse else "tp"))
    local = whole
    for axis in axes:
        local = local_part(
            local, placed[axis], ranks=mesh.root[axis].size(), rank=mesh.root[axis].get_local_rank()
        )
    local = local.to(device, copy=local is whole)
    if mesh.root[axes].size() == 1:
        return local
    return DTensor.from_local(
        local,
        mesh.root[axes],
        [placed[axis] for axis in axes],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def install_reshards(model: nn.Module, plan: Plan, mesh: Meshes) -> None:
    """Put the plan's conversions along `tp` onto the modules' borders."""
    axis = mesh.tp
    if axis.size() == 1:
        return
    planned = [r for r in plan.reshards if r.axis == "tp" and says_something(r)]
    for name, module in model.named_modules():
        if inside_routing(plan, name):  # where every rank has its own tokens
            continue
        for reshard in planned:
            if matches(reshard.module, name):
                install(module, reshard, axis)
