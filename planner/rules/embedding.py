"""Table lookups: embedding and embedding_bag.

Splitting the rows of the table leaves partial sums (a rank contributes zero for rows it lacks);
splitting its columns splits the output.
"""

from __future__ import annotations

from .registry import rule
from .spec import Axis, Call, Spec, axis_of


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


SUM, MEAN = 0, 1
"""Values of the `mode` argument; 2 is the maximum, which is not linear."""


@rule("aten.embedding_bag", "aten._embedding_bag")
def embedding_bag(call: Call) -> Spec:
    """`table[v, h], ids[bags * n], offsets[bags] -> y[bags, h]` (first output).

    Bags are taken to be of equal length, which static shapes imply; each rank counts its offsets from
    its own first id. With sums or means the rows of the table may be split, unless ids are weighted
    (the weights' gradient would be partial). The other outputs serve the op's own backward pass.
    """
    table, ids, offsets, *weights = call.inputs
    count, column = call.outputs[0].shape[0], axis_of("h", table.shape[1])
    bags = axis_of("bags", count)
    equal = len(ids.shape) == 1 and ids.shape[0] % count == 0 and offsets.shape == (count,)
    times = ids.shape[0] // count if equal else ids.shape[0]
    index = ((bags if equal else ()) + axis_of("n", times),)
    linear = call.arg(4, "mode", SUM) in (SUM, MEAN) and not weights
    return Spec(
        family="memory",
        inputs=(
            (("v",), column),
            index,
            (bags if equal else axis_of("q", offsets.shape[0]),),
            *(index for _ in weights),
        ),
        outputs=((bags, column), *(tuple(() for _ in value.shape) for value in call.outputs[1:])),
        sizes={"bags": count, "n": times},
        sums=frozenset({"v"}),
        local=frozenset({*bags, *column}),
        blocked=frozenset({"n", "q", *(() if linear else "v"), *(() if equal else bags)}),
        table="v",
        names={"v": "vocab", "h": "hidden"},
    )
