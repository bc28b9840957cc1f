"""The plan file: exact round trips, stable bytes, and messages that name the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.errors import PlanError
from tpplan.planner.plan import Plan
from tpplan.planner.plan_file import from_yaml, load, save, to_yaml

from .sample_plan import ALL_PLANS, llama3_8b

PLANS = pytest.mark.parametrize("make", ALL_PLANS.values(), ids=ALL_PLANS)
SOURCE = "plan.yaml"


@PLANS
def test_reading_returns_what_was_written(make) -> None:
    plan = make()
    assert from_yaml(to_yaml(plan), source=SOURCE) == plan


@PLANS
def test_equal_plans_give_equal_bytes(make) -> None:
    text = to_yaml(make())
    assert text == to_yaml(make())
    assert text == to_yaml(from_yaml(text, source=SOURCE))


FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    times=st.tuples(FINITE, FINITE),
    words=TEXT,
    warnings=st.lists(TEXT, max_size=3),
    kinds=st.dictionaries(TEXT, FINITE),
)
def test_any_number_and_any_text_round_trips(times, words, warnings, kinds) -> None:
    plan = llama3_8b()
    predicted = replace(
        plan.predicted, step_time_s=times[0], step_time_interval_s=times, memory_by_kind_bytes=kinds
    )
    odd = replace(
        plan,
        predicted=predicted,
        warnings=tuple(warnings),
        model=replace(plan.model, name=words),
        splits=(),
        communications=(),
    )
    assert from_yaml(to_yaml(odd), source=SOURCE) == odd


def test_whole_numbers_in_float_fields_are_written_as_floats() -> None:
    plan = llama3_8b()
    whole = replace(plan, predicted=replace(plan.predicted, peak_memory_bytes=4096))
    exact = replace(plan, predicted=replace(plan.predicted, peak_memory_bytes=4096.0))
    assert to_yaml(whole) == to_yaml(exact)


def test_the_file_reads_like_a_document() -> None:
    lines = to_yaml(llama3_8b()).splitlines()
    assert lines[0].startswith("# A tpplan plan")
    assert lines[1] == "version: 1"
    assert "mesh:" in lines
    assert "  dp: 32" in lines
    assert any(line.endswith("placements: [[dp, R], [tp, S(ffn)@1]]") for line in lines)
    assert not any("!!" in line or "&id" in line or "*id" in line for line in lines)
    assert max(map(len, lines)) <= 130


def _edited(path: str, value: object) -> str:
    """The Llama plan's file with the value at a dotted `path` replaced (or removed, by `...`)."""
    document = yaml.safe_load(to_yaml(llama3_8b()))
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    target = document
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return yaml.safe_dump(document, sort_keys=False)


BROKEN = [
    ("version", 2, ["version", "expected 1 (", "found 2"]),
    ("version", "1", ["version", "expected 1 (", "found '1'"]),
    ("version", True, ["version", "found True"]),
    ("version", ..., ["version", "found nothing"]),
    ("model.layers", ..., ["model: field 'layers' is missing", "expected a whole number"]),
    ("model.layers", 32.0, ["model.layers", "expected a whole number", "found 32.0"]),
    ("model.layer", 32, ["model: unknown field 'layer'", "did you mean 'layers'"]),
    ("model", "llama", ["model: expected a mapping with the fields name, source", "found 'llama'"]),
    ("job.seq_len", True, ["job.seq_len: expected a whole number, found True"]),
    ("mesh.tp", 0, ["mesh.tp: expected a size of at least 1, found 0"]),
    ("mesh.order", ["pp", "dp"], ["mesh.order: expected each of pp, dp, cp, ep, tp once"]),
    (
        "mesh.tp",
        4,
        ["mesh: expected sizes whose product is cluster.devices (64)", "dp32 x tp4 (128 devices)"],
    ),
    ("predicted.step_time_s", "fast", ["predicted.step_time_s: expected a finite number, found 'fast'"]),
    ("predicted.step_time_s", float("inf"), ["predicted.step_time_s", "found inf"]),
    ("predicted.step_time_s", float("nan"), ["predicted.step_time_s", "found nan"]),
    ("predicted.step_time_s", 10**400, ["predicted.step_time_s: expected a finite number"]),
    ("predicted.step_time_interval_s", [1.0], ["step_time_interval_s: expected a list of 2, found [1.0]"]),
    (
        "predicted.origin",
        "modeled",
        ["predicted.origin: expected one of measured", "did you mean 'modelled'"],
    ),
    (
        "predicted.memory_by_kind_bytes.logits",
        "big",
        ["memory_by_kind_bytes.logits: expected a finite number"],
    ),
    ("communications.1.axis", 3, ["communications[1].axis: expected text, found 3"]),
    (
        "communications.0.collective",
        "allreduce",
        ["communications[0].collective", "did you mean 'all-reduce'"],
    ),
    (
        "stages.0.blocks.1",
        ["LlamaBlock", "many", "none"],
        ["stages[0].blocks[1][1]: expected a whole number"],
    ),
    ("sequence_parallel", "yes", ["sequence_parallel: expected true or false, found 'yes'"]),
    ("search", [], ["search: expected a mapping"]),
    ("warnings", "none", ["warnings: expected a list, found 'none'"]),
]


@pytest.mark.parametrize(
    ("path", "value", "expected"), BROKEN, ids=[f"{p}={str(v)[:30]}" for p, v, _ in BROKEN]
)
def test_a_mistake_is_named(path: str, value: object, expected: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        from_yaml(_edited(path, value), source=SOURCE)
    message = str(caught.value)
    assert message.startswith(f"{SOURCE}: ")
    for words in expected:
        assert words in message


NOT_PLANS = [
    ("", "found nothing"),
    ("- 1\n- 2\n", "found [1, 2]"),
    ("version: [1\n", "not valid YAML: line"),
    ("version: 1\nversion: 1\n", "line 2, column 1: key 'version' is given twice"),
    ("!!python/object/apply:os.system [echo]\n", "not valid YAML"),
    ("[" * 5000, "YAML"),
    ("? [a, b]\n: 1\n", "YAML"),
    ("a\x00b", "YAML"),
]


@pytest.mark.parametrize(("text", "expected"), NOT_PLANS, ids=range(len(NOT_PLANS)))
def test_text_that_is_no_plan_is_refused(text: str, expected: str) -> None:
    with pytest.raises(PlanError, match=r"^plan\.yaml: ") as caught:
        from_yaml(text, source=SOURCE)
    assert expected in str(caught.value)


def test_new_optional_fields_may_be_absent() -> None:
    plan = from_yaml(_edited("cluster.links", ...), source=SOURCE)
    assert isinstance(plan, Plan)
    assert plan.cluster.links == ()


def test_plans_of_older_files_stand_beside_the_plan_as_they_did() -> None:
    """Without what `--pareto` adds to each: a size of its own, and a gap."""
    plan = replace(llama3_8b(), pareto=llama3_8b().alternatives)
    document = yaml.safe_load(to_yaml(plan))
    for alternative in document["pareto"]:
        assert {alternative.pop(name) for name in ("size", "gap")} == {None}
    assert from_yaml(yaml.safe_dump(document), source=SOURCE) == plan


def test_saving_replaces_the_file_and_leaves_nothing_else(tmp_path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old")
    save(llama3_8b(), path)
    assert load(path) == llama3_8b()
    assert [file.name for file in tmp_path.iterdir()] == ["plan.yaml"]


def test_files_that_cannot_be_read_or_written(tmp_path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PlanError, match=r"absent\.yaml: cannot read the plan: No such file"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(PlanError, match="cannot read the plan"):
        load(tmp_path)
    with pytest.raises(PlanError, match="not UTF-8"):
        load(tmp_path / "binary.yaml")
    with pytest.raises(PlanError, match=r"plan\.yaml: cannot write the plan: No such file"):
        save(llama3_8b(), tmp_path / "absent" / "plan.yaml")
