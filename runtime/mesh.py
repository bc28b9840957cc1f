"""The plan's mesh as a `DeviceMesh`.

In: `planner.mesh.Mesh` and the default process group. Out: a mesh with the five axes of the plan in
canonical order (pp, dp, cp, ep, tp), whose ranks lie as the plan's own order says, and two flattened
axes: `data` (dp, cp, ep: over which dense parameters are replicated or sharded) and `replica` (dp,
cp: the same for experts and embedding tables, which ep splits).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..planner.errors import PlanError
from ..planner.mesh import AXES, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The mesh and its two flattened axes."""

    root: DeviceMesh
    data: DeviceMesh
    replica: DeviceMesh
    shards: DeviceMesh
    """Over which FSDP shards: `data`, or (copies, neighbours that share one) of dp under HSDP."""

    @property
    def tp(self) -> DeviceMesh:
        """The axis that tensors are split over."""
        return self.root["tp"]

    @property
    def activations(self) -> DeviceMesh:
        """On which activations are DTensors: `cp` and `tp`, those of them that have several ranks."""
        axes = tuple(axis for axis in ("cp", "tp") if self.root[axis].size() > 1)
        return self.root[axes or ("tp",)]

    @property
    def ep(self) -> DeviceMesh:
        """The axis that experts and tables are split over."""
        return self.root["ep"]


DATA_AXES = ("dp", "cp", "ep")
REPLICA, REPLICA_AXES = "replica", ("dp", "cp")


def device_mesh(mesh: Mesh, device_type: str, *, shard_group: int | None = None) -> Meshes:
    """Ranks in the plan's order under the axes' canonical order. Collective.

    `shard_group`: neighbours along dp that share one copy of parameters; None: all data ranks. Raises
    `PlanError` when the process group has another number of ranks than the plan.
    """
    world = dist.get_world_size()
    if world != mesh.devices:
        raise PlanError(f"the plan ({mesh}) is for {mesh.devices} ranks, the process group has {world}")
    return _made(mesh, device_type, shard_group, dist.group.WORLD)


@cache
def _made(mesh: Mesh, device_type: str, shard_group: int | None, _world: dist.ProcessGroup | None) -> Meshes:
    """One mesh, and one set of process groups, for all models of a process group."""
    ranks = torch.arange(mesh.devices).view([mesh.size(axis) for axis in mesh.order])
    canonical = ranks.permute([mesh.order.index(axis) for axis in AXES]).contiguous()
    root = DeviceMesh(device_type, canonical, mesh_dim_names=AXES)
    data = root[DATA_AXES]._flatten("data")
    shards = data
    if shard_group is not None:
        sizes = (mesh.dp // shard_group, shard_group)
        shards = root["dp"]._unflatten("dp", sizes, ("copies", "shards"))
    return Meshes(root=root, data=data, replica=root[REPLICA_AXES]._flatten(REPLICA), shards=shards)
