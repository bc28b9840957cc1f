"""The graph cache: exact round trips, keys that see every change, entries that may be broken."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpplan.planner import graph_cache
from tpplan.planner.errors import ModelError
from tpplan.planner.graph import Node, Ref, Repeat, Saved, TracedGraph, Value
from tpplan.planner.graph_cache import (
    TraceOptions,
    cache_key,
    content_hash,
    find_source,
    from_json,
    load_cached,
    local_imports,
    split_factory,
    store,
    to_json,
)

OPTIONS = TraceOptions(seq_len=16)


def graph(args: tuple = (Ref("x"), (2, (Ref("w"), None)), -1, 1e-5, True, "none")) -> TracedGraph:
    """A graph of one op."""
    node = Node(
        name="y", target="aten.linear.default", args=args, kwargs=(("dim", (0, 1)), ("scale", float("inf"))),
        outputs=("y",), module="layers.0", module_class="Linear", source="model.py:3",
        saved=(Saved(value="x", shape=(2, 4), dtype="bfloat16"), Saved(value=None, shape=(), dtype="bool")),
    )  # fmt: skip
    values = (
        Value(name="x", shape=(2, 4), dtype="bfloat16", kind="input"),
        Value(name="w", shape=(4, 4), dtype="bfloat16", kind="parameter", fqn="layers.0.w", trainable=True),
        Value(name="y", shape=(2, 4), dtype="bfloat16", kind="activation"),
    )
    return TracedGraph(
        name="model", source="model.py", batch=2, seq_len=16, dtype="bf16",
        values={value.name: value for value in values}, nodes=(node,), inputs=("x",), output="y",
        repeats=(Repeat(path="layers", traced=2, classes=(0, 0, 0)),), parameters=48,
        trainable_parameters=48, torch_version="2.13.0", content_hash="", warnings=("slow",),
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model file that imports a neighbour, which imports another."""
    (tmp_path / "model.py").write_text("import math\nfrom blocks import Block\n")
    (tmp_path / "blocks.py").write_text("import shapes\n")
    (tmp_path / "shapes.py").write_text("WIDTH = 4\n")
    (tmp_path / "unrelated.py").write_text("\n")
    return tmp_path / "model.py"


def through_text(traced: TracedGraph) -> TracedGraph:
    """What comes back from disk."""
    return from_json(json.loads(json.dumps(to_json(traced))))


def test_a_graph_survives_the_round_trip():
    assert through_text(graph()) == graph()


literals = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.builds(Ref, st.text()),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


@given(st.lists(literals, max_size=4).map(tuple))
def test_any_arguments_survive_the_round_trip(args: tuple):
    again = through_text(graph(args))
    assert again == graph(args)
    assert repr(again.nodes[0].args) == repr(args)  # 1, 1.0 and True are equal but not the same


def test_what_is_stored_is_loaded(model: Path, tmp_path: Path):
    assert load_cached(str(model), OPTIONS, cache_dir=tmp_path) is None
    store(graph(), tmp_path / f"{cache_key(str(model), OPTIONS)}.json")
    assert load_cached(str(model), OPTIONS, cache_dir=tmp_path) == replace(graph(), source=str(model))
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"values": 3}', '{"values": [], "nodes": []}', "\x00"]
)
def test_a_corrupted_entry_is_a_miss(model: Path, tmp_path: Path, text: str):
    (tmp_path / f"{cache_key(str(model), OPTIONS)}.json").write_text(text)
    assert load_cached(str(model), OPTIONS, cache_dir=tmp_path) is None


def test_local_imports_are_followed(model: Path):
    assert [path.name for path in local_imports(model)] == ["blocks.py", "model.py", "shapes.py"]


@pytest.mark.parametrize("name", ["model.py", "blocks.py", "shapes.py"])
def test_the_key_sees_every_file_that_matters(model: Path, name: str):
    before = cache_key(str(model), OPTIONS)
    with (model.parent / name).open("a") as file:
        file.write("# changed\n")
    assert cache_key(str(model), OPTIONS) != before


def test_the_key_ignores_other_files_and_the_folder(model: Path, tmp_path_factory: pytest.TempPathFactory):
    before = cache_key(str(model), OPTIONS)
    (model.parent / "unrelated.py").write_text("# changed\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for file in model.parent.glob("*.py"):
        (elsewhere / file.name).write_bytes(file.read_bytes())
    assert cache_key(str(model), OPTIONS) == cache_key(str(elsewhere / "model.py"), OPTIONS) == before


@pytest.mark.parametrize("change", [{"seq_len": 32}, {"batch": 4}, {"dtype": "fp32"}, {"mode": "serve"}])
def test_the_key_sees_every_option(model: Path, change: dict):
    assert cache_key(str(model), replace(OPTIONS, **change)) != cache_key(str(model), OPTIONS)


def test_the_key_sees_the_factory_and_the_versions(model: Path, monkeypatch: pytest.MonkeyPatch):
    before = cache_key(str(model), OPTIONS)
    assert cache_key(f"{model}:small", OPTIONS) != before
    monkeypatch.setattr(graph_cache.metadata, "version", lambda _: "0.0.1")
    assert cache_key(str(model), OPTIONS) != before


def test_a_model_with_a_syntax_error_still_has_a_key(model: Path):
    model.write_text("def (:")
    assert len(cache_key(str(model), OPTIONS)) == 64


def test_content_is_the_graph_not_its_place():
    same = replace(graph(), name="other", source="elsewhere.py", torch_version="3.0")
    assert content_hash(same) == content_hash(graph())
    assert content_hash(graph(args=(Ref("x"), 3))) != content_hash(graph())


def test_split_factory():
    assert split_factory("a/model.py:tiny") == (Path("a/model.py"), "tiny")
    assert split_factory("model.py") == (Path("model.py"), None)
    assert split_factory("folder:with/colon.json") == (Path("folder:with/colon.json"), None)


def test_sources_that_do_not_exist(model: Path):
    with pytest.raises(ModelError, match=r"no model file .*modle\.py.*did you mean 'model\.py'"):
        find_source(str(model.with_name("modle.py")))
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_source(str(model.parent))
    with pytest.raises(ModelError, match="is no model: expected"):
        readme = model.with_name("README.md")
        readme.write_text("")
        find_source(str(readme))


def test_a_known_graph_is_loaded_without_torch(model: Path, tmp_path: Path):
    store(graph(), tmp_path / f"{cache_key(str(model), OPTIONS)}.json")
    code = (
        "import sys; from pathlib import Path\n"
        "from tpplan.planner.graph_cache import TraceOptions, load_or_trace\n"
        f"load_or_trace({str(model)!r}, TraceOptions(seq_len=16), cache_dir=Path({str(tmp_path)!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
