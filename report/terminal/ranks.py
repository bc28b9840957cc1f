"""The mesh: which ranks form each axis's groups, and over which link each group talks.

A group crosses the innermost link level that still holds all its ranks in one unit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from rich.console import Group, RenderableType

from ...planner.plan import Link, Plan
from .. import words
from .tables import literal, number, table
from .tables import words as column

AXIS_NAMES = {"pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "tp": "tensor"}
GROUPS_SHOWN = 2
"""Groups shown from the front where there is room; the last one is always shown."""
LINE_CELLS = 32
"""Room for examples of groups beside the other columns."""

RankGroup = tuple[int, ...]


def rank_table(plan: Plan) -> RenderableType:
    """One row an axis (and a set of axes that talk together), then how ranks lie on the nodes."""
    if plan.mesh.devices == 1:
        return literal("one device: no groups")
    made = table(
        column("Axis"),
        number("Size"),
        number("Stride"),
        number("Groups"),
        column("Ranks"),
        column("Talks over"),
    )
    for axes in _axes(plan):
        made.add_row(*_row(plan, axes))
    return Group(made, literal(_placement(plan), "dim"))


def _axes(plan: Plan) -> list[tuple[str, ...]]:
    """Axes larger than one, outermost first, and the joined ones that communications name."""
    single = [(axis,) for axis in plan.mesh.order if plan.mesh.size(axis) > 1]
    joined = dict.fromkeys(_real_axes(plan, comm.axis.split("+")) for comm in plan.communications)
    return single + [axes for axes in joined if len(axes) > 1]


def _real_axes(plan: Plan, names: Iterable[str]) -> tuple[str, ...]:
    wanted = set(names)
    return tuple(axis for axis in plan.mesh.order if axis in wanted and plan.mesh.size(axis) > 1)


def _row(plan: Plan, axes: tuple[str, ...]) -> list[RenderableType]:
    mesh = plan.mesh
    size = math.prod(mesh.size(axis) for axis in axes)
    number_of_groups = mesh.devices // size
    examples = _examples(mesh.groups(*axes))
    name = f"{axes[0]} {AXIS_NAMES[axes[0]]}" if len(axes) == 1 else "+".join(axes)
    stride = f"{mesh.stride(axes[0]):,}" if len(axes) == 1 else ""
    cells = [
        name,
        f"{size:,}",
        stride,
        f"{number_of_groups:,}",
        _examples_in_words(examples, number_of_groups),
        _talks_over(plan, axes, examples),
    ]
    return [literal(cell) for cell in cells]


def _examples(groups: Iterable[RankGroup]) -> list[RankGroup]:
    """The first few groups and the last."""
    iterator = iter(groups)
    return [*islice(iterator, GROUPS_SHOWN), *deque(iterator, maxlen=1)]


def _examples_in_words(groups: Sequence[RankGroup], number_of_groups: int) -> str:
    """As many examples as fit one line, the first and the last at least."""
    shown = [words.ranks(group) for group in groups]
    ways = [
        [*shown[:first], *["..."] * (number_of_groups > first + 1), *shown[-1:] * (number_of_groups > first)]
        for first in (2, 1)
    ]
    lines = ["  ".join(way) for way in ways if number_of_groups > 1] or shown
    return next((line for line in lines if len(line) <= LINE_CELLS), lines[-1])


def _talks_over(plan: Plan, axes: tuple[str, ...], groups: Sequence[RankGroup]) -> str:
    """The link, e.g. `nvlink (node), 450 GB/s`; the level alone if the plan names no links."""
    crossed = max((_crossed(plan.cluster.links, group) for group in groups), default=-1)
    if crossed >= 0:
        link = plan.cluster.links[crossed]
        return f"{link.kind} ({link.level}), {words.rate(link.bytes_per_s)}"
    levels = {c.level for c in plan.communications if _real_axes(plan, c.axis.split("+")) == axes}
    return words.listed(sorted(levels)) if levels else "(not told)"


def _crossed(links: Sequence[Link], group: RankGroup) -> int:
    """Index of the innermost level one unit of which holds the whole group; -1 if none is known."""
    unit = 1
    for index, link in enumerate(links):
        unit *= link.size
        if len({rank // unit for rank in group}) == 1:
            return index
    return -1


def _placement(plan: Plan) -> str:
    """The rank formula, and what the first node holds."""
    mesh = plan.mesh
    here = range(min(plan.cluster.devices_per_node, mesh.devices))
    points = [mesh.coordinates(rank) for rank in here]
    held = ", ".join(
        f"{axis} {words.ranks(sorted({point[axis] for point in points}))}"
        for axis in mesh.order
        if mesh.size(axis) > 1
    )
    return f"{words.rank_formula(mesh)}; node 0 holds ranks {words.ranks(here)}: {held}"
