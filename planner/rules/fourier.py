"""Complex numbers and Fourier transforms: linear, blocked along what they transform."""

from __future__ import annotations

import math

from .registry import rule
from .spec import Axis, Call, Spec, fresh_axes


@rule(
    "aten.view_as_complex",
    "aten.view_as_real",
    "aten.real",
    "aten.imag",
    "aten._conj",
    "aten.conj",
    "aten.resolve_conj",
    "aten.resolve_neg",
)
def complex_view(call: Call) -> Spec:
    """The pair axis of `view_as_complex` and `view_as_real` is blocked; all else is free."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    axes = fresh_axes(before if len(before) <= len(after) else after)
    pair: tuple[Axis, ...] = (("pair",),)
    inputs = axes + pair if len(before) > len(after) else axes
    outputs = axes + pair if len(after) > len(before) else axes
    return Spec(
        family="view",
        inputs=(inputs,),
        outputs=(outputs,),
        blocked=frozenset({"pair"}),
        linear=(0,),
        sort="keep",
    )


@rule(
    *(
        f"aten.fft_{kind}{depth}"
        for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
        for depth in ("", "2", "n")
    )
)
def fourier(call: Call) -> Spec:
    """FLOPs: 5 n log2 n per transform of n elements (Cooley-Tukey's customary count)."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    rank = len(before)
    dims = _transformed(call, rank)
    axes = fresh_axes(before)
    out = tuple(((f"y{i}",) if size > 1 else ()) if i in dims else axes[i] for i, size in enumerate(after))
    points = max(math.prod(before[i] for i in dims), math.prod(after[i] for i in dims))
    blocked = frozenset(label for i in dims for label in (*axes[i], *out[i]))
    labels = tuple(label for axis in out for label in axis)
    cost = 5.0 * math.log2(points) if points > 1 else 1.0
    return Spec(
        family="memory", inputs=(axes,), outputs=(out,), blocked=blocked, linear=(0,), flops=((cost, labels),)
    )


def _transformed(call: Call, rank: int) -> set[int]:
    name = call.node.target.split(".")[1]
    default = -1 if not name.endswith(("2", "n")) else (-2, -1) if name.endswith("2") else None
    dims = call.arg(2, "dim", default)
    if dims is None:
        return set(range(rank))
    return {int(d) % rank for d in (dims if isinstance(dims, tuple) else (dims,))}  # type: ignore[call-overload]
