"""Windows laid side by side and pixels moved between space and channels: unfold, fold, pixel shuffle."""

from __future__ import annotations

import math

from .registry import rule
from .spec import Call, Spec, axis_of, fresh_axes


@rule("aten.unfold")
def unfold(call: Call) -> Spec:
    """`x.unfold(dim, size, step)`: windows of one axis, which is blocked; a new last axis inside them."""
    x, y = call.inputs[0], call.outputs[0]
    axes = fresh_axes(x.shape)
    dim = int(call.args[1]) % len(axes)
    windows, inside = axis_of("w", y.shape[dim]), axis_of("e", y.shape[-1])
    out = tuple(windows if i == dim else axis for i, axis in enumerate(axes))
    return Spec(
        family="memory",
        inputs=(axes,),
        outputs=((*out, inside),),
        blocked=frozenset({*axes[dim], *windows, *inside}),
        linear=(0,),
    )


@rule("aten.im2col")
def im2col(call: Call) -> Spec:
    """`x[n.., c, h, w] -> y[n.., c*k, l]`: batch and channels are free."""
    return _columns(call, image=call.inputs[0].shape, columns=call.outputs[0].shape, kernel=call.args[1])


@rule("aten.col2im")
def col2im(call: Call) -> Spec:
    """The sum of overlapping windows, back to an image."""
    return _columns(call, image=call.outputs[0].shape, columns=call.inputs[0].shape, kernel=call.args[2])


def _columns(
    call: Call, *, image: tuple[int, ...], columns: tuple[int, ...], kernel: tuple[int, ...]
) -> Spec:
    lead, c, k = fresh_axes(image[:-3], "n"), axis_of("c", image[-3]), axis_of("k", math.prod(kernel))
    space, places = fresh_axes(image[-2:], "s"), axis_of("l", columns[-1])
    whole, flat = (*lead, c, *space), (*lead, c + k, places)
    forward = call.node.target.startswith("aten.im2col")
    return Spec(
        family="memory",
        inputs=(whole if forward else flat,),
        outputs=(flat if forward else whole,),
        sizes={"c": image[-3], "k": math.prod(kernel)},
        blocked=frozenset({*k, *places, *(label for axis in space for label in axis)}),
        linear=(0,),
    )


@rule("aten.pixel_shuffle", "aten.pixel_unshuffle")
def pixel_shuffle(call: Call) -> Spec:
    """`x[.., c*r*r, h, w] <-> y[.., c, h*r, w*r]`; the block of `r` by `r` pixels is blocked."""
    forward = call.node.target.startswith("aten.pixel_shuffle")
    deep, wide = call.inputs[0].shape, call.outputs[0].shape
    if not forward:
        deep, wide = wide, deep
    r = int(call.args[1])
    lead, c = fresh_axes(deep[:-3], "n"), axis_of("c", wide[-3])
    h, w, p, q = axis_of("h", deep[-2]), axis_of("w", deep[-1]), axis_of("p", r), axis_of("q", r)
    channels, pixels = (*lead, c + p + q, h, w), (*lead, c, h + p, w + q)
    return Spec(
        family="memory",
        inputs=(channels if forward else pixels,),
        outputs=(pixels if forward else channels,),
        sizes={"c": wide[-3], "h": deep[-2], "w": deep[-1], "p": r, "q": r},
        blocked=frozenset({*p, *q}),
        linear=(0,),
    )


@rule("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(call: Call) -> Spec:
    """`x[n, g*c, ..] -> y[n, c*g, ..]`."""
    shape, groups = call.inputs[0].shape, int(call.args[1])
    axes = fresh_axes(shape)
    g, c = axis_of("g", groups), axis_of("c", shape[1] // groups)
    return Spec(
        family="memory",
        inputs=((axes[0], g + c, *axes[2:]),),
        outputs=((axes[0], c + g, *axes[2:]),),
        sizes={"g": groups, "c": shape[1] // groups},
        linear=(0,),
    )
