"""Splits as a tree of modules, and the parameters' placements."""

from __future__ import annotations

from typing import Any

from ...planner.plan import Plan
from .. import words


def split_tree(plan: Plan) -> list[dict[str, Any]]:
    """One tree a block class: nodes have `name`, `children` and `ops`."""
    made = []
    for block in dict.fromkeys(split.block for split in plan.splits):
        root = {"name": block, "times": _times(plan, block), "children": {}, "ops": {}}
        for split in plan.splits:
            if split.block == block:
                node = _descend(root, split.module)
                op = node["ops"].setdefault(split.op, {})
                op[split.axis] = {"words": split.words, "whole": split.dim is None}
        made.append(_tidy(root))
    return made


def _times(plan: Plan, block: str) -> int:
    """How many blocks of the class all stages hold together."""
    return sum(number for stage in plan.stages for name, number, _ in stage.blocks if name == block)


def _descend(node: dict[str, Any], module: str) -> dict[str, Any]:
    """The node of a module path below `node`, made where it is missing."""
    for name in module.split("."):
        node = node["children"].setdefault(name, {"name": name, "times": 0, "children": {}, "ops": {}})
    return node


def _tidy(node: dict[str, Any]) -> dict[str, Any]:
    """Chains of only children in one line; children and ops as lists in order."""
    children = [_tidy(child) for child in node["children"].values()]
    ops = [{"op": op, "splits": list(axes.items())} for op, axes in node["ops"].items()]
    if len(children) == 1 and not ops and not node["times"]:
        [only] = children
        return {**only, "name": f"{node['name']}.{only['name']}"}
    return {"name": node["name"], "times": node["times"], "children": children, "ops": ops}


def parameter_rows(plan: Plan) -> list[dict[str, Any]]:
    """Every parameter: name, dims with sizes, size on all devices together, placement by axis."""
    return [
        {
            "fqn": parameter.fqn,
            "dims": " x ".join(
                f"{dim} {size:,}" for dim, size in zip(parameter.dims, parameter.shape, strict=False)
            ),
            "elements": words.count(_elements(parameter.shape)),
            "placements": [(axis, text.split("@")[0], text == "R") for axis, text in parameter.placements],
        }
        for parameter in plan.parameters
    ]


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
