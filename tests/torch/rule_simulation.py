"""Ranks simulated in one process, one op at a time: does a rule's choice compute what the op computes?

`one_op` makes the planner's `Op` of a single call. `check` runs the call on each rank's piece of real
inputs, in the layouts a `Choice` states for its reads, puts the results together by the layouts it
states for its writes, and compares with the call on whole inputs; the gradients likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree
from tpplan.planner.fold import build
from tpplan.planner.graph import Node, Op, Operand, Ref, TracedGraph, Value
from tpplan.planner.layout import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard, gradient_needed
from tpplan.planner.rules.choices import Choice, _partial, _split, divides

DEGREE = 2
TOLERANCE = 1e-8
"""In double precision, for inputs and results of order one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of an op with small real inputs."""

    op: torch._ops.OpOverload | torch._ops.OpOverloadPacket
    args: tuple
    kwargs: dict = field(default_factory=dict)
    weights: tuple[int, ...] = ()
    """Which tensors, counted in argument order, are parameters."""
    fixed: tuple[int, ...] = ()
    """Which tensors, counted likewise, have no gradient."""
    graded: tuple[int, ...] | None = None
    """Which outputs pass gradients on; None: all that torch says do."""
    compared: tuple[int, ...] | None = None
    """Which outputs are compared; None: all. Others serve the op's own backward pass."""

    @property
    def target(self) -> str:
        """`aten.linear.default`."""
        return str(self.op)

    def tensors(self) -> list[torch.Tensor]:
        """All tensor arguments in order, each once."""
        found: list[torch.Tensor] = []
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, torch.Tensor) and not any(leaf is other for other in found):
                found.append(leaf)
        return found


# ------------------------------------------------------------------------------- the planner's op


def one_op(sample: Sample, *, factored: bool = False) -> Op:
    """The planner's op of a call; `factored` cuts every even axis of its inputs in two before."""
    graph = _Graph(sample, factored)
    return build(graph.traced()).blocks["model"].ops[-1]


class _Graph:
    """Inputs are made by a product with a parameter, so that they are activations with a gradient."""

    def __init__(self, sample: Sample, factored: bool) -> None:
        self.sample, self.factored = sample, factored
        self.values = {
            "scale": Value(name="scale", shape=(), dtype="float64", kind="parameter", trainable=True)
        }
        self.nodes: list[Node] = []

    def traced(self) -> TracedGraph:
        names = {id(tensor): self._input(i, tensor) for i, tensor in enumerate(self.sample.tensors())}
        outputs = self._outputs()
        self._node(
            "op",
            self.sample.target,
            _literal(self.sample.args, names),
            _literal(self.sample.kwargs, names),
            outputs,
        )
        return TracedGraph(
            name="sample", source="sample", batch=-1, seq_len=-1, dtype="float64", values=self.values,
            nodes=tuple(self.nodes), inputs=(), output=outputs[0], repeats=(), parameters=0,
            trainable_parameters=0, torch_version="", content_hash="",
        )  # fmt: skip

    def _input(self, index: int, tensor: torch.Tensor) -> str:
        name, shape = f"t{index}", tuple(tensor.shape)
        weight = index in self.sample.weights
        fixed = index in self.sample.fixed or (not tensor.is_floating_point() and not tensor.is_complex())
        kind = "parameter" if weight else "input"
        start = f"{name}_raw"
        first = _cut(shape) if self.factored else shape
        self._value(start, first, tensor.dtype, kind, fqn=name if weight else None, trainable=weight)
        if first != shape:
            start = self._made("aten.view.default", (Ref(start), shape), f"{name}_view", tensor, shape)
        if weight or fixed:
            return start
        return self._made("aten.mul.Tensor", (Ref(start), Ref("scale")), name, tensor, shape)

    def _made(self, target: str, args: tuple, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> str:
        self._value(name, shape, tensor.dtype, "activation")
        self._node(f"make_{name}", target, args, (), (name,))
        return name

    def _outputs(self) -> tuple[str, ...]:
        results = outputs_of(run(self.sample, self.sample.args, self.sample.kwargs))
        for i, tensor in enumerate(results):
            self._value(f"y{i}", tuple(tensor.shape), tensor.dtype, "activation")
        return tuple(f"y{i}" for i in range(len(results)))

    def _value(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, **more) -> None:
        self.values[name] = Value(
            name=name, shape=shape, dtype=str(dtype).removeprefix("torch."), kind=kind, **more
        )

    def _node(self, name: str, target: str, args: tuple, kwargs: tuple, outputs: tuple[str, ...]) -> None:
        self.nodes.append(
            Node(
                name=name,
                target=target,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                module="",
                module_class="",
                source="",
            )
        )


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`(6, 5)` as `(2, 3, 5)`: every even axis as a product."""
    return tuple(
        part for size in shape for part in ((2, size // 2) if size % 2 == 0 and size > 2 else (size,))
    )


def _literal(arg: object, names: dict[int, str]) -> tuple:
    def literal(item: object) -> object:
        if isinstance(item, torch.Tensor):
            return Ref(names[id(item)])
        if isinstance(item, torch.dtype):
            return str(item).removeprefix("torch.")
        return tuple(literal(part) for part in item) if isinstance(item, list | tuple) else item

    if isinstance(arg, dict):
        return tuple((key, literal(value)) for key, value in arg.items())
    return literal(arg)  # type: ignore[return-value]


def run(sample: Sample, args: object, kwargs: object) -> object:
    """Call the op on copies, so that in-place ops leave the inputs as they are."""
    copies = pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
    )
    return sample.op(*copies[0], **copies[1])


def outputs_of(result: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


# ----------------------------------------------------------------------------------- the pieces


def all_choices(op: Op, degree: int = DEGREE) -> list[Choice]:
    """Every split that an iteration space allows, whatever axis would use it, and passing partial sums."""
    sizes = {dim.label: float(dim.size) for dim in op.dims}
    splits = [_split(op, dim.label) for dim in op.dims if divides(op, dim.label, degree, sizes)]
    return [*splits, *([_partial(op)] if op.linear else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one operand is cut: its axis of the label, and the extents before, of and after the label."""

    axis: int
    outer: int
    size: int
    inner: int


def cut_of(op: Op, operand: Operand, label: str) -> Cut:
    for axis, labels in enumerate(operand.axes):
        if label in labels:
            at = labels.index(label)
            outer = math.prod(op.size(other) for other in labels[:at])
            inner = math.prod(op.size(other) for other in labels[at + 1 :])
            return Cut(axis=axis, outer=outer, size=op.size(label), inner=inner)
    raise AssertionError(f"{operand.tensor} has no {label}")


def shard(whole: torch.Tensor, cut: Cut, rank: int, degree: int = DEGREE) -> torch.Tensor:
    """The rank's piece: a plain shard when `cut.outer` is 1, else a strided one."""
    part = whole.unflatten(cut.axis, (cut.outer, degree, cut.size // degree * cut.inner))
    return part.select(cut.axis + 1, rank).flatten(cut.axis, cut.axis + 1)


def unshard(parts: list[torch.Tensor], cut: Cut) -> torch.Tensor:
    """Put pieces together again."""
    rows = [part.unflatten(cut.axis, (cut.outer, part.shape[cut.axis] // cut.outer)) for part in parts]
    return torch.cat(rows, cut.axis + 1).flatten(cut.axis, cut.axis + 1)


def place(
    op: Op, operand: Operand, whole: torch.Tensor, placement: Placement, choice: Choice
) -> list[torch.Tensor]:
    """What each rank holds of a tensor."""
    ranks = range(DEGREE)
    if isinstance(placement, Shard):
        cut = cut_of(op, operand, choice.label or "")
        assert placement.axis == cut.axis
        return [shard(whole, cut, rank).contiguous() for rank in ranks]
    if isinstance(placement, Replicate):
        return [whole.clone() for _ in ranks]
    noise = (
        torch.randn_like(whole) if whole.is_floating_point() or whole.is_complex() else torch.ones_like(whole)
    )
    return [whole - (DEGREE - 1) * noise if rank == 0 else noise.clone() for rank in ranks]


def together(
    op: Op, operand: Operand, parts: list[torch.Tensor], placement: Placement, choice: Choice
) -> torch.Tensor:
    """The whole tensor of what the ranks hold; replicas must agree."""
    if isinstance(placement, Shard):
        return unshard(parts, cut_of(op, operand, choice.label or ""))
    if isinstance(placement, Partial):
        return torch.stack(parts).sum(0)
    for part in parts[1:]:
        same(part, parts[0], f"replicas of {operand.tensor}")
    return parts[0]


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    error = (found.to(wide) - expected.to(wide)).abs().nan_to_num().max().item() if expected.numel() else 0.0
    assert error < TOLERANCE, f"{what}: off by {error:.3g}"


# ------------------------------------------------------------------------------------ the check


@dataclass(slots=True, kw_only=True)
class Ranks:
    """The arguments of every rank, for an op that runs on its own or one that exchanges buffers."""

    sample: Sample
    op: Op
    choice: Choice
    calls: list[tuple[tuple, dict]]
    """(args, kwargs) of each rank."""
    exchanged: list[int] = field(default_factory=list)
    """Element counts of the buffers reduced over the ranks."""

    def all_reduce(self, parts: list[torch.Tensor], combine: Callable = torch.sum) -> torch.Tensor:
        """The reduction over ranks, counted."""
        self.exchanged.append(parts[0].numel())
        stacked = torch.stack(parts)
        return stacked.sum(0) if combine is torch.sum else combine(stacked)


Adapt = Callable[[Ranks, tuple, dict, list[tuple[int, ...]]], tuple[tuple, dict]]
"""Literal arguments of one rank: (ranks, args, kwargs, local output shapes) -> (args, kwargs)."""
Emulate = Callable[[Ranks], list[object]]
"""The results of all ranks, for an op that exchanges buffers or looks up rows a rank may lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The call on whole inputs: leaves with their gradients, results, and the gradients that arrived."""

    leaves: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]
    arriving: list[torch.Tensor | None]


def run_whole(sample: Sample) -> Whole:
    """Run the call forward and backward on one device."""
    torch.manual_seed(0)
    leaves = {f"t{i}": _leaf(tensor, i in sample.fixed) for i, tensor in enumerate(sample.tensors())}
    outputs = outputs_of(run(sample, *_filled(sample, leaves)))
    arriving = _output_gradients(sample, outputs)
    _backward(outputs, arriving)
    return Whole(leaves=leaves, outputs=[y.detach() for y in outputs], arriving=arriving)


def check(
    sample: Sample,
    op: Op,
    choice: Choice,
    whole: Whole,
    *,
    adapt: Adapt | None = None,
    emulate: Emulate | None = None,
) -> None:
    """Compare forward results and gradients of the split call with the whole one."""
    leaves, expected, gradients = whole.leaves, whole.outputs, whole.arriving
    pieces = _pieces(sample, op, choice, leaves)
    ranks = Ranks(sample=sample, op=op, choice=choice, calls=[_filled(sample, piece) for piece in pieces])
    results = [outputs_of(result) for result in (emulate(ranks) if emulate else _alone(ranks, adapt))]
    for i, (write, placement) in enumerate(zip(op.writes, choice.writes, strict=True)):
        if sample.compared is not None and i not in sample.compared:
            continue
        parts = [result[i].detach() for result in results]
        own = PARTIAL if choice.label in op.local and placement == REPLICATE else placement
        same(together(op, write, parts, own, choice), expected[i], f"output {i}")
    _backward_ranks(op, choice, results, gradients)
    _check_gradients(op, choice, pieces, leaves)
    if choice.inner and emulate:
        stated = sum(
            (
                math.prod(op.size(label) for label in inner.forward_labels)
                for inner in choice.inner
                for _ in range(inner.count)
            ),
        )
        assert sum(ranks.exchanged) == stated, (
            f"exchanged {ranks.exchanged} elements, the rule states {stated}"
        )


def _leaf(tensor: torch.Tensor, fixed: bool) -> torch.Tensor:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(differentiable and not fixed)


def _filled(sample: Sample, leaves: dict[str, torch.Tensor]) -> tuple[tuple, dict]:
    names = {id(tensor): f"t{i}" for i, tensor in enumerate(sample.tensors())}
    return pytree.tree_map(
        lambda leaf: leaves[names[id(leaf)]] if isinstance(leaf, torch.Tensor) else leaf,
        (sample.args, sample.kwargs),
    )


def _output_gradients(sample: Sample, outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    return [
        torch.randn_like(y) if y.requires_grad and (sample.graded is None or i in sample.graded) else None
        for i, y in enumerate(outputs)
    ]


def _backward(outputs: list[torch.Tensor], gradients: list[torch.Tensor | None]) -> None:
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def _base(tensor: str) -> str:
    return tensor.partition("_")[0]


def _pieces(
    sample: Sample, op: Op, choice: Choice, leaves: dict[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    pieces: list[dict[str, torch.Tensor]] = [{} for _ in range(DEGREE)]
    for read, placement in zip(op.reads, choice.reads, strict=True):
        whole = leaves[_base(read.tensor)].detach()
        for rank, part in enumerate(place(op, read, whole, placement, choice)):
            pieces[rank][_base(read.tensor)] = _leaf(part, not read.grad)
    for name, whole in leaves.items():
        for piece in pieces:
            piece.setdefault(name, whole.detach().clone())  # lends its shape only
    return pieces


def local_shapes(op: Op, choice: Choice) -> list[tuple[int, ...]]:
    """Shapes of one rank's outputs."""
    extent = {dim.label: dim.size // (DEGREE if dim.label == choice.label else 1) for dim in op.dims}
    return [tuple(math.prod(extent[label] for label in axis) for axis in write.axes) for write in op.writes]


def _alone(ranks: Ranks, adapt: Adapt | None) -> list[object]:
    shapes = local_shapes(ranks.op, ranks.choice)
    if adapt:
        ranks.calls = [adapt(ranks, args, kwargs, shapes) for args, kwargs in ranks.calls]
    return [run(ranks.sample, args, kwargs) for args, kwargs in ranks.calls]


def _backward_ranks(op: Op, choice: Choice, results: list, gradients: list[torch.Tensor | None]) -> None:
    outputs, arriving = [], []
    for i, (write, placement, gradient) in enumerate(zip(op.writes, choice.writes, gradients, strict=True)):
        if gradient is None:
            continue
        for result, part in zip(
            results, place(op, write, gradient, gradient_needed(placement), choice), strict=True
        ):
            outputs.append(result[i])
            arriving.append(part)
    if outputs:
        torch.autograd.backward(outputs, arriving)


def _check_gradients(op: Op, choice: Choice, pieces: list, leaves: dict[str, torch.Tensor]) -> None:
    seen = [_base(read.tensor) for read in op.reads]
    for read, placement in zip(op.reads, choice.read_gradients, strict=True):
        name = _base(read.tensor)
        if placement is None or seen.count(name) > 1:
            continue
        whole = leaves[name]
        parts = [_grad(piece[name]) for piece in pieces]
        same(together(op, read, parts, placement, choice), _grad(whole), f"gradient of {name}")


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
