"""Named iteration spaces: what every traced op iterates over, with dims shared over the graph.

In: a `TracedGraph`. Out: per node its `Spec` with labels resolved to atoms, per value its axes as
atoms, and a name for every leaf atom. Uniting dims over the graph serves *naming and factoring*
only: a residual stream makes a square projection's input and output dims one atom, yet inside the
op they stay two labels, one reduced and one produced.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .atoms import Atoms
from .graph import Node, Ref, TracedGraph, Value
from .rules import Call, Spec, describe, is_factory
from .rules.spec import Axis

FLOATING = ("float", "bfloat", "complex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One op with its spec and, per label, the atoms it runs over."""

    node: Node
    spec: Spec
    known: bool
    labels: dict[str, tuple[int, ...]]
    reads: tuple[str, ...]
    factored: bool
    """False when axes do not factor as the op wants (a reshape of 6 x 4 to 8 x 3), so that no dim can be
    followed through it and none may be split."""


@dataclass(slots=True, kw_only=True)
class Space:
    """The store that fills while nodes are described in order."""

    traced: TracedGraph
    atoms: Atoms = field(default_factory=Atoms)
    axes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    data: set[str] = field(default_factory=set)
    """Values that depend on the user's inputs or on parameters; all others are constants."""
    grads: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    """Parameters and views or casts of them."""
    permutations: set[str] = field(default_factory=set)
    routed: set[str] = field(default_factory=set)
    roots: dict[str, str] = field(default_factory=dict)
    """The value whose storage a view shares."""
    votes: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    nodes: list[Described] = field(default_factory=list)


def describe_all(traced: TracedGraph) -> Space:
    """Describe every live node of the traced graph, in order."""
    space = Space(traced=traced)
    for value in traced.values.values():
        if value.kind != "activation":
            _enter(space, value)
    live = _live(traced)
    for node in traced.nodes:
        if node.name in live:
            _describe(space, node)
    return space


def _live(traced: TracedGraph) -> set[str]:
    """Nodes that the output depends on."""
    maker = {output: node for node in traced.nodes for output in node.outputs}
    live: set[str] = set()
    stack = [traced.output]
    while stack:
        node = maker.get(stack.pop())
        if node is not None and node.name not in live:
            live.add(node.name)
            stack.extend(node.refs())
    return live


def _enter(space: Space, value: Value) -> None:
    """An input, parameter, buffer or constant: fresh axes."""
    axes = tuple(space.atoms.axis(size) for size in value.shape)
    space.axes[value.name] = axes
    space.roots[value.name] = value.name
    if value.kind in ("input", "parameter"):
        space.data.add(value.name)
    if value.kind == "parameter":
        space.weights.add(value.name)
        if value.trainable:
            space.grads.add(value.name)
    if value.kind == "input" and value.shape and value.shape[0] == space.traced.batch:
        space.votes.append((10, "batch", axes[0]))
        if len(value.shape) > 1 and value.shape[1] == space.traced.seq_len:
            space.votes.append((10, "sequence", axes[1]))


def _describe(space: Space, node: Node) -> None:
    call = _call(space, node)
    spec, known = describe(call)
    labels = _labels(space, call, spec)
    bound = labels is not None
    labels = labels if labels is not None else _fresh_labels(space, call, spec)
    factored = _outputs(space, call, spec, labels) and bound
    for label, name in spec.names.items():
        if label in labels:
            space.votes.append((_PRIORITY.get(name, 6), name, labels[label]))
    _vote_matrix(space, call, spec, labels)
    _mark(space, call, spec)
    space.nodes.append(
        Described(
            node=node,
            spec=spec,
            known=known or is_factory(node.target),
            labels=labels,
            reads=tuple(call_reads(call, spec)),
            factored=factored,
        )
    )


def call_reads(call: Call, spec: Spec) -> list[str]:
    """Names of the values whose data the op reads."""
    return [v.name for v, axes in zip(call.inputs, spec.inputs, strict=True) if axes is not None]


_PRIORITY = {
    "batch": 10, "sequence": 10, "experts": 9, "heads": 8, "kv_heads": 8, "query_groups": 8, "head_dim": 8,
    "vocab": 7,
}  # fmt: skip
"""How much a rule's word counts against another's for the same dim; 6 for words not listed."""
MOST_PIECES = 4
"""Matrices that one product makes at once: gate and up, queries, keys and values, an LSTM's gates."""
_FACTOR_PRIORITY = {"head_dim": 3}
"""The same where a label turned out to be a product: half a head is still `head_dim`."""


def _call(space: Space, node: Node) -> Call:
    values = space.traced.values

    def resolve(arg: object) -> object:
        if isinstance(arg, Ref):
            return values[arg.name]
        return tuple(resolve(item) for item in arg) if isinstance(arg, tuple | list) else arg

    return Call(
        node=node,
        args=tuple(resolve(arg) for arg in node.args),
        kwargs={key: resolve(arg) for key, arg in node.kwargs},
        inputs=tuple(values[name] for name in node.refs()),
        outputs=tuple(values[name] for name in node.outputs),
        permutations=frozenset(space.permutations),
        routed=frozenset(space.routed),
    )


def _labels(space: Space, call: Call, spec: Spec) -> dict[str, tuple[int, ...]] | None:
    """Bind labels to the atoms of the tensors read, refining where an axis has several labels.

    None when an axis is already cut into other factors than the op's.
    """
    labels: dict[str, tuple[int, ...]] = {}
    for value, axes in zip(call.inputs, spec.inputs, strict=True):
        for atoms, axis, size in zip(
            space.axes[value.name], axes or (), value.shape, strict=axes is not None
        ):
            if not _bind(space, labels, spec, axis, atoms, size):
                return None
    return labels


def _fresh_labels(space: Space, call: Call, spec: Spec) -> dict[str, tuple[int, ...]]:
    """Labels of an op whose axes cannot be followed: sizes only."""
    labels: dict[str, tuple[int, ...]] = {}
    for value, axes in zip(call.inputs, spec.inputs, strict=True):
        for axis, size in zip(axes or (), value.shape, strict=axes is not None):
            for label in axis:
                labels.setdefault(label, (space.atoms.new(spec.sizes.get(label, size)),))
    return labels


def _bind(
    space: Space,
    labels: dict[str, tuple[int, ...]],
    spec: Spec,
    axis: Axis,
    atoms: tuple[int, ...],
    size: int,
) -> bool:
    """Say that an axis is the product of its labels; False when its factors do not allow that."""
    if len(axis) == 1 and axis[0] not in labels:
        labels[axis[0]] = atoms
        return True
    for label in axis:
        labels.setdefault(label, (space.atoms.new(spec.sizes.get(label, size)),))
    bound = tuple(atom for label in axis for atom in labels[label])
    return not axis or space.atoms.equate(atoms, bound)


def _outputs(space: Space, call: Call, spec: Spec, labels: dict[str, tuple[int, ...]]) -> bool:
    factored = True
    for position, (value, axes) in enumerate(zip(call.outputs, spec.outputs, strict=True)):
        if spec.reshape:
            made = tuple(space.atoms.axis(size) for size in value.shape)
            flat = [atom for axis in space.axes[call.inputs[0].name] for atom in axis]
            factored = space.atoms.equate(flat, [atom for axis in made for atom in axis])
        else:
            for axis, size in zip(axes, value.shape, strict=True):
                for label in axis:
                    labels.setdefault(label, (space.atoms.new(spec.sizes.get(label, size)),))
            made = tuple(tuple(atom for label in axis for atom in labels[label]) for axis in axes)
        space.axes[value.name] = made
        keeps_storage = spec.family == "view" and position < len(call.outputs) and bool(call.inputs)
        space.roots[value.name] = space.roots[call.inputs[0].name] if keeps_storage else value.name
    return factored


def _vote_matrix(space: Space, call: Call, spec: Spec, labels: dict[str, tuple[int, ...]]) -> None:
    """Weak names for what only shape can tell: hidden after a norm, ffn between two products."""
    if spec.gemm is not None:
        name = "expert_ffn" if spec.family == "grouped_gemm" else "ffn"
        for label in (*spec.gemm[1], *spec.gemm[2]):
            space.votes.append((2, name, labels[label]))
    normed = spec.inputs[0] if call.node.target.split(".")[1] in ("layer_norm", "rms_norm") else None
    if normed and normed[-1]:
        space.votes.append((5, "hidden", labels[normed[-1][0]]))


def _mark(space: Space, call: Call, spec: Spec) -> None:
    """Carry provenance over to the outputs: data, gradients, weights, routing."""
    read = call_reads(call, spec)
    factory = is_factory(call.node.target)
    for value in call.outputs:
        if factory or not any(name in space.data for name in read):
            continue
        space.data.add(value.name)
        floating = value.dtype.startswith(FLOATING)
        if floating and any(name in space.grads for name in read):
            space.grads.add(value.name)
        cast = spec.family == "view" or call.node.target.startswith(("aten.to.", "aten._to_copy"))
        if cast and all(name in space.weights for name in read):
            space.weights.add(value.name)
        if not floating:
            _mark_order(space, call, value, read)
        elif spec.sort == "make" or (spec.sort == "keep" and _stays_routed(space, value, read)):
            space.routed.add(value.name)


def _mark_order(space: Space, call: Call, value: Value, read: list[str]) -> None:
    sorts = call.node.target.split(".")[1] in ("sort", "argsort")
    order = sorts and value is call.outputs[-1] and len(value.shape) == 1
    if order or any(name in space.permutations for name in read):
        space.permutations.add(value.name)


def _stays_routed(space: Space, value: Value, read: list[str]) -> bool:
    rows = space.atoms.leaves(space.axes[value.name][0]) if value.shape else ()
    return any(
        name in space.routed and space.atoms.leaves(space.axes[name][0]) == rows
        for name in read
        if space.axes[name]
    )


def names_of(space: Space) -> dict[int, str]:
    """A name for every leaf atom, from the strongest vote; numbered when one word means two sizes."""
    strongest: dict[int, tuple[int, int, str]] = {}
    for order, (priority, name, atoms) in enumerate(space.votes):
        leaves = space.atoms.leaves(atoms)
        for leaf in leaves:
            rank = (priority if len(leaves) == 1 else _FACTOR_PRIORITY.get(name, 0), -order, name)
            if leaf not in strongest or rank[:2] > strongest[leaf][:2]:
                strongest[leaf] = rank
    _name_projections(space, strongest)
    _name_head(space, strongest)
    return _numbered(space, {leaf: name for leaf, (_, _, name) in strongest.items()})


def _name_projections(space: Space, strongest: dict[int, tuple[int, int, str]]) -> None:
    """Factors of a projection's output that nothing named: heads x head_dim."""
    for described in space.nodes:
        if described.spec.gemm is None:
            continue
        for label in (*described.spec.gemm[1], *described.spec.gemm[2]):
            whole = space.atoms.leaves(described.labels[label])
            leaves = [a for a in whole if strongest[a][0] == 0]
            if len(leaves) >= 2:
                for leaf, name in zip(leaves[-2:], ("heads", "head_dim"), strict=True):
                    strongest[leaf] = (1, 0, name)
            elif leaves and len(whole) > 1 and space.atoms.size(leaves[0]) <= MOST_PIECES:
                strongest[leaves[0]] = (1, 0, "pieces")


def _name_head(space: Space, strongest: dict[int, tuple[int, int, str]]) -> None:
    """A product's columns that are as many as the vocabulary, where no loss says what they are."""
    sizes = {space.atoms.size(leaf) for leaf, (_, _, name) in strongest.items() if name == "vocab"}
    for leaf, (_, _, name) in list(strongest.items()):
        if name == "ffn" and space.atoms.size(leaf) in sizes:
            strongest[leaf] = (1, 0, "vocab")


def _numbered(space: Space, names: dict[int, str]) -> dict[int, str]:
    sizes: dict[str, list[int]] = defaultdict(list)
    result = {}
    bound = [atoms for described in space.nodes for atoms in described.labels.values()]
    axes = [axis for axes in space.axes.values() for axis in axes]
    every = sorted({leaf for axis in (*axes, *bound) for leaf in space.atoms.leaves(axis)})
    for leaf in every:
        name = names.get(leaf) or f"d{space.atoms.size(leaf)}"
        size = space.atoms.size(leaf)
        if size not in sizes[name]:
            sizes[name].append(size)
        number = sizes[name].index(size)
        result[leaf] = name if number == 0 else f"{name}{number + 1}"
    return result
