"""Names of modules in layers of one kind, where a list has layers of several.

In: a graph, a block class, the path of a module in it, with `*` for the layer's index. Out: the same path
with the indices it stands for, `layers.{1-3,7}.mlp`, where other kinds of layers lie in the same list: what
is planned of one kind is not done to the others. A list with layers of one kind keeps its `*`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .graph import Edge, Graph


def of_kind(graph: Graph, block: str, module: str) -> str:
    """The name of a module in every layer of a class."""
    kinds = _kinds(graph, block)
    return _named(graph, block, module, [i for i, kind in enumerate(kinds) if kind == block])


def where_read(graph: Graph, edge: Edge, consumer: tuple[str, int, int]) -> str:
    """The name of the module that reads a tensor, in those layers that read it from this producer."""
    block, op, _ = consumer
    maker, module = edge.producer[0], graph.blocks[block].ops[op].module
    kinds = _kinds(graph, block)
    handed_on = graph.boundary.get(maker) == edge.producer[1:] and (maker != block or op <= edge.producer[1])
    if maker not in kinds or not handed_on:
        return of_kind(graph, block, module)
    after = [i for i, kind in enumerate(kinds) if i and (kinds[i - 1], kind) == (maker, block)]
    return _named(graph, block, module, after)


def _kinds(graph: Graph, block: str) -> list[str]:
    """The class of every layer of the list that a block's layers lie in; empty for other blocks."""
    path = graph.blocks[block].module
    return [n for n in graph.chain if graph.blocks[block].repeated and graph.blocks[n].module == path]


def _named(graph: Graph, block: str, module: str, indices: Sequence[int]) -> str:
    layer = graph.blocks[block].module
    inside = module == layer or module.startswith(f"{layer}.")
    if not inside or not indices or len(set(_kinds(graph, block))) < 2:
        return module
    return layer.replace("*", f"{{{_ranges(indices)}}}") + module.removeprefix(layer)


def _ranges(indices: Sequence[int]) -> str:
    """`1-3,7` for 1, 2, 3 and 7."""
    texts: list[str] = []
    for i in indices:
        if i - 1 in indices:
            texts[-1] = f"{texts[-1].partition('-')[0]}-{i}"
        else:
            texts.append(str(i))
    return ",".join(texts)
