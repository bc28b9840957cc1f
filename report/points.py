"""Explored plans as points of step time against memory, and the front that none of them beats.

In: a `Plan`. Out: one `Point` for each plan that was priced and told: the plan itself, the plans that
none beats in both time and memory (where they were asked for), and the runners-up, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..planner.plan import Alternative, Plan
from . import words

SAME = 1e-9
"""Relative difference of time and memory below which two plans of one mesh are the same plan."""


LABEL_HEIGHT, LABEL_WIDTH = 0.05, 0.3
"""Room that a label takes, as shares of a figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One priced plan."""

    memory_bytes: float
    """Of the fullest device."""
    step_s: float
    label: str
    """Its name where an expert would try it, else its mesh."""
    mesh: str
    choices: str
    """What it chose besides the mesh, in words."""
    reason: str
    """Why it lost; of the plan itself, why it won."""
    kind: str
    """`chosen`, `front` (none beats it in both, but it is slower) or `rival`."""


def points(plan: Plan) -> tuple[Point, ...]:
    """The plan first, then the front, then the other runners-up."""
    front = [_point(each, "front") for each in plan.pareto if each.mesh.devices == plan.mesh.devices]
    rivals = [_point(each, "rival") for each in plan.alternatives]
    return tuple(_once([_chosen(plan), *front, *rivals]))


def _chosen(plan: Plan) -> Point:
    said = (
        words.zero(plan.zero_stage, plan.shard_group),
        words.batches(plan.micro_batch, plan.num_microbatches),
        words.recompute(plan.recompute),
    )
    return Point(
        memory_bytes=plan.predicted.peak_memory_bytes,
        step_s=plan.predicted.step_time_s,
        label=str(plan.mesh),
        mesh=str(plan.mesh),
        choices=", ".join(said),
        reason=plan.reasons[0] if plan.reasons else "the fastest found",
        kind="chosen",
    )


def front(found: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both memory and time, by memory."""
    best, kept = float("inf"), []
    for point in sorted(found, key=lambda point: (point.memory_bytes, point.step_s)):
        if point.step_s < best:
            best = point.step_s
            kept.append(point)
    return kept


def apart(found: Sequence[Point]) -> list[Point]:
    """The points whose labels, beside them, do not run into the label of one that comes before."""
    steps, widest = [point.step_s for point in found], max(point.memory_bytes for point in found)
    tallest = max(steps) - min(steps) or 1.0
    kept: list[Point] = []
    for point in found:
        near = (
            abs(point.step_s - other.step_s) < LABEL_HEIGHT * tallest
            and abs(point.memory_bytes - other.memory_bytes) < LABEL_WIDTH * widest
            for other in kept
        )
        if not any(near):
            kept.append(point)
    return kept


def choices(alternative: Alternative) -> str:
    """What a runner-up chose besides its mesh."""
    said = (
        words.zero(alternative.zero_stage, alternative.shard_group),
        words.batches(alternative.micro_batch, alternative.num_microbatches),
        words.recompute(alternative.recompute),
    )
    return ", ".join(said)


def _point(alternative: Alternative, kind: str) -> Point:
    return Point(
        memory_bytes=alternative.peak_memory_bytes,
        step_s=alternative.step_time_s,
        label=alternative.seeded_as or str(alternative.mesh),
        mesh=str(alternative.mesh),
        choices=choices(alternative),
        reason=alternative.reason,
        kind=kind,
    )


def _once(found: Iterable[Point]) -> Iterator[Point]:
    """Each plan once; of two tellings of a runner-up the one with a name wins."""
    kept: list[Point] = []
    for point in found:
        twin = next((i for i, other in enumerate(kept) if _same(point, other)), None)
        if twin is None:
            kept.append(point)
        elif kept[twin].kind == "front" and point.label != point.mesh:
            kept[twin] = replace(point, kind="front")
    return iter(kept)


def _same(left: Point, right: Point) -> bool:
    pairs = ((left.memory_bytes, right.memory_bytes), (left.step_s, right.step_s))
    return left.mesh == right.mesh and all(abs(a - b) <= SAME * max(abs(a), abs(b)) for a, b in pairs)
