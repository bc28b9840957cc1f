"""What is alive while a block runs, op by op, as eager autograd runs it.

In: a block's ops with their extents on one device, what each keeps for backward, which parameters train.
Out: `Live`, bytes beside what the block keeps. Forward, a tensor lives until its last reader has run.
Backward goes through the ops in reverse; after each

    gone     what the op kept, and the gradients of what it made
    there    gradients of what it read: new ones, save that views and additions hand on the one that came
    added    a tensor with several readers gets a gradient from each, the second added to the first

A parameter's gradient stays from the first microbatch on; later ones are added to it and let go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..cost import Live
from ..graph import Op, Operand
from .op_work import Sizes, operand_bytes

HANDS_ON = ("aten.add.Tensor", "aten.add_.Tensor", "aten.dropout.default", "aten.contiguous.default")
"""Ops whose inputs' gradients are their output's (dropout where it drops nothing)."""
COPIES = (
    "aten.slice.Tensor",
    "aten.chunk.default",
    "aten.unbind.int",
    "aten.split.Tensor",
    "aten.expand.default",
)
"""Views whose input's gradient is a tensor of its own: pieces put together, or copies summed."""
LOSS = "aten.cross_entropy"
"""Its backward makes two tensors like its input: of the negative log-likelihood, then of the softmax."""


def live(
    ops: Sequence[Op],
    local: Sequence[Sizes],
    kept: Mapping[tuple[int, int], float],
    handed: str | None,
    again: Mapping[int, float] | None = None,
) -> Live:
    """What is alive while a block runs.

    `kept`: bytes by (op, index of its storage); `handed`: the block's output; `again`: bytes that an op
    gathers once more for its backward.
    """
    keeps = [0.0] * len(ops)
    for (index, _), nbytes in kept.items():
        keeps[index] += nbytes
    stored = _storages(ops)
    handed = handed or _loss(ops)
    again = again or {}
    backward = _Backward(ops, local, stored, handed, again)
    first = _Backward(ops, local, stored, handed, again, stay=True)
    inputs = _Backward(ops, local, stored, handed, again, weights=False)
    most_of_inputs = inputs.run([0.0] * len(ops))
    weights = [operand_bytes(r, sizes) for op, sizes in zip(ops, local, strict=True) for r in _weights(op)]
    return Live(
        forward=_forward(ops, local, stored, keeps),
        whole_forward=_forward(ops, local, stored, None),
        backward=backward.run(keeps),
        first_backward=first.run(keeps),
        input_gradients=most_of_inputs,
        waiting=sum(inputs.sizes[storage] for storage in inputs.waiting),
        weight_gradient=max(weights, default=0.0),
    )


def _loss(ops: Sequence[Op]) -> str | None:
    """What the last op makes that a gradient flows through."""
    made = [op.writes[0].tensor for op in ops if op.writes and any(read.grad for read in op.reads)]
    return made[-1] if made else None


def _weights(op: Op) -> list[Operand]:
    return [read for read in op.reads if read.kind == "parameter" and read.grad and op.family != "view"]


def _storages(ops: Sequence[Op]) -> dict[str, str]:
    """Tensor -> the tensor of which it is a view."""
    of: dict[str, str] = {}
    for op in ops:
        if op.family == "view" and op.reads:
            source = of.get(op.reads[0].tensor, op.reads[0].tensor)
            of.update((write.tensor, source) for write in op.writes)
    return of


def _forward(
    ops: Sequence[Op], local: Sequence[Sizes], stored: Mapping[str, str], keeps: Sequence[float] | None
) -> float:
    """Most beside what is kept in the end (`keeps` None: nothing is)."""
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        for operand in (*op.reads, *op.writes):
            last[stored.get(operand.tensor, operand.tensor)] = i
    saved = _saved_tensors(ops, stored) if keeps else frozenset()
    alive: dict[str, float] = {}
    level = most = 0.0
    for i, (op, sizes) in enumerate(zip(ops, local, strict=True)):
        for write in op.writes:
            if write.tensor not in stored and write.tensor not in saved:
                alive[write.tensor] = operand_bytes(write, sizes)
        level += keeps[i] if keeps else 0.0
        most = max(most, level + sum(alive.values()))
        alive = {tensor: size for tensor, size in alive.items() if last[tensor] > i}
    return most - (sum(keeps) if keeps else 0.0)


def _saved_tensors(ops: Sequence[Op], stored: Mapping[str, str]) -> frozenset[str]:
    names = set()
    for op in ops:
        for saved in op.saved:
            if saved.operand is not None:
                operand = op.reads[saved.operand] if saved.operand >= 0 else op.writes[~saved.operand]
                names.add(stored.get(operand.tensor, operand.tensor))
    return frozenset(names)


@dataclass(slots=True)
class _Backward:
    """One backward through a block. Gradients are storages, shared by the tensors they are handed on to."""

    ops: Sequence[Op]
    local: Sequence[Sizes]
    stored: Mapping[str, str]
    handed: str | None
    again: Mapping[int, float]
    stay: bool = False
    """Whether parameters' gradients stay."""
    weights: bool = True
    """Whether there are any; else the gradients that theirs are made from wait."""
    waiting: set[int] = field(default_factory=set)
    of: dict[str, int] = field(default_factory=dict)
    """Tensor -> the storage of its gradient."""
    sizes: dict[int, float] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    total: float = 0.0
    """Of `sizes`."""
    most: float = 0.0
    level: float = 0.0
    """What is kept, less what was, and what stays."""

    def run(self, keeps: Sequence[float]) -> float:
        """The most beside all of `keeps`."""
        for i in reversed(range(len(self.ops))):
            op, sizes = self.ops[i], self.local[i]
            self._seed(op, sizes)
            if any(write.tensor in self.of for write in op.writes):
                self._step(op, sizes, self.again.get(i, 0.0))
            self.level -= keeps[i]
        return self.most

    def _seed(self, op: Op, sizes: Sizes) -> None:
        """The gradient that comes from behind the block."""
        for write in op.writes:
            if write.tensor == self.handed:
                self._put(write.tensor, operand_bytes(write, sizes))

    def _step(self, op: Op, sizes: Sizes, extra: float) -> None:
        arrived = next(self.of[w.tensor] for w in op.writes if w.tensor in self.of)
        hands_on = (op.family == "view" and op.target not in COPIES) or op.target in HANDS_ON
        weights, new = 0.0, []
        for read in op.reads:
            size = operand_bytes(read, sizes)
            if read.grad and read.kind == "parameter":
                weights += size if op.family != "view" and self.weights else 0.0
            elif read.grad and hands_on:
                self.users[arrived] += 1
                new.append((read.tensor, arrived))
            elif read.grad:
                new.append((read.tensor, self._storage(size)))
        extra += operand_bytes(op.reads[0], sizes) if op.target.startswith(LOSS) else 0.0
        self._note(weights + extra)
        self.level += weights if self.stay else 0.0
        if not self.weights and _weights(op) and arrived not in self.waiting:
            self.waiting.add(arrived)
            self.users[arrived] += 1
        for write in op.writes:
            self._leave(write.tensor)
        for tensor, storage in new:
            self._arrive(tensor, storage)

    def _arrive(self, tensor: str, storage: int) -> None:
        """A gradient reaches a tensor: added to one that is there, in a third if that is shared."""
        if tensor not in self.of:
            self.of[tensor] = storage
            return
        old = self.of[tensor]
        if self.users[old] == 1:
            self._release(storage)
        else:
            self.of[tensor] = self._storage(self.sizes[old])
            self._note(0.0)
            self._release(old)
            self._release(storage)

    def _leave(self, tensor: str) -> None:
        storage = self.of.pop(tensor, None)
        if storage is not None:
            self._release(storage)

    def _release(self, storage: int) -> None:
        self.users[storage] -= 1
        if not self.users[storage]:
            self.total -= self.sizes.pop(storage)

    def _put(self, tensor: str, size: float) -> None:
        if tensor not in self.of:
            self.of[tensor] = self._storage(size)

    def _storage(self, size: float) -> int:
        """A new one, with one user."""
        storage = len(self.users)
        self.sizes[storage], self.users[storage] = size, 1
        self.total += size
        return storage

    def _note(self, extra: float) -> None:
        self.most = max(self.most, self.level + self.total + extra)
