"""Normalisations over trailing dims: layer norm, RMS norm, softmax, log-softmax; and the loss.

The normalised dims cannot be split; everything before them can. Cross-entropy may be split over
the vocabulary at the price of three small all-reduces (maximum, sum of exponentials, the target's
logit), as in Megatron's vocabulary-parallel loss.
"""

from __future__ import annotations

from dataclasses import replace

from .registry import rule
from .spec import Call, InnerSpec, Spec, fresh_axes, labels_of

FLOPS_PER_NORM_ELEMENT = 8.0
"""Two reductions, a subtraction, a scale, a shift: counted as a convention, never decisive."""
FLOPS_PER_SOFTMAX_ELEMENT = 5.0
VOCABULARY_EXCHANGES = 3
"""Maximum, sum of exponentials, target logit (Megatron-LM, vocab_parallel_cross_entropy)."""


@rule("aten.layer_norm", "aten.rms_norm", "aten._fused_rms_norm", "aten.native_layer_norm")
def norm(call: Call) -> Spec:
    """`x[.., h], weight[h], bias[h] -> y[.., h]`; `h` is blocked."""
    shape = call.inputs[0].shape
    depth = len(call.arg(1, "normalized_shape", (1,)))  # type: ignore[arg-type]
    axes = fresh_axes(shape)
    weight = axes[len(axes) - depth :]
    statistics = tuple(
        tuple(axes[i] if size == shape[i] else () for i, size in enumerate(value.shape))
        for value in call.outputs[1:]
    )
    return Spec(
        family="memory",
        inputs=(axes, *(weight for _ in call.inputs[1:])),
        outputs=(axes, *statistics),
        blocked=frozenset(labels_of(*weight)),
        flops=((FLOPS_PER_NORM_ELEMENT, labels_of(*axes)),),
    )


@rule("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten._safe_softmax",
      "aten.logcumsumexp", "aten.cumprod", "aten.cummax", "aten.cummin")  # fmt: skip
def along(call: Call) -> Spec:
    """An op that runs along one dim of its only tensor; that dim is blocked."""
    shape = call.inputs[0].shape
    dim = int(call.arg(1, "dim", -1)) % max(len(shape), 1)  # type: ignore[call-overload]
    axes = fresh_axes(shape)
    return Spec(
        family="memory",
        inputs=(axes,),
        outputs=(axes,) * len(call.outputs),
        blocked=frozenset(axes[dim] if axes else ()),
        flops=((FLOPS_PER_SOFTMAX_ELEMENT, labels_of(*axes)),),
    )


@rule("aten.cumsum", "aten.cumsum_")
def running_sum(call: Call) -> Spec:
    """A sum of all before along one dim, which is blocked; linear."""
    return replace(along(call), linear=(0,), flops=((1.0, labels_of(*along(call).outputs[0])),))


@rule("aten.cosine_similarity")
def cosine_similarity(call: Call) -> Spec:
    """`a[.., h], b[.., h] -> y[..]`, broadcast; `h` is blocked."""
    shape = tuple(max(sizes) for sizes in zip(*(value.shape for value in call.inputs), strict=True))
    dim = int(call.arg(2, "dim", 1)) % len(shape)  # type: ignore[call-overload]
    axes = fresh_axes(shape)
    inputs = tuple(tuple(a if s > 1 else () for a, s in zip(axes, v.shape, strict=True)) for v in call.inputs)
    out = tuple(axis for i, axis in enumerate(axes) if i != dim)
    return Spec(family="memory", inputs=inputs, outputs=(out,), blocked=frozenset(axes[dim]))


@rule("aten.cross_entropy_loss")
def cross_entropy(call: Call) -> Spec:
    """`logits[n, v, ..], target[n, ..] -> scalar` (or one loss per token)."""
    logits = call.inputs[0]
    classes = 1 if len(logits.shape) > 1 else 0
    axes = tuple(
        () if size == 1 else ("v",) if i == classes else (f"d{i}",) for i, size in enumerate(logits.shape)
    )
    rows = tuple(axis for i, axis in enumerate(axes) if i != classes)
    output = rows if call.outputs[0].shape else ()
    target = axes if call.inputs[1].shape == logits.shape else rows
    weight = tuple((axes[classes],) for _ in call.inputs[2:])
    tokens = labels_of(*rows)
    return Spec(
        family="memory",
        inputs=(axes, target, *weight),
        outputs=(output,),
        sums=frozenset() if output else frozenset(tokens),
        inner=(InnerSpec(label="v", collective="all-reduce", labels=tokens, count=VOCABULARY_EXCHANGES),),
        flops=((FLOPS_PER_SOFTMAX_ELEMENT, labels_of(*axes)),),
        names={"v": "vocab"},
    )


@rule("aten.nll_loss_nd", "aten.nll_loss")
def nll_loss(call: Call) -> Spec:
    """Like cross-entropy on log-probabilities: the class dim is picked from, not reduced."""
    spec = cross_entropy(call)
    inner = tuple(InnerSpec(label="v", collective="all-reduce", labels=i.labels, count=1) for i in spec.inner)
    return Spec(
        family="memory",
        inputs=spec.inputs,
        outputs=spec.outputs,
        sums=spec.sums,
        inner=inner,
        names=spec.names,
    )


@rule(
    "aten.binary_cross_entropy_with_logits", "aten.binary_cross_entropy", "aten.mse_loss", "aten.l1_loss",
    "aten.smooth_l1_loss", "aten.huber_loss", "aten.kl_div", "aten.soft_margin_loss",
)  # fmt: skip
def elementwise_loss(call: Call) -> Spec:
    """A loss per element, summed or averaged over all of them unless the output keeps the shape."""
    shape = call.inputs[0].shape
    axes = fresh_axes(shape)
    inputs = tuple(
        tuple(axes[len(shape) - len(v.shape) + i] if size > 1 else () for i, size in enumerate(v.shape))
        for v in call.inputs
    )
    scalar = not call.outputs[0].shape
    broadcast = {label for axis in axes for label in axis if any(label not in labels_of(*i) for i in inputs)}
    return Spec(
        family="memory",
        inputs=inputs,
        outputs=(() if scalar else axes,),
        sums=frozenset(labels_of(*axes)) if scalar else frozenset(),
        blocked=frozenset(broadcast) if scalar else frozenset(),
        flops=((FLOPS_PER_SOFTMAX_ELEMENT, labels_of(*axes)),),
    )
