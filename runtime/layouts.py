"""Placement texts of a plan as DTensor placements, and the part of a tensor that one rank holds.

In: `R`, `P` or `S(heads)@0`, with the parameter's dims where there is one. Out: `Replicate()`,
`Partial()`, `Shard(0)`, or `_StridedShard(0, split_factor=3)` when the cut factor is an inner one of
a fused axis: of `pieces*heads*head_dim` cut along heads, each rank holds its heads of every piece,
and the split factor is the product of the factors before it.
"""

from __future__ import annotations

import math
import re

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..planner.errors import PlanError
from ..planner.plan import ParameterPlacement

SHARD_TEXT = re.compile(r"S\((?P<dim>.+)\)@(?P<axis>\d+)")


def placement(text: str) -> Placement:
    """The placement of an activation. Raises `PlanError` for a text that is none."""
    if text == "R":
        return Replicate()
    if text == "P":
        return Partial()
    match = SHARD_TEXT.fullmatch(text)
    if match is None:
        raise PlanError(f"{text!r} is no placement; expected R, P or S(dim)@axis")
    return Shard(int(match["axis"]))


def parameter_placement(parameter: ParameterPlacement, mesh_axis: str) -> Placement:
    """Where a parameter's elements lie along one mesh axis; whole where the plan does not name it."""
    text = dict(parameter.placements).get(mesh_axis, "R")
    plain = placement(text)
    match = SHARD_TEXT.fullmatch(text)
    if match is None or not isinstance(plain, Shard):
        return plain
    outer = _outer_size(parameter, match["dim"], plain.dim)
    return Shard(plain.dim) if outer == 1 else _StridedShard(plain.dim, split_factor=outer)


def _outer_size(parameter: ParameterPlacement, dim: str, axis: int) -> int:
    """Product of the factors of a tensor axis that come before the one that is cut."""
    factors = parameter.dims[axis].split("*")
    name, _, position = dim.partition("#")
    if name not in factors:
        raise PlanError(f"{parameter.fqn}: the plan cuts {name!r}, but axis {axis} is {parameter.dims[axis]}")
    index = int(position) if position else factors.index(name)
    if index and len(parameter.dim_sizes) <= axis:
        raise PlanError(f"{parameter.fqn}: the plan has no dim_sizes, so {dim!r} cannot be cut; plan again")
    return math.prod(parameter.dim_sizes[axis][:index]) if index else 1


def is_strided(placed: Placement) -> bool:
    """Whether it cuts an inner factor of a fused axis."""
    return isinstance(placed, _StridedShard)


def shard_dim(placed: Placement) -> int | None:
    """The tensor dim that is cut, or None."""
    return placed.dim if isinstance(placed, Shard | _StridedShard) else None


def local_part(whole: torch.Tensor, placed: Placement, *, ranks: int, rank: int) -> torch.Tensor:
    """What rank `rank` of `ranks` holds of a whole tensor, as a tensor of its own.

    Raises `PlanError` when the cut factor does not divide.
    """
    dim = shard_dim(placed)
    if dim is None:
        return whole.clone()
    outer = placed.split_factor if isinstance(placed, _StridedShard) else 1
    size = int(whole.shape[dim])
    if size % int(outer * ranks):
        raise PlanError(f"a dim of {size} in {outer} pieces does not divide by {ranks} ranks")
    pieces = whole.unflatten(dim, (outer, -1)).chunk(ranks, dim + 1)
    return pieces[rank].flatten(dim, dim + 1).clone()


def joined(parts: list[torch.Tensor], placed: Placement) -> torch.Tensor:
    """The inverse of `local_part`: the whole tensor from all ranks' parts."""
    dim = shard_dim(placed)
    if dim is None:
        return parts[0]
    outer = placed.split_factor if isinstance(placed, _StridedShard) else 1
    return torch.cat([part.unflatten(dim, (outer, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)
