"""Scaled dot-product attention with grouped key/value heads.

`q[b, H, s, d], k[b, K, t, d], v[b, K, t, e] -> y[b, H, s, e]` with `H = K * g` under grouped-query
attention. Heads split freely (query groups inside a key/value head leave k and v whole and their
gradients partial); queries split along the sequence with k and v gathered, which is how context
parallelism by all-gather works. Key positions and head dims are blocked.
"""

from __future__ import annotations

from .registry import rule
from .spec import Axis, Call, Spec, axis_of

BACKWARD_OVER_FORWARD = 2.5
"""Five matrix products backward against two forward (FlashAttention-2, arXiv:2307.08691, sec. 3.1)."""
CAUSAL_SHARE = 0.5
"""A causal mask leaves half of the score matrix."""


@rule("aten.scaled_dot_product_attention")
def attention(call: Call) -> Spec:
    """See the module docstring. The mask, if any, is broadcast over batch and heads."""
    q, k, v, *mask = call.inputs
    kv_heads, groups = k.shape[-3], q.shape[-3] // k.shape[-3]
    lead = tuple((f"b{i}",) if size > 1 else () for i, size in enumerate(q.shape[:-3]))
    kv_axis: Axis = ("kv",) if kv_heads > 1 else ()
    heads: Axis = kv_axis + (("g",) if groups > 1 else ())
    rows, keys = axis_of("s", q.shape[-2]), axis_of("t", k.shape[-2])
    depth, value_depth = axis_of("d", q.shape[-1]), axis_of("e", v.shape[-1])
    return Spec(
        family="attention",
        inputs=(
            (*lead, heads, rows, depth),
            (*_broadcast(lead, k.shape), kv_axis, keys, depth),
            (*_broadcast(lead, v.shape), kv_axis, keys, value_depth),
            *(_mask_axes(m.shape, (*lead, heads, rows, keys), call) for m in mask),
        ),
        outputs=((*lead, heads, rows, value_depth),),
        sizes={"kv": kv_heads, "g": groups},
        blocked=frozenset({*keys, *depth, *value_depth}),
        flops=_flops(call, lead, heads, rows, keys, depth, value_depth),
        backward_flops=BACKWARD_OVER_FORWARD,
        causal=rows if _is_causal(call) else (),
        names={
            "kv": "kv_heads" if groups > 1 else "heads",
            "g": "query_groups",
            "d": "head_dim",
            "e": "head_dim",
        },
    )


def _broadcast(lead: tuple[Axis, ...], shape: tuple[int, ...]) -> tuple[Axis, ...]:
    return tuple(axis if size > 1 else () for axis, size in zip(lead, shape, strict=False))


def _is_causal(call: Call) -> bool:
    return bool(call.arg(5, "is_causal", False))


def _flops(call: Call, lead: tuple[Axis, ...], *axes: Axis) -> tuple[tuple[float, tuple[str, ...]], ...]:
    heads, rows, keys, depth, value_depth = axes
    common = tuple(label for axis in lead for label in axis) + heads + rows + keys
    share = CAUSAL_SHARE if _is_causal(call) else 1.0
    return ((2.0 * share, common + depth), (2.0 * share, common + value_depth))


def _mask_axes(shape: tuple[int, ...], full: tuple[Axis, ...], call: Call) -> tuple[Axis, ...]:
    whole = (*call.inputs[0].shape[:-1], call.inputs[1].shape[-2])
    offset = len(full) - len(shape)
    return tuple(full[offset + i] if size == whole[offset + i] else () for i, size in enumerate(shape))
