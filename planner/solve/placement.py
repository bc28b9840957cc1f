"""Where a mesh lies: in which order its axes are laid out over ranks, and which devices it leaves idle.

In: a `SearchProblem`, a mesh or pins. Out: the orders that differ (`Placements`), and the meshes that use
only a part of the cluster (`part_meshes`).

The order of axes decides which groups stay inside a node (or a pair of linked devices) and which cross it.
Tensor groups are always neighbours: their collectives run in every layer and cannot be hidden. Of the other
axes every permutation is tried that the framework can lay out, once for each way in which groups then lie.

A part of the cluster is whole nodes, or some devices of one node.

Both are unusual: launchers number ranks in the usual order, and people want to use what they pay for. They
are chosen when they gain more than `WORTH`, so that no plan is turned over for less than predictions know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

from ..estimate.frameworks import OWN_FRAMEWORK
from ..estimate.step import spans
from ..mesh import DEFAULT_ORDER, Mesh
from ..problem import Pins, SearchProblem
from .space import allowed, divisors, pipelines_tensor_groups, tensor_sizes

WORTH = 0.01
"""What an unusual layout has to gain, as a share of the step. A judgement: software releases alone move equal
plans by 3 to 6%."""
PP_INSIDE_ORDER = ("dp", "cp", "ep", "pp", "tp")
"""Stages of a pipeline next to each other; Megatron calls it `--use-tp-pp-dp-mapping`."""
ORDERS_OF = {
    OWN_FRAMEWORK: tuple((*outer, "tp") for outer in permutations(DEFAULT_ORDER[:-1])),
    "megatron": (DEFAULT_ORDER, PP_INSIDE_ORDER),
}
"""Orders that a framework can lay out; others have the usual one alone."""

GROUPS = (("dp",), ("dp", "cp"), ("dp", "cp", "ep"))
SLICE = ("tp", "ep", "cp")


def is_unusual(mesh: Mesh, problem: SearchProblem) -> bool:
    """Whether a mesh has to gain `WORTH` to be chosen."""
    return mesh.order != problem.order or mesh.devices < problem.topology.devices


class Placements:
    """The orders of a problem's meshes that differ in where some group lies."""

    def __init__(self, problem: SearchProblem) -> None:
        self._span = spans(problem.topology)
        usual = problem.order
        self._orders = (usual, *(o for o in ORDERS_OF.get(problem.framework.name, ()) if o != usual))

    def alike(self, mesh: Mesh) -> list[tuple[Mesh, ...]]:
        """The mesh in every order that differs, those together whose tp, ep and cp groups lie alike."""
        seen: set[tuple] = set()
        classes: dict[tuple, list[Mesh]] = {}
        for laid in self._distinct(mesh):
            tensors = tuple(self._span(laid, (axis,)) for axis in SLICE)
            rest = tuple(self._span(laid, axes) for axes in GROUPS)
            where = (tensors, rest, self._span(laid, ("pp",)).outermost)
            if where not in seen:
                seen.add(where)
                classes.setdefault(tensors, []).append(laid)
        return [tuple(found) for found in classes.values()]

    def _distinct(self, mesh: Mesh) -> list[Mesh]:
        """One mesh for each order of the axes larger than one."""
        found: dict[tuple[str, ...], Mesh] = {}
        for order in self._orders:
            large = tuple(axis for axis in order if mesh.size(axis) > 1)
            found.setdefault(large, replace(mesh, order=order))
        return list(found.values())


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
