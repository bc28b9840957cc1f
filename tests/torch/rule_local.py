"""How one rank calls an op on its pieces: literal arguments that hold sizes, and exchanges.

`adapt` rewrites sizes (`view`, `expand`, `split_with_sizes`, ...) to the local ones. `emulator` gives
the ops that do not run on their own: means, lookups in a part of a table, statistics over ranks.
"""

from __future__ import annotations

import math

import torch
from tpplan.planner.graph import Op
from tpplan.planner.layout import PARTIAL, Shard
from tpplan.planner.rules.choices import Choice

from .rule_simulation import DEGREE, Emulate, Ranks, Sample, cut_of, run, shard

Shapes = list[tuple[int, ...]]
A = torch.ops.aten

# ------------------------------------------------------------------------- literal arguments


def adapt(ranks: Ranks, args: tuple, kwargs: dict, shapes: Shapes) -> tuple[tuple, dict]:
    """The call with local sizes in place of whole ones."""
    change = _ADAPT.get(_name(ranks.sample))
    return (change(ranks, list(args), shapes) if change else args), kwargs


def _shape(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
    return tuple(args) if ranks.sample.target == "aten.view.dtype" else (args[0], list(shapes[0]))


def _like(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
    return args[0], torch.zeros(shapes[0])


def _unflatten(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
    at = args[1] % args[0].dim()
    return args[0], at, list(shapes[0][at : at + len(args[2])])


def _pieces(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
    at = (args[2] if len(args) > 2 else 0) % args[0].dim()
    if ranks.sample.target.endswith("sections"):
        return tuple(args)
    if ranks.sample.target.endswith("indices"):
        ends = torch.tensor([shape[at] for shape in shapes]).cumsum(0)[:-1].tolist()
        return args[0], ends, at
    extents = [shape[at] for shape in shapes]
    return args[0], max(extents) if isinstance(args[1], int) else extents, at


def _copies(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
    """`repeat` and `tile`, where an outer factor may be split."""
    x = args[0]
    lead = len(shapes[0]) - x.dim()
    return x, [size // (x.shape[i - lead] if i >= lead else 1) for i, size in enumerate(shapes[0])]


def _interleaved(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
    if len(args) < 3 or args[2] is None:
        return args[0], shapes[0][0] // args[0].numel()
    return args[0], shapes[0][args[2]] // args[0].shape[args[2]], args[2]


def _groups(position: int):
    """Groups, where they are split; the op's first axis of channels says how many are left."""

    def change(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
        if len(args) > position and str(ranks.choice.label).partition(".")[0] == "g":
            args[position] //= DEGREE
        return tuple(args)

    return change


def _native_group_norm(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
    args[3:6] = [shapes[0][0], shapes[0][1], math.prod(shapes[0][2:])]
    return _groups(6)(ranks, args, shapes)


def _offsets(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
    if str(ranks.choice.label).startswith("bags"):
        args[2] = torch.arange(len(args[2])) * (len(args[1]) // len(args[2]))
    return tuple(args)


def _bias_once(position: int):
    """A summed dim is split: the bias counts on one rank, its gradient is whole on all."""

    def change(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
        if PARTIAL in ranks.choice.writes and len(args) > position and args[position] is not None:
            args[position] = _once(ranks, args[position])
        return tuple(args)

    return change


def _once(ranks: Ranks, tensor: torch.Tensor) -> torch.Tensor:
    first = tensor is not None and any(tensor is arg for arg in ranks.calls[0][0])
    return tensor if first else tensor - tensor.detach()


def _then(*changes):
    def change(ranks: Ranks, args: list, shapes: Shapes) -> tuple:
        for step in changes:
            args = list(step(ranks, list(args), shapes))
        return tuple(args)

    return change


_ADAPT = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "expand", "broadcast_to"), _shape),
    **dict.fromkeys(("expand_as", "view_as", "reshape_as"), _like),
    "unflatten": _unflatten,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "tensor_split"), _pieces),
    **dict.fromkeys(("repeat", "tile"), _copies),
    "repeat_interleave": _interleaved,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _then(_groups(6), _bias_once(2))),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _then(_groups(6), _bias_once(2))
    ),
    "convolution": _then(_groups(8), _bias_once(2)),
    "linear": _bias_once(2),
    **dict.fromkeys(
        ("addmm", "baddbmm", "index_add", "index_add_", "scatter_add", "scatter_add_"), _bias_once(0)
    ),
    "group_norm": _groups(1),
    "native_group_norm": _native_group_norm,
    **dict.fromkeys(("embedding_bag", "_embedding_bag"), _offsets),
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), _groups(1)),
}


def _name(sample: Sample) -> str:
    return sample.target.split(".")[1]


# -------------------------------------------------------------------------------- exchanges


def emulator(sample: Sample, op: Op, choice: Choice) -> Emulate | None:
    """What ranks do together for this op and choice; None when each runs the op on its own."""
    name = _name(sample)
    if choice.kind != "split":
        return None
    if choice.inner:
        return {"batch_norm": _batch_norm, "cross_entropy_loss": _cross_entropy}.get(name, _nll)
    if (
        op.table
        and str(choice.label).partition(".")[0] == op.table.partition(".")[0]
        and PARTIAL in choice.writes
    ):
        return _lookup if name == "embedding" else _bags
    if name in ("index", "index_select") and PARTIAL in choice.writes:
        return _lookup
    if name == "scaled_dot_product_attention" and set(op.causal) & {choice.label}:
        return _causal
    if PARTIAL in choice.writes and _averages(sample):
        return _average
    return None


_REDUCTION = {
    "cross_entropy_loss": 3, "nll_loss": 3, "nll_loss_nd": 3, "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "kl_div": 2,
}  # fmt: skip
"""Position of the argument that says whether a loss is averaged (1, the default)."""


def _averages(sample: Sample) -> bool:
    name = _name(sample)
    at = _REDUCTION.get(name, len(sample.args))
    return name == "mean" or (name in _REDUCTION and (sample.args[at] if len(sample.args) > at else 1) == 1)


def _average(ranks: Ranks) -> list[object]:
    """The mean of equal pieces: each rank's term is its own mean over the number of ranks."""
    return [run(ranks.sample, args, kwargs) / DEGREE for args, kwargs in ranks.calls]  # pyright: ignore[reportOperatorIssue]


def _rows(ranks: Ranks, operand: int = 0, axis: int = 0) -> list[torch.Tensor]:
    """Per rank: local position of every whole index along a split axis, -1 for those it lacks."""
    read = ranks.op.reads[operand]
    cut = cut_of(ranks.op, read, ranks.choice.label or "")
    size = math.prod(ranks.op.size(label) for label in read.axes[axis])
    positions = []
    for rank in range(DEGREE):
        held = shard(
            torch.arange(size), type(cut)(axis=0, outer=cut.outer, size=cut.size, inner=cut.inner), rank
        )
        position = torch.full((size,), -1)
        position[held] = torch.arange(len(held))
        positions.append(position)
    return positions


def _lookup(ranks: Ranks) -> list[object]:
    """Rows that a rank lacks count zero."""
    axis = ranks.choice.reads[0].axis if isinstance(ranks.choice.reads[0], Shard) else 0
    results = []
    for (args, _), position in zip(ranks.calls, _rows(ranks, axis=axis), strict=True):
        ids = (
            args[1][0]
            if _name(ranks.sample) == "index"
            else args[-1]
            if _name(ranks.sample) == "index_select"
            else args[1]
        )
        mine = position[ids]
        table = args[0].movedim(axis, 0)
        y = table[mine.clamp_min(0)]
        if ranks.sample.op is A.embedding.default and len(args) > 2:
            y = torch.where((ids == args[2])[..., None], y.detach(), y)
        y = torch.where((mine >= 0).reshape(*mine.shape, *(1,) * (y.dim() - mine.dim())), y, 0.0)
        results.append(y.movedim(tuple(range(mine.dim())), tuple(range(axis, axis + mine.dim()))))
    return results


def _bags(ranks: Ranks) -> list[object]:
    """Sums or means over the ids of a bag whose rows the rank has."""
    results = []
    for (args, _), position in zip(ranks.calls, _rows(ranks), strict=True):
        table, ids, offsets, mode = args[0], args[1], args[2], args[4]
        mine = position[ids]
        rows = torch.where((mine >= 0)[:, None], table[mine.clamp_min(0)], 0.0)
        bag = torch.bucketize(torch.arange(len(ids)), offsets, right=True) - 1
        y = torch.zeros(len(offsets), table.shape[1], dtype=table.dtype).index_add(0, bag, rows)
        results.append([y / torch.bincount(bag)[:, None] if mode == 1 else y])
    return results


def _causal(ranks: Ranks) -> list[object]:
    """Each rank's queries see the keys up to their own positions in the whole sequence."""
    size = math.prod(ranks.op.size(label) for label in ranks.op.reads[0].axes[-2])
    cut = cut_of(ranks.op, ranks.op.reads[0], ranks.choice.label or "")
    results = []
    for rank, (args, kwargs) in enumerate(ranks.calls):
        held = shard(
            torch.arange(size), type(cut)(axis=0, outer=cut.outer, size=cut.size, inner=cut.inner), rank
        )
        mask = held[:, None] >= torch.arange(args[1].shape[-2])
        results.append(run(ranks.sample, (*args[:3], mask, 0.0, False), kwargs))
    return results


def _cross_entropy(ranks: Ranks) -> list[object]:
    """Vocabulary-parallel: maximum, sum of exponentials and the target's logit are reduced."""
    logits = [args[0].movedim(1, -1) for args, _ in ranks.calls]
    top = ranks.all_reduce([part.detach().amax(-1) for part in logits], lambda parts: parts.amax(0))
    total = ranks.all_reduce([(part - top[..., None]).exp().sum(-1) for part in logits])
    picked = ranks.all_reduce(_picked(ranks, logits))
    whole = _weight_of_targets(ranks)
    return _reduced(ranks, whole * (total.log() + top) - picked)


def _nll(ranks: Ranks) -> list[object]:
    """The target's log-probability lies on one rank."""
    return _reduced(
        ranks, -ranks.all_reduce(_picked(ranks, [args[0].movedim(1, -1) for args, _ in ranks.calls]))
    )


def _picked(ranks: Ranks, logits: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = []
    for (args, _), part, position in zip(ranks.calls, logits, _rows(ranks, axis=1), strict=True):
        target = args[1]
        if target.is_floating_point():
            parts.append((part * target.movedim(1, -1)).sum(-1))
            continue
        mine = position[target]
        found = part.gather(-1, mine.clamp_min(0)[..., None])[..., 0]
        scale = args[2][mine.clamp_min(0)] if len(args) > 2 and args[2] is not None else 1.0
        parts.append(torch.where(mine >= 0, found * scale, 0.0))
    return parts


def _weight_of_targets(ranks: Ranks) -> torch.Tensor | float:
    whole = ranks.sample.args
    return whole[2][whole[1]] if len(whole) > 2 and whole[2] is not None else 1.0


def _reduced(ranks: Ranks, losses: torch.Tensor) -> list[object]:
    at = _REDUCTION[_name(ranks.sample)]
    reduction = ranks.sample.args[at] if len(ranks.sample.args) > at else 1
    whole = [losses, losses.mean(), losses.sum()][reduction]
    return [whole, *(0.0 * whole + whole.detach() for _ in range(DEGREE - 1))]


def _batch_norm(ranks: Ranks) -> list[object]:
    """Sum and sum of squares of every channel over all ranks."""
    calls = [args for args, _ in ranks.calls]
    over = [axis for axis in range(calls[0][0].dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(calls[0][0].dim())]
    count = sum(args[0].numel() // args[0].shape[1] for args in calls)
    mean = ranks.all_reduce([args[0].sum(over) for args in calls]) / count
    variance = ranks.all_reduce([args[0].square().sum(over) for args in calls]) / count - mean.square()
    scale = (variance + calls[0][7]).rsqrt().reshape(shape)
    results = []
    for x, weight, bias, *_ in calls:
        y = (x - mean.reshape(shape)) * scale
        results.append(y if weight is None else y * weight.reshape(shape) + bias.reshape(shape))
    return results
