"""Writing at positions: index_put, index_add, index_copy, scatter, and their in-place forms.

The axis written along is blocked in the base, because a position may lie on any rank. Where sources
are *added*, they may be split: each rank adds its own into its copy, and the results are partial
sums, the base counted once. Other axes are free where all tensors agree in extent.
"""

from __future__ import annotations

from ..graph import Value
from .index import aligned_picks, picked_axes, unsplit
from .registry import rule
from .routing import routed_writes
from .spec import Axis, Call, Spec, fresh_axes


@rule("aten.index_add", "aten.index_add_", "aten.index_copy", "aten.index_copy_")
def index_add(call: Call) -> Spec:
    """`base.index_add(dim, ids, source)`: `base[.., t, ..], ids[r], source[.., r, ..]`."""
    routed = routed_writes(call)
    base, ids, source = call.inputs
    if routed or not base.shape:
        return routed or unsplit(call)
    dim = int(call.args[1]) % len(base.shape)
    axes = fresh_axes(base.shape)
    rows: Axis = ("r",) if source.shape[dim] > 1 else ()
    written = tuple(rows if i == dim else axis for i, axis in enumerate(axes))
    adds = "index_add" in call.node.target
    return Spec(
        family="memory",
        inputs=(axes, (rows,) if ids.shape else (), written),
        outputs=(axes,),
        sums=frozenset(rows) if adds else frozenset(),
        blocked=frozenset(axes[dim]) | (frozenset() if adds else frozenset(rows)),
    )


@rule("aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_", "aten.scatter_reduce")
def scatter(call: Call) -> Spec:
    """`base.scatter(dim, ids, source)`, the source a tensor of at least the ids' extents or a number."""
    base, ids, *source = call.inputs
    routed = routed_writes(call) if source else None
    if routed or not base.shape or not ids.shape:
        return routed or unsplit(call)
    dim = int(call.args[1]) % len(base.shape)
    axes = fresh_axes(base.shape)
    own: Axis = ("r",) if ids.shape[dim] > 1 else ()
    shapes = (base.shape, ids.shape, *(value.shape for value in source))
    reads, blocked = [], set(axes[dim])
    for j, shape in enumerate(shapes[1:]):
        labels = tuple(
            (own if shape[i] == ids.shape[i] else (f"s{j}",) if shape[i] > 1 else ()) if i == dim
            else axes[i] if shape[i] == base.shape[i] else ((f"s{j}_{i}",) if shape[i] > 1 else ())
            for i in range(len(shape))
        )  # fmt: skip
        reads.append(labels)
        blocked |= {
            label for i, axis in enumerate(labels) if axis != (own if i == dim else axes[i]) for label in axis
        }
    blocked |= {
        label
        for i, axis in enumerate(axes)
        if any(shape[i] != base.shape[i] for shape in shapes)
        for label in axis
    }
    adds = "scatter_add" in call.node.target and not blocked & {f"s{j}" for j in range(len(shapes))}
    return Spec(
        family="memory",
        inputs=(axes, *reads),
        outputs=(axes,),
        sums=frozenset(own) if adds else frozenset(),
        blocked=frozenset(blocked) | (frozenset() if adds else frozenset(own)),
    )


@rule("aten.index_put", "aten.index_put_", "aten._unsafe_index_put")
def index_put(call: Call) -> Spec:
    """`base[ids] = values`: axes not indexed are free; positions of a mask and one value, too."""
    routed = routed_writes(call)
    positions = call.args[1]
    if routed or not isinstance(positions, tuple):
        return routed or unsplit(call)
    base, *ids, values = call.inputs
    if len(ids) == 1 and ids[0].dtype == "bool" and positions[0] is not None and values.numel == 1:
        return _masked(base, ids[0], values)
    if any(not value.dtype.startswith("int") for value in ids):
        return unsplit(call)
    return _written(call, positions, base, tuple(ids), values)


def _masked(base: Value, mask: Value, values: Value) -> Spec:
    axes = fresh_axes(base.shape)
    return Spec(
        family="memory",
        inputs=(axes, axes[: len(mask.shape)], ((),) * len(values.shape)),
        outputs=(axes,),
    )


def _written(call: Call, positions: tuple, base: Value, ids: tuple[Value, ...], values: Value) -> Spec:
    axes = fresh_axes(base.shape)
    indexed = [i for i, position in enumerate(positions) if position is not None]
    kept = [i for i in range(len(base.shape)) if i not in indexed]
    depth = max(len(value.shape) for value in ids)
    at = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    wide = tuple(
        max(v.shape[len(v.shape) - depth + i] if i >= depth - len(v.shape) else 1 for v in ids)
        for i in range(depth)
    )
    shape = (*(base.shape[i] for i in kept[:at]), *wide, *(base.shape[i] for i in kept[at:]))
    picks, at = picked_axes(shape, indexed, ids)
    region = (*(axes[i] for i in kept[:at]), *picks, *(axes[i] for i in kept[at:]))
    last = region[len(region) - len(values.shape) :]
    written = tuple(axis if size > 1 else () for axis, size in zip(last, values.shape, strict=True))
    return Spec(
        family="memory",
        inputs=(axes, *(aligned_picks(picks, value) for value in ids), written),
        outputs=(axes,),
        blocked=frozenset(label for i in indexed for label in axes[i])
        | {label for axis in picks for label in axis},
    )


@rule("aten.masked_scatter", "aten.masked_scatter_")
def masked_scatter(call: Call) -> Spec:
    """Source elements, in order, at the places of a mask: only the batch (axis 0) may be split.

    Splitting it assumes that each sample takes the same number of source rows, which lie in batch
    order: what static shapes imply of image features put among text tokens.
    """
    x, mask, source = call.inputs
    if not x.shape or not source.shape or source.shape[0] % x.shape[0] or mask.shape != x.shape:
        return unsplit(call)
    axes, rest = fresh_axes(x.shape), fresh_axes(source.shape, "s")
    times = source.shape[0] // x.shape[0]
    lead: Axis = axes[0] + (("t",) if times > 1 else ())
    blocked = {label for axis in (*axes[1:], *rest[1:]) for label in axis} | {"t"}
    return Spec(
        family="memory",
        inputs=(axes, axes, (lead, *rest[1:])),
        outputs=(axes,),
        sizes={"d0": x.shape[0], "t": times},
        blocked=frozenset(blocked),
    )
