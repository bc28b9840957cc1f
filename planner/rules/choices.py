"""The choices one op has along ONE mesh axis: whole, split along a dim, or passing partial sums.

From the iteration space alone: splitting dim `d` shards every operand that has `d`, leaves the
others whole, and makes an output that lacks `d` partial when `d` is summed. Which dims an axis may
use at all is its policy (`AXIS_DIMS`): data axes cut the batch, context axes the sequence, tensor
axes a weight's own dims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..graph import Inner, Op, Operand
from ..layout import PARTIAL, REPLICATE, UNSUMMED, Placement, Shard, gradient_yielded
from ..layout import Collective as C

EXPERTS = "experts"
"""Name of the row cut by expert, on tensors whose rows lie in expert order."""
BATCH = "batch"
SEQUENCE = "sequence"
EXPERT_WIDTH = "expert_ffn"
"""Name of the dim between an expert's products."""
WHOLE_EXPERTS, PARTS_OF_EXPERTS = "whole experts", "parts of experts"
"""What each rank of an axis holds of the experts that tokens are routed to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run an op on one mesh axis."""

    kind: str
    """`whole`, `split`, `partial`, `experts` or `table`."""
    label: str | None
    """The split dim's label, for `split`, `experts` (the expert dim) and `table` (its rows)."""
    reads: tuple[Placement, ...]
    read_gradients: tuple[Placement | None, ...]
    """In which layout it yields each input's gradient; None where no gradient flows."""
    writes: tuple[Placement, ...]
    inner: tuple[Inner, ...] = ()


def choices(
    op: Op, *, axis: str, degree: int, sizes: dict[str, float], tables: frozenset[str], routed: str = ""
) -> tuple[Choice, ...]:
    """All legal choices of `op` on an axis of `degree` ranks; `sizes` are extents before the split.

    `routed`: see `token_choices`; empty where the axis' own policy holds.
    """
    if degree == 1:
        return (_whole(op),)
    if routed:
        found = token_choices(op, degree, sizes, whole_experts=routed == WHOLE_EXPERTS)
    else:
        found = _choices(op, axis=axis, degree=degree, sizes=sizes, tables=tables)
    pinned = [dim for over, dim in op.pinned if over == axis]
    return tuple(c for c in found if _keeps(op, c, pinned[0])) if pinned else found


def _keeps(op: Op, choice: Choice, dim: str | None) -> bool:
    """Whether a choice is what the user decided: split along that dim, or whole."""
    names = {d.label: d.name for d in op.dims}
    return (names[choice.label] if choice.label is not None else None) == dim


def _choices(
    op: Op, *, axis: str, degree: int, sizes: dict[str, float], tables: frozenset[str]
) -> tuple[Choice, ...]:
    if axis == "tp":
        return _tensor_choices(op, degree, sizes)
    if axis == "ep":
        return _expert_choices(op, degree, sizes, tables)
    wanted = SEQUENCE if axis == "cp" else BATCH
    return _named_or_whole(op, wanted, degree, sizes)


def _tensor_choices(op: Op, degree: int, sizes: dict[str, float]) -> tuple[Choice, ...]:
    """Of equally good splits the first is taken: by batch last, since the data axes cut it already."""
    found = [_whole(op)]
    weight = matrix_labels(op)
    for dim in sorted(op.dims, key=lambda dim: dim.name == BATCH):
        if (not weight or dim.label in weight) and divides(op, dim.label, degree, sizes):
            found.append(_split(op, dim.label))
    if op.linear:
        found.append(_partial(op))
    found.extend(_by_expert(op, degree, sizes))
    return tuple(found)


def _expert_choices(
    op: Op, degree: int, sizes: dict[str, float], tables: frozenset[str]
) -> tuple[Choice, ...]:
    """Sparse parameters by expert or by row, everything else by batch."""
    if op.table and op.reads[0].fqn in tables and divides(op, op.table, degree, sizes):
        return (_table(op, degree),)
    expert = _by_expert(op, degree, sizes)
    if op.experts:
        return expert
    if op.reads and all(read.kind == "parameter" for read in op.reads):  # a view of what is split
        return (_whole(op), *(_split(op, d.label) for d in op.dims if divides(op, d.label, degree, sizes)))
    return (*_named_or_whole(op, BATCH, degree, sizes), *expert)


def token_choices(op: Op, degree: int, sizes: dict[str, float], *, whole_experts: bool) -> tuple[Choice, ...]:
    """Of an op in a module that routes each rank's own tokens: split along the sequence, weights whole.

    Rows in expert order may be split by expert instead, where each rank holds `whole_experts`, or else
    along the width of every expert: all rows go to all ranks, and terms are added on the way back.
    """
    if op.reads and all(read.kind == "parameter" for read in op.reads):  # a view of what is split
        return (_whole(op), *(_split(op, d.label) for d in op.dims if divides(op, d.label, degree, sizes)))
    if whole_experts and (op.experts or op.sort == "keep"):
        by_expert = _by_expert(op, degree, sizes)
    else:
        width = op.experts or op.sort == "keep"
        wide = (d.label for d in op.dims if width and d.name == EXPERT_WIDTH)
        by_expert = tuple(_split(op, label) for label in wide if divides(op, label, degree, sizes))
    along = [d.label for d in op.dims if d.name == SEQUENCE and any(write.grad for write in op.writes)]
    if op.experts or (along and not any(divides(op, label, degree, sizes) for label in along)):
        return by_expert
    return (*by_expert, *_named_or_whole(op, SEQUENCE, degree, sizes))


def _named_or_whole(op: Op, name: str, degree: int, sizes: dict[str, float]) -> tuple[Choice, ...]:
    """Split along the dim of that name where the op has one; an op without it runs whole."""
    for dim in op.dims:
        if dim.name == name and divides(op, dim.label, degree, sizes):
            return (_split(op, dim.label),)
    return (_whole(op), _partial(op)) if op.linear else (_whole(op),)


def divides(op: Op, label: str, degree: int, sizes: dict[str, float]) -> bool:
    """Whether a dim may be cut into `degree` equal parts."""
    size = sizes[label]
    return size >= degree and size % degree == 0 and can_split(op, label)


def can_split(op: Op, label: str) -> bool:
    """Whether the op's rule lets a dim be cut at all."""
    return label not in op.blocked and _has_effect(op, label)


def _has_effect(op: Op, label: str) -> bool:
    """A dim that no operand has, or that an output lacks without being summed, cannot be cut."""
    in_output = all(_axis_of(write, label) is not None for write in op.writes)
    inner = any(i.label == label for i in op.inner)
    return in_output or label in op.sums or label in op.local or inner


def matrix_labels(op: Op) -> frozenset[str]:
    """Dims of the op's weight matrices; empty when it has none (vectors do not count)."""
    weights = [r for r in op.reads if r.kind == "parameter" and sum(bool(axis) for axis in r.axes) > 1]
    if op.family == "view" or not weights:
        return frozenset()
    return frozenset(label for weight in weights for label in weight.labels)


def _axis_of(operand: Operand, label: str) -> int | None:
    return next((i for i, axis in enumerate(operand.axes) if label in axis), None)


def shard(op: Op, operand: Operand, label: str) -> Shard | None:
    """The placement that cuts `operand` along the op's dim, or None if it lacks the dim."""
    axis = _axis_of(operand, label)
    if axis is None:
        return None
    labels = operand.axes[axis]
    names = [_name(op, other) for other in labels]
    position = labels.index(label)
    name = names[position]
    return Shard(axis, f"{name}#{position}" if names.count(name) > 1 else name)


def _name(op: Op, label: str) -> str:
    return next(dim.name for dim in op.dims if dim.label == label)


def _whole(op: Op) -> Choice:
    return Choice(
        kind="whole",
        label=None,
        reads=(REPLICATE,) * len(op.reads),
        read_gradients=tuple(REPLICATE if read.grad else None for read in op.reads),
        writes=(REPLICATE,) * len(op.writes),
    )


def unsummed(op: Op) -> Choice:
    """Whole on every rank, but for gradients: of each a rank takes a term and hands a term on."""
    return replace(
        _whole(op),
        read_gradients=tuple(PARTIAL if read.grad else None for read in op.reads),
        writes=(UNSUMMED,) * len(op.writes),
    )


def _split(op: Op, label: str) -> Choice:
    reads = tuple(shard(op, read, label) or REPLICATE for read in op.reads)
    writes = tuple(_written(op, write, label) for write in op.writes)
    scattered = any(isinstance(write, Shard) for write in writes)
    return Choice(
        kind="split",
        label=label,
        reads=reads,
        read_gradients=tuple(
            gradient_yielded(placement, split_elsewhere=scattered) if read.grad else None
            for read, placement in zip(op.reads, reads, strict=True)
        ),
        writes=writes,
        inner=tuple(i for i in op.inner if i.label == label),
    )


def _written(op: Op, write: Operand, label: str) -> Placement:
    placement = shard(op, write, label)
    if placement is not None:
        return placement
    return PARTIAL if label in op.sums else REPLICATE


def _partial(op: Op) -> Choice:
    """Partial sums in, partial sums out; the gradient that comes back is whole."""
    return Choice(
        kind="partial",
        label=None,
        reads=tuple(PARTIAL if i in op.linear else REPLICATE for i in range(len(op.reads))),
        read_gradients=tuple(REPLICATE if read.grad else None for read in op.reads),
        writes=(PARTIAL,) * len(op.writes),
    )


def _by_expert(op: Op, degree: int, sizes: dict[str, float]) -> tuple[Choice, ...]:
    """Rows cut by the expert they are routed to."""
    if op.experts:
        return (_grouped(op),) if sizes[op.experts] % degree == 0 else ()
    rows = Shard(0, EXPERTS)
    match op.sort:
        case "make":
            reads: tuple[Placement, ...] = (REPLICATE,) * len(op.reads)
            gradients = tuple(PARTIAL if read.grad else None for read in op.reads)
            writes: tuple[Placement, ...] = (rows,) * len(op.writes)
        case "keep" if all(write.sorted_by_expert for write in op.writes):
            reads = tuple(rows if read.sorted_by_expert else REPLICATE for read in op.reads)
            gradients = tuple(
                (rows if read.sorted_by_expert else PARTIAL) if read.grad else None for read in op.reads
            )
            writes = (rows,) * len(op.writes)
        case "undo":
            reads = tuple(rows if read.sorted_by_expert else REPLICATE for read in op.reads)
            gradients = tuple(p if read.grad else None for p, read in zip(reads, op.reads, strict=True))
            writes = (PARTIAL,) * len(op.writes)
        case _:
            return ()
    return (Choice(kind="experts", label=None, reads=reads, read_gradients=gradients, writes=writes),)


def _grouped(op: Op) -> Choice:
    """A grouped matmul over the local experts only."""
    rows = Shard(0, EXPERTS)
    reads = tuple(
        rows if i == 0 else shard(op, read, op.experts or "") or REPLICATE if i == 1 else REPLICATE
        for i, read in enumerate(op.reads)
    )
    return Choice(
        kind="experts",
        label=op.experts,
        reads=reads,
        read_gradients=tuple(p if read.grad else None for p, read in zip(reads, op.reads, strict=True)),
        writes=(rows,) * len(op.writes),
    )


def _table(op: Op, degree: int) -> Choice:
    """Rows of a table over the ranks that also split the batch: ids out, vectors back, gradients out."""
    assert op.table is not None
    batch = next((dim.label for dim in op.dims if dim.name == BATCH), None)
    split = _split(op, batch) if batch else _whole(op)
    row = shard(op, op.reads[0], op.table) or REPLICATE
    labels = op.writes[0].labels
    width = 2 if op.writes[0].dtype in ("bfloat16", "float16") else 4
    ids = op.reads[1].labels
    exchange = (
        Inner(
            label=op.table,
            collective=C.ALL_TO_ALL,
            forward_labels=ids,
            element_bytes=8,
            count=1,
            backward_count=0,
        ),
        Inner(
            label=op.table,
            collective=C.ALL_TO_ALL,
            forward_labels=labels,
            element_bytes=width,
            count=1,
            backward_count=1,
        ),
    )
    return Choice(
        kind="table",
        label=op.table,
        reads=(row, *split.reads[1:]),
        read_gradients=(row if op.reads[0].grad else None, *split.read_gradients[1:]),
        writes=split.writes,
        inner=exchange,
    )
