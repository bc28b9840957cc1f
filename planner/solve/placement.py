"""Where a mesh lies: in which order its axes are laid out over ranks, and which devices it leaves idle.

In: a `SearchProblem`, a mesh or pins. Out: the orders that differ (`Placements`), and the meshes that use
only a part of the cluster (`part_meshes`).

The order of axes decides which groups stay inside a node (or a pair of linked devices) and which cross it.
The more often a group communicates, the nearer its ranks: tp in every operation, ep and cp in every layer, dp
for every step. That leaves the pipeline: outermost, or inside dp, so that stages are neighbours and replicas
lie apart. Both are tried, where groups then lie differently.

A part of the cluster is whole nodes, or some devices of one node: most of the cluster, or what a level's
links join (one node, say), where slower links are not worth what lies behind them.

Both are unusual: launchers number ranks in the usual order, and people want to use what they pay for. They
are chosen when they gain more than `WORTH`, so that no plan is turned over for less than predictions know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ..estimate.frameworks import OWN_FRAMEWORK
from ..estimate.step import spans
from ..mesh import Mesh
from ..problem import Pins, SearchProblem
from ..topology import Topology
from .space import allowed, divisors, pipelines_tensor_groups, tensor_sizes

WORTH = 0.01
"""What an unusual layout has to gain, as a share of the step. A judgement: software releases alone move equal
plans by 3 to 6%."""
LEAST_USED = 0.9
"""Share of the devices that is most of a cluster. A smaller part would have to use its devices a tenth better
to draw level; ruling every one of them out took DeepSeek-V3 on 2,048 H800 4 times as long."""
PP_INSIDE_ORDER = ("dp", "pp", "cp", "ep", "tp")
"""Stages of a pipeline inside a replica; without ep and cp Megatron's `--use-tp-pp-dp-mapping`."""
PP_INSIDE_FRAMEWORKS = (OWN_FRAMEWORK, "megatron")
"""Frameworks that can lay ranks out so; others have the usual order alone."""

GROUPS = (("tp",), ("ep",), ("cp",), ("dp",), ("dp", "cp"), ("dp", "cp", "ep"))


def is_unusual(mesh: Mesh, problem: SearchProblem) -> bool:
    """Whether a mesh has to gain `WORTH` to be chosen."""
    return mesh.order != problem.order or mesh.devices < problem.topology.devices


class Placements:
    """The orders of a problem's meshes that differ in where some group lies."""

    def __init__(self, problem: SearchProblem) -> None:
        self._span, self._inside = spans(problem.topology), problem.framework.name in PP_INSIDE_FRAMEWORKS

    def of(self, mesh: Mesh) -> tuple[Mesh, ...]:
        """The mesh as it is and, if that differs, with its pipeline inside dp; slices lie alike in both."""
        if not self._inside or mesh.pp == 1 or mesh.dp == 1:
            return (mesh,)
        other = replace(mesh, order=PP_INSIDE_ORDER)
        return (mesh,) if self._where(other) == self._where(mesh) else (mesh, other)

    def _where(self, mesh: Mesh) -> tuple:
        groups = tuple(self._span(mesh, axes) for axes in GROUPS)
        return groups, self._span(mesh, ("pp",)).outermost


def part_sizes(topology: Topology, *, every: bool) -> set[int]:
    """Numbers of devices that are a part worth trying; or `every` part, where nothing on all devices fits."""
    inner = {math.prod(level.size for level in topology.levels[:n]) for n in range(len(topology.levels))}
    most = range(1 if every else math.ceil(LEAST_USED * topology.devices), topology.devices)
    return inner - {topology.devices} | {devices for devices in most if topology.has_part(devices)}


def part_meshes(problem: SearchProblem, pins: Pins, *, sizes: set[int]) -> Iterator[Mesh]:
    """Every mesh of so many devices that divides the global batch."""
    batch, layers = problem.job.global_batch, max(problem.layers, 1) if problem.pipelines else 1
    for tp in tensor_sizes(problem, pins):
        for ep in allowed("ep", problem.ep_sizes, pins):
            for cp in allowed("cp", problem.cp_sizes, pins):
                for dp in allowed("dp", divisors(batch // ep), pins) if batch % ep == 0 else ():
                    inner = tp * ep * cp * dp
                    stages = [devices // inner for devices in sizes if devices % inner == 0]
                    for pp in allowed("pp", [pp for pp in stages if pp <= layers], pins):
                        tensors = pp == 1 or tp == 1 or pipelines_tensor_groups(problem, pins)
                        if tensors and inner * pp in sizes:  # pins may say otherwise
                            yield Mesh(pp=pp, dp=dp, cp=cp, ep=ep, tp=tp, order=problem.order)
