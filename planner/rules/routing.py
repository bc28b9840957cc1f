"""Token routing: sort by expert, count, gather into expert order, and back.

Each rank routes the tokens it holds, so sorting and counting are local to a shard of the tokens.
Between the gather that puts rows into expert order and the one that takes them out, a tensor may
be cut by expert instead of by token (`sorted_by_expert`): moving from one to the other is the
all-to-all of expert parallelism, and nothing else needs to know about it.
"""

from __future__ import annotations

from .registry import rule
from .spec import Axis, Call, Spec, fresh_axes, labels_at


@rule("aten.sort", "aten.argsort", "aten.sort.stable", "aten.argsort.stable")
def sort(call: Call) -> Spec:
    """A flat list of expert ids is sorted per shard of tokens; any other sorted dim is blocked."""
    value = call.inputs[0]
    axes = fresh_axes(value.shape)
    flat_ids = len(value.shape) == 1 and value.dtype.startswith("int")
    dim = call.arg(1, "dim", -1)
    position = (dim if isinstance(dim, int) and not isinstance(dim, bool) else -1) % max(len(axes), 1)
    blocked = frozenset[str]() if flat_ids or not axes else labels_at(axes, position)
    return Spec(family="memory", inputs=(axes,), outputs=(axes,) * len(call.outputs), blocked=blocked)


@rule("aten.histc", "aten.bincount")
def count(call: Call) -> Spec:
    """Rows per expert, counted by each rank for its own tokens."""
    axes = fresh_axes(call.inputs[0].shape)
    rows = frozenset(label for axis in axes for label in axis)
    rest = tuple(fresh_axes(value.shape) for value in call.inputs[1:])
    out = (("e",) if call.outputs[0].shape[0] > 1 else (),)
    return Spec(
        family="memory",
        inputs=(axes, *rest),
        outputs=(out,),
        local=rows,
        blocked=frozenset({"e"}),
        names={"e": "experts"},
    )


def routed_rows(call: Call) -> Spec | None:
    """Rows gathered into expert order, or taken out of it, by a sort order; None where there is none."""
    x, ids = call.inputs[:2]
    tokens, rows = x.shape[0], ids.shape[0] if ids.shape else 1
    if ids.name not in call.permutations or len(ids.shape) != 1 or rows % tokens:
        return None
    rest = fresh_axes(x.shape[1:], "h")
    undo = call.inputs[0].name in call.routed
    spread: Axis = ("t", "k") if rows > tokens else ("t",)
    return Spec(
        family="memory",
        inputs=((("t",), *rest), (spread,)),
        outputs=((spread, *rest),),
        sizes={"t": tokens, "k": rows // tokens},
        linear=(0,),
        sort="undo" if undo else "make",
    )


def routed_writes(call: Call) -> Spec | None:
    """Rows in expert order written, or added, back to their tokens; None where no routing is involved."""
    base, source = call.inputs[0], call.inputs[-1]
    routed = any(value.name in call.permutations for value in call.inputs[1:-1])
    if not routed or not source.shape or base.shape[0] == 0 or source.shape[0] % base.shape[0]:
        return None
    rest = fresh_axes(base.shape[1:], "h")
    times = source.shape[0] // base.shape[0]
    spread: Axis = ("t", "k") if times > 1 else ("t",)
    middle = tuple(
        (spread, *rest[: len(v.shape) - 1])
        if v.shape[:1] == source.shape[:1]
        else fresh_axes(v.shape, f"m{j}")
        for j, v in enumerate(call.inputs[1:-1])
    )
    return Spec(
        family="memory",
        inputs=((("t",), *rest), *middle, (spread, *rest[: len(source.shape) - 1])),
        outputs=((("t",), *rest),),
        sizes={"t": base.shape[0], "k": times},
        sums=frozenset({"k"}) if times > 1 else frozenset(),
        linear=(len(call.inputs) - 1,),
        sort="undo",
    )
