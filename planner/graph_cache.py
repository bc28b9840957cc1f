"""Traced graphs on disk, so that planning a known model never imports torch.

A graph is stored as JSON under the SHA-256 of everything that determines it: the model's source (the
file and the files next to it that it imports, or the configuration), the options of the trace, the
versions of torch and transformers, and the tracer's own source. Entries are written atomically; one that
cannot be read is a miss.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import ModelError, did_you_mean
from .graph import Node, Ref, Repeat, Saved, TracedGraph, Value

DEFAULT_SEQ_LEN = 4096
"""Tokens per sample when neither the user nor the model says: Llama 2's (arXiv:2307.09288, sec. 2.2)."""
LONGEST_DEFAULT_SEQ_LEN = 8192
"""Most tokens per sample that a model's own limit stands for: long contexts are reached by training at
this length first (Llama 3, arXiv:2407.21783, sec. 3.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What is asked of a trace: the shapes of the example, the dtype of the parameters, and the mode."""

    seq_len: int | None = None
    """None: what the model says, which the traced graph then holds."""
    batch: int = 2
    dtype: str = "bf16"
    mode: str = "train"


def default_cache_dir() -> Path:
    """`~/.cache/tpplan/graphs`."""
    return Path.home() / ".cache" / "tpplan" / "graphs"


def load_or_trace(
    source: str, options: TraceOptions, *, cache_dir: Path | None = None, use_cache: bool = True
) -> TracedGraph:
    """The graph of a model file, configuration or export: from the cache if it is there, else traced.

    `cache_dir` defaults to `default_cache_dir()`. A cache that cannot be written is not an error.

    Raises:
        ModelError: the source cannot be loaded. TraceError: it loads but cannot be traced.
    """
    cached = load_cached(source, options, cache_dir=cache_dir) if use_cache else None
    if cached is not None:
        return cached
    with _collector_paused():
        from .trace import trace_source  # imports torch: only when the graph is not known yet

        graph = trace_source(source, **asdict(options))
    if use_cache:
        with contextlib.suppress(OSError):
            store(graph, _entry(source, options, cache_dir))
    return graph


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: a tenth of the time to import torch and trace, for 10 MB."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_cached(source: str, options: TraceOptions, *, cache_dir: Path | None = None) -> TracedGraph | None:
    """The cached graph, or None. Does not import torch.

    Raises:
        ModelError: the source does not exist.
    """
    try:
        graph = from_json(json.loads(_entry(source, options, cache_dir).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return replace(graph, source=source)


def store(graph: TracedGraph, path: Path) -> None:
    """Write a graph to a file, atomically: a reader sees the old entry or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(to_json(graph), file, separators=(",", ":"))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _entry(source: str, options: TraceOptions, cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / f"{cache_key(source, options)}.json"


# ------------------------------------------------------------------------------------------- key


def split_factory(source: str) -> tuple[Path, str | None]:
    """`model.py:factory` -> the file and the factory; other sources have none."""
    head, _, tail = source.rpartition(":")
    return (Path(head), tail) if head.endswith(".py") else (Path(source), None)


def find_source(source: str) -> Path:
    """The file that a source names; a folder stands for the `config.json` in it.

    Raises:
        ModelError: there is no such file, or it is of no known kind.
    """
    path, _ = split_factory(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelError(f"folder {source!r} has no config.json")
    if not path.is_file():
        near = did_you_mean(path.name, _neighbours(path))
        raise ModelError(f"no model file {str(path)!r}{near}")
    if path.suffix not in {".py", ".json", ".pt2"}:
        raise ModelError(
            f"{str(path)!r} is no model: expected model.py[:factory], a Hugging Face config.json or its "
            "folder, or a .pt2 export"
        )
    return path


def _neighbours(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return []
    return [p.name for p in path.parent.iterdir() if p.suffix in {".py", ".json", ".pt2"}]


def cache_key(source: str, options: TraceOptions) -> str:
    """SHA-256 over all that determines the traced graph.

    Raises:
        ModelError: the source does not exist.
    """
    path = find_source(source)
    digest = hashlib.sha256()
    for part in (path.stem, split_factory(source)[1], asdict(options), metadata.version("torch")):
        digest.update(repr(part).encode())
    if path.suffix == ".json":
        digest.update(_version("transformers").encode())
    for file in (*local_imports(path), *_tracer_files()):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _tracer_files() -> list[Path]:
    here = Path(__file__).parent
    return [*sorted((here / "trace").glob("*.py")), here / "graph.py", Path(__file__)]


def local_imports(path: Path) -> tuple[Path, ...]:
    """A model file and the files of its folder that it imports, directly or through each other."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += _imported_files(file, path.parent) if file.suffix == ".py" else []
    return tuple(sorted(found))


def _imported_files(file: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # the tracer will say what is wrong
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if (folder / f"{top}.py").is_file():
                yield folder / f"{top}.py"
            elif (folder / top).is_dir():
                yield from (folder / top).rglob("*.py")


# ----------------------------------------------------------------------------------------- codec


def content_hash(graph: TracedGraph) -> str:
    """SHA-256 over the graph itself: its values, ops and repeats, wherever the model came from."""
    document = to_json(graph)
    content = {key: document[key] for key in ("values", "nodes", "inputs", "output", "repeats", "parameters")}
    for node in content["nodes"]:
        del node["source"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def to_json(graph: TracedGraph) -> dict[str, Any]:
    """A graph as JSON values; `from_json` gives back an equal one."""
    document = {field.name: getattr(graph, field.name) for field in fields(graph)}
    return document | {
        "values": [asdict(value) for value in graph.values.values()],
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "repeats": [asdict(repeat) for repeat in graph.repeats],
    }


def from_json(document: dict[str, Any]) -> TracedGraph:
    """The graph that `to_json` wrote.

    Raises:
        KeyError, TypeError, ValueError: the document is not one of ours.
    """
    values = [Value(**{**value, "shape": tuple(value["shape"])}) for value in document["values"]]
    repeats = [Repeat(**{**repeat, "classes": tuple(repeat["classes"])}) for repeat in document["repeats"]]
    return TracedGraph(
        **document
        | {
            "values": {value.name: value for value in values},
            "nodes": tuple(_node_from_json(node) for node in document["nodes"]),
            "repeats": tuple(repeats),
            "inputs": tuple(document["inputs"]),
            "warnings": tuple(document["warnings"]),
        }
    )


def _node_to_json(node: Node) -> dict[str, Any]:
    document = {field.name: getattr(node, field.name) for field in fields(node)}
    return document | {
        "args": _encode(node.args),
        "kwargs": _encode(node.kwargs),
        "saved": [asdict(saved) for saved in node.saved],
    }


def _node_from_json(document: dict[str, Any]) -> Node:
    saved = [Saved(**{**item, "shape": tuple(item["shape"])}) for item in document["saved"]]
    return Node(
        **document
        | {
            "args": _decode(document["args"]),
            "kwargs": _decode(document["kwargs"]),
            "outputs": tuple(document["outputs"]),
            "saved": tuple(saved),
        }
    )


def _encode(arg: Any) -> Any:
    """Tuples become lists and references objects; all else is JSON already."""
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    return [_encode(item) for item in arg] if isinstance(arg, tuple | list) else arg


def _decode(arg: Any) -> Any:
    if isinstance(arg, dict):
        return Ref(arg["ref"])
    return tuple(_decode(item) for item in arg) if isinstance(arg, list) else arg
