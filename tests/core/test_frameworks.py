"""Framework profiles are complete, within their ranges, and say where each number was read."""

from __future__ import annotations

import pytest
from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.profile import Framework

OWN_NUMBERS = (
    "gradient_bytes",
    "sync_bytes",
    "master_bytes",
    "dp_overlap",
    "gather_overlap",
    "tp_overlap",
    "saves_gathered_input",
    "logits_bytes_per_element",
    "step_overhead_s",
)


def test_the_frameworks_a_user_may_name() -> None:
    assert list(FRAMEWORKS) == ["tpplan", "megatron", "torch", "deepspeed"]
    assert all(name == framework.name for name, framework in FRAMEWORKS.items())


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS.keys())
def test_numbers_lie_in_their_ranges(framework: Framework) -> None:
    assert all(0.0 <= getattr(framework, f"{what}_overlap") <= 1.0 for what in ("dp", "gather", "tp"))
    typical, upper = framework.allocator_reserve
    assert 1.0 <= typical <= upper < 1.2
    assert 0.5 * 2**30 < framework.context_bytes < 4 * 2**30
    assert {framework.gradient_bytes, framework.sync_bytes, framework.master_bytes} <= {2, 4}


@pytest.mark.parametrize("name", ["megatron", "torch", "deepspeed"])
def test_every_number_has_its_source(name: str) -> None:
    assert [field for field in OWN_NUMBERS if field not in FRAMEWORKS[name].source] == []


def test_megatron_spends_18_bytes_per_parameter_and_zero_16() -> None:
    """2 of weights, 8 of Adam's moments, and what the profile adds."""
    for name, expected in (("megatron", 18), ("deepspeed", 16), ("torch", 16)):
        framework = FRAMEWORKS[name]
        assert 2 + framework.gradient_bytes + framework.master_bytes + 8 == expected
