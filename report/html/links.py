"""Communication by level of links: how long a level is busy, what a device sends over it, how near that is to
what the link carries.

In: a `Plan`. Out: one row a level, in words and percentages. A collective counts at the widest level it
crosses. What a device's share of that level carries follows from the group: with `n` members, `g` of them on
the near side of the link together with the device, a ring moves (n - 1)/n of the buffer over the boundary
once (an all-reduce twice), shared by the g members' links; an all-to-all sends the parts of the n - g
members outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...planner.cost import Communication
from ...planner.layout import Collective
from ...planner.mesh import AXES
from ...planner.plan import Plan
from .. import words

RING_LAPS = {Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1}
"""How often a ring passes the buffer round."""


def links(plan: Plan) -> list[dict[str, Any]]:
    """One row a level: busy and exposed time as shares of the step, bytes sent, share of the link's rate."""
    rates = {link.level: link for link in plan.cluster.links}
    levels = dict.fromkeys([*rates, *(comm.level for comm in plan.communications)])
    return [
        _row(plan, level, [comm for comm in plan.communications if comm.level == level]) for level in levels
    ]


def _row(plan: Plan, level: str, here: Sequence[Communication]) -> dict[str, Any]:
    step_s = plan.predicted.step_time_s
    link = next((link for link in plan.cluster.links if link.level == level), None)
    busy_s = sum(comm.seconds * comm.count for comm in here)
    exposed_s = sum(comm.exposed_s * comm.count for comm in here)
    return {
        "level": level,
        "link": f"{link.kind}, {words.rate(link.bytes_per_s)}" if link else "",
        "axes": ", ".join(dict.fromkeys(comm.axis for comm in here)) or "nothing",
        "busy": words.duration(busy_s),
        "exposed": words.duration(exposed_s),
        "busy_width": min(100.0, words.percentage(busy_s, step_s)),
        "exposed_width": min(100.0, words.percentage(exposed_s, step_s)),
        "share": words.percent(busy_s / step_s),
        "used": _used(plan, level, here, busy_s),
    }


def _used(plan: Plan, level: str, here: Sequence[Communication], busy_s: float) -> str:
    """`12.3 GiB a device, 38.0 GB/s while busy: 76.0 % of what it carries`; empty where nothing is known."""
    index = next((i for i, link in enumerate(plan.cluster.links) if link.level == level), None)
    if index is None or busy_s <= 0.0:
        return ""
    unit = math.prod(link.size for link in plan.cluster.links[:index])
    crossing = [crossing_bytes(plan, comm, unit) * comm.count for comm in here]
    rate = sum(crossing) / busy_s
    share = words.percent(rate / plan.cluster.links[index].bytes_per_s)
    sent = words.size(sum(crossing))
    return f"{sent} a device and step, {words.rate(rate)} while busy: {share} of what it carries"


def crossing_bytes(plan: Plan, comm: Communication, unit: int) -> float:
    """Bytes that a device's link out of its unit of `unit` devices carries in one collective."""
    near, members = _near(plan, comm, unit), comm.group_size
    if members <= 1:
        return 0.0
    match comm.collective:
        case Collective.ALL_TO_ALL:
            return comm.bytes * (members - near) / members
        case Collective.BROADCAST | Collective.SEND_RECV:
            return comm.bytes
    return RING_LAPS[comm.collective] * comm.bytes * (members - 1) / members / near


def _near(plan: Plan, comm: Communication, unit: int) -> int:
    """Members of the first group of the collective's axes that share a unit with its first."""
    axes = comm.axis.split("+")
    if not set(axes) <= set(AXES):
        return 1
    first = next(plan.mesh.groups(*axes))
    here = sum(rank // unit == first[0] // unit for rank in first)
    return max(1, min(here, comm.group_size - 1))
