"""Convolutions: `x[n, g*c, s..] w[g*o, c, k..] (+ bias[g*o]) -> y[n, g*o, t..]`, `g` groups.

Batch and groups split freely; output channels split the weight; input channels are summed, so that
splitting them leaves partial sums. Spatial dims are blocked (they would need halos), except where
the kernel is a single point. A transposed convolution has its weight as `w[g*c, o, k..]`.

FLOPs: 2 per multiply-add: `2 n g o t.. c k..`, for a transposed convolution `2 n g c s.. o k..`.
"""

from __future__ import annotations

import math

from .registry import rule
from .spec import Call, Spec, axis_of, labels_of

NAMES = {"c": "channels", "o": "channels", "g": "channel_groups"}


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(call: Call) -> Spec:
    """See the module docstring; padding given as a word included."""
    return _spec(call, groups=int(call.arg(6, "groups", 1)), transposed=False, places=(3, 4))  # type: ignore[call-overload]


@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def transposed_convolution(call: Call) -> Spec:
    """See the module docstring."""
    return _spec(call, groups=int(call.arg(6, "groups", 1)), transposed=True, places=(3, 4))  # type: ignore[call-overload]


@rule("aten.convolution")
def any_convolution(call: Call) -> Spec:
    """The form with all arguments: stride, padding, dilation, transposed, output padding, groups."""
    return _spec(call, groups=int(call.args[8]), transposed=bool(call.args[6]), places=(3, 4))


def _spec(call: Call, *, groups: int, transposed: bool, places: tuple[int, int]) -> Spec:
    x, w, *bias = call.inputs
    depth = len(w.shape) - 2
    lead = axis_of("n", x.shape[0]) if len(x.shape) > depth + 1 else None
    own = w.shape[0] // groups if transposed else w.shape[1]
    made = w.shape[1] if transposed else w.shape[0] // groups
    point = all(size == 1 for size in w.shape[2:]) and _plain(call, places)
    before = tuple(axis_of(f"t{i}" if point else f"s{i}", size) for i, size in enumerate(x.shape[-depth:]))
    after = tuple(axis_of(f"t{i}", size) for i, size in enumerate(call.outputs[0].shape[-depth:]))
    kernel = tuple(axis_of(f"k{i}", size) for i, size in enumerate(w.shape[2:]))
    group, c, o = axis_of("g", groups), axis_of("c", own), axis_of("o", made)
    batch = () if lead is None else (lead,)
    fixed = () if point else (*before, *after)
    swept = before if transposed else after
    rows = labels_of(*batch, *swept)
    return Spec(
        family="gemm",
        inputs=(
            (*batch, group + c, *before),
            (group + (c if transposed else o), o if transposed else c, *kernel),
            *((group + o,) for _ in bias),
        ),
        outputs=((*batch, group + o, *after),),
        sizes={"g": groups, "c": own, "o": made},
        sums=frozenset(c),
        blocked=frozenset(labels_of(*fixed, *kernel)),
        linear=() if bias else (0,),
        gemm=(rows, o, (*c, *labels_of(*kernel)), group),
        flops=((2.0, (*rows, *group, *o, *c, *labels_of(*kernel))),),
        names=NAMES,
    )


def _plain(call: Call, places: tuple[int, int]) -> bool:
    """Stride one and no padding."""
    stride, padding = call.arg(places[0], "stride", 1), call.arg(places[1], "padding", 0)
    if isinstance(padding, str):
        padding = 0
    return math.prod(_tuple(stride)) == 1 and not any(_tuple(padding))


def _tuple(value: object) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple) else (int(value),)  # type: ignore[call-overload]
