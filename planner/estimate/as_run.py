"""The traced graph as a framework runs it: other kernels for the same arithmetic.

In: a `Graph` (plain PyTorch as traced), a `Framework`, the matmul precision, the device's architecture.
Out: a `Graph` in which attention may write its scores to memory, matrix products with a parameter may run
in fp8, and what is kept for backward is what that framework's kernels keep.

    flash          the graph as traced: no score is ever written
    materialised   every score is written: Q K' and P V are batched matrix products, softmax and dropout
                   pass over memory, and softmax, mask and dropped scores are kept (5 bytes a score;
                   Korthikanti et al. 2022, arXiv:2205.05198, section 4.1)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from ..graph import DTYPE_BYTES, Block, Graph, Op, Operand, SavedTensor
from ..profile import Framework

FP8 = "fp8"
CPU = "cpu"
RMS_NORM = "aten.rms_norm.default"
ELEMENTWISE = ("pointwise", "memory")
"""Families that move memory and compute next to nothing."""
STATISTIC_BYTES = 4
"""A row's log-sum-exp, fp32."""
KEPT_SCORES = (2, 1, 2)
"""Bytes per score of what materialised attention keeps: softmax, dropout mask, dropped softmax."""


def as_run(graph: Graph, framework: Framework, *, precision: str, architecture: str = "other") -> Graph:
    """The graph with this framework's kernels, on a device of this architecture."""
    changed = {name: _block(block, framework, precision) for name, block in graph.blocks.items()}
    if architecture == CPU:
        changed = {
            name: replace(block, ops=tuple(map(_on_cpu, block.ops))) for name, block in changed.items()
        }
    return graph if changed == graph.blocks else replace(graph, blocks=changed)


def _block(block: Block, framework: Framework, precision: str) -> Block:
    ops = block.ops
    attention = _materialised if framework.attention == "materialised" else _flash
    ops = tuple(attention(op) if op.family == "attention" else op for op in ops)
    if framework.fuses_pointwise:
        ops = kept_by_fused_kernels(ops)
    if framework.weights_inside_experts:
        ops = _without_expert_results(ops)
    if framework.eager_traffic > 1 and not framework.fuses_pointwise:
        ops = tuple(
            replace(op, traffic=framework.eager_traffic) if op.family in ELEMENTWISE else op for op in ops
        )
    if precision == FP8 and block.repeated:
        ops = tuple(replace(op, compute_dtype=FP8) if _runs_in_fp8(op) else op for op in ops)
    return block if ops == block.ops else replace(block, ops=ops)


def _on_cpu(op: Op) -> Op:
    """RMSNorm has no kernel of its own on a CPU: what it divides is kept as well as what it reads."""
    if op.target != RMS_NORM or not op.saved:
        return op
    labels = tuple(label for axis in op.reads[0].axes for label in axis)
    width = DTYPE_BYTES[op.reads[0].dtype]
    divided = SavedTensor(operand=None, labels=labels, element_bytes=width, elements=_elements(op, labels))
    return replace(op, saved=(*op.saved, divided))


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


def _flash(op: Op) -> Op:
    """Queries, keys, values, the result and one statistic a row: what every flash kernel keeps."""
    statistics = tuple(label for axis in op.reads[0].axes[:-1] for label in axis)
    if not any(op.saved) or all(
        _elements(op, s.labels) <= _largest(op) for s in op.saved if s.operand is None
    ):
        return op
    operands = [(i, read) for i, read in enumerate(op.reads[:3])] + [(~0, op.writes[0])]
    kept = [
        SavedTensor(
            operand=i, labels=o.labels, element_bytes=DTYPE_BYTES[o.dtype], elements=_elements(op, o.labels)
        )
        for i, o in operands
    ]
    rows = SavedTensor(
        operand=None,
        labels=statistics,
        element_bytes=STATISTIC_BYTES,
        elements=_elements(op, statistics),
    )
    return replace(op, saved=(*kept, rows))


def _elements(op: Op, labels: tuple[str, ...]) -> int:
    return math.prod(op.size(label) for label in labels)


def _largest(op: Op) -> int:
    """Elements of the larger of queries and the result: scores are more."""
    return max(_elements(op, o.labels) for o in (op.reads[0], op.writes[0]))


def kept_by_fused_kernels(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """A kernel of several pointwise ops keeps what it read, not what it made for itself on the way."""
    maker = {write.tensor: op for op in ops for write in op.writes}
    keepers: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        for tensor in _saved_tensors(op):
            keepers[tensor].append(op)

    def remade(tensor: str) -> bool:
        source = maker.get(tensor)
        pointwise = source is not None and source.family == "pointwise"
        if source is None or not pointwise or any(op.family != "pointwise" for op in keepers[tensor]):
            return False
        return all(read.tensor in keepers for read in source.reads if read.kind == "activation")

    return tuple(_keep(op, lambda tensor: not remade(tensor)) for op in ops)


def _without_expert_results(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Rows that the experts made, kept only to weigh them."""
    source = {write.tensor: op.reads[0].tensor for op in ops if op.family == "view" for write in op.writes}
    restored = {write.tensor for op in ops if op.sort == "undo" for write in op.writes}

    def is_result(tensor: str) -> bool:
        while tensor in source:
            tensor = source[tensor]
        return tensor in restored

    return tuple(_keep(op, lambda tensor: not is_result(tensor)) for op in ops)


def _saved_tensors(op: Op) -> list[str]:
    return [_operand(op, s.operand).tensor for s in op.saved if s.operand is not None]


def _operand(op: Op, index: int) -> Operand:
    return op.reads[index] if index >= 0 else op.writes[~index]


def _keep(op: Op, wanted: Callable[[str], bool]) -> Op:
    kept = tuple(s for s in op.saved if s.operand is None or wanted(_operand(op, s.operand).tensor))
    return op if len(kept) == len(op.saved) else replace(op, saved=kept)


def scores(op: Op) -> tuple[str, ...]:
    """Labels of an attention's score matrix: what queries and keys have, the summed depth aside."""
    query, key = op.reads[0], op.reads[1]
    rows = [label for axis in query.axes[:-1] for label in axis]
    columns = [label for label in key.axes[-2] if label not in rows]
    return (*rows, *columns)
