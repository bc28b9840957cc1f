"""Measured curves into a topology file, or a file of their own.

In: curves of a log, and a drafted topology or none. Out: data in the format of `clusters/*.yaml`
(`measured` of a level) or `curves/*.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...planner.topology import CollectiveCurve

MICRO = 1e-6
SMALL_BYTES = 2**20
"""A level's curve must reach down to this: smaller messages are priced like the smallest measured one."""


def attach(
    data: Mapping[str, Any], curves: Sequence[CollectiveCurve]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The topology with each curve on the level whose groups have that many ranks, and notes on the rest.

    A group belongs to a level if it holds several full units of the levels below.
    """
    levels = [dict(level) for level in data["levels"]]
    notes = []
    for curve in curves:
        index = _level_of(levels, curve.ranks)
        if index is None or curve.points[0][0] > SMALL_BYTES:
            why = "fits no level" if index is None else "has no sizes of 1 MiB or less"
            notes.append(f"left out {curve.collective} over {curve.ranks} ranks: it {why}")
            continue
        known = levels[index].setdefault("measured", [])
        known.append({**entry(curve), "source": curve.source})
    return {**data, "levels": levels}, tuple(notes)


def curve_file(curves: Sequence[CollectiveCurve], *, name: str, device: str) -> dict[str, Any]:
    """The data of a `curves/*.yaml` file."""
    return {
        "name": name,
        "device": device,
        "library": "nccl-tests (version not in the log)",
        "link": "as measured",
        "source": "; ".join(dict.fromkeys(curve.source for curve in curves)),
        "curves": [entry(curve) for curve in curves],
    }


def entry(curve: CollectiveCurve) -> dict[str, Any]:
    """One curve with bytes and microseconds."""
    points = [[int(size), round(seconds / MICRO, 3)] for size, seconds in curve.points]
    return {"collective": curve.collective, "ranks": curve.ranks, "bytes_us": points}


def _level_of(levels: Sequence[Mapping[str, Any]], ranks: int) -> int | None:
    below = 1
    for i, level in enumerate(levels):
        unit = below * level["size"]
        outermost = i == len(levels) - 1
        if below < ranks and ranks % below == 0 and (ranks <= unit or outermost):
            return i
        below = unit
    return None
