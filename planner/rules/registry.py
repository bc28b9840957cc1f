"""The table of rules: ATen op name -> the function that describes its iteration space.

Add one with `@rule("aten.my_op.default")` on a function from `Call` to `Spec`. Registering a
name twice is an error. An op without a rule gets `opaque`: planned whole, and named in the report.
"""

from __future__ import annotations

from .factory import is_factory
from .spec import Axis, Call, Rule, Spec

_RULES: dict[str, Rule] = {}


def rule(*targets: str):
    """Register a rule for one or several ATen ops (`aten.name` covers all its overloads)."""

    def register(function: Rule) -> Rule:
        for target in targets:
            if target in _RULES:
                raise ValueError(f"a rule for {target} is already registered by {_RULES[target].__module__}")
            _RULES[target] = function
        return function

    return register


def find(target: str) -> Rule | None:
    """The rule for `aten.name.overload`: exact name first, then `aten.name`."""
    return _RULES.get(target) or _RULES.get(target.rsplit(".", 1)[0])


def registered() -> dict[str, Rule]:
    """A copy of the table."""
    return dict(_RULES)


def describe(call: Call) -> tuple[Spec, bool]:
    """The op's iteration space and whether a rule gave it (False: opaque)."""
    function = find(call.node.target)
    return (function(call), True) if function else (opaque(call), False)


def opaque(call: Call) -> Spec:
    """An op nobody has described: every dim blocked, priced by the bytes it touches."""
    labels: list[str] = []

    def fresh(shape: tuple[int, ...]) -> tuple[Axis, ...]:
        axes = []
        for size in shape:
            if size == 1:
                axes.append(())
                continue
            labels.append(f"o{len(labels)}")
            axes.append((labels[-1],))
        return tuple(axes)

    lend = is_factory(call.node.target)  # their shapes alone
    inputs = tuple(None if lend else fresh(value.shape) for value in call.inputs)
    outputs = tuple(fresh(value.shape) for value in call.outputs)
    return Spec(family="opaque", inputs=inputs, outputs=outputs, blocked=frozenset(labels))
