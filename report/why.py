"""Why a plan is not another one: what some pinned choices change, in words.

In: a plan, the best plan under the pins (or why none fits), the pins. Out: sentences, each with its
numbers: what the step gains or loses, which parts of it, over which links, what else had to change,
and what the fullest device holds instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..planner.mesh import AXES
from ..planner.plan import Infeasible, Plan
from ..planner.problem import pins_in_words
from . import words
from .compare import Comparison, compare, comparison_document

SMALL_SHARE = 0.1
"""Changes below this share of the largest one are not told."""
MOST_TOLD = 5
"""Changes told in one sentence: the comparison has them all."""
FIXES_TOLD = 3
UNTOLD = ("rank order", "layers a stage")
"""Choices that follow from others."""
SAME_TIME = 5e-4
"""Step times closer than this share are called the same: it is what a percentage with one decimal shows."""
PIN_CHOICES = {"zero": "ZeRO", "micro_batch": "microbatch", "virtual_stages": "schedule"}
"""Rows of a comparison that a pin of another name stands in."""

Pins = Mapping[str, int | str]


def why_sentences(plan: Plan, pinned: Plan | Infeasible, pins: Pins) -> tuple[str, ...]:
    """The answer, most important sentence first."""
    return tuple(_does_not_fit(pinned, pins) if isinstance(pinned, Infeasible) else _told(plan, pinned, pins))


def why_document(plan: Plan, pinned: Plan | Infeasible, pins: Pins) -> dict[str, Any]:
    """The answer as plain JSON: `reasons`, and the comparison (`left`: the plan) or `infeasible`."""
    document: dict[str, Any] = {"pins": dict(pins), "reasons": list(why_sentences(plan, pinned, pins))}
    if isinstance(pinned, Infeasible):
        from .json_view import infeasible_document

        return document | infeasible_document(pinned)
    return document | comparison_document(compare(plan, pinned))


def _does_not_fit(answer: Infeasible, pins: Pins) -> Iterator[str]:
    yield f"Under {pins_in_words(pins)} {answer.reason}."
    if answer.short_by_bytes > 0:
        yield f"{words.gib(answer.short_by_bytes)} GiB a device are missing."
    fixes = answer.fixes or (answer.nearest_fix,)
    yield f"What would help: {'; or '.join(fixes[:FIXES_TOLD])}."


def _told(plan: Plan, pinned: Plan, pins: Pins) -> Iterator[str]:
    found = compare(plan, pinned)
    yield _headline(found, pins)
    yield from _time(found)
    yield from _links(plan, pinned)
    yield from _other_choices(found, pins)
    yield from _memory(plan, found)


def _headline(found: Comparison, pins: Pins) -> str:
    before, after = found.step_time_s
    name, share = pins_in_words(pins), after / before - 1
    if all(left == right for _, left, right in found.choices):
        return f"{name} is what the plan has: nothing changes."
    if abs(share) < SAME_TIME:
        return f"With {name} a step takes the same {words.duration(before)}."
    difference, slower = words.duration(abs(after - before)), "slower" if share > 0 else "faster"
    told = (
        f"With {name} a step takes {words.duration(after)} instead of {words.duration(before)}: "
        f"{difference} ({words.percent(abs(share))}) {slower}."
    )
    return told if share > 0 else f"{told} The plan was not the best for this job."


def _time(found: Comparison) -> Iterator[str]:
    changes = [(name, right - left) for name, left, right in found.time_s]
    told = _largest(changes, floor=SAME_TIME * found.step_time_s[0])
    if told:
        yield f"Time: {', '.join(_signed(words.duration, change, name) for name, change in told)}."


def _memory(plan: Plan, found: Comparison) -> Iterator[str]:
    changes = [(name, right - left) for name, left, right in found.memory_bytes]
    before, after = (f"{words.gib(peak)} GiB" for peak in found.peak_memory_bytes)
    told = _largest(changes, floor=SAME_TIME * plan.predicted.device_memory_bytes)
    if told:
        kinds = ", ".join(_signed(lambda b: f"{words.gib(b)} GiB", change, name) for name, change in told)
        yield f"Memory of the fullest device: {after} instead of {before}: {kinds}."


def _largest(changes: list[tuple[str, float]], *, floor: float) -> list[tuple[str, float]]:
    """The changes worth a word, largest first."""
    ordered = sorted(changes, key=lambda change: -abs(change[1]))
    least = max(floor, SMALL_SHARE * abs(ordered[0][1])) if ordered else floor
    return [change for change in ordered if abs(change[1]) > least][:MOST_TOLD]


def _signed(show: Callable[[float], str], change: float, name: str) -> str:
    return f"{show(abs(change))} {'more' if change > 0 else 'less'} {name}"


def _links(plan: Plan, pinned: Plan) -> Iterator[str]:
    """Axes whose groups now talk over other links."""
    for axis in AXES:
        before, after = _outermost(plan, axis), _outermost(pinned, axis)
        if after is None or before == after or pinned.mesh.size(axis) == plan.mesh.size(axis) == 1:
            continue
        now = f"{axis}={pinned.mesh.size(axis)} talks over {_link(pinned, after)}"
        yield f"{now}, not {_link(plan, before)}." if before is not None else f"{now}."


def _outermost(plan: Plan, axis: str) -> int | None:
    """Index of the outermost level that collectives of this axis alone cross."""
    order = [link.level for link in plan.cluster.links]
    levels = [order.index(c.level) for c in plan.communications if c.axis == axis and c.level in order]
    return max(levels, default=None)


def _link(plan: Plan, level: int) -> str:
    link = plan.cluster.links[level]
    return f"the {link.level}'s {link.kind} ({words.rate(link.bytes_per_s)} a device)"


def _other_choices(found: Comparison, pins: Pins) -> Iterator[str]:
    pinned = {PIN_CHOICES.get(name, name) for name in pins}
    others = [
        f"{name} {right} (was {left})"
        for name, left, right in found.choices
        if left != right and name not in pinned and name not in UNTOLD
    ]
    if others:
        yield f"Best with it: {', '.join(others)}."
