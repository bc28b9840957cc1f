"""What the tracer saw of a model: its blocks, its ops by kind and by module, and which have a rule.

In: a `Graph` and groups of its ops. Out: an object that rich can print, or a plain dict (FLOPs of one
sample's forward pass, bytes kept for backward).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.text import Text

from ..planner.graph import Graph
from . import words
from .terminal.tables import number, table
from .terminal.tables import words as column

NO_RULE = "none"
SHOWN_MODULES = 20
"""Modules listed in the table; the JSON has all."""


class Ops(Protocol):
    """Ops of the whole model with something in common."""

    key: str
    kind: str
    count: int
    flops: float
    saved_bytes: float
    source: str


def document(
    graph: Graph, targets: Iterable[Any], modules: Iterable[Any], *, covered_flops: float
) -> dict[str, Any]:
    """The same as JSON."""
    facts = ("name", "parameters", "trainable_parameters", "seq_len", "dtype", "content_hash")
    return {
        "model": {fact: getattr(graph, fact) for fact in facts},
        "blocks": [_block(graph, name) for name in graph.blocks],
        "covered_flops": covered_flops,
        "ops": [_row(ops) | {"rule": ops.kind != NO_RULE} for ops in targets],
        "modules": [_row(ops) for ops in modules],
        "warnings": list(graph.warnings),
    }


def _block(graph: Graph, name: str) -> dict[str, Any]:
    block = graph.blocks[name]
    parameters = sum(value.numel for value in block.parameters)
    return {"name": name, "count": block.count, "ops": len(block.ops), "parameters": parameters}


def _row(ops: Any) -> dict[str, Any]:
    row = asdict(ops)
    return {"name": row.pop("key"), "family": row.pop("kind"), **row}


def render(
    graph: Graph, targets: Iterable[Any], modules: Iterable[Any], *, covered_flops: float, ops: bool
) -> RenderableType:
    """The blocks, and with `ops` the ops by kind and the heaviest modules."""
    count, length = words.count(graph.parameters), f"{graph.seq_len:,}"
    head = Text(f"{graph.name}: {count} parameters, {length} tokens a sample, {graph.dtype}", style="bold")
    parts: list[RenderableType] = [head, Text(), _blocks(graph), Text(), _verdict(graph, covered_flops)]
    if ops:
        parts += [Text(), _table("op", "rule", targets), Text()]
        parts.append(_table("module", "class", list(modules)[:SHOWN_MODULES]))
    return Group(*parts)


def _blocks(graph: Graph) -> RenderableType:
    made = table(column("block"), number("count"), number("ops"), number("parameters of one"))
    for name in graph.blocks:
        block = _block(graph, name)
        made.add_row(name, f"{block['count']:,}", f"{block['ops']:,}", words.count(block["parameters"]))
    return made


def _verdict(graph: Graph, covered_flops: float) -> Text:
    if not graph.unknown:
        return Text("Every op has a sharding rule.")
    listed = ", ".join(graph.unknown)
    return Text(f"{covered_flops:.2%} of the FLOPs lie under a rule; without one: {listed}", style="yellow")


def _table(first: str, second: str, rows: Iterable[Ops]) -> RenderableType:
    rows = list(rows)
    total = sum(row.flops for row in rows) or 1.0
    numbers = [number(header) for header in ("count", "FLOPs", "share", "kept")]
    made = table(column(first), column(second), *numbers, column("first at"))
    for row in rows:
        flops, share = words.count(row.flops), words.percent(row.flops / total)
        made.add_row(
            row.key, row.kind, f"{row.count:,}", flops, share, words.size(row.saved_bytes), row.source
        )
    return made
