"""Ops that move, add or blank elements along some axes: padding, rolling, triangles, differences.

Axes that change, or may, are blocked; the others are free. All are copies.
"""

from __future__ import annotations

from .registry import rule
from .spec import Call, Spec, fresh_axes


def _copy(call: Call, changed: set[int], *, linear: tuple[int, ...] = (0,)) -> Spec:
    before, after = call.inputs[0].shape, call.outputs[0].shape
    axes = fresh_axes(before)
    out = tuple(
        ((f"y{i}",) if size > 1 else ()) if before[i] != size else axes[i] for i, size in enumerate(after)
    )
    return Spec(
        family="memory",
        inputs=(axes, *(None for _ in call.inputs[1:])),
        outputs=(out,),
        blocked=frozenset(label for i in changed for label in (*axes[i], *out[i])),
        linear=linear,
        sort="keep",
    )


@rule("aten.pad", "aten.constant_pad_nd")
def pad(call: Call) -> Spec:
    """Zeros, another constant or copies of the border; only a constant other than zero is not linear."""
    rank = len(call.inputs[0].shape)
    amounts: tuple[int, ...] = call.args[1]
    changed = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    constant = call.node.target.startswith("aten.constant") or call.arg(2, "mode", "constant") == "constant"
    value = call.arg(2 if call.node.target.startswith("aten.constant") else 3, "value", 0)
    return _copy(call, changed, linear=() if constant and value else (0,))


@rule("aten.roll", "aten.flip", "aten.fliplr", "aten.flipud", "aten.rot90")
def move(call: Call) -> Spec:
    """Elements change places along the named axes; rolling without naming one rolls all."""
    rank, name = len(call.inputs[0].shape), call.node.target.split(".")[1]
    if name in ("fliplr", "flipud"):
        return _copy(call, {1 if name == "fliplr" else 0})
    if name == "rot90":
        return _rotated(call)
    dims = call.arg(2 if name == "roll" else 1, "dims", ())
    named = dims if isinstance(dims, tuple) else (dims,)
    return _copy(call, {int(d) % rank for d in named} if named else set(range(rank)))  # type: ignore[call-overload]


def _rotated(call: Call) -> Spec:
    dims = {int(d) % len(call.inputs[0].shape) for d in call.arg(2, "dims", (0, 1))}  # type: ignore[union-attr]
    axes = fresh_axes(call.inputs[0].shape)
    out = tuple(
        ((f"y{i}",) if size > 1 else ()) if i in dims else axes[i]
        for i, size in enumerate(call.outputs[0].shape)
    )
    blocked = frozenset(label for i in dims for label in (*axes[i], *out[i]))
    return Spec(family="memory", inputs=(axes,), outputs=(out,), blocked=blocked, linear=(0,))


@rule("aten.triu", "aten.tril", "aten.triu_", "aten.tril_")
def triangle(call: Call) -> Spec:
    """Zeros above or below a diagonal of the last two axes."""
    rank = len(call.inputs[0].shape)
    return _copy(call, {rank - 1, rank - 2})


@rule("aten.diff")
def diff(call: Call) -> Spec:
    """Differences of neighbours, with tensors to put before and after: linear in all of them."""
    rank = len(call.inputs[0].shape)
    dim = int(call.arg(2, "dim", -1)) % rank  # type: ignore[call-overload]
    spec = _copy(call, {dim}, linear=tuple(range(len(call.inputs))))
    axes = spec.inputs[0] or ()
    ends = tuple(
        tuple(((f"e{j}",) if size > 1 else ()) if i == dim else axes[i] for i, size in enumerate(value.shape))
        for j, value in enumerate(call.inputs[1:])
    )
    extra = frozenset(label for end in ends for label in end[dim])
    return Spec(
        family="memory",
        inputs=(axes, *ends),
        outputs=spec.outputs,
        blocked=spec.blocked | extra,
        linear=spec.linear,
    )
