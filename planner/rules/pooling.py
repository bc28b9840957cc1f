"""Pooling and resizing over trailing spatial axes: those are blocked, batch and channels are free.

Averages and interpolations are linear; maxima are not.
"""

from __future__ import annotations

from .registry import rule
from .spec import Call, Spec, fresh_axes


def _windows(call: Call, depth: int, *, linear: bool) -> Spec:
    x = call.inputs[0]
    lead = fresh_axes(x.shape[:-depth], "d")
    before = fresh_axes(x.shape[-depth:], "s")
    outputs, fixed = [], [*before]
    for i, value in enumerate(call.outputs):
        after = fresh_axes(value.shape[-depth:], "t" if i == 0 else f"t{i}_")
        outputs.append((*lead, *after))
        fixed.extend(after)
    labels = tuple(label for axis in outputs[0] for label in axis)
    return Spec(
        family="memory",
        inputs=((*lead, *before), *(None for _ in call.inputs[1:])),
        outputs=tuple(outputs),
        blocked=frozenset(label for axis in fixed for label in axis),
        linear=(0,) if linear else (),
        flops=((1.0, labels),),
    )


def _depth(call: Call) -> int:
    """`2` of `max_pool2d_with_indices`."""
    return int(next(letter for letter in call.node.target.split(".")[1] if letter.isdigit()))


@rule(
    "aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d", "aten.max_pool1d_with_indices",
    "aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", "aten.adaptive_max_pool1d",
    "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d",
)  # fmt: skip
def max_pool(call: Call) -> Spec:
    """Maxima of windows, perhaps with their positions."""
    return _windows(call, _depth(call), linear=False)


@rule(
    "aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", "aten.adaptive_avg_pool1d",
    "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d", "aten._adaptive_avg_pool2d",
    "aten._adaptive_avg_pool3d", "aten.upsample_nearest1d", "aten.upsample_nearest2d",
    "aten.upsample_nearest3d", "aten._upsample_nearest_exact1d", "aten._upsample_nearest_exact2d",
    "aten._upsample_nearest_exact3d", "aten.upsample_linear1d", "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d", "aten.upsample_trilinear3d", "aten._upsample_bilinear2d_aa",
    "aten._upsample_bicubic2d_aa", "aten.reflection_pad1d", "aten.reflection_pad2d",
    "aten.reflection_pad3d", "aten.replication_pad1d", "aten.replication_pad2d", "aten.replication_pad3d",
)  # fmt: skip
def average(call: Call) -> Spec:
    """Averages of windows, interpolation, copies of a border."""
    return _windows(call, _depth(call), linear=True)


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(call: Call) -> Spec:
    """`x[n, c, s..], grid[n, t.., 2] -> y[n, c, t..]`: samples and their places are free."""
    x, grid = call.inputs
    n, c = fresh_axes(x.shape[:1], "n")[0], fresh_axes(x.shape[1:2], "c")[0]
    before, after = fresh_axes(x.shape[2:], "s"), fresh_axes(grid.shape[1:-1], "t")
    blocked = frozenset(label for axis in before for label in axis) | {"xy"}
    return Spec(
        family="memory",
        inputs=((n, c, *before), (n, *after, ("xy",))),
        outputs=((n, c, *after),),
        blocked=blocked,
    )
