"""Views: the same elements under other axes; nothing is computed.

Reshapes are resolved by refining dims into factors. Cutting an axis into equal pieces (`chunk`,
`split`) makes it a product `piece x inner`: the inner factor may still be split, which is how a
fused projection is split by heads or by ffn (DTensor's strided shard).
"""

from __future__ import annotations

from typing import Any

from .pointwise import aligned
from .registry import rule
from .spec import Axis, Call, Spec, fresh_axes

PIECE = {"piece": "pieces"}


def _view(
    inputs: tuple[tuple[Axis, ...] | None, ...], outputs: tuple[tuple[Axis, ...], ...], **extra: Any
) -> Spec:
    usual: dict[str, Any] = {"family": "view", "linear": tuple(range(len(inputs))), "sort": "keep"}
    return Spec(inputs=inputs, outputs=outputs, **usual | extra)


def _dim(call: Call, position: int, name: str = "dim", default: int = 0) -> int:
    rank = max(len(call.inputs[0].shape), len(call.outputs[0].shape), 1)
    value = call.arg(position, name, default)
    return int(value) % rank  # type: ignore[call-overload]


@rule(
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.squeeze",
    "aten.unsqueeze", "aten.view_as", "aten.reshape_as", "aten.unsqueeze_", "aten.squeeze_", "aten.ravel",
)  # fmt: skip
def reshape(call: Call) -> Spec:
    """Same elements in the same order."""
    if call.node.target == "aten.view.dtype":
        return _reread(call)
    inputs = (fresh_axes(call.inputs[0].shape, "i"), *(None for _ in call.inputs[1:]))
    return _view(inputs, (fresh_axes(call.outputs[0].shape, "o"),), reshape=True, linear=(0,))


def _reread(call: Call) -> Spec:
    """The same bytes as another dtype: the last axis is blocked where its extent changes."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    axes = fresh_axes(before)
    if before == after:
        return _view((axes,), (axes,), linear=(), sort="")
    last: Axis = ("y",) if after[-1] > 1 else ()
    return _view((axes,), ((*axes[:-1], last),), blocked=frozenset({*axes[-1], *last}), linear=(), sort="")


@rule("aten.transpose", "aten.permute", "aten.t", "aten.numpy_T", "aten.mT", "aten.movedim", "aten.swapaxes",
      "aten.swapdims", "aten.moveaxis", "aten.transpose_", "aten.mH", "aten.adjoint")  # fmt: skip
def permute(call: Call) -> Spec:
    """Axes change places."""
    axes = fresh_axes(call.inputs[0].shape)
    rank = len(axes)
    name = call.node.target.split(".")[1]
    if name in ("transpose", "swapaxes", "swapdims", "transpose_"):
        a, b = (int(v) % rank for v in call.args[1:3])
        order = [b if i == a else a if i == b else i for i in range(rank)]
    elif name == "permute":
        order = [int(v) % rank for v in call.arg(1, "dims")]  # type: ignore[union-attr]
    elif name in ("mT", "mH", "adjoint"):
        order = [*range(rank - 2), rank - 1, rank - 2]
    elif name in ("movedim", "moveaxis"):
        order = _moved(rank, call.args[1], call.args[2])
    else:
        order = list(range(rank))[::-1]
    return _view((axes,), (tuple(axes[i] for i in order),))


def _moved(rank: int, source: object, target: object) -> list[int]:
    sources = [int(v) % rank for v in (source if isinstance(source, tuple) else (source,))]  # type: ignore[call-overload]
    targets = [int(v) % rank for v in (target if isinstance(target, tuple) else (target,))]  # type: ignore[call-overload]
    order: list[int] = [i for i in range(rank) if i not in sources]
    for destination, origin in sorted(zip(targets, sources, strict=True)):
        order.insert(destination, origin)
    return order


@rule("aten.expand", "aten.expand_as", "aten.broadcast_to")
def expand(call: Call) -> Spec:
    """New elements are copies: dims that only the output has."""
    shape = call.outputs[0].shape
    output = fresh_axes(shape)
    inputs = (aligned(call.inputs[0].shape, shape, output), *(None for _ in call.inputs[1:]))
    return _view(inputs, (output,), linear=(0,))


@rule("aten.slice", "aten.narrow")
def narrow(call: Call) -> Spec:
    """A range of one axis; the whole range changes nothing."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    if before == after:
        axes = fresh_axes(before)
        return _view((axes,), (axes,))
    return _resized(call, _dim(call, 1))


def _resized(call: Call, dim: int) -> Spec:
    before, after = call.inputs[0].shape, call.outputs[0].shape
    axes = fresh_axes(before)
    out = tuple((("y",) if size > 1 else ()) if i == dim else axes[i] for i, size in enumerate(after))
    return _view((axes,), (out,), blocked=frozenset({*axes[dim], "y"}))


@rule("aten.select", "aten.unbind")
def select(call: Call) -> Spec:
    """One index of an axis (or each in turn): the axis is blocked, the others free."""
    axes = fresh_axes(call.inputs[0].shape)
    dim = int(call.arg(1, "dim", 0)) % len(axes)  # type: ignore[call-overload]
    out = tuple(axis for i, axis in enumerate(axes) if i != dim)
    return _view((axes,), tuple(out for _ in call.outputs), blocked=frozenset(axes[dim]))


@rule("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split", "aten.unsafe_split",
      "aten.unsafe_chunk")  # fmt: skip
def split(call: Call) -> Spec:
    """Pieces of one axis: `piece x inner` when they are equal, blocked when not."""
    shape = call.inputs[0].shape
    dim = int(call.arg(2, "dim", 0)) % len(shape)  # type: ignore[call-overload]
    axes = list(fresh_axes(shape))
    extents = {value.shape[dim] for value in call.outputs}
    extent = min(extents)
    if len(extents) == 1 and extent > 1 and extent * len(call.outputs) == shape[dim]:
        pieces = len(call.outputs)
        whole: Axis = ("piece", "inner") if pieces > 1 else ("inner",)
        before = tuple(whole if i == dim else axis for i, axis in enumerate(axes))
        after = tuple(("inner",) if i == dim else axis for i, axis in enumerate(axes))
        sizes = {"piece": pieces, "inner": extent}
        return _view((before,), (after,) * pieces, blocked=frozenset({"piece"}), sizes=sizes, names=PIECE)
    outs = tuple(
        tuple(((f"y{j}",) if v.shape[i] > 1 else ()) if i == dim else axis for i, axis in enumerate(axes))
        for j, v in enumerate(call.outputs)
    )
    blocked = frozenset({*axes[dim], *(f"y{j}" for j in range(len(outs)))})
    return _view((tuple(axes),), outs, blocked=blocked)


@rule("aten.cat", "aten.concat")
def cat(call: Call) -> Spec:
    """Pieces put together: `piece x inner` when they are equal, blocked when not. A copy."""
    values = call.inputs
    shape = call.outputs[0].shape
    dim = int(call.arg(1, "dim", 0)) % len(shape)  # type: ignore[call-overload]
    axes = fresh_axes(shape)
    pieces, extents = len(values), {v.shape[dim] for v in values if len(v.shape) == len(shape)}
    if len(extents) == 1 and pieces > 1 and min(extents) > 1:
        out: Axis = ("piece", "inner")
        before = tuple(("inner",) if i == dim else axis for i, axis in enumerate(axes))
        after = tuple(out if i == dim else axis for i, axis in enumerate(axes))
        sizes = {"piece": pieces, "inner": min(extents)}
        return _view(
            (before,) * pieces,
            (after,),
            blocked=frozenset({"piece"}),
            sizes=sizes,
            family="memory",
            names=PIECE,
        )
    inputs = tuple(
        tuple(((f"x{j}",) if v.shape[i] > 1 else ()) if i == dim else axis for i, axis in enumerate(axes))
        if len(v.shape) == len(shape)
        else ((),) * len(v.shape)
        for j, v in enumerate(values)
    )
    blocked = frozenset({*axes[dim], *(f"x{j}" for j in range(pieces))})
    return _view(inputs, (axes,), blocked=blocked, family="memory")


@rule("aten.stack")
def stack(call: Call) -> Spec:
    """Tensors side by side along a new axis, which is blocked. A copy."""
    shape = call.outputs[0].shape
    axes = fresh_axes(shape)
    dim = int(call.arg(1, "dim", 0)) % len(shape)  # type: ignore[call-overload]
    inner = tuple(axis for i, axis in enumerate(axes) if i != dim)
    return _view((inner,) * len(call.inputs), (axes,), blocked=frozenset(axes[dim]), family="memory")


@rule("aten.repeat", "aten.tile")
def repeat(call: Call) -> Spec:
    """Whole copies along axes: each grows by an outer factor that only the output has."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    axes = fresh_axes(before)
    offset = len(after) - len(before)
    out, sizes = [], {}
    for i, size in enumerate(after):
        inner = axes[i - offset] if i >= offset else ()
        times = size // (before[i - offset] if i >= offset else 1)
        if inner:
            sizes[inner[0]] = before[i - offset]
        if times > 1:
            sizes[f"r{i}"] = times
        out.append(((f"r{i}",) if times > 1 else ()) + inner)
    return _view((axes,), (tuple(out),), sizes=sizes, family="memory")


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Spec:
    """Every element `n` times in a row: an inner factor that only the output has."""
    shape = call.inputs[0].shape
    times = int(call.arg(1, "repeats", 1))  # type: ignore[call-overload]
    axes, dim = fresh_axes(shape), call.arg(2, "dim", None)
    copies: Axis = ("r",) if times > 1 else ()
    sizes = {"r": times} | {label: size for axis, size in zip(axes, shape, strict=True) for label in axis}
    if not isinstance(dim, int):
        flat = (tuple(label for axis in axes for label in axis) + copies,)
        return _view((axes,), (flat,), sizes=sizes, family="memory")
    out = tuple(axis + copies if i == dim % len(axes) else axis for i, axis in enumerate(axes))
    return _view((axes,), (out,), sizes=sizes, family="memory")


@rule("aten.glu")
def glu(call: Call) -> Spec:
    """`x[.., 2*f] -> y[.., f]`: the first half times the sigmoid of the second."""
    axes, f = fresh_axes(call.inputs[0].shape), call.outputs[0].shape
    dim = int(call.arg(1, "dim", -1)) % len(axes)  # type: ignore[call-overload]
    inner: Axis = ("inner",) if f[dim] > 1 else ()
    before = tuple(("piece", *inner) if i == dim else axis for i, axis in enumerate(axes))
    after = tuple(inner if i == dim else axis for i, axis in enumerate(axes))
    return Spec(
        family="memory",
        inputs=(before,),
        outputs=(after,),
        blocked=frozenset({"piece"}),
        sizes={"piece": 2, "inner": f[dim]},
        names=PIECE,
    )


@rule("aten.prelu")
def prelu(call: Call) -> Spec:
    """`x[n, c, ..], slope[c]`, or one slope for all."""
    axes = fresh_axes(call.inputs[0].shape)
    slope = axes[1] if len(axes) > 1 and call.inputs[1].numel > 1 else ()
    return Spec(family="memory", inputs=(axes, (slope,) * len(call.inputs[1].shape)), outputs=(axes,))


@rule("aten.broadcast_tensors", "aten.meshgrid")
def broadcast_tensors(call: Call) -> Spec:
    """Each tensor spread over the axes of all."""
    shape = call.outputs[0].shape
    out = fresh_axes(shape)
    if call.node.target.startswith("aten.meshgrid"):
        order = list(range(len(shape)))
        if call.kwargs.get("indexing") == "xy":
            order[:2] = order[1::-1]
        inputs = tuple((out[order[i]],) * len(v.shape) for i, v in enumerate(call.inputs))
    else:
        inputs = tuple(aligned(v.shape, shape, out) for v in call.inputs)
    return _view(inputs, (out,) * len(call.outputs), linear=())


@rule("aten.select_scatter", "aten.slice_scatter")
def overwrite(call: Call) -> Spec:
    """A copy of the base with a slice replaced: blocked along the dim, free elsewhere; linear in both."""
    base, source = call.inputs
    axes = fresh_axes(base.shape)
    dim = int(call.arg(2, "dim", 0)) % len(axes)  # type: ignore[call-overload]
    if len(source.shape) < len(base.shape):
        written = tuple(axis for i, axis in enumerate(axes) if i != dim)
    else:
        written = tuple(
            (("s",) if n > 1 else ()) if i == dim else axes[i] for i, n in enumerate(source.shape)
        )
    return _view((axes, written), (axes,), blocked=frozenset({*axes[dim], "s"}), family="memory")


@rule("aten.diagonal")
def diagonal(call: Call) -> Spec:
    """Two axes become one, which comes last; both are blocked."""
    axes = fresh_axes(call.inputs[0].shape)
    pair = {int(call.arg(2, "dim1", 0)) % len(axes), int(call.arg(3, "dim2", 1)) % len(axes)}  # type: ignore[call-overload]
    last: Axis = ("y",) if call.outputs[0].shape[-1] > 1 else ()
    out = (*(axis for i, axis in enumerate(axes) if i not in pair), last)
    return _view((axes,), (out,), blocked=frozenset({*last, *(label for i in pair for label in axes[i])}))
