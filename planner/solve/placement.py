"""Where a mesh lies: in which order its axes are laid out over ranks, and which devices it leaves idle.

In: a `SearchProblem`, a mesh or pins. Out: the orders that differ (`Placements`), and the meshes that use
only a part of the cluster (`part_meshes`).

The order of axes decides which groups stay inside a node (or a pair of linked devices) and which cross it.
The more often a group communicates, the nearer its ranks: tp in every operation, ep and cp in every layer, dp
for every step. That leaves the pipeline: outermost, or inside dp, so that stages are neighbours and replicas
lie apart. Both are tried, where groups then lie differently.

A part of the cluster is whole nodes, or some devices of one node.

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
from .space import allowed, divisors, pipelines_tensor_groups, tensor_sizes

WORTH = 0.01
"""What an unusual layout has to gain, as a share of the step. A judgement: software releases alone move equal
plans by 3 to 6%."""
LEAST_USED = 0.9
"""Share of the devices that a part has, where a plan on all of them fits. A smaller part would have to use
its devices a tenth better to draw level; ruling them out took DeepSeek-V3 on 2,048 H800 4 times as long."""
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


def part_meshes(problem: SearchProblem, pins: Pins, *, at_least: float) -> Iterator[Mesh]:
    """Every mesh of at least so many devices, but not all, that divides the global batch."""
    batch, layers = problem.job.global_batch, max(problem.layers, 1) if problem.pipelines else 1
    for tp in tensor_sizes(problem, pins):
        for ep in allowed("ep", problem.ep_sizes, pins):
            for cp in allowed("cp", problem.cp_sizes, pins):
                for dp in allowed("dp", divisors(batch // ep), pins) if batch % ep == 0 else ():
                    inner = tp * ep * cp * dp
                    stages = range(max(1, math.ceil(at_least / inner)), layers + 1)
                    for pp in allowed("pp", stages, pins):
                        devices = inner * pp
                        if devices >= problem.topology.devices:
                            break
                        tensors = pp == 1 or tp == 1 or pipelines_tensor_groups(problem, pins)
                        if devices >= at_least and tensors and problem.topology.has_part(devices):
                            yield Mesh(pp=pp, dp=dp, cp=cp, ep=ep, tp=tp, order=problem.order)
