"""Splits as a tree of modules: placements, the bytes of parameters, collectives and lines of code.

In: a `Plan`. Out: one tree a block class, its parameters included: a module that has parameters is there even
where no op of it is split. Bytes are those of the job's data type, whole and on one device.
"""

from __future__ import annotations

import math
from typing import Any

from ...planner.plan import ParameterPlacement, Plan
from .. import words

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def split_tree(plan: Plan) -> list[dict[str, Any]]:
    """One tree a block class: nodes have `name`, `children`, `ops` and, with parameters, `bytes`."""
    roots = {block: _node(block, times=plan.blocks_of(block)) for block in _blocks(plan)}
    for split in plan.splits:
        op = _descend(roots[split.block], split.module)["ops"].setdefault(
            split.op, {"axes": {}, "source": split.source}
        )
        said, arrow, after = split.words.partition(" -> ")
        op["axes"][split.axis] = {"words": said, "after": after if arrow else "", "whole": split.dim is None}
    loose = _node("model")
    for parameter in plan.parameters:
        _weigh(_home(parameter, roots, loose), parameter, plan)
    if loose["held"]:
        roots["model"] = loose
    return [_tidy(root) for root in roots.values()]


def _blocks(plan: Plan) -> dict[str, None]:
    return dict.fromkeys(split.block for split in plan.splits)


def _node(name: str, times: int = 0) -> dict[str, Any]:
    return {"name": name, "times": times, "children": {}, "ops": {}, "whole": 0.0, "held": 0.0}


def _descend(node: dict[str, Any], module: str) -> dict[str, Any]:
    """The node of a module path below `node`, made where it is missing."""
    for name in module.split("."):
        node = node["children"].setdefault(name, _node(name))
    return node


def _home(
    parameter: ParameterPlacement, roots: dict[str, Any], loose: dict[str, Any]
) -> list[dict[str, Any]]:
    """The nodes on the way to a parameter's module: in the block class that has its ops, else beside them."""
    module = parameter.fqn.split(".")[:-1]
    deepest: list[dict[str, Any]] = []
    for root in roots.values():
        way = [root]
        for name in module:
            if name not in way[-1]["children"]:
                break
            way.append(way[-1]["children"][name])
        if len(way) > max(1, len(deepest)):
            deepest = way
    if deepest:
        return deepest
    way = [loose]
    for name in module:
        way.append(way[-1]["children"].setdefault(name, _node(name)))
    return way


def _weigh(way: list[dict[str, Any]], parameter: ParameterPlacement, plan: Plan) -> None:
    """Add a parameter's bytes to each module above it."""
    whole = math.prod(parameter.shape) * DTYPE_BYTES.get(plan.job.dtype, 2)
    cut = math.prod(plan.mesh.size(axis) for axis, text in parameter.placements if text.startswith("S("))
    for node in way:
        node["whole"] += whole
        node["held"] += whole / cut


def _tidy(node: dict[str, Any]) -> dict[str, Any]:
    """Chains of only children in one line; children and ops as lists in order."""
    children = [_tidy(child) for child in node["children"].values()]
    ops = [
        {"op": op, "splits": list(o["axes"].items()), "source": o["source"]} for op, o in node["ops"].items()
    ]
    if len(children) == 1 and not ops and not node["times"]:
        [only] = children
        return {**only, "name": f"{node['name']}.{only['name']}"}
    return {
        "name": node["name"],
        "times": node["times"],
        "children": children,
        "ops": ops,
        "bytes": _bytes(node),
    }


def _bytes(node: dict[str, Any]) -> str:
    """`218 MiB, 27.3 MiB a device`; empty without parameters."""
    if not node["whole"]:
        return ""
    whole, held = words.size(node["whole"]), words.size(node["held"])
    return whole if node["held"] == node["whole"] else f"{whole}, {held} a device"


def parameter_rows(plan: Plan) -> list[dict[str, Any]]:
    """Every parameter: name, dims with sizes, size on all devices together, placement by axis."""
    return [
        {
            "fqn": parameter.fqn,
            "dims": " x ".join(
                f"{dim} {size:,}" for dim, size in zip(parameter.dims, parameter.shape, strict=False)
            ),
            "elements": words.count(math.prod(parameter.shape)),
            "placements": [(axis, text.split("@")[0], text == "R") for axis, text in parameter.placements],
        }
        for parameter in plan.parameters
    ]
