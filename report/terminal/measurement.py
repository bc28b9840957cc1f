"""What `bench` measured beside what the plan predicted, as a page and as a JSON document.

In: a plan and a `Measured`. Out: rows of (what, predicted, measured). The plan's waterfall is summed
into the phases that a running step can be seen to be in: waiting for a collective and waiting for a
neighbour in the pipeline look alike there, and so they are one phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from ...planner.plan import Plan
from .. import words as say
from .tables import Heading, literal, number, table, words

if TYPE_CHECKING:
    from ...runtime.bench import Measured

COMMUNICATION, OVERHEAD = "communication", "overhead"
PHASE_OF = {
    "forward compute": "forward",
    "backward compute": "backward",
    "recompute": "backward",
    "gradient norm": "gradients",
    "optimizer": "optimizer",
    "framework overhead": OVERHEAD,
}
"""By the waterfall's labels; all other parts are exposed communication and bubbles."""
NOT_TENSORS = ("context", "reserve")
"""Kinds of predicted memory that are not tensors."""


def predicted_phases_s(plan: Plan) -> dict[str, float]:
    """Seconds of a step by phase; they add up to the predicted step."""
    found: dict[str, float] = {}
    for part in plan.predicted.waterfall:
        phase = PHASE_OF.get(part.label, COMMUNICATION)
        found[phase] = found.get(phase, 0.0) + part.seconds
    return found


def predicted_tensor_bytes(plan: Plan) -> float:
    """What tensors should occupy on the fullest device."""
    kinds = plan.predicted.memory_by_kind_bytes
    return sum(size for kind, size in kinds.items() if kind not in NOT_TENSORS)


def measurement_document(plan: Plan, measured: Measured) -> dict[str, Any]:
    """The JSON of `bench`: times in seconds, sizes in bytes."""
    predicted_s = plan.predicted.step_time_s
    return {
        "ranks": measured.ranks,
        "device": measured.device,
        "measured": {
            "step_time_s": measured.step_s,
            "step_times_s": list(measured.steps_s),
            "spread": measured.spread,
            "phases_s": measured.phases_s,
            "tensor_bytes": measured.memory_bytes,
            "apply_s": measured.apply_s,
            "first_step_s": measured.first_step_s,
        },
        "predicted": {
            "step_time_s": predicted_s,
            "phases_s": predicted_phases_s(plan),
            "tensor_bytes": predicted_tensor_bytes(plan),
        },
        "step_time_error": predicted_s / measured.step_s - 1,
        "tensor_bytes_error": predicted_tensor_bytes(plan) / measured.memory_bytes - 1,
    }


def render_measurement(plan: Plan, measured: Measured) -> Group:
    """The whole page."""
    return Group(*_parts(plan, measured))


def _parts(plan: Plan, measured: Measured) -> Iterator[RenderableType]:
    yield Heading(f"{plan.mesh} on {say.plural(measured.ranks, 'rank')} ({measured.device})")
    yield _times(plan, measured)
    yield literal(
        f"{len(measured.steps_s)} steps, spread {measured.spread:.1%}; the model was put onto its mesh in "
        f"{say.duration(measured.apply_s)}, the first step took {say.duration(measured.first_step_s)}"
    )
    if measured.device != plan.cluster.device:
        yield literal(f"the prediction is for {plan.cluster.device}: not for what was measured here")


def _times(plan: Plan, measured: Measured) -> RenderableType:
    made = table(words(""), number("predicted"), number("measured"), number("predicted is"))
    made.add_row(*_row("step", plan.predicted.step_time_s, measured.step_s, say.duration))
    planned = predicted_phases_s(plan)
    for phase in dict.fromkeys((*measured.phases_s, *planned)):
        made.add_row(*_row(f"  {phase}", planned.get(phase), measured.phases_s.get(phase), say.duration))
    made.add_row(
        *_row(
            "memory of tensors",
            predicted_tensor_bytes(plan),
            measured.memory_bytes,
            lambda size: f"{size / 1e6:.4g} MB",
        )
    )
    return made


def _row(what: str, predicted: float | None, found: float | None, unit: Any) -> Iterator[Any]:
    yield literal(what)
    yield literal("-" if predicted is None else unit(predicted))
    yield literal("-" if found is None else unit(found))
    yield literal("" if not predicted or not found else f"{predicted / found - 1:+.1%}")
