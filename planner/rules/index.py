"""Reading at positions: index, index_select, gather, one-hot, searches.

A lookup along the first axis is linear in the table, so splitting its rows leaves partial sums (a
rank contributes zero for rows it lacks). Axes that the positions themselves run over are free: each
rank reads its own positions from the whole table, whose gradient is then a partial sum.
"""

from __future__ import annotations

from ..graph import Value
from .registry import opaque, rule
from .routing import routed_rows
from .spec import Axis, Call, Spec, fresh_axes, labels_at


def unsplit(call: Call) -> Spec:
    """A known op none of whose dims can be split."""
    spec = opaque(call)
    return Spec(family="memory", inputs=spec.inputs, outputs=spec.outputs, blocked=spec.blocked)


@rule("aten.index")
def index(call: Call) -> Spec:
    """`x[ids]`: rows picked by a routed order (local), or by any ids."""
    ids, positions = call.inputs[1:], call.args[1]
    if any(not value.dtype.startswith("int") for value in ids) or not isinstance(positions, tuple):
        return unsplit(call)
    if len(ids) > 1 or positions[0] is None:
        return _picked(call, positions)
    return routed_rows(call) or _rows(call, call.inputs[1], 0)


@rule("aten.index_select")
def index_select(call: Call) -> Spec:
    """`x.index_select(dim, ids)`."""
    dim = int(call.args[1]) % max(len(call.inputs[0].shape), 1)
    return (routed_rows(call) if dim == 0 else None) or _rows(call, call.inputs[1], dim)


def _rows(call: Call, ids: Value, dim: int) -> Spec:
    """Slices of one axis picked by one tensor of ids."""
    x = call.inputs[0]
    axes, picks = fresh_axes(x.shape, "h"), fresh_axes(ids.shape, "i")
    rows = axes[dim]
    return Spec(
        family="memory",
        inputs=(axes, picks),
        outputs=((*axes[:dim], *picks, *axes[dim + 1 :]),),
        sums=frozenset(rows),
        linear=(0,),
    )


def _picked(call: Call, positions: tuple) -> Spec:
    """`x[:, i, j]`: indexed axes are blocked, the others free; picks come first unless adjacent."""
    x, ids = call.inputs[0], call.inputs[1:]
    axes = fresh_axes(x.shape)
    indexed = [i for i, position in enumerate(positions) if position is not None]
    picks, at = picked_axes(call.outputs[0].shape, indexed, ids)
    kept = [axes[i] for i in range(len(x.shape)) if i not in indexed]
    reads = tuple(aligned_picks(picks, value) for value in ids)
    return Spec(
        family="memory",
        inputs=(axes, *reads),
        outputs=((*kept[:at], *picks, *kept[at:]),),
        blocked=labels_at(axes, *indexed),
        linear=(0,),
    )


def picked_axes(
    shape: tuple[int, ...], indexed: list[int], ids: tuple[Value, ...]
) -> tuple[tuple[Axis, ...], int]:
    """Labels of the axes that positions run over, and where those stand in the result's `shape`."""
    depth = max(len(value.shape) for value in ids)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if adjacent else 0
    return tuple((f"p{i}",) if size > 1 else () for i, size in enumerate(shape[at : at + depth])), at


def aligned_picks(picks: tuple[Axis, ...], value: Value) -> tuple[Axis, ...]:
    """Labels of one tensor of positions that broadcasts with the others."""
    last = picks[len(picks) - len(value.shape) :]
    return tuple(axis if size > 1 else () for axis, size in zip(last, value.shape, strict=True))


@rule("aten.gather")
def gather(call: Call) -> Spec:
    """`x.gather(dim, ids)`: `x` is blocked along `dim`; other axes are free where extents agree."""
    x, ids = call.inputs
    if not x.shape or not ids.shape:
        return unsplit(call)
    dim = int(call.arg(1, "dim", 0)) % len(x.shape)  # type: ignore[call-overload]
    axes = fresh_axes(x.shape)
    picked = tuple(
        axes[i] if i != dim and size == x.shape[i] else ((f"i{i}",) if size > 1 else ())
        for i, size in enumerate(ids.shape)
    )
    narrower = {
        label for i, axis in enumerate(picked) if i != dim and axis != axes[i] for label in (*axis, *axes[i])
    }
    return Spec(
        family="memory",
        inputs=(axes, picked),
        outputs=(picked,),
        blocked=labels_at(axes, dim) | frozenset(narrower),
        linear=(0,),
    )


@rule("aten.take_along_dim")
def take_along_dim(call: Call) -> Spec:
    """Like gather, with other axes broadcast; without a dim both tensors are read flat."""
    x, ids = call.inputs
    dim = call.arg(2, "dim", None)
    if not isinstance(dim, int):
        return unsplit(call)
    dim %= len(x.shape)
    out = fresh_axes(call.outputs[0].shape)
    table = tuple((("x",) if i == dim else out[i]) if size > 1 else () for i, size in enumerate(x.shape))
    picked = tuple(out[i] if size > 1 else () for i, size in enumerate(ids.shape))
    return Spec(
        family="memory", inputs=(table, picked), outputs=(out,), blocked=labels_at(table, dim), linear=(0,)
    )


@rule("aten.one_hot", "aten.bucketize")
def appended(call: Call) -> Spec:
    """The input's axes, plus a blocked one for one-hot; `bucketize` reads its boundaries whole."""
    axes = fresh_axes(call.inputs[0].shape)
    extra = tuple((f"n{i}",) if size > 1 else () for i, size in enumerate(call.outputs[0].shape[len(axes) :]))
    rest = tuple(fresh_axes(value.shape, "b") for value in call.inputs[1:])
    blocked = frozenset(label for group in (*rest, extra) for axis in group for label in axis)
    return Spec(family="memory", inputs=(axes, *rest), outputs=((*axes, *extra),), blocked=blocked)


@rule("aten.searchsorted")
def searchsorted(call: Call) -> Spec:
    """`sorted[.., n], values[.., m] -> y[.., m]`, or one sorted list for all; `n` is blocked."""
    boundaries, *values = call.inputs
    axes = fresh_axes(values[0].shape) if values else ()
    lead = axes[:-1] if len(boundaries.shape) > 1 else ()
    table: tuple[Axis, ...] = (*lead, () if boundaries.shape[-1:] == (1,) else ("n",))
    sorters = tuple(table for _ in values[1:])
    return Spec(
        family="memory",
        inputs=(table, *((axes,) if values else ()), *sorters),
        outputs=(axes,),
        blocked=frozenset({"n"}),
    )
