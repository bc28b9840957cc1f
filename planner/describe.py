"""Splits in words, and placements by name: what a plan says about the choices behind it.

In: a `Graph` and the `Splits` of an intra-op solution. Out: the `Split`, `ParameterPlacement` and
`ModuleLayout` records of a plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .borders import Borders, has_gradients
from .graph import Block, Dim, Edge, Graph, Op, Operand
from .layer_kinds import of_kind, where_read
from .layout import Collective, Placement, Replicate, Shard, conversion, gradient_needed
from .plan import LayerList, ModuleLayout, ParameterPlacement, PlannedReshard, Split
from .rules.choices import Choice
from .solve.axis import AxisSolution, OpKey
from .solve.intra_op import Splits
from .solve.reshards import edge_label, partial_gradients


def splits_in_words(graph: Graph, splits: Splits) -> tuple[Split, ...]:
    """One line per op that says something: products, attention, lookups, norms, the loss."""
    return tuple(
        split
        for solution in (splits.cp, splits.ep, splits.tp)
        if solution is not None and solution.degree > 1
        for block in graph.blocks.values()
        for i, op in enumerate(block.ops)
        if (split := _split(graph, block, (block.name, i), op, solution)) is not None
    )


def _split(graph: Graph, block: Block, key: OpKey, op: Op, solution: AxisSolution) -> Split | None:
    choice = solution.choices[key]
    words = _words(op, choice, solution.axis)
    if words is None:
        return None
    after = _reduced_into(graph, key, solution)
    dim = _dim(op, choice.label)
    return Split(
        block=block.name,
        module=op.module or op.target.split(".")[1],
        op=op.target.split(".")[1],
        axis=solution.axis,
        dim=dim.name if dim else None,
        words=f"{words}{after}",
        source=op.source,
    )


def _dim(op: Op, label: str | None) -> Dim | None:
    return next((dim for dim in op.dims if dim.label == label), None)


def _words(op: Op, choice: Choice, axis: str) -> str | None:
    """What happens to one op; None for ops that merely follow."""
    dim = _dim(op, choice.label)
    name = dim.name if dim else ""
    parameters = any(read.kind == "parameter" for read in op.reads)
    if choice.kind == "table":
        return f"{name} rows split over {axis}: ids out, vectors back by all-to-all"
    if choice.kind == "experts":
        return f"experts split over {axis}" if op.experts else None
    if op.family in ("gemm", "grouped_gemm") and parameters:
        return _product_words(op, choice, name, axis)
    if op.family == "attention":
        return f"{name} split over {axis}" if choice.kind == "split" else f"whole on every rank of {axis}"
    if op.table:
        return _lookup_words(op, choice, name, axis)
    if op.inner and choice.inner:
        return f"{name} split over {axis}: {choice.inner[0].count} small {choice.inner[0].collective}s inside"
    if parameters and op.family == "memory":
        return f"{name} split over {axis}" if choice.kind == "split" else f"whole on every rank of {axis}"
    return None


def _product_words(op: Op, choice: Choice, name: str, axis: str) -> str:
    assert op.gemm is not None
    if choice.kind != "split":
        return f"whole on every rank of {axis}"
    if choice.label in op.gemm.n:
        return f"{name} split over {axis}, column"
    if choice.label in op.gemm.k:
        return f"reduced over {name}, row"
    return f"{name} split over {axis}, weights whole"


def _lookup_words(op: Op, choice: Choice, name: str, axis: str) -> str:
    if choice.kind != "split":
        return f"table whole on every rank of {axis}"
    if choice.label == op.table:
        return f"{name} rows split over {axis}"
    in_table = any(choice.label in labels for labels in op.reads[0].axes)
    return f"{name} columns split over {axis}" if in_table else f"{name} split over {axis}, table whole"


def _reduced_into(graph: Graph, key: OpKey, solution: AxisSolution) -> str:
    """` -> reduce-scatter over sequence`, when the op's output is resharded on its way."""
    found: list[str] = []
    for edge in graph.edges:
        if edge.producer[:2] != key:
            continue
        source = solution.choices[key].writes[edge.producer[2]]
        for block, op, read in edge.consumers:
            target = solution.choices[block, op].reads[read]
            collective = conversion(source, target)
            if collective is not None:
                found.append(_arrow(collective, source, target))
    return "".join(dict.fromkeys(found))


def _arrow(collective: Collective, source: Placement, target: Placement) -> str:
    if isinstance(target, Shard):
        return f" -> {collective} over {target.dim}"
    if isinstance(source, Shard):
        return f" -> {collective} over {source.dim}"
    return f" -> {collective}"


# --------------------------------------------------------------------------- parameters


def parameter_placements(graph: Graph, splits: Splits) -> tuple[ParameterPlacement, ...]:
    """Every parameter with its named dims and where its elements lie."""
    return tuple(_parameter_placements(graph, splits))


def _parameter_placements(graph: Graph, splits: Splits) -> Iterator[ParameterPlacement]:
    operands, readers = _parameter_operands(graph), _readers(graph)
    summed = set().union(*(partial_gradients(block, splits.tp) for block in graph.blocks.values()))
    axes = [solution for solution in (splits.ep, splits.tp) if solution.degree > 1]
    for block in graph.blocks.values():
        for value in block.parameters:
            operand = operands.get(value.name)
            yield ParameterPlacement(
                fqn=value.fqn or value.name,
                shape=value.shape,
                dims=_named_axes(*operand) if operand else tuple("?" for _ in value.shape),
                dim_sizes=_axis_sizes(*operand) if operand else tuple((n,) for n in value.shape),
                placements=tuple(
                    (s.axis, placement_text(s.parameters.get(value.name, Replicate()))) for s in axes
                ),
                blocks=(block.name, *(name for name in readers[value.name] if name != block.name)),
                summed_over_tp=(
                    splits.tp.degree > 1
                    and value.name in summed
                    and isinstance(splits.tp.parameters.get(value.name, Replicate()), Replicate)
                ),
            )


def _parameter_operands(graph: Graph) -> dict[str, tuple[Op, Operand]]:
    """Per parameter: the first op that reads it, and as which operand."""
    found: dict[str, tuple[Op, Operand]] = {}
    for block in graph.blocks.values():
        for op in block.ops:
            for read in op.reads:
                if read.kind == "parameter" and read.fqn and read.tensor not in found:
                    found[read.tensor] = (op, read)
    return found


def _readers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Per parameter, the block classes that read it."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for block in graph.blocks.values():
        for op in block.ops:
            found_here = (read.tensor for read in op.reads if read.kind == "parameter")
            for tensor in found_here:
                found[tensor][block.name] = None
    return defaultdict(tuple, {tensor: tuple(names) for tensor, names in found.items()})


def _named_axes(op: Op, operand: Operand) -> tuple[str, ...]:
    names = {dim.label: dim.name for dim in op.dims}
    return tuple("*".join(names[label] for label in axis) or "1" for axis in operand.axes)


def _axis_sizes(op: Op, operand: Operand) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(op.size(label) for label in axis) for axis in operand.axes)


def placement_text(placement: Placement) -> str:
    """`S(ffn)@0`, `R` or `P`."""
    return f"S({placement.dim})@{placement.axis}" if isinstance(placement, Shard) else str(placement)


# --------------------------------------------------------------------------- modules


def module_layouts(graph: Graph, splits: Splits) -> tuple[ModuleLayout, ...]:
    """Layouts at the boundaries of modules that own parameters: what the runtime installs."""
    return tuple(
        layout
        for solution in (splits.ep, splits.tp)
        if solution.degree > 1
        for block in graph.blocks.values()
        for layout in _module_layouts(block, solution)
    )


def _module_layouts(block: Block, solution: AxisSolution) -> Iterator[ModuleLayout]:
    owners = {(value.fqn or "").rpartition(".")[0] for value in block.parameters}
    ops: dict[str, list[int]] = {}
    for i, op in enumerate(block.ops):
        if op.module in owners:
            ops.setdefault(op.module, []).append(i)
    for module, indices in ops.items():
        first, last = indices[0], indices[-1]
        reads = zip(block.ops[first].reads, solution.choices[block.name, first].reads, strict=True)
        yield ModuleLayout(
            module=module,
            axis=solution.axis,
            inputs=tuple(placement_text(p) for read, p in reads if read.kind in ("activation", "input")),
            outputs=tuple(placement_text(p) for p in solution.choices[block.name, last].writes),
        )


# --------------------------------------------------------------------------- borders


def layer_lists(graph: Graph) -> tuple[LayerList, ...]:
    """Where each repeated block class lies in the model."""
    return tuple(
        LayerList(block=name, module=block.module) for name, block in graph.blocks.items() if block.repeated
    )


def planned_reshards(graph: Graph, splits: Splits) -> tuple[PlannedReshard, ...]:
    """Conversions that can be stated on the border of a module that owns parameters, or of a layer.

    A tensor that leaves such a module and is read in one layout is converted where it leaves, so
    that its consumers share the conversion and the gradients they yield are added before they are
    reduced, once. What enters the first of several layers is converted there, for all that the layer
    does with it. Otherwise each consumer that is such a module converts what it reads.
    """
    by_producer: dict[tuple[str, int, int], list[Edge]] = {}
    for edge in graph.edges:
        by_producer.setdefault(edge.producer, []).append(edge)
    borders = Borders(graph)
    found = [
        reshard
        for solution in (splits.ep, splits.tp)
        if solution.degree > 1
        for edges in by_producer.values()
        for reshard in _reshards_of(graph, borders, edges, solution)
    ]
    return tuple(dict.fromkeys(found))


def _reshards_of(
    graph: Graph, borders: Borders, edges: list[Edge], solution: AxisSolution
) -> Iterator[PlannedReshard]:
    block, index, write = edges[0].producer
    producer = graph.blocks[block].ops[index]
    source = solution.choices[block, index].writes[write]

    def stated(edge: Edge, module: str, side: str, target: Placement) -> PlannedReshard:
        return PlannedReshard(
            label=edge_label(graph, edge),
            axis=solution.axis,
            module=module,
            side=side,
            source=placement_text(source),
            target=placement_text(target),
            gradient=placement_text(gradient_needed(source)),
        )

    targets = [_targets(edge, solution) for edge in edges]
    if borders.ends((block, index)) and len(set().union(*targets)) == 1:
        yield stated(edges[0], of_kind(graph, block, producer.module), "output", *targets[0])
        return
    for edge, wanted in zip(edges, targets, strict=True):
        entered = borders.layer_entered(edge)
        if entered is not None and len(wanted) == 1:
            yield stated(edge, entered, "input", *wanted)
            continue
        for b, i, read in edge.consumers:
            if has_gradients(graph.blocks[b].ops[i].reads[read]) and borders.begins((b, i)):
                target = solution.choices[b, i].reads[read]
                yield stated(edge, where_read(graph, edge, (b, i, read)), "input", target)


def _targets(edge: Edge, solution: AxisSolution) -> set[Placement]:
    return {solution.choices[block, op].reads[read] for block, op, read in edge.consumers}
