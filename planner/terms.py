"""Which ops may hand terms of a gradient on, whose sum over the ranks of tp is the gradient.

In: the borders of a graph. Out: the ops between a tensor that all heads share (the rotary key of latent
attention, the only key and value head of multi-query attention) and the border where it was made. Split by
heads, a rank yields its own heads' term of that tensor's gradient, and layouts change on borders only
(`borders`): what lies between is the same on every rank, and takes and hands on terms, since backward is
linear in the gradient. On the border the sum is made, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .borders import Borders, OpKey
from .graph import Edge, Graph, Op, Operand
from .rules.choices import divides

HEADS = ("heads", "kv_heads", "query_groups")
"""Names of the dims that attention is split along."""
PASSED_ON = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "unflatten", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "slice",
        "split", "split_with_sizes", "chunk", "cat", "neg", "add", "sub", "mul", "pow", "mean", "rsqrt", "to",
        "_to_copy", "contiguous", "clone", "alias", "rms_norm",
    )
)  # fmt: skip
"""Ops in whose backward DTensor leaves partial sums as they are (`tests/dist/test_terms.py`)."""


def hand_on_terms(borders: Borders, degree: int) -> frozenset[OpKey]:
    """The ops between tensors that heads share and the borders before them, on an axis of `degree` ranks.

    Beyond those upstream it takes the others that read what these make: their gradients are added.
    """
    read_from, read_by = _edges(borders.graph)
    waiting = [edge.producer[:2] for edge in borders.graph.edges if _is_shared(borders, edge, degree)]
    found: set[OpKey] = set()
    while waiting:
        key = waiting.pop()
        if key in found or not _passes_on(_op(borders.graph, key)):
            continue
        found.add(key)
        waiting += [e.producer[:2] for e in read_from[key] if not _is_stated(borders, e, key)]
        waiting += [c[:2] for e in read_by[key] for c in e.consumers if not _yields(borders.graph, c, degree)]
    return frozenset(found)


def _edges(graph: Graph) -> tuple[dict[OpKey, list[Edge]], dict[OpKey, list[Edge]]]:
    """Per op the edges of what it reads, and of what it makes, with gradients."""
    read_from: dict[OpKey, list[Edge]] = defaultdict(list)
    read_by: dict[OpKey, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        if not _operand(graph, edge.consumers[0]).grad:
            continue
        read_by[edge.producer[:2]].append(edge)
        for consumer in edge.consumers:
            read_from[consumer[:2]].append(edge)
    return read_from, read_by


def _is_shared(borders: Borders, edge: Edge, degree: int) -> bool:
    """Whether heads share the tensor, where no border lies between it and what is split by heads."""
    if borders.stated_together(edge):
        return False
    pairs = zip(edge.consumers, borders.stated_by(edge), strict=True)
    return any(not stated and _yields(borders.graph, consumer, degree) for consumer, stated in pairs)


def _is_stated(borders: Borders, edge: Edge, reader: OpKey) -> bool:
    pairs = zip(edge.consumers, borders.stated_by(edge), strict=True)
    return borders.stated_together(edge) or any(by for consumer, by in pairs if consumer[:2] == reader)


def _yields(graph: Graph, consumer: tuple[str, int, int], degree: int) -> bool:
    """Whether a consumer that is split by heads yields a term of the gradient of what it reads whole."""
    op, read = _op(graph, consumer[:2]), _operand(graph, consumer)
    if not read.grad or any(_divides(op, label, degree) for label in _heads(op, read)):
        return False
    missing = {label for write in op.writes for label in _heads(op, write)}
    return any(_divides(op, label, degree) for label in missing)


def _heads(op: Op, operand: Operand) -> Iterator[str]:
    """Labels of the dims that attention is split along."""
    names = {dim.label: dim.name for dim in op.dims}
    return (label for label in operand.labels if names[label] in HEADS)


def _divides(op: Op, label: str, degree: int) -> bool:
    return divides(op, label, degree, {dim.label: float(dim.size) for dim in op.dims})


def _passes_on(op: Op) -> bool:
    return op.target.rsplit(".", 1)[0] in PASSED_ON and any(write.grad for write in op.writes)


def _op(graph: Graph, key: OpKey) -> Op:
    return graph.blocks[key[0]].ops[key[1]]


def _operand(graph: Graph, consumer: tuple[str, int, int]) -> Operand:
    return _op(graph, consumer[:2]).reads[consumer[2]]
