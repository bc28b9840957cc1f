"""The names of a plan matched with those of a module.

In: a plan, whose names carry `*` for the index of a repeated layer, or the indices of one kind of layers,
and a model. Out: for each parameter its `ParameterPlacement`, for each planned border the modules it is
on. Tied parameters have one entry, under any of their names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

from torch import nn

from ..planner.errors import PlanError
from ..planner.plan import ParameterPlacement, Plan

INDICES = re.compile(r"\{([\d,-]+)\}")
"""Of layers of one kind, as in `layers.{1-3,7}.mlp`."""


def matches(pattern: str, name: str) -> bool:
    """Whether `layers.*.mlp.up`, or `layers.{1-3,7}.mlp.up`, stands for `layers.3.mlp.up`."""
    return _regex(pattern).fullmatch(name) is not None


@cache
def _regex(pattern: str) -> re.Pattern:
    parts = INDICES.split(pattern)
    texts = [re.escape(part).replace(r"\*", r"\d+") for part in parts[::2]]
    alternatives = ["|".join(map(str, _listed(part))) for part in parts[1::2]]
    return re.compile(texts[0] + "".join(f"(?:{a}){t}" for a, t in zip(alternatives, texts[1:], strict=True)))


def in_all_layers(pattern: str) -> str:
    """The same name with `*` for the indices of one kind."""
    return INDICES.sub("*", pattern)


def _listed(ranges: str) -> list[int]:
    ends = [text.partition("-") for text in ranges.split(",")]
    return [i for first, _, last in ends for i in range(int(first), int(last or first) + 1)]


def aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each name of a parameter, all its names: one unless it is tied."""
    by_identity: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity[id(parameter)].append(name)
    return {name: tuple(names) for names in by_identity.values() for name in names}


def placements_by_name(plan: Plan, model: nn.Module) -> dict[str, ParameterPlacement]:
    """The planned placement of every parameter, under each of its names.

    Raises `PlanError` for a parameter that the plan does not know, knows in another shape, or
    places in two ways.
    """
    every = aliases(model)
    result = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        planned = _planned(plan, every[name])
        if planned.shape != tuple(parameter.shape):
            raise PlanError(
                f"{name} has shape {tuple(parameter.shape)}, the plan says {planned.shape}: "
                "it is for another model"
            )
        result[name] = planned
    return result


def _planned(plan: Plan, names: tuple[str, ...]) -> ParameterPlacement:
    exact = [p for p in plan.parameters if p.fqn in names]
    found = exact or [p for p in plan.parameters if any(matches(p.fqn, name) for name in names)]
    if not found:
        raise PlanError(f"the plan has no parameter {names[0]}: it is for another model")
    if len({p.placements for p in found}) > 1:
        raise PlanError(f"the plan places {names[0]} in two ways: layers of several kinds share its name")
    return found[0]
