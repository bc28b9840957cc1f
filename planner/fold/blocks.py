"""Block classes with their counts and parameters; what of the whole model is told beside them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from ..graph import Block, Op, TracedGraph, Value
from ..space import Space
from .segments import Segment

TABLE_SHARE = 0.5
"""Embedding tables are sparse parameters when they hold more than this share of all parameters."""
TABLE_MINIMUM_ELEMENTS = 2**23
"""A smaller table is cheaper to replicate: its gradient is no larger than the vectors of one batch."""


def make_blocks(
    traced: TracedGraph,
    space: Space,
    segments: tuple[Segment, ...],
    chain: tuple[int, ...],
    ops: dict[int, tuple[Op, ...]],
) -> dict[str, Block]:
    """Block classes by name, each with the ops of its representative and the parameters it owns."""
    counts = Counter(chain)
    owners: dict[str, int] = {}
    for segment in segments:
        for described in segment.nodes:
            for name in described.reads:
                if traced.values[name].kind == "parameter":
                    owners.setdefault(name, segment.index)
    blocks = {}
    for index in sorted(counts, key=chain.index):
        segment = segments[index]
        parameters = tuple(traced.values[name] for name, owner in owners.items() if owner == index)
        module = f"{segment.list_path}.*" if segment.list_path else ""
        blocks[segment.name] = Block(
            name=segment.name,
            ops=tuple(_generic(op, segment) for op in ops[index]),
            count=counts[index],
            repeated=segment.list_path is not None,
            parameters=tuple(_generic_value(value, segment) for value in parameters),
            module=module,
        )
    return blocks


def _generic(op: Op, segment: Segment) -> Op:
    """Replace the traced layer's index by `*`."""
    reads = tuple(replace(r, fqn=_star(r.fqn, segment)) if r.fqn else r for r in op.reads)
    return replace(op, module=_star(op.module, segment), reads=reads)


def _generic_value(value: Value, segment: Segment) -> Value:
    return replace(value, fqn=_star(value.fqn or "", segment))


def _star(path: str, segment: Segment) -> str:
    if segment.list_path is None:
        return path
    prefix = f"{segment.list_path}.{segment.layer}"
    return f"{segment.list_path}.*{path[len(prefix) :]}" if path.startswith(prefix) else path


def sparse_tables(traced: TracedGraph, space: Space) -> frozenset[str]:
    """Embedding tables that dominate the model and are used for nothing but lookups."""
    used_otherwise = {
        name for d in space.nodes for i, name in enumerate(d.reads) if not (d.spec.table and i == 0)
    }
    tables = {
        d.reads[0]: traced.values[d.reads[0]]
        for d in space.nodes
        if d.spec.table and d.reads[0] in space.weights and d.reads[0] not in used_otherwise
    }
    numel = {name: math.prod(value.shape) for name, value in tables.items()}
    if sum(numel.values()) <= TABLE_SHARE * max(traced.parameters, 1):
        return frozenset()
    return frozenset(str(tables[name].fqn) for name, n in numel.items() if n >= TABLE_MINIMUM_ELEMENTS)


def unknown_ops(space: Space) -> tuple[str, ...]:
    """Ops without a rule, once each, with the source line where the first of them stands."""
    seen = {}
    for described in space.nodes:
        if not described.known and described.node.outputs and described.node.outputs[0] in space.data:
            where = described.node.source or described.node.module
            seen.setdefault(described.node.target, f"{described.node.target} at {where}")
    return tuple(seen.values())
