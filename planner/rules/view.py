"""Views: the same elements under other axes; nothing is computed.

Reshapes are resolved by refining dims into factors. Cutting an axis into equal pieces (`chunk`,
`split`) makes it a product `piece x inner`: the inner factor may still be split, which is how a
fused projection is split by heads or by ffn (DTensor's strided shard).
"""

from __future__ import annotations

from .pointwise import aligned
from .registry import rule
from .spec import Axis, Call, Spec


PIECE = {"piece": "pieces"}


def _axes(shape: tuple[int, ...], prefix: str = "d") -> tuple[Axis, ...]:
    return tuple((f"{prefix}{i}",) if size > 1 else () for i, size in enumerate(shape))


def _view(inputs: tuple[tuple[Axis, ...] | None, ...], outputs: tuple[tuple[Axis, ...], ...], **extra: object) -> Spec:
    linear = tuple(range(len(inputs)))
    return Spec(**{"family": "view", "inputs": inputs, "outputs": outputs, "linear": linear, "sort": "keep"} | extra)  # type: ignore[arg-type]


def _dim(call: Call, position: int, name: str = "dim", default: int = 0) -> int:
    rank = max(len(call.inputs[0].shape), len(call.outputs[0].shape), 1)
    value = call.arg(position, name, default)
    return int(value) % rank  # type: ignore[call-overload]


@rule(
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.squeeze",
    "aten.unsqueeze", "aten.view_as", "aten.reshape_as", "aten.unsqueeze_", "aten.squeeze_",
)  # fmt: skip
def reshape(call: Call) -> Spec:
    """Same elements in the same order."""
    inputs = (_axes(call.inputs[0].shape, "i"), *(None for _ in call.inputs[1:]))
    return _view(inputs, (_axes(call.outputs[0].shape, "o"),), reshape=True, linear=(0,))


@rule("aten.transpose", "aten.permute", "aten.t", "aten.numpy_T", "aten.mT", "aten.movedim", "aten.swapaxes")
def permute(call: Call) -> Spec:
    """Axes change places."""
    axes = _axes(call.inputs[0].shape)
    rank = len(axes)
    name = call.node.target.split(".")[1]
    if name in ("transpose", "swapaxes"):
        a, b = (int(v) % rank for v in call.args[1:3])
        order = [b if i == a else a if i == b else i for i in range(rank)]
    elif name == "permute":
        order = [int(v) % rank for v in call.arg(1, "dims")]  # type: ignore[union-attr]
    elif name == "mT":
        order = [*range(rank - 2), rank - 1, rank - 2]
    elif name == "movedim":
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
    output = _axes(shape)
    inputs = (aligned(call.inputs[0].shape, shape, output), *(None for _ in call.inputs[1:]))
    return _view(inputs, (output,), linear=(0,))


@rule("aten.slice")
def narrow(call: Call) -> Spec:
    """A range of one axis; the whole range changes nothing."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    if before == after:
        axes = _axes(before)
        return _view((axes,), (axes,))
    return _resized(call, _dim(call, 1))


def _resized(call: Call, dim: int) -> Spec:
    before, after = call.inputs[0].shape, call.outputs[0].shape
    axes = _axes(before)
    out = tuple((("y",) if size > 1 else ()) if i == dim else axes[i] for i, size in enumerate(after))
    return _view((axes,), (out,), blocked=frozenset({*axes[dim], "y"}))


@rule("aten.select", "aten.unbind")
def select(call: Call) -> Spec:
    """One index of an axis (or each in turn): the axis is blocked, the others free."""
    axes = _axes(call.inputs[0].shape)
    dim = int(call.arg(1, "dim", 0)) % len(axes)  # type: ignore[call-overload]
    out = tuple(axis for i, axis in enumerate(axes) if i != dim)
    return _view((axes,), tuple(out for _ in call.outputs), blocked=frozenset(axes[dim]))


@rule("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split", "aten.unsafe_split")
def split(call: Call) -> Spec:
    """Pieces of one axis: `piece x inner` when they are equal, blocked when not."""
    shape = call.inputs[0].shape
    dim = int(call.arg(2, "dim", 0)) % len(shape)  # type: ignore[call-overload]
    axes = list(_axes(shape))
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
    axes = _axes(shape)
    pieces, extents = len(values), {v.shape[dim] for v in values if len(v.shape) == len(shape)}
    if len(extents) == 1 and pieces > 1 and min(extents) > 1:
        out: Axis = ("piece", "inner")
        before = tuple(("inner",) if i == dim else axis for i, axis in enumerate(axes))
        after = tuple(out if i == dim else axis for i, axis in enumerate(axes))
        sizes = {"piece": pieces, "inner": min(extents)}
        return _view(
            (before,) * pieces, (after,), blocked=frozenset({"piece"}), sizes=sizes, family="memory", names=PIECE
        )
    inputs = tuple(
        tuple(((f"x{j}",) if v.shape[i] > 1 else ()) if i == dim else axis for i, axis in enumerate(axes))
        if len(v.shape) == len(shape) else ((),) * len(v.shape)
        for j, v in enumerate(values)
    )
    blocked = frozenset({*axes[dim], *(f"x{j}" for j in range(pieces))})
    return _view(inputs, (axes,), blocked=blocked, family="memory")


@rule("aten.stack")
def stack(call: Call) -> Spec:
    """Tensors side by side along a new axis, which is blocked. A copy."""
    shape = call.outputs[0].shape
    axes = _axes(shape)
    dim = int(call.arg(1, "dim", 0)) % len(shape)  # type: ignore[call-overload]
    inner = tuple(axis for i, axis in enumerate(axes) if i != dim)
    return _view((inner,) * len(call.inputs), (axes,), blocked=frozenset(axes[dim]), family="memory")


@rule("aten.pad", "aten.constant_pad_nd", "aten.roll", "aten.flip", "aten.triu", "aten.tril", "aten.diff")
def shifted(call: Call) -> Spec:
    """Ops that move or add elements along some axes: axes that change, or may, are blocked. A copy."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    name = call.node.target.split(".")[1]
    changed = {i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}
    if name in ("roll", "flip"):
        dims = call.arg(2 if name == "roll" else 1, "dims", ())
        changed |= {int(d) % len(before) for d in (dims if isinstance(dims, tuple) else (dims,))}  # type: ignore[call-overload]
    elif name in ("triu", "tril"):
        changed |= {len(before) - 1, len(before) - 2}
    axes = _axes(before)
    out = tuple((("y" + str(i),) if s > 1 else ()) if before[i] != s else axes[i] for i, s in enumerate(after))
    blocked = {label for i in changed for label in (*axes[i], *out[i])}
    return _view((axes, *(((),) * len(v.shape) for v in call.inputs[1:])), (out,), blocked=frozenset(blocked), family="memory", linear=(0,))


@rule("aten.repeat", "aten.tile")
def repeat(call: Call) -> Spec:
    """Whole copies along axes: each grows by an outer factor that only the output has."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    axes = _axes(before)
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
    dim = int(call.arg(2, "dim", 0)) % len(shape)  # type: ignore[call-overload]
    axes = _axes(shape)
    grown = axes[dim] + (("r",) if times > 1 else ())
    out = tuple(grown if i == dim else axis for i, axis in enumerate(axes))
    sizes = {"r": times} | {label: shape[dim] for label in axes[dim]}
    return _view((axes,), (out,), sizes=sizes, family="memory")
