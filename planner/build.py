"""`TracedGraph` -> `Graph`: block classes with named ops, and the edges inside and between them.

Folding: consecutive nodes of one layer form a segment; layers of one class share the ops of one
traced representative; edges are counted over the full depth, so that a cost per edge or per op
times its count is the cost of the whole model, whatever its depth.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from .graph import (
    DTYPE_BYTES,
    Block,
    Dim,
    Edge,
    Gemm,
    Graph,
    Inner,
    Op,
    Operand,
    SavedTensor,
    TracedGraph,
    Value,
)
from .layout import Collective
from .rules.spec import Axis, Spec
from .space import Described, Space, describe_all, names_of

TABLE_SHARE = 0.5
"""Embedding tables are sparse parameters when they hold more than this share of all parameters."""
TABLE_MINIMUM_ELEMENTS = 2**23
"""A smaller table is cheaper to replicate: its gradient is no larger than the vectors of one batch."""


def build(traced: TracedGraph) -> Graph:
    """The planner's graph of a traced model."""
    space = describe_all(traced)
    names = names_of(space)
    segments = _segments(traced, space)
    chain = _chain(traced, segments)
    ops = {s.index: tuple(_op(space, names, d) for d in s.nodes) for s in segments}
    fused = {index: _fuse(block, space) for index, block in ops.items()}
    edges, boundary = _edges(space, segments, chain, fused)
    blocks = _blocks(traced, space, segments, chain, fused)
    return Graph(
        name=traced.name,
        content_hash=traced.content_hash,
        batch=traced.batch,
        seq_len=traced.seq_len,
        dtype=traced.dtype,
        blocks=blocks,
        chain=tuple(segments[i].name for i in chain),
        edges=edges,
        boundary=boundary,
        parameters=traced.parameters,
        trainable_parameters=traced.trainable_parameters,
        table_fqns=_tables(traced, space),
        unknown=_unknown(space),
        warnings=traced.warnings,
    )


# --------------------------------------------------------------------------- segments


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of nodes: one traced layer, or what lies before, between or after layer lists."""

    index: int
    name: str
    """Block class name."""
    path: str
    layer: int | None
    """Traced layer index inside its list."""
    list_path: str | None
    nodes: tuple[Described, ...]


def _segments(traced: TracedGraph, space: Space) -> tuple[Segment, ...]:
    """Cut the node sequence by call order: a layer runs until the next layer starts."""
    tags = [_layer_of(traced, d.node.module) for d in space.nodes]
    starts = {}
    for position, tag in enumerate(tags):
        if tag is not None and tag not in starts:
            starts[tag] = position
    order = sorted(starts, key=lambda tag: starts[tag])
    cuts = []
    for i, tag in enumerate(order):
        following = starts[order[i + 1]] if i + 1 < len(order) else len(tags)
        same_list = i + 1 < len(order) and order[i + 1][0] == tag[0]
        last = max(p for p in range(starts[tag], following) if tags[p] == tag)
        cuts.append((tag, starts[tag], following if same_list else last + 1))
    pieces: list[tuple[tuple[str, int] | None, int, int]] = []
    at = 0
    for tag, start, stop in cuts:
        if start > at:
            pieces.append((None, at, start))
        pieces.append((tag, start, stop))
        at = stop
    if at < len(tags):
        pieces.append((None, at, len(tags)))
    return _named(traced, space, pieces)


def _layer_of(traced: TracedGraph, module: str) -> tuple[str, int] | None:
    """(list path, traced index) of the innermost repeated list that holds the module."""
    best = None
    for repeat in traced.repeats:
        match = re.match(rf"{re.escape(repeat.path)}\.(\d+)(?:\.|$)", module)
        if match and int(match[1]) < repeat.traced and (best is None or len(repeat.path) > len(best[0])):
            best = (repeat.path, int(match[1]))
    return best


def _named(
    traced: TracedGraph, space: Space, pieces: list[tuple[tuple[str, int] | None, int, int]]
) -> tuple[Segment, ...]:
    classes = {repeat.path: repeat.classes for repeat in traced.repeats}
    taken: Counter[str] = Counter()
    names: dict[tuple[str, int], str] = {}
    segments = []
    for index, (tag, start, stop) in enumerate(pieces):
        if tag is None:
            word = _outside_word(index, len(pieces), space.nodes[start:stop])
            name = _unique(word, taken)
            path, layer, list_path = "", None, None
        else:
            key = (tag[0], classes[tag[0]][tag[1]])
            if key not in names:
                names[key] = _unique(_layer_word(traced, tag[0]), taken)
            name, (list_path, layer) = names[key], tag
            path = f"{list_path}.{layer}"
        nodes = tuple(space.nodes[start:stop])
        segments.append(
            Segment(index=index, name=name, path=path, layer=layer, list_path=list_path, nodes=nodes)
        )
    return tuple(segments)


def _outside_word(index: int, total: int, nodes: list[Described]) -> str:
    if total == 1:
        return "model"
    if index == 0:
        looks_up = any(d.spec.table for d in nodes)
        return "embedding" if looks_up else "stem"
    return "head" if index == total - 1 else "between"


def _layer_word(traced: TracedGraph, path: str) -> str:
    """`layers` of one list is `layer`; with several lists the owner's name leads: `encoder layer`."""
    if len({repeat.path for repeat in traced.repeats}) == 1:
        return "layer"
    parts = [part for part in path.split(".")[:-1] if part != "model"]
    return " ".join((*parts[-1:], "layer"))


def _unique(word: str, taken: Counter[str]) -> str:
    taken[word] += 1
    return word if taken[word] == 1 else f"{word} {taken[word]}"


def _chain(traced: TracedGraph, segments: tuple[Segment, ...]) -> tuple[int, ...]:
    """Representative segment of every block of the full-depth model, in order."""
    representative = _representatives(segments)
    chain: list[int] = []
    done: set[str] = set()
    for segment in segments:
        if segment.list_path is None:
            chain.append(segment.index)
        elif segment.list_path not in done:
            done.add(segment.list_path)
            classes = next(r.classes for r in traced.repeats if r.path == segment.list_path)
            by_layer = {s.layer: s.name for s in segments if s.list_path == segment.list_path}
            chain.extend(representative[by_layer[c]] for c in classes)
    return tuple(chain)


def _representatives(segments: tuple[Segment, ...]) -> dict[str, int]:
    """The last traced copy stands for its class, as what feeds it is typical of the interior.

    Where something runs between the layers of a list, nothing follows the last: an earlier, longer one does.
    """
    longest = sorted(segments, key=lambda segment: (len(segment.nodes), segment.index))
    return {segment.name: segment.index for segment in longest}


# --------------------------------------------------------------------------- ops


def _op(space: Space, names: dict[int, str], described: Described) -> Op:
    spec, node = described.spec, described.node
    expanded = _expand_labels(space, names, described)
    dims = tuple(dim for group in expanded.values() for dim in group)
    if spec.reshape:
        reads_axes, writes_axes, dims = _reshape_axes(space, names, described)
    else:
        reads_axes = tuple(_resolve(axes, expanded) for axes in spec.inputs if axes is not None)
        writes_axes = tuple(_resolve(axes, expanded) for axes in spec.outputs)
    reads = tuple(_operand(space, name, axes) for name, axes in zip(described.reads, reads_axes, strict=True))
    writes = tuple(_operand(space, name, axes) for name, axes in zip(node.outputs, writes_axes, strict=True))
    blocked = frozenset(d.label for d in dims) if not described.factored else _labels(spec.blocked, expanded)
    return Op(
        name=node.name,
        target=node.target,
        family=spec.family,
        dims=dims,
        reads=reads,
        writes=writes,
        sums=_labels(spec.sums, expanded),
        local=_labels(spec.local, expanded),
        blocked=blocked,
        linear=spec.linear if _may_pass_partial(spec.linear, reads) else (),
        inner=tuple(
            Inner(
                label=label,
                collective=Collective(inner.collective),
                forward_labels=_flat(inner.labels, expanded),
                element_bytes=inner.element_bytes,
                count=inner.count,
                backward_count=inner.backward_count,
            )
            for inner in spec.inner
            for label in _flat((inner.label,), expanded)
        ),
        gemm=_gemm(spec, expanded),
        flops=tuple((factor, _flat(labels, expanded)) for factor, labels in spec.flops),
        backward_flops=spec.backward_flops,
        experts=_flat((spec.experts,), expanded)[0] if spec.experts else None,
        table=_flat((spec.table,), expanded)[0] if spec.table else None,
        sort=spec.sort if any(name in space.routed for name in (*described.reads, *node.outputs)) else "",
        causal=_flat(spec.causal, expanded),
        fused_reads=frozenset(),
        fused_writes=frozenset(),
        saved=_saved(space, described, reads, writes, dims),
        module=node.module,
        module_class=node.module_class,
        source=node.source,
    )


def _gemm(spec: Spec, expanded: dict[str, tuple[Dim, ...]]) -> Gemm | None:
    if spec.gemm is None:
        return None
    m, n, k, batch = (_flat(group, expanded) for group in spec.gemm)
    return Gemm(m=m, n=n, k=k, batch=batch)


def _expand_labels(space: Space, names: dict[int, str], described: Described) -> dict[str, tuple[Dim, ...]]:
    result = {}
    for label, atoms in described.labels.items():
        leaves = space.atoms.leaves(atoms)
        parts = [label] if len(leaves) == 1 else [f"{label}.{i}" for i in range(len(leaves))]
        result[label] = tuple(
            Dim(label=part, name=names[leaf], size=space.atoms.size(leaf))
            for part, leaf in zip(parts, leaves, strict=True)
        )
    return result


def _reshape_axes(
    space: Space, names: dict[int, str], described: Described
) -> tuple[tuple[tuple[Axis, ...], ...], tuple[tuple[Axis, ...], ...], tuple[Dim, ...]]:
    """Labels by position in the flat order that both sides of a reshape share."""
    dims: list[Dim] = []

    def walk(name: str, prefix: str, record: bool) -> tuple[Axis, ...]:
        axes, position = [], 0
        for axis in space.axes[name]:
            labels = []
            for leaf in space.atoms.leaves(axis):
                labels.append(f"{prefix}{position}")
                if record:
                    dims.append(Dim(label=labels[-1], name=names[leaf], size=space.atoms.size(leaf)))
                position += 1
            axes.append(tuple(labels))
        return tuple(axes)

    source, target = described.reads[0], described.node.outputs[0]
    first = walk(source, "f", True)
    second = walk(target, "f" if described.factored else "u", not described.factored)
    return (first,), (second,), tuple(dims)


def _resolve(axes: tuple[Axis, ...], expanded: dict[str, tuple[Dim, ...]]) -> tuple[Axis, ...]:
    return tuple(tuple(dim.label for label in axis for dim in expanded[label]) for axis in axes)


def _flat(labels: tuple[str, ...], expanded: dict[str, tuple[Dim, ...]]) -> tuple[str, ...]:
    return tuple(dim.label for label in labels for dim in expanded.get(label, ()))


def _labels(labels: frozenset[str], expanded: dict[str, tuple[Dim, ...]]) -> frozenset[str]:
    return frozenset(_flat(tuple(sorted(labels)), expanded))


def _operand(space: Space, name: str, axes: tuple[Axis, ...]) -> Operand:
    value = space.traced.values[name]
    kind = value.kind
    if name in space.weights:
        kind = "parameter"
    elif name not in space.data:
        kind = "constant"
    return Operand(
        tensor=name,
        axes=axes,
        dtype=value.dtype,
        kind=kind,
        grad=name in space.grads,
        fqn=value.fqn,
        sorted_by_expert=name in space.routed,
    )


def _may_pass_partial(linear: tuple[int, ...], reads: tuple[Operand, ...]) -> bool:
    """Partial sums pass only if no other operand needs a gradient (it would be partial too)."""
    if not linear or any(reads[i].kind != "activation" for i in linear):
        return False
    return not any(r.grad for i, r in enumerate(reads) if i not in linear)


def _saved(
    space: Space,
    described: Described,
    reads: tuple[Operand, ...],
    writes: tuple[Operand, ...],
    dims: tuple[Dim, ...],
) -> tuple[SavedTensor, ...]:
    result = []
    for saved in described.node.saved:
        elements = math.prod(saved.shape)
        width = DTYPE_BYTES[saved.dtype]
        position = _position(space, saved.value, reads, writes) if saved.value else None
        if saved.value is not None and position is None and saved.value not in space.data:
            continue
        if position is None:
            labels = _match(saved.shape, dims)
        else:
            operand = reads[position] if position >= 0 else writes[~position]
            labels = tuple(label for axis in operand.axes for label in axis)
        if math.prod(d.size for d in dims if d.label in labels) != elements:
            labels = _match(saved.shape, dims)
        result.append(SavedTensor(operand=position, labels=labels, element_bytes=width, elements=elements))
    return tuple(result)


def _position(space: Space, name: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...]) -> int | None:
    """Which operand shares the storage of a saved value."""
    root = space.roots.get(name, name)
    for i, operand in enumerate(reads):
        if space.roots[operand.tensor] == root:
            return i
    for i, operand in enumerate(writes):
        if operand.tensor == name or space.roots[operand.tensor] == root:
            return ~i
    return None


def _match(shape: tuple[int, ...], dims: tuple[Dim, ...]) -> tuple[str, ...]:
    """Dims whose sizes spell out a shape, in order: how internal storage scales."""
    labels: list[str] = []
    position = 0
    for size in shape:
        remaining = size
        while remaining > 1 and position < len(dims):
            dim = dims[position]
            position += 1
            if remaining % dim.size == 0:
                labels.append(dim.label)
                remaining //= dim.size
    return tuple(labels)


def _fuse(ops: tuple[Op, ...], space: Space) -> tuple[Op, ...]:
    """Mark traffic that stays on chip when neighbouring pointwise ops run as one kernel."""
    maker = {write.tensor: op for op in ops for write in op.writes}
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        for read in op.reads:
            readers[read.tensor].append(op)

    def pointwise(name: str, seen: int = 0) -> bool:
        op = maker.get(name)
        if op is None or seen > len(ops):
            return False
        return op.family == "pointwise" or (op.family == "view" and pointwise(op.reads[0].tensor, seen + 1))

    inside = {write.tensor for op in ops for write in op.writes}
    leaves_block = inside & _read_elsewhere(ops, space)
    result = []
    for op in ops:
        if op.family == "pointwise":
            reads = frozenset(i for i, read in enumerate(op.reads) if pointwise(read.tensor))
            writes = frozenset(
                i
                for i, write in enumerate(op.writes)
                if write.tensor not in leaves_block
                and all(r.family in ("pointwise", "view") for r in readers[write.tensor])
                and readers[write.tensor]
            )
            op = replace(op, fused_reads=reads, fused_writes=writes)
        result.append(op)
    return tuple(result)


def _read_elsewhere(ops: tuple[Op, ...], space: Space) -> set[str]:
    here = {op.name for op in ops}
    return {name for d in space.nodes if d.node.name not in here for name in d.reads}


# --------------------------------------------------------------------------- edges


def _edges(
    space: Space, segments: tuple[Segment, ...], chain: tuple[int, ...], ops: dict[int, tuple[Op, ...]]
) -> tuple[tuple[Edge, ...], dict[str, tuple[int, int] | None]]:
    """All edges with their counts over the full-depth model."""
    places = {
        write.tensor: (segment.index, i, j)
        for segment in segments
        for i, op in enumerate(ops[segment.index])
        for j, write in enumerate(op.writes)
    }
    slots = _handed_on(segments, ops, places)
    counts: Counter[tuple] = Counter()
    exact = _exact(segments, chain)
    for position, rep in enumerate(chain):
        actual = exact.get(position, rep)
        previous = chain[position - 1] if position else None
        for source, consumers in _reads_of(ops[actual], places, actual).items():
            producer = _producer(source, actual, previous, slots, segments)
            counts[(producer, consumers, segments[rep].name)] += 1
    edges = tuple(
        Edge(
            producer=(segments[producer[0]].name, *producer[1:]),
            consumers=tuple((block, *consumer) for consumer in consumers),
            count=float(count),
            block=block,
        )
        for (producer, consumers, block), count in counts.items()
    )
    boundary = {segment.name: next(iter(slots.get(segment.index, ())), None) for segment in segments}
    return edges, {name: (slot[0], slot[1]) if slot else None for name, slot in boundary.items()}


def _exact(segments: tuple[Segment, ...], chain: tuple[int, ...]) -> dict[int, int]:
    """Positions of the full chain whose very layer was traced."""
    result, first_of_list = {}, {}
    for position, rep in enumerate(chain):
        path = segments[rep].list_path
        if path is None:
            result[position] = rep
        else:
            first_of_list.setdefault(path, position)
    for segment in segments:
        if segment.list_path is not None:
            result[first_of_list[segment.list_path] + segment.layer] = segment.index
    return result


def _reads_of(
    ops: tuple[Op, ...], places: dict[str, tuple[int, int, int]], here: int
) -> dict[tuple[int, int, int], tuple[tuple[int, int], ...]]:
    """Per producing place: the (op, read) pairs of this segment that consume it."""
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for i, op in enumerate(ops):
        for j, read in enumerate(op.reads):
            if read.kind != "constant" and read.tensor in places:
                found[places[read.tensor]].append((i, j))
    return {place: tuple(consumers) for place, consumers in found.items()}


def _handed_on(
    segments: tuple[Segment, ...], ops: dict[int, tuple[Op, ...]], places: dict[str, tuple[int, int, int]]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Per segment: what the next one reads of it, as (op, write), in order of first use."""
    result = {}
    for segment in segments[1:]:
        sources = _reads_of(ops[segment.index], places, segment.index)
        result[segment.index - 1] = tuple(s[1:] for s in sources if s[0] == segment.index - 1)
    return result


def _producer(
    source: tuple[int, int, int],
    actual: int,
    previous: int | None,
    slots: dict[int, tuple[tuple[int, int], ...]],
    segments: tuple[Segment, ...],
) -> tuple[int, int, int]:
    """Where a tensor comes from in the full-depth chain."""
    if source[0] == actual or source[0] != actual - 1 or previous is None:
        last = max(s.index for s in segments if s.name == segments[source[0]].name)
        return (last, *source[1:])
    if segments[previous].name == segments[source[0]].name:
        return (previous, *source[1:])
    ordinal = slots[source[0]].index((source[1], source[2]))
    handed = slots.get(previous, ())
    return (previous, *handed[min(ordinal, len(handed) - 1)]) if handed else (source[0], *source[1:])


# --------------------------------------------------------------------------- blocks


def _blocks(
    traced: TracedGraph,
    space: Space,
    segments: tuple[Segment, ...],
    chain: tuple[int, ...],
    ops: dict[int, tuple[Op, ...]],
) -> dict[str, Block]:
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


def _tables(traced: TracedGraph, space: Space) -> frozenset[str]:
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


def _unknown(space: Space) -> tuple[str, ...]:
    seen = {}
    for described in space.nodes:
        if not described.known and described.node.outputs and described.node.outputs[0] in space.data:
            where = described.node.source or described.node.module
            seen.setdefault(described.node.target, f"{described.node.target} at {where}")
    return tuple(seen.values())
