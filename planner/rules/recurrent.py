"""Recurrent layers: `x[s, b, i], states[l, b, h], weights -> y[s, b, d*h], states`.

All layers and directions are one op. Steps follow each other and each contracts the whole state, so
only the batch may be split; the weights are whole on every rank and their gradients partial.

FLOPs: 2 per multiply-add of the products in every step, `2 s b (rows * columns)` summed over the
two-dimensional weights (gates x inputs, gates x hidden, projections).
"""

from __future__ import annotations

import math

from .index import unsplit
from .registry import rule
from .spec import Axis, Call, Spec, axis_of

BATCH_FIRST = {"lstm": 8, "gru": 8, "rnn_tanh": 8, "rnn_relu": 8}
"""Position of the argument in the `input` overloads."""


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def recurrent(call: Call) -> Spec:
    """See the module docstring; packed sequences are another overload and have no rule."""
    x = call.inputs[0]
    first = bool(call.arg(8, "batch_first", False))
    if len(x.shape) != 3:
        return unsplit(call)
    batch, steps = x.shape[0 if first else 1], x.shape[1 if first else 0]
    b, s = axis_of("b", batch), axis_of("s", steps)
    weights = tuple(value for value in call.inputs[1:] if value.kind == "parameter")
    states = sum(len(value.shape) == 3 for value in call.inputs[1:])
    reads = [_ordered(b, s, axis_of("i", x.shape[2]), first)]
    reads += [_state(j, value.shape, b) for j, value in enumerate(call.inputs[1 : 1 + states])]
    matrices = call.inputs[1 + states :]
    reads += [_weight(j, value.shape) for j, value in enumerate(matrices)]
    outputs = [_ordered(b, s, axis_of("y", call.outputs[0].shape[2]), first)]
    outputs += [_state(j, value.shape, b, "z") for j, value in enumerate(call.outputs[1:])]
    labels = {label for group in (*reads, *outputs) for axis in group for label in axis}
    products = sum(math.prod(value.shape) for value in matrices if len(value.shape) == 2)
    return Spec(
        family="gemm",
        inputs=tuple(reads),
        outputs=tuple(outputs),
        blocked=frozenset(labels - set(b)),
        gemm=((*s, *b), _first(matrices, 0), _first(matrices, 1), ()) if weights else None,
        flops=((2.0 * products, (*s, *b)),),
    )


def _ordered(b: Axis, s: Axis, last: Axis, first: bool) -> tuple[Axis, ...]:
    return (b, s, last) if first else (s, b, last)


def _state(j: int, shape: tuple[int, ...], b: Axis, prefix: str = "h") -> tuple[Axis, ...]:
    return (axis_of(f"{prefix}{j}l", shape[0]), b, axis_of(f"{prefix}{j}", shape[2]))


def _weight(j: int, shape: tuple[int, ...]) -> tuple[Axis, ...]:
    """Rows and columns of one weight; the first reads the input's features."""
    columns = ("i",) if j == 0 else (f"w{j}c",)
    return (axis_of(f"w{j}r", shape[0]), *(columns if size > 1 else () for size in shape[1:]))


def _first(matrices: tuple, axis: int) -> Axis:
    """Labels of the first weight's rows (0) or columns (1)."""
    return _weight(0, matrices[0].shape)[axis] if matrices else ()
