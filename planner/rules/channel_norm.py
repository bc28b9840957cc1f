"""Normalisations with channels: batch, group and instance norm, weight norm.

Batch norm in training needs the mean and variance over batch and space: where those are split, ranks
reduce two small buffers of one number per channel, forward (sum, sum of squares) and backward (sum
of gradients, their product with the input), as synchronised batch norm does, so that the result is
that of one device. Channels are free. Group norm is free over batch and groups, instance norm over
batch and channels; space and the channels inside a group are blocked.
"""

from __future__ import annotations

from .norm import FLOPS_PER_NORM_ELEMENT
from .registry import rule
from .spec import Axis, Call, InnerSpec, Spec, axis_of, fresh_axes, labels_of

BATCH_STATISTICS = 2
"""Sum and sum of squares; backward: sum of gradients and of gradient times input."""


@rule("aten.batch_norm", "aten.native_batch_norm")
def batch_norm(call: Call) -> Spec:
    """`x[n, c, s..]`; weight, bias and running statistics have one number per channel."""
    x = call.inputs[0]
    axes = fresh_axes(x.shape)
    channels = axes[1]
    training = bool(call.arg(5, "training", False))
    mixed = tuple(label for label in labels_of(*axes) if label not in channels)
    inner = tuple(
        InnerSpec(
            label=label,
            collective="all-reduce",
            labels=channels,
            count=BATCH_STATISTICS,
            backward_count=BATCH_STATISTICS,
        )
        for label in mixed
    )
    return Spec(
        family="memory",
        inputs=(axes, *((channels,) for _ in call.inputs[1:])),
        outputs=(axes, *(_statistics(value.shape, x.shape, channels) for value in call.outputs[1:])),
        inner=inner if training else (),
        flops=((FLOPS_PER_NORM_ELEMENT, labels_of(*axes)),),
        names=dict.fromkeys(channels, "channels"),
    )


def _statistics(shape: tuple[int, ...], whole: tuple[int, ...], channels: Axis) -> tuple[Axis, ...]:
    return tuple(channels if size == whole[1] else () for size in shape)


@rule("aten.group_norm", "aten.native_group_norm")
def group_norm(call: Call) -> Spec:
    """`x[n, g*c, s..]`, statistics over `c` and space; the native form also returns them per `[n, g]`."""
    x = call.inputs[0]
    native = "native" in call.node.target
    groups = int(call.args[6] if native else call.args[1])
    n, space = axis_of("n", x.shape[0]), fresh_axes(x.shape[2:], "s")
    g, c = axis_of("g", groups), axis_of("c", x.shape[1] // groups)
    axes = (n, g + c, *space)
    return Spec(
        family="memory",
        inputs=(axes, *((g + c,) for _ in call.inputs[1:])),
        outputs=(axes, *((n, g) for _ in call.outputs[1:])),
        sizes={"g": groups, "c": x.shape[1] // groups},
        blocked=frozenset({*c, *labels_of(*space)}),
        flops=((FLOPS_PER_NORM_ELEMENT, labels_of(*axes)),),
        names={"g": "channel_groups", "c": "channels"},
    )


@rule("aten.instance_norm")
def instance_norm(call: Call) -> Spec:
    """`x[n, c, s..]`; running statistics that are updated mix the batch, which is then blocked."""
    axes = fresh_axes(call.inputs[0].shape)
    updates = call.arg(3, "running_mean") is not None and bool(call.arg(5, "use_input_stats", True))
    mixed = (*axes[2:], *(axes[:1] if updates else ()))
    return Spec(
        family="memory",
        inputs=(axes, *((axes[1],) for _ in call.inputs[1:])),
        outputs=(axes,),
        blocked=frozenset(labels_of(*mixed)),
        flops=((FLOPS_PER_NORM_ELEMENT, labels_of(*axes)),),
        names=dict.fromkeys(axes[1], "channels"),
    )


@rule("aten._weight_norm", "aten._weight_norm_interface")
def weight_norm(call: Call) -> Spec:
    """`v[.., o, ..] g[1.., o, ..1] -> w`: the norm runs over all axes but `dim`, which is free."""
    v, g = call.inputs
    axes = fresh_axes(v.shape)
    dim = int(call.arg(2, "dim", 0)) % len(axes)  # type: ignore[call-overload]
    scale = tuple(axes[dim] if size > 1 else () for size in g.shape)
    return Spec(
        family="memory",
        inputs=(axes, scale),
        outputs=(axes, *(scale for _ in call.outputs[1:])),
        blocked=frozenset(label for i, axis in enumerate(axes) if i != dim for label in axis),
        flops=((FLOPS_PER_NORM_ELEMENT, labels_of(*axes)),),
    )
