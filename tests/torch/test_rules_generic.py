"""Every registered rule against its op: all splits it allows, on simulated ranks, with gradients.

A new rule needs samples in `rule_samples.py` and nothing else; a rule without samples fails here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tpplan.planner.graph import Op
from tpplan.planner.rules import find, registered
from tpplan.planner.rules.choices import Choice

from . import rule_samples_layers, rule_samples_more  # noqa: F401 - they fill the table
from .rule_local import adapt, emulator
from .rule_samples import SAMPLES
from .rule_simulation import Sample, all_choices, check, one_op, run_whole

NOT_ONE_OP = {
    "aten._grouped_mm": "the CPU kernel takes bfloat16 only, and rows lie in expert order",
    "transformers.grouped_mm_fallback": "an op of another package; the same rule",
}
"""Rules without samples here, with the reason."""


@pytest.mark.parametrize("name", SAMPLES)
def test_every_split_computes_the_same(name: str):
    problems = [
        problem
        for sample in SAMPLES[name]
        for factored in (False, True)
        for problem in wrong_splits(name, sample, factored=factored)
    ]
    assert not problems, "\n".join(problems)


def wrong_splits(name: str, sample: Sample, *, factored: bool) -> Iterator[str]:
    """What is wrong with the splits of one call; `factored`: with every even axis a product of two dims."""
    assert find(sample.target) is registered()[name]
    op = one_op(sample, factored=factored)
    whole = run_whole(sample)
    for choice in all_choices(op):
        try:
            check(sample, op, choice, whole, adapt=adapt, emulate=emulator(sample, op, choice))
        except (AssertionError, RuntimeError, IndexError, ValueError) as error:
            yield f"{describe(op, choice)}: {type(error).__name__}: {str(error)[:200]}"


def describe(op: Op, choice: Choice) -> str:
    """`aten.mm.default split k: S(k) S(k) -> P`."""
    reads = " ".join(map(str, choice.reads))
    return f"{op.target} {choice.kind} {choice.label}: {reads} -> {' '.join(map(str, choice.writes))}"


def test_every_rule_has_samples():
    assert set(registered()) - set(NOT_ONE_OP) - set(SAMPLES) == set()
    assert set(SAMPLES) - set(registered()) == set()


def test_every_rule_names_an_op_that_exists():
    missing = [name for name in registered() if name.startswith("aten.") and not exists(name)]
    assert missing == []


def exists(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.split(".")[1], None)
    overload = name.split(".")[2:]
    return packet is not None and (not overload or overload[0] in packet.overloads())
