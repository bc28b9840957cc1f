"""Token routing: sort by expert, count, gather into expert order, and back.

Each rank routes the tokens it holds, so sorting and counting are local to a shard of the tokens.
Between the gather that puts rows into expert order and the one that takes them out, a tensor may
be cut by expert instead of by token (`sorted_by_expert`): moving from one to the other is the
all-to-all of expert parallelism, and nothing else needs to know about it.
"""

from __future__ import annotations

from .registry import rule
from .spec import Axis, Call, Spec


def _axes(shape: tuple[int, ...], prefix: str = "d") -> tuple[Axis, ...]:
    return tuple((f"{prefix}{i}",) if size > 1 else () for i, size in enumerate(shape))


def _blocked(axes: tuple[Axis, ...], *dims: int) -> frozenset[str]:
    return frozenset(label for dim in dims for label in axes[dim])


@rule("aten.sort", "aten.argsort", "aten.sort.stable", "aten.argsort.stable")
def sort(call: Call) -> Spec:
    """A flat list of expert ids is sorted per shard of tokens; any other sorted dim is blocked."""
    value = call.inputs[0]
    axes = _axes(value.shape)
    flat_ids = len(value.shape) == 1 and value.dtype.startswith("int")
    dim = call.arg(1, "dim", -1)
    position = (dim if isinstance(dim, int) and not isinstance(dim, bool) else -1) % max(len(axes), 1)
    blocked = frozenset[str]() if flat_ids or not axes else _blocked(axes, position)
    return Spec(family="memory", inputs=(axes,), outputs=(axes,) * len(call.outputs), blocked=blocked)


@rule("aten.histc", "aten.bincount")
def count(call: Call) -> Spec:
    """Rows per expert, counted by each rank for its own tokens."""
    axes = _axes(call.inputs[0].shape)
    rows = frozenset(label for axis in axes for label in axis)
    rest = tuple(_axes(value.shape) for value in call.inputs[1:])
    out = (("e",) if call.outputs[0].shape[0] > 1 else (),)
    return Spec(
        family="memory",
        inputs=(axes, *rest),
        outputs=(out,),
        local=rows,
        blocked=frozenset({"e"}),
        names={"e": "experts"},
    )


@rule("aten.index")
def index(call: Call) -> Spec:
    """`x[ids]`: rows picked by a routed order (local), or by any ids (a linear lookup)."""
    x, ids = call.inputs[0], call.inputs[1:]
    positions = call.args[1]
    if any(not value.dtype.startswith("int") for value in ids) or not isinstance(positions, tuple):
        return _opaque_index(call)
    if len(ids) > 1 or positions[0] is None:
        return _picked(call, positions)
    rest = _axes(x.shape[1:], "h")
    if ids[0].name in call.permutations and len(ids[0].shape) == 1:
        return _routed(call, rest)
    picks = _axes(ids[0].shape, "i")
    rows = ("v",) if x.shape[0] > 1 else ()
    return Spec(
        family="memory", inputs=((rows, *rest), picks), outputs=((*picks, *rest),), sums=frozenset(rows), linear=(0,)
    )


def _picked(call: Call, positions: tuple) -> Spec:
    """`x[:, i, j]`: indexed axes are blocked, the others free; picks come first unless adjacent."""
    x, ids = call.inputs[0], call.inputs[1:]
    axes = _axes(x.shape)
    indexed = [i for i, position in enumerate(positions) if position is not None]
    free = [i for i in range(len(x.shape)) if i not in indexed]
    depth = max(len(value.shape) for value in ids)
    shape = call.outputs[0].shape
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if adjacent else 0
    picks = tuple((f"p{i}",) if size > 1 else () for i, size in enumerate(shape[at : at + depth]))
    kept = [axes[i] for i in free]
    reads = tuple(
        tuple(axis if size > 1 else () for axis, size in zip(picks[depth - len(v.shape) :], v.shape, strict=True))
        for v in ids
    )
    return Spec(
        family="memory",
        inputs=(axes, *reads),
        outputs=((*kept[:at], *picks, *kept[at:]),),
        blocked=_blocked(axes, *indexed) | frozenset(label for axis in picks for label in axis),
        linear=(0,),
    )


def _routed(call: Call, rest: tuple[Axis, ...]) -> Spec:
    tokens, rows = call.inputs[0].shape[0], call.inputs[1].shape[0]
    undo = call.inputs[0].name in call.routed
    spread: Axis = ("t", "k") if rows > tokens else ("t",)
    return Spec(
        family="memory",
        inputs=((("t",), *rest), (spread,)),
        outputs=((spread, *rest),),
        sizes={"t": tokens, "k": rows // tokens},
        linear=(0,),
        sort="undo" if undo else "make",
    )


@rule("aten.index_add", "aten.index_add_", "aten.scatter_add", "aten.scatter_add_", "aten.index_put", "aten.index_put_",
      "aten.scatter", "aten.scatter_", "aten.index_copy", "aten.index_copy_")  # fmt: skip
def combine(call: Call) -> Spec:
    """Rows in expert order written, or added, back to their tokens; anything else is opaque."""
    base, source = call.inputs[0], call.inputs[-1]
    routed = any(value.name in call.permutations for value in call.inputs[1:-1])
    if not routed or not source.shape or base.shape[0] == 0 or source.shape[0] % base.shape[0]:
        return _opaque_index(call)
    rest = _axes(base.shape[1:], "h")
    times = source.shape[0] // base.shape[0]
    spread: Axis = ("t", "k") if times > 1 else ("t",)
    middle = tuple(
        (spread, *rest[: len(v.shape) - 1]) if v.shape[:1] == source.shape[:1] else _axes(v.shape, f"m{j}")
        for j, v in enumerate(call.inputs[1:-1])
    )
    return Spec(
        family="memory",
        inputs=((("t",), *rest), *middle, (spread, *rest[: len(source.shape) - 1])),
        outputs=((("t",), *rest),),
        sizes={"t": base.shape[0], "k": times},
        sums=frozenset({"k"}) if times > 1 else frozenset(),
        linear=(len(call.inputs) - 1,),
        sort="undo",
    )


def _opaque_index(call: Call) -> Spec:
    inputs = tuple(_axes(value.shape, f"x{i}_") for i, value in enumerate(call.inputs))
    outputs = tuple(_axes(value.shape, f"y{i}_") for i, value in enumerate(call.outputs))
    every = frozenset(label for axes in (*inputs, *outputs) for axis in axes for label in axis)
    return Spec(family="memory", inputs=inputs, outputs=outputs, blocked=every)


@rule("aten.gather", "aten.take_along_dim")
def gather(call: Call) -> Spec:
    """`x.gather(dim, ids)`: blocked along `dim`, free along axes of equal extent."""
    x, ids = call.inputs
    dim = int(call.arg(1, "dim", 0)) % len(x.shape)  # type: ignore[call-overload]
    axes = _axes(x.shape)
    picked = tuple(
        axes[i] if i != dim and size == x.shape[i] else ((f"i{i}",) if size > 1 else ())
        for i, size in enumerate(ids.shape)
    )
    odd = frozenset(label for i, axis in enumerate(picked) for label in axis if axis != axes[i])
    return Spec(
        family="memory", inputs=(axes, picked), outputs=(picked,), blocked=_blocked(axes, dim) | odd, linear=(0,)
    )


@rule("aten.one_hot", "aten.searchsorted", "aten.bucketize")
def appended(call: Call) -> Spec:
    """Integer ops whose output has the input's axes plus blocked ones."""
    value = call.inputs[-1] if call.node.target.startswith("aten.searchsorted") else call.inputs[0]
    axes = _axes(value.shape)
    shape = call.outputs[0].shape
    extra = tuple((f"n{i}",) if size > 1 else () for i, size in enumerate(shape[len(axes) :]))
    inputs = tuple(
        axes if v is value else tuple((f"x{j}_{i}",) if s > 1 else () for i, s in enumerate(v.shape))
        for j, v in enumerate(call.inputs)
    )
    free = {label for axis in axes for label in axis}
    blocked = frozenset(label for group in (*inputs, (*extra,)) for axis in group for label in axis) - free
    return Spec(family="memory", inputs=inputs, outputs=((*axes, *extra),), blocked=blocked)
