"""Reductions. Sums and means are linear, so a split leaves partial sums; others block their dims."""

from __future__ import annotations

from .registry import rule
from .spec import Axis, Call, Spec

LINEAR = ("sum", "mean")


@rule(
    "aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max.dim", "aten.min.dim", "aten.max",
    "aten.min", "aten.argmax", "aten.argmin", "aten.var", "aten.std", "aten.prod", "aten.norm",
    "aten.linalg_vector_norm", "aten.logsumexp", "aten.any", "aten.all", "aten.var_mean", "aten.std_mean",
    "aten.topk", "aten.median", "aten.nanmedian", "aten.mode", "aten.kthvalue", "aten.aminmax",
    "aten.nansum", "aten.nanmean", "aten.count_nonzero", "aten._is_all_true", "aten._is_any_true",
)  # fmt: skip
def reduce(call: Call) -> Spec:
    """`x[.., r..] -> y[..]`, kept axes first; kept-as-one axes count as reduced. `topk` keeps k."""
    shape = call.inputs[0].shape
    axes = tuple((f"d{i}",) if size > 1 else () for i, size in enumerate(shape))
    dims = _reduced(call, len(shape))
    outputs = tuple(_output(axes, dims, shape, value.shape, f"k{j}") for j, value in enumerate(call.outputs))
    reduced = frozenset(label for i in dims for label in axes[i])
    linear = call.node.target.split(".")[1] in LINEAR and call.inputs[0].dtype != "bool"
    fresh = frozenset(label for axes_ in outputs for axis in axes_ for label in axis if label.startswith("k"))
    return Spec(
        family="memory",
        inputs=(axes,),
        outputs=outputs,
        sums=reduced if linear else frozenset(),
        blocked=fresh if linear else reduced | fresh,
        linear=(0,) if linear else (),
        flops=((1.0, tuple(label for axis in axes for label in axis)),),
        names=_routing_names(call, axes, dims),
    )


def _routing_names(call: Call, axes: tuple[Axis, ...], dims: tuple[int, ...]) -> dict[str, str]:
    """`topk` picks experts."""
    if not call.node.target.startswith("aten.topk"):
        return {}
    return {"k0": "top_k", "k1": "top_k"} | {label: "experts" for dim in dims for label in axes[dim]}


def _reduced(call: Call, rank: int) -> tuple[int, ...]:
    name = call.node.target.split(".")[1]
    if name in ("topk", "kthvalue"):
        dims: object = call.arg(2, "dim", -1)
    elif name == "mode":
        dims = call.arg(1, "dim", -1)
    elif name == "aminmax":
        dims = call.kwargs.get("dim")
    elif name in ("norm", "linalg_vector_norm"):
        dims = call.arg(2, "dim", None)
    else:
        dims = call.arg(1, "dim", None)
        dims = None if isinstance(dims, bool) else dims
    if dims is None or dims == ():
        return tuple(range(rank))
    return tuple(int(d) % max(rank, 1) for d in (dims if isinstance(dims, tuple) else (dims,)))  # type: ignore[call-overload]


def _output(
    axes: tuple[Axis, ...], dims: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...], label: str
) -> tuple[Axis, ...]:
    if len(after) == len(before):
        return tuple(((label,) if after[i] > 1 else ()) if i in dims else axis for i, axis in enumerate(axes))
    kept = tuple(axis for i, axis in enumerate(axes) if i not in dims)
    return (
        kept
        if len(kept) == len(after)
        else tuple((f"{label}{i}",) if s > 1 else () for i, s in enumerate(after))
    )
