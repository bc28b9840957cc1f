"""Splits that the user has decided: kept, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import tpplan
from tpplan import cli
from tpplan.planner.errors import OptionError
from tpplan.planner.plan import Plan
from tpplan.planner.split_pins import parse_split

EXAMPLES = Path(__file__).parents[2] / "examples"


def plan(*splits: str, **pins: int) -> Plan:
    found = tpplan.suggest(
        str(EXAMPLES / "gpt2.py"),
        topology="dgx-h100",
        global_batch=64,
        seq_len=512,
        splits=splits,
        pins={"tp": 2, **pins},
        top=1,
    )
    assert isinstance(found, Plan), found
    return found


def placed(found: Plan, name: str) -> str:
    parameter = next(p for p in found.parameters if p.fqn.endswith(name))
    return dict(parameter.placements)["tp"]


def test_a_pin_is_kept_and_costs_no_less_than_freedom():
    free = plan()
    name = next(p.fqn for p in free.parameters if "mlp" in p.fqn and len(p.shape) == 2)
    assert placed(free, name).startswith("S(")
    module = name.removesuffix(".weight")
    whole = plan(f"{module}=Replicate@tp")
    assert placed(whole, name) == "R"
    assert whole.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9)


def test_a_pin_on_a_parameter_turns_its_split():
    free = plan()
    name = next(p.fqn for p in free.parameters if "mlp" in p.fqn and len(p.shape) == 2)
    other = next(
        dim for p in free.parameters if p.fqn == name for dim in p.dims if dim not in placed(free, name)
    )
    turned = plan(f"{name}=Shard({other})@tp")
    assert placed(turned, name).startswith(f"S({other})")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lm_head", "expected NAME=Shard"),
        ("lm_head=Shard(vocab)", "expected NAME=Shard"),
        ("lm_head=Shard(vocab)@dp", "over tp or ep, not 'dp'"),
        ("lm_hed=Shard(vocab)@tp", "no weight matrix is called 'lm_hed'"),
        ("layers.*.mlp=Shard(vocabulary)@tp", "has no dim 'vocabulary'"),
    ],
)
def test_a_pin_that_cannot_hold_says_why(text: str, said: str):
    with pytest.raises(OptionError) as caught:
        parse_split(text)
        plan(text)
    assert said in str(caught.value) and text.split("=")[0] in str(caught.value)


def test_two_pins_that_disagree_are_named():
    name = next(p.fqn for p in plan().parameters if "mlp" in p.fqn and len(p.shape) == 2)
    with pytest.raises(OptionError, match="pinned otherwise"):
        plan(f"{name}=Replicate@tp", f"{name}=Shard(ffn)@tp")


def test_the_command_line_takes_pins(capsys: pytest.CaptureFixture[str]):
    command = ["suggest", str(EXAMPLES / "gpt2.py"), "-t", "dgx-h100", "--pin", "nonsense"]
    assert cli.main(command) == 2
    assert "expected NAME=Shard(DIM)@AXIS" in capsys.readouterr().err
