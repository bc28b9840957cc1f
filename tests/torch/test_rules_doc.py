"""The worked example of `docs/adding-a-rule.md` is run, and its op tested like any other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tpplan.planner.rules import registered, registry, rule

from .rule_samples import call, unit, x
from .rule_simulation import all_choices, check, one_op, run_whole

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-rule.md"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    """A copy of the table, so that the example's rule does not outlive the test."""
    monkeypatch.setattr(registry, "_RULES", registered())


@pytest.fixture(scope="module")
def decay_scan():
    library = torch.library.Library("my_ops", "DEF")
    library.define("decay_scan(Tensor x, Tensor decay) -> Tensor")
    library.impl("decay_scan", scan, "CompositeImplicitAutograd")
    yield torch.ops.my_ops.decay_scan.default
    library._destroy()


def scan(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        state = decay * state + step
        states.append(state)
    return torch.stack(states, 1)


def test_the_example_splits_what_the_page_says(table: None, decay_scan):
    exec(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1], {})  # type: ignore[index]
    sample = call(decay_scan, x(4, 6, 8), unit(8), weights=(1,))
    op = one_op(sample)
    choices = all_choices(op)
    assert {choice.label for choice in choices} == {"b", "c"}
    batch = next(choice for choice in choices if choice.label == "b")
    assert [str(p) for p in batch.read_gradients] == [str(batch.reads[0]), "P"]
    for choice in choices:
        check(sample, op, choice, run_whole(sample))


def test_without_a_rule_nothing_is_split(decay_scan):
    op = one_op(call(decay_scan, x(4, 6, 8), unit(8)))
    assert op.family == "opaque"
    assert all_choices(op) == []


def test_a_wrong_rule_is_found(table: None, decay_scan):
    @rule("my_ops.decay_scan")
    def wrong(call):
        axes = (("b",), ("s",), ("c",))
        return registry.Spec(family="memory", inputs=(axes, (("c",),)), outputs=(axes,))

    sample = call(decay_scan, x(4, 6, 8), unit(8))
    op = one_op(sample)
    steps = next(choice for choice in all_choices(op) if choice.label == "s")
    with pytest.raises(AssertionError, match="output 0: off by"):
        check(sample, op, steps, run_whole(sample))


def test_registering_twice_is_an_error():
    with pytest.raises(ValueError, match=r"aten.linear is already registered by .*matmul"):
        rule("aten.linear")(lambda call: call)


def test_axes_that_do_not_factor_are_planned_whole():
    """12 = 3 x 4 as the op wants, 2 x 6 as the model has it: no dim may be split, and nothing fails."""
    op = one_op(call(torch.ops.aten.split.Tensor, x(4, 12), 4, -1), factored=True)
    assert all_choices(op) == [choice for choice in all_choices(op) if choice.kind == "partial"]
    assert [dim.size for dim in op.dims if dim.label in ("piece", "inner")] == [3, 4]
