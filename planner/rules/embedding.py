"""Table lookups: embedding and embedding_bag.

Splitting the rows of the table leaves partial sums (a rank contributes zero for rows it lacks);
splitting its columns splits the output.
"""

from __future__ import annotations

from .registry import rule
from .spec import Axis, Call, Spec


def _index_axes(shape: tuple[int, ...]) -> tuple[Axis, ...]:
    return tuple((f"i{j}",) if size > 1 else () for j, size in enumerate(shape))


@rule("aten.embedding")
def embedding(call: Call) -> Spec:
    """`table[v, h], ids[..] -> y[.., h]`."""
    table, ids = call.inputs[:2]
    index = _index_axes(ids.shape)
    column = ("h",) if table.shape[1] > 1 else ()
    return Spec(
        family="memory",
        inputs=((("v",), column), index),
        outputs=((*index, column),),
        sums=frozenset({"v"}),
        table="v",
        names={"v": "vocab", "h": "hidden"},
    )


@rule("aten.embedding_bag", "aten._embedding_bag")
def embedding_bag(call: Call) -> Spec:
    """`table[v, h], ids[bags, n] or (ids[n], offsets[bags]) -> y[bags, h]` (first output)."""
    table, ids = call.inputs[:2]
    column = ("h",) if table.shape[1] > 1 else ()
    bags = ("i0",) if call.outputs[0].shape[0] > 1 else ()
    if len(ids.shape) == 2:
        index: tuple[Axis, ...] = (bags, ("n",) if ids.shape[1] > 1 else ())
        blocked, sums = frozenset[str](), frozenset({"v", "n"} if ids.shape[1] > 1 else {"v"})
    elif ids.shape == call.outputs[0].shape[:1]:
        index, blocked, sums = (bags,), frozenset(), frozenset({"v"})
    else:
        index, blocked, sums = (("n",),), frozenset({"n", "i0"}), frozenset({"v"})
    offsets = tuple(
        (bags,) if value.shape == call.outputs[0].shape[:1] else (("q",),) for value in call.inputs[2:3]
    )
    rest = tuple(tuple(("n",) if size > 1 else () for size in value.shape) for value in call.inputs[3:])
    extra = tuple(tuple(() for _ in value.shape) for value in call.outputs[1:])
    return Spec(
        family="memory",
        inputs=((("v",), column), index, *offsets, *rest),
        outputs=((bags, column), *extra),
        sums=sums,
        blocked=blocked,
        table="v",
        names={"v": "vocab", "h": "hidden"},
    )
