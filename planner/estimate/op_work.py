"""What one device does for one op, forward and backward, given its local extents.

In: an `Op` and the extent of each of its dims on one device. Out: `Work` items for `kernel_time`,
and bytes kept for backward. Backward work: one matrix product per operand that needs a gradient;
attention by its own factor; memory-bound ops read the output's gradient and what was saved, and
write the inputs' gradients.
"""

from __future__ import annotations

import math

from ..cost import Work
from ..graph import DTYPE_BYTES, Op, Operand
from . import materialised
from .materialised import Sizes

SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def extent(labels: tuple[str, ...], sizes: Sizes) -> float:
    """Product of local extents."""
    return math.prod([sizes[label] for label in labels])


def operand_bytes(operand: Operand, sizes: Sizes) -> float:
    """Local bytes of a tensor as the op sees it."""
    return extent(operand.labels, sizes) * DTYPE_BYTES[operand.dtype]


def forward_work(op: Op, sizes: Sizes, *, imbalance: float = 1.0, fused: bool = False) -> tuple[Work, ...]:
    """Forward kernels of the op on one device; views do nothing."""
    if op.family == "view":
        return ()
    moved = _traffic(op, sizes, fused)
    flops = sum(factor * extent(labels, sizes) for factor, labels in op.flops) * imbalance
    dtype = SHORT_DTYPE.get(op.reads[0].dtype if op.reads else op.writes[0].dtype, "fp32")
    if op.gemm is not None:
        precision = op.compute_dtype or dtype
        return (_product(op, sizes, op.gemm.m, op.gemm.n, op.gemm.k, flops, moved, precision),)
    if op.materialised:
        return materialised.forward(op, sizes, dtype)
    if op.family == "attention":
        return (Work(family="attention", flops=flops, bytes=moved, dtype=dtype),)
    return _memory(moved, dtype)


def backward_work(op: Op, sizes: Sizes, *, imbalance: float = 1.0, fused: bool = False) -> tuple[Work, ...]:
    """Backward kernels of the op on one device; none when no input needs a gradient."""
    wanted = [read for read in op.reads if read.grad]
    if op.family == "view" or not wanted:
        return ()
    flops = sum(factor * extent(labels, sizes) for factor, labels in op.flops) * imbalance
    dtype = SHORT_DTYPE.get(wanted[0].dtype, "fp32")
    if op.gemm is not None:
        return tuple(_gradient_products(op, sizes, flops, op.compute_dtype or dtype))
    if op.materialised:
        return materialised.backward(op, sizes, dtype)
    moved = _backward_traffic(op, sizes, fused)
    if op.family == "attention":
        return (Work(family="attention_backward", flops=flops * op.backward_flops, bytes=moved, dtype=dtype),)
    return _memory(moved, dtype)


def saved_bytes(op: Op, sizes: Sizes) -> list[float]:
    """Local bytes of each storage the op keeps for backward."""
    return [
        (extent(saved.labels, sizes) * saved.multiple if saved.labels else float(saved.elements))
        * saved.element_bytes
        for saved in op.saved
    ]


def _memory(moved: float, dtype: str) -> tuple[Work, ...]:
    """A bandwidth-bound kernel; none when fusion leaves no traffic."""
    return (Work(family="memory", flops=0.0, bytes=moved, dtype=dtype),) if moved else ()


def _traffic(op: Op, sizes: Sizes, fused: bool) -> float:
    """Bytes read and written; a lookup reads the rows it picks, not the table."""
    reads = [
        operand_bytes(read, sizes)
        for i, read in enumerate(op.reads)
        if not (fused and i in op.fused_reads) and not (op.table and i == 0)
    ]
    writes = [
        operand_bytes(w, sizes) for i, w in enumerate(op.writes) if not (fused and i in op.fused_writes)
    ]
    return (sum(reads) + sum(writes) + (sum(writes) if op.table else 0.0)) * op.traffic


def _backward_traffic(op: Op, sizes: Sizes, fused: bool) -> float:
    written = [
        operand_bytes(read, sizes)
        for i, read in enumerate(op.reads)
        if read.grad and not (fused and i in op.fused_reads)
    ]
    arriving = [
        operand_bytes(w, sizes) for i, w in enumerate(op.writes) if not (fused and i in op.fused_writes)
    ]
    return (sum(written) + sum(arriving) + sum(saved_bytes(op, sizes))) * op.traffic


def _product(
    op: Op,
    sizes: Sizes,
    m: tuple[str, ...],
    n: tuple[str, ...],
    k: tuple[str, ...],
    flops: float,
    moved: float,
    dtype: str,
) -> Work:
    assert op.gemm is not None
    batch = extent(op.gemm.batch, sizes)
    return Work(
        family=op.family,
        flops=flops,
        bytes=moved,
        dtype=dtype,
        m=_side(op, m, sizes, batch),
        n=_side(op, n, sizes, batch),
        k=_side(op, k, sizes, batch),
        batch=batch,
    )


def _side(op: Op, labels: tuple[str, ...], sizes: Sizes, batch: float) -> float:
    """One side of one product of a batch; the experts of a grouped product share its rows."""
    assert op.gemm is not None
    length = extent(labels, sizes)
    return length / max(batch, 1.0) if op.family == "grouped_gemm" and labels == op.gemm.m else length


def _gradient_products(op: Op, sizes: Sizes, flops: float, dtype: str) -> list[Work]:
    """One product per matrix operand that needs a gradient, with its own shape."""
    assert op.gemm is not None
    m, n, k = op.gemm.m, op.gemm.n, op.gemm.k
    moved = _traffic(op, sizes, False)
    result = []
    for read in op.reads:
        labels = set(read.labels)
        if not read.grad or not labels & set(k):
            continue
        left = bool(labels & set(m)) or not labels & set(n)
        shape = (m, k, n) if left else (k, n, m)
        result.append(_product(op, sizes, *shape, flops, moved, dtype))
    return result
