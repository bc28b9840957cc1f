"""The mesh as a picture: devices in nodes, ready to be coloured by their place along an axis.

Up to `MOST_NODES` nodes are all drawn. Beyond, nodes that differ only in their data-parallel place
are drawn once, with how many they stand for; if there are still too many, the first and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...planner.mesh import Mesh
from ...planner.plan import Plan
from .. import words

MOST_NODES = 32
"""Nodes drawn one by one."""
COLUMNS = 8
"""Devices in a row of a node, at most."""


def mesh_picture(plan: Plan) -> dict[str, Any]:
    """Nodes to draw, the axes that can colour them, and what a reader sees on hover."""
    mesh, per_node = plan.mesh, max(1, plan.cluster.devices_per_node)
    nodes, folded, left_out = _nodes(mesh, per_node)
    axes = [axis for axis in mesh.order if mesh.size(axis) > 1]
    return {
        "nodes": nodes,
        "columns": min(COLUMNS, per_node, mesh.devices),
        "axes": axes,
        "shown": next((axis for axis in ("pp", "ep", "tp", "dp", "cp") if axis in axes), ""),
        "formula": words.rank_formula(mesh),
        "folded": folded,
        "left_out": left_out,
        "data": _data(plan),
        "groups": [_group(plan, axis) for axis in axes],
        "links": [
            f"{link.kind} joins {link.size:,} {'devices' if i == 0 else 'groups'} of a {link.level}: "
            f"{words.rate(link.bytes_per_s)} a device and direction"
            for i, link in enumerate(plan.cluster.links)
            if link.size > 1
        ],
    }


def _nodes(mesh: Mesh, per_node: int) -> tuple[list[dict[str, Any]], bool, int]:
    """(nodes to draw, whether they stand for others, how many kinds of nodes are left out)."""
    count = -(-mesh.devices // per_node)
    all_nodes = [range(i * per_node, min((i + 1) * per_node, mesh.devices)) for i in range(count)]
    if count <= MOST_NODES:
        return [_node([i], ranks) for i, ranks in enumerate(all_nodes)], False, 0
    alike: dict[tuple, list[int]] = {}
    for i, ranks in enumerate(all_nodes):
        alike.setdefault(_signature(mesh, ranks), []).append(i)
    drawn = [_node(indices, all_nodes[indices[0]]) for indices in alike.values()]
    if len(drawn) <= MOST_NODES:
        return drawn, True, 0
    return [*drawn[: MOST_NODES - 1], drawn[-1]], True, len(drawn) - MOST_NODES


def _signature(mesh: Mesh, ranks: Sequence[int]) -> tuple:
    """What a node holds, its data-parallel place left out."""
    others = [axis for axis in mesh.order if axis != "dp"]
    ends = (mesh.coordinates(ranks[0]), mesh.coordinates(ranks[-1]))
    return tuple(point[axis] for point in ends for axis in others)


def _node(indices: Sequence[int], ranks: Sequence[int]) -> dict[str, Any]:
    return {
        "name": f"node {indices[0]}",
        "stands_for": len(indices),
        "first_others": words.listed([str(i) for i in indices[1:]], limit=3),
        "ranks": list(ranks),
    }


def _data(plan: Plan) -> dict[str, Any]:
    """What the page's script needs to say where a rank stands and what it holds."""
    mesh = plan.mesh
    return {
        "order": list(mesh.order),
        "sizes": mesh.sizes,
        "strides": {axis: mesh.stride(axis) for axis in mesh.order},
        "over": {axis: _crossed(plan, axis) for axis in mesh.order if mesh.size(axis) > 1},
        "stages": [
            {
                "layers": words.plural(stage.layers, "layer"),
                "blocks": ", ".join(f"{number} {name}" for name, number, _ in stage.blocks),
                "peak": f"{words.gib(stage.peak_memory_bytes)} GiB at the peak",
            }
            for stage in plan.stages
        ],
    }


def _group(plan: Plan, axis: str) -> dict[str, str]:
    """One axis: its size, its stride, an example of its groups."""
    mesh = plan.mesh
    return {
        "axis": axis,
        "size": f"{mesh.size(axis):,}",
        "stride": f"{mesh.stride(axis):,}",
        "groups": f"{mesh.devices // mesh.size(axis):,}",
        "first": words.ranks(next(mesh.groups(axis))),
        "over": _crossed(plan, axis),
    }


def _crossed(plan: Plan, axis: str) -> str:
    """The links that the first group of an axis talks over."""
    first = next(plan.mesh.groups(axis))
    unit = 1
    for link in plan.cluster.links:
        unit *= link.size
        if first[0] // unit == first[-1] // unit:
            return f"{link.kind} ({link.level}), {words.rate(link.bytes_per_s)}"
    return "(not told)"
