"""The names of a plan matched with those of a module.

In: a plan, whose names carry `*` for the index of a repeated layer, and a model. Out: for each
parameter its `ParameterPlacement`, for each planned border the modules it is on. Tied parameters
have one entry, under any of their names.
"""

from __future__ import annotations

import re
from collections import defaultdict

from torch import nn

from ..planner.errors import PlanError
from ..planner.plan import ParameterPlacement, Plan


def matches(pattern: str, name: str) -> bool:
    """Whether `layers.*.mlp.up` stands for `layers.3.mlp.up`."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


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
