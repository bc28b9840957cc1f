"""What does not divide: heads and inner widths, the vocabulary and its padding, sequences, quantised groups.

In: a `Graph` and a tensor-parallel size, or plain sizes. Out: whether a framework can split the model so,
warnings of a plan, and the error for a size that was asked for and cannot split the model's attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from .errors import OptionError
from .estimate.frameworks import OWN_FRAMEWORK
from .graph import DTYPE_BYTES, Graph, Op

PADDING_UNIT = 128
"""Rows to which each rank's part of a vocabulary is padded (Megatron-LM, --make-vocab-size-divisible-by)."""
VOCABULARY = "vocab"
INNER_WIDTHS = ("ffn", "expert_ffn")
"""Dims between the two products of an MLP."""
WHOLE_KV_HEADS = ("torch", "deepspeed")
"""Frameworks that give every rank whole key/value heads and hold none twice (a view of local heads)."""
COPIED_KV_HEADS = ("megatron",)
"""Frameworks that copy key/value heads to several ranks, evenly; ranks also hold equal parts of every MLP."""
GIB = 2.0**30

DEMANDS = {
    "torch": "gives every rank whole key/value heads, and the model's do not divide",
    "deepspeed": "gives every rank whole key/value heads, and the model's do not divide",
    "megatron": "splits heads and MLPs evenly, and the model's do not divide",
}


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


def head_sizes(op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of an attention: the factors of its key/value heads and of the query groups on each."""
    kv = tuple(dim.size for dim in op.dims if dim.label.partition(".")[0] == "kv")
    groups = tuple(dim.size for dim in op.dims if dim.label.partition(".")[0] == "g")
    return (kv, groups) if groups else (kv[:1], kv[1:])


def framework_splits(graph: Graph, tp: int, framework: str) -> bool:
    """Whether a framework's own checks accept a tensor-parallel size for the model's heads and MLPs.

    torch and DeepSpeed want `kv_heads % tp == 0`; Megatron `heads % tp == 0`, `kv_heads % tp == 0` or
    `tp % kv_heads == 0`, and `ffn % tp == 0`. This project's runtime splits what the rules say.
    """
    layers = [op for block in graph.blocks.values() if block.repeated for op in block.ops]
    heads = [head_sizes(op) for op in layers if op.family == "attention"]
    if framework in WHOLE_KV_HEADS:
        return all(math.prod(kv) % tp == 0 for kv, _ in heads)
    if framework in COPIED_KV_HEADS:
        return all(_copies(math.prod(kv), math.prod(groups), tp) for kv, groups in heads) and all(
            width % tp == 0 for op in layers for width in _inner_widths(op)
        )
    return True


def _copies(kv_heads: int, groups: int, tp: int) -> bool:
    return kv_heads * groups % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _inner_widths(op: Op) -> Iterator[int]:
    """Widths between an MLP's products that the op's weight has."""
    if op.gemm is not None and any(read.kind == "parameter" for read in op.reads):
        for side in (op.gemm.n, op.gemm.k):
            inner = [dim.size for dim in op.dims if dim.label in side and dim.name in INNER_WIDTHS]
            if inner:
                yield math.prod(inner)


def sequence_multiple(*, cp: int, tp: int = 1, halves: bool = True) -> int:
    """What a sequence must be a multiple of: `lcm(2 cp, cp tp)`.

    `halves`: each rank of cp holds an early and a late piece, to share causal work evenly; tp counts where
    it splits sequences too.
    """
    return math.lcm(2 * cp if halves and cp > 1 else cp, cp * tp)


def whole_groups(width: int, group: int, degrees: Iterable[int]) -> tuple[int, ...]:
    """Degrees that split a quantised dim into equal parts of whole groups (a scale belongs to one group)."""
    return tuple(degree for degree in degrees if width % degree == 0 and width // degree % group == 0)


def check_tensor_size(
    graph: Graph, tp: int, allowed: tuple[int, ...], framework: str = OWN_FRAMEWORK
) -> None:
    """Raise `OptionError` for a pinned size that the heads or the framework refuse; it names the nearest."""
    near = " or ".join(str(size) for size in sorted(allowed)[-2:])
    for block in graph.blocks.values():
        for op in block.ops:
            if op.family != "attention":
                continue
            kv, shared = head_sizes(op)
            if any(size % tp == 0 for size in (*kv, *shared)):
                continue
            total = math.prod((*kv, *shared))
            groups = f" in {math.prod(kv)} key/value groups" if shared else ""
            where = op.module or op.source
            raise OptionError(f"tp={tp}: the {total} heads{groups} of {where} do not divide; tp={near} would")
    if not framework_splits(graph, tp, framework):
        raise OptionError(f"tp={tp}: {framework} {DEMANDS[framework]}; tp={near} would do")
