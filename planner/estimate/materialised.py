"""Attention that writes its scores: batched matrix products, softmax and dropout over memory.

In: an attention `Op` marked `materialised` and its local extents. Out: the `Work` of its kernels. A
causal mask saves nothing here: all scores are computed and written.

    forward    Q K' -> scores;  scale, mask and softmax in one kernel;  dropout;  P V
    backward   dP and dV;  dropout;  softmax;  dQ and dK
"""

from __future__ import annotations

import math

from ..cost import Work
from ..graph import Op

Sizes = dict[str, float]

ELEMENT_BYTES = 2
SOFTMAX_BYTES, SOFTMAX_BACKWARD_BYTES = 4, 6
"""Per score: read and write; backward reads the softmax and its gradient and writes one."""
DROPOUT_BYTES, DROPOUT_BACKWARD_BYTES = 5, 5
"""Per score: read, write, and a mask of one byte."""


def forward(op: Op, sizes: Sizes, dtype: str) -> tuple[Work, ...]:
    """Kernels of the forward pass."""
    scores = _scores(op, sizes)
    return (
        _product(op, sizes, dtype, wide=True),
        _pass(scores * SOFTMAX_BYTES, dtype),
        _pass(scores * DROPOUT_BYTES, dtype),
        _product(op, sizes, dtype, wide=False),
    )


def backward(op: Op, sizes: Sizes, dtype: str) -> tuple[Work, ...]:
    """Kernels of the backward pass."""
    scores = _scores(op, sizes)
    return (
        _product(op, sizes, dtype, wide=True),
        _product(op, sizes, dtype, wide=False),
        _pass(scores * DROPOUT_BACKWARD_BYTES, dtype),
        _pass(scores * SOFTMAX_BACKWARD_BYTES, dtype),
        _product(op, sizes, dtype, wide=False),
        _product(op, sizes, dtype, wide=False),
    )


def _pass(nbytes: float, dtype: str) -> Work:
    return Work(family="memory", flops=0.0, bytes=nbytes, dtype=dtype)


def _shape(op: Op, sizes: Sizes) -> tuple[float, float, float, float]:
    """(matrices, rows, keys, depth) of the score products."""
    query, key = op.reads[0], op.reads[1]
    rows, depth = (math.prod(sizes[label] for label in axis) for axis in query.axes[-2:])
    keys = math.prod(sizes[label] for label in key.axes[-2])
    matrices = math.prod(sizes[label] for axis in query.axes[:-2] for label in axis)
    return matrices, rows, keys, depth


def _scores(op: Op, sizes: Sizes) -> float:
    matrices, rows, keys, _ = _shape(op, sizes)
    return matrices * rows * keys


def _product(op: Op, sizes: Sizes, dtype: str, *, wide: bool) -> Work:
    """A product that writes the scores (`wide`) or contracts over them."""
    matrices, rows, keys, depth = _shape(op, sizes)
    n, k = (keys, depth) if wide else (depth, keys)
    touched = matrices * (rows * keys + rows * depth + keys * depth)
    return Work(
        family="gemm",
        flops=2 * matrices * rows * keys * depth,
        bytes=ELEMENT_BYTES * touched,
        dtype=dtype,
        m=rows,
        n=n,
        k=k,
        batch=matrices,
    )
