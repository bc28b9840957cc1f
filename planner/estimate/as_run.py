"""The traced graph as a framework runs it: other kernels for the same arithmetic.

In: a `Graph` (plain PyTorch as traced), a `Framework`, the matmul precision. Out: a `Graph` in which
attention may write its scores to memory, matrix products with a parameter may run in fp8, and what is
kept for backward is what that framework's kernels keep.

    flash          the graph as traced: no score is ever written
    materialised   every score is written: Q K' and P V are batched matrix products, softmax and dropout
                   pass over memory, and softmax, mask and dropped scores are kept (5 bytes a score;
                   Korthikanti et al. 2022, arXiv:2205.05198, section 4.1)
"""

from __future__ import annotations

from dataclasses import replace

from ..graph import Block, Graph, Op, SavedTensor
from ..profile import Framework

FP8 = "fp8"
ELEMENTWISE = ("pointwise", "memory")
"""Families that move memory and compute next to nothing."""
KEPT_SCORES = (2, 1, 2)
"""Bytes per score of what materialised attention keeps: softmax, dropout mask, dropped softmax."""


def as_run(graph: Graph, framework: Framework, *, precision: str) -> Graph:
    """The graph with this framework's kernels."""
    changed = {name: _block(block, framework, precision) for name, block in graph.blocks.items()}
    return graph if changed == graph.blocks else replace(graph, blocks=changed)


def _block(block: Block, framework: Framework, precision: str) -> Block:
    ops = block.ops
    if framework.attention == "materialised":
        ops = tuple(_materialised(op) if op.family == "attention" else op for op in ops)
    if framework.eager_traffic > 1 and not framework.fuses_pointwise:
        ops = tuple(
            replace(op, traffic=framework.eager_traffic) if op.family in ELEMENTWISE else op for op in ops
        )
    if precision == FP8 and block.repeated:
        ops = tuple(replace(op, compute_dtype=FP8) if _runs_in_fp8(op) else op for op in ops)
    return block if ops == block.ops else replace(block, ops=ops)


def _runs_in_fp8(op: Op) -> bool:
    """Products of activations with parameters inside layers; embedding, head and attention stay 16 bit."""
    return op.gemm is not None and any(read.kind == "parameter" for read in op.reads)


def _materialised(op: Op) -> Op:
    labels = scores(op)
    elements = 1
    for label in labels:
        elements *= op.size(label)
    kept = tuple(
        SavedTensor(operand=None, labels=labels, element_bytes=width, elements=elements)
        for width in KEPT_SCORES
    )
    operands = tuple(saved for saved in op.saved if saved.operand is not None and saved.operand >= 0)
    return replace(op, materialised=True, saved=(*operands, *kept))


def scores(op: Op) -> tuple[str, ...]:
    """Labels of an attention's score matrix: what queries and keys have, the summed depth aside."""
    query, key = op.reads[0], op.reads[1]
    rows = [label for axis in query.axes[:-1] for label in axis]
    columns = [label for label in key.axes[-2] if label not in rows]
    return (*rows, *columns)
