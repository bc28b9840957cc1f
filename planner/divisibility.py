"""What does not divide, in words: heads against a tensor-parallel size, the vocabulary and its padding.

In: a `Graph` and a tensor-parallel size. Out: warnings of a plan, and the error for a size that was asked
for and cannot split the model's attention.
"""

from __future__ import annotations

from .errors import OptionError
from .graph import DTYPE_BYTES, Graph, Op

PADDING_UNIT = 128
"""Rows to which each rank's part of a vocabulary is padded (Megatron-LM, --make-vocab-size-divisible-by)."""
VOCABULARY = "vocab"
GIB = 2.0**30


def padded(vocabulary: int, tp: int) -> int:
    """The vocabulary with the rows added that let it split into `tp` equal, aligned parts."""
    unit = PADDING_UNIT * tp
    return -(-vocabulary // unit) * unit


def vocabulary_warnings(graph: Graph, tp: int) -> tuple[str, ...]:
    """Tables and heads that stay whole on every rank of tp because their rows do not divide."""
    if tp == 1:
        return ()
    tables: dict[str, tuple[int, int]] = {}
    for block in graph.blocks.values():
        for op in block.ops:
            tables.update(_indivisible(op, tp))
    found = []
    for fqn, (rows, row_bytes) in sorted(tables.items()):
        wanted = padded(rows, tp)
        found.append(
            f"{fqn}: a vocabulary of {rows:,} does not divide by tp={tp}, so that it is not split by rows; "
            f"padded to {wanted:,} (a multiple of {PADDING_UNIT} x {tp}) it could be, "
            f"for {(wanted - rows) * row_bytes:,} bytes more"
        )
    return tuple(found)


def _indivisible(op: Op, tp: int) -> dict[str, tuple[int, int]]:
    """Per parameter with a vocabulary axis that does not divide: its rows, and bytes of one."""
    found = {}
    for read in op.reads:
        if read.kind != "parameter" or read.fqn is None or len(read.axes) != 2:
            continue
        sizes = [_extent(op, axis) for axis in read.axes]
        names = [{dim.name for dim in op.dims if dim.label in axis} for axis in read.axes]
        for rows, row, name in zip(sizes, reversed(sizes), names, strict=True):
            if VOCABULARY in name and rows % tp:
                found[read.fqn] = (rows, row * DTYPE_BYTES[read.dtype])
    return found


def _extent(op: Op, axis: tuple[str, ...]) -> int:
    extent = 1
    for label in axis:
        extent *= op.size(label)
    return extent


def check_tensor_size(graph: Graph, tp: int, allowed: tuple[int, ...]) -> None:
    """Raise `OptionError` for a pinned size that does not split attention by heads; it names the nearest."""
    for block in graph.blocks.values():
        for op in block.ops:
            heads = [dim.size for dim in op.dims if op.family == "attention" and dim.label in ("kv", "g")]
            if not heads or any(size % tp == 0 for size in heads):
                continue
            total = heads[0] * (heads[1] if len(heads) > 1 else 1)
            groups = f" in {heads[0]} key/value groups" if len(heads) > 1 else ""
            near = " or ".join(str(size) for size in sorted(allowed)[-2:])
            where = op.module or op.source
            raise OptionError(f"tp={tp}: the {total} heads{groups} of {where} do not divide; tp={near} would")
