"""Exports use only options that their targets have, with values that these take: recorded schemas."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tpplan.planner.errors import OptionError
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import Plan
from tpplan.report.exporters import export
from tpplan.report.exporters.torchtitan import settings

from .sample_plan import gpt3_175b, llama3_8b, mixtral_8x7b

SCHEMAS = yaml.safe_load((Path(__file__).parent / "target_schemas.yaml").read_text())
EXPORTING = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text()


def plans() -> Iterator[Plan]:
    """Plans that between them make every option: stages, uneven ones, experts, ZeRO, recomputation, types."""
    base, pipeline = llama3_8b(), replace(gpt3_175b(), schedule="interleaved")
    yield from (base, pipeline, mixtral_8x7b())
    yield from (replace(base, zero_stage=stage) for stage in range(4))
    yield from (replace(base, job=replace(base.job, dtype=dtype)) for dtype in ("fp16", "fp32"))
    for mode in ("full", "selective"):
        blocks = tuple((name, number, mode) for name, number, _ in base.stages[0].blocks)
        yield replace(base, recompute=mode, stages=(replace(base.stages[0], blocks=blocks),))
    yield replace(base, mesh=Mesh(dp=16, tp=4))
    yield replace(
        pipeline, mesh=replace(pipeline.mesh, order=("dp", "cp", "ep", "pp", "tp")), schedule="1f1b"
    )
    uneven = (replace(pipeline.stages[0], layers=11), *pipeline.stages[1:])
    yield replace(pipeline, stages=uneven, virtual_stages=1, schedule="1f1b")


def options(target: str, plan: Plan) -> Iterator[tuple[str, list[Any]]]:
    """(name, values) of everything that the export of a plan sets."""
    if target == "torchtitan":
        for name, value in settings(plan):
            if name != "activation_checkpoint":
                yield name, [ast.literal_eval(value)]
        return
    files = export(plan, target).files
    if target == "nanotron":
        for section, values in yaml.safe_load(files["nanotron.yaml"]).items():
            yield from ((f"{section}.{name}", [value]) for name, value in values.items())
        return
    [script] = files.values()
    for line in re.findall(r"^  (--.*)$", script, re.MULTILINE):
        name, *values = shlex.split(line)
        yield name, values


def fits(kind: Any, values: list[Any]) -> bool:
    """Whether an option of this kind takes these values."""
    match kind:
        case "flag":
            return values == []
        case "int" | "str" | "bool" | "list" if len(values) == 1:
            [value] = values
            return kind == "str" or type(value).__name__ == kind or (kind == "int" and str(value).isdigit())
        case [[*choices]]:
            return bool(values) and set(values) <= set(choices)
        case [*choices]:
            return len(values) == 1 and str(values[0]) in map(str, choices)
    return False


@pytest.mark.parametrize("target", SCHEMAS)
def test_every_option_exists_and_takes_its_value(target: str):
    known, seen = SCHEMAS[target]["options"], set()
    for plan in plans():
        try:
            found = list(options(target, plan))
        except OptionError:
            continue  # refused, which is an answer
        for name, values in found:
            assert name in known, name
            assert fits(known[name], values), (name, values)
            seen.add(name)
    assert len(seen) >= 0.6 * len(known)


@pytest.mark.parametrize("target", SCHEMAS)
def test_the_documentation_names_what_was_read(target: str):
    version = SCHEMAS[target]["read_from"].split(" (")[0]
    assert version in " ".join(EXPORTING.split()), version
