"""Which traffic of pointwise ops stays on chip."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ..graph import Op
from ..space import Space


def mark_fused(ops: tuple[Op, ...], space: Space) -> tuple[Op, ...]:
    """Mark traffic that stays on chip when neighbouring pointwise ops run as one kernel."""
    maker = {write.tensor: op for op in ops for write in op.writes}
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        for read in op.reads:
            readers[read.tensor].append(op)

    def pointwise(name: str, seen: int = 0) -> bool:
        op = maker.get(name)
        if op is None or seen > len(ops):
            return False
        return op.family == "pointwise" or (op.family == "view" and pointwise(op.reads[0].tensor, seen + 1))

    inside = {write.tensor for op in ops for write in op.writes}
    leaves_block = inside & _read_elsewhere(ops, space)
    result = []
    for op in ops:
        if op.family == "pointwise":
            reads = frozenset(i for i, read in enumerate(op.reads) if pointwise(read.tensor))
            writes = frozenset(
                i
                for i, write in enumerate(op.writes)
                if write.tensor not in leaves_block
                and all(r.family in ("pointwise", "view") for r in readers[write.tensor])
                and readers[write.tensor]
            )
            op = replace(op, fused_reads=reads, fused_writes=writes)
        result.append(op)
    return tuple(result)


def _read_elsewhere(ops: tuple[Op, ...], space: Space) -> set[str]:
    here = {op.name for op in ops}
    return {name for d in space.nodes if d.node.name not in here for name in d.reads}
