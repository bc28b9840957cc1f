"""Conversions that chosen splits ask for: on the edges of the graph, of parameters, and inside ops.

In: the graph, the choices along one axis, the extents before it. Out: `Reshard`s with the block that pays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from ..estimate.op_work import Sizes, operand_bytes
from ..graph import Block, Edge, Graph, Op
from ..layout import Collective, Partial, Placement, Replicate, Shard, conversion, gradient_needed
from ..rules.choices import BATCH, SEQUENCE
from .axis import AxisSolution, OpKey, inner_exchanges, local_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """A conversion that one block pays for, forward or backward."""

    axis: str
    collective: Collective
    bytes: float
    count: float
    """Per block and microbatch."""
    backward: bool
    label: str
    consumers: frozenset[tuple[int, int]]
    """(op, read) that need it."""
    first: int
    """The first op of its block that has to wait for it."""
    copies: float = 1.0
    """Rows per token, of rows sent to the experts that were picked."""
    enters: bool = False
    """Whether the tensor comes from outside all layers: it is converted once, before it enters the first."""


def reshards_along(
    graph: Graph, solution: AxisSolution, sizes: dict[OpKey, Sizes], inner: list[AxisSolution]
) -> list[tuple[Reshard, str]]:
    """Every conversion on the edges of the graph along one axis, each paid once per layout.

    `inner`: axes that split what this axis leaves: a rank moves only its part of what they shard.
    """
    if solution.degree == 1:
        return []
    found = []
    for edge in graph.edges:
        count = edge.count / graph.blocks[edge.block].count
        ways = _ways(edge, inner)
        found.extend((r, edge.block) for r in _edge_reshards(graph, edge, solution, sizes, count, ways))
    found += _parameter_reshards(graph, solution, sizes)
    for key, choice in solution.choices.items():
        op = graph.blocks[key[0]].ops[key[1]]
        local = sizes[key]
        for later in inner:
            local = local_sizes(op, later.choices[key], local, later.degree)
        for collective, nbytes, times, backward in inner_exchanges(op, choice, local, solution.degree):
            found.append(
                (
                    Reshard(
                        axis=solution.axis,
                        collective=collective,
                        bytes=nbytes,
                        count=times,
                        backward=backward,
                        label=f"inside {place(op)}",
                        consumers=frozenset(),
                        first=key[1],
                    ),
                    key[0],
                )
            )
    return found


def _ways(edge: Edge, axes: list[AxisSolution]) -> int:
    """Into how many parts `axes` cut the tensor of this edge where it is made."""
    made = [(a.degree, a.choices[edge.producer[:2]].writes[edge.producer[2]]) for a in axes]
    return math.prod(degree for degree, placement in made if isinstance(placement, Shard))


def _edge_reshards(
    graph: Graph, edge: Edge, solution: AxisSolution, sizes: dict[OpKey, Sizes], count: float, ways: int
) -> list[Reshard]:
    source = solution.choices[edge.producer[:2]].writes[edge.producer[2]]
    label = edge_label(graph, edge)
    parts = ways * (repeats(graph, edge) if solution.axis == "cp" else 1)  # keys and values go as they were
    made = _conversions(graph, solution, sizes, source, edge.consumers, count=count, ways=parts, label=label)
    if graph.blocks[edge.block].repeated and not graph.blocks[edge.producer[0]].repeated:
        made = [replace(reshard, enters=True) for reshard in made]
    block, op, read = edge.consumers[0]
    if graph.blocks[block].ops[op].reads[read].kind != "parameter":
        return made
    return [
        r for r in made if not (r.backward and isinstance(source, Replicate))
    ]  # summed as the parameter's


def repeats(graph: Graph, edge: Edge) -> int:
    """How often each element lies in a tensor that views made by repeating, as heads of grouped attention."""
    block, index, write = edge.producer
    ops = graph.blocks[block].ops
    maker = {made.tensor: (op, made) for op in ops for made in op.writes}
    tensor, times = ops[index].writes[write].tensor, 1
    while tensor in maker:
        op, made = maker[tensor]
        activations = [read for read in op.reads if read.kind == "activation"]
        if op.family != "view" or len(activations) != 1:
            break
        before, after = (
            math.prod(op.size(d) for axis in o.axes for d in axis) for o in (activations[0], made)
        )
        if after < before:
            break
        times, tensor = times * (after // before), activations[0].tensor
    return times


def _parameter_reshards(
    graph: Graph, solution: AxisSolution, sizes: dict[OpKey, Sizes]
) -> list[tuple[Reshard, str]]:
    """Conversions of parameters that several ops read, from the layout they are stored in.

    The gradient of one that is stored whole is summed once per step, with the others: see `ParameterGroup`.
    """
    readers: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for block in graph.blocks.values():
        for i, op in enumerate(block.ops):
            for j, read in enumerate(op.reads):
                if read.kind == "parameter" and read.fqn is not None:
                    readers[read.tensor].append((block.name, i, j))
    found = []
    for tensor, places in readers.items():
        stored = solution.parameters[tensor]
        if len(places) == 1:
            continue
        block, op, read = places[0]
        label = graph.blocks[block].ops[op].reads[read].fqn or tensor
        count = 1.0 / graph.blocks[block].count
        made = _conversions(graph, solution, sizes, stored, tuple(places), count=count, ways=1, label=label)
        found += [(r, block) for r in made if not (r.backward and isinstance(stored, Replicate))]
    return found


def _conversions(
    graph: Graph,
    solution: AxisSolution,
    sizes: dict[OpKey, Sizes],
    source: Placement,
    consumers: tuple[tuple[str, int, int], ...],
    *,
    count: float,
    ways: int,
    label: str,
) -> list[Reshard]:
    """What it takes to hand a tensor laid out as `source` to its consumers, and their gradients back."""
    forward: dict[Placement, list[tuple[int, int]]] = defaultdict(list)
    gradients: dict[Placement, list[tuple[int, int]]] = defaultdict(list)
    for block, op, read in consumers:
        choice = solution.choices[block, op]
        forward[choice.reads[read]].append((op, read))
        gradient = choice.read_gradients[read]
        if gradient is not None:
            gradients[gradient].append((op, read))
    block, op, read = consumers[0]
    nbytes = operand_bytes(graph.blocks[block].ops[op].reads[read], sizes[block, op]) / ways
    needed = gradient_needed(source)
    pairs = [(source, target, users, False) for target, users in forward.items()]
    pairs += [(gradient, needed, users, True) for gradient, users in gradients.items()]
    result = []
    for before, target, users, backward in pairs:
        collective = conversion(before, target)
        if collective is None:
            continue
        buffer = nbytes / solution.degree if collective is Collective.ALL_TO_ALL else nbytes
        result.append(
            Reshard(
                axis=solution.axis,
                collective=collective,
                bytes=buffer,
                count=count,
                backward=backward,
                label=label,
                consumers=frozenset(users),
                first=min(op for op, _ in users),
                copies=_copies(graph.blocks[block].ops[op], read, sizes[block, op]),
            )
        )
    return result


def _copies(op: Op, read: int, sizes: Sizes) -> float:
    """Rows per token of a tensor in expert order."""
    operand = op.reads[read]
    if not operand.sorted_by_expert or not operand.axes:
        return 1.0
    names = {dim.label: dim.name for dim in op.dims}
    return math.prod(sizes[label] for label in operand.axes[0] if names[label] not in (BATCH, SEQUENCE))


def distinct_share(copies: float, units: int) -> float:
    """Distinct units over copies when each of `copies` picks one of `units` at random."""
    return units * (1 - (1 - 1 / units) ** copies) / copies


def partial_gradients(block: Block, tp: AxisSolution) -> set[str]:
    """Tensors of whose gradient the ranks of tp each hold a term; a view's term is its parameter's."""
    found = {
        read.tensor
        for i, op in enumerate(block.ops)
        for read, gradient in zip(op.reads, tp.choices[block.name, i].read_gradients, strict=True)
        if isinstance(gradient, Partial)
    }
    for op in reversed(block.ops):
        view = bool(op.reads) and all(read.kind == "parameter" for read in op.reads)
        if view and found.intersection(write.tensor for write in op.writes):
            found.update(read.tensor for read in op.reads)
    return found


def place(op: Op) -> str:
    """Where an op is, in words: its module, or its own name outside any module."""
    return op.module.removeprefix("model.") or op.target.split(".")[1]


def edge_label(graph: Graph, edge: Edge) -> str:
    """Between which places a tensor goes, in words: `layers.*.norm1 -> layers.*.attention.q`."""
    producer = graph.blocks[edge.producer[0]].ops[edge.producer[1]]
    consumers = dict.fromkeys(place(graph.blocks[b].ops[op]) for b, op, _ in edge.consumers)
    return f"{place(producer)} -> {', '.join(consumers)}"
