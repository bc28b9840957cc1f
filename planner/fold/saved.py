"""What an op keeps for backward, by the labels that scale it."""

from __future__ import annotations

import math

from ..graph import DTYPE_BYTES, Dim, Operand, SavedTensor
from ..space import Described, Space


def saved_tensors(
    space: Space,
    described: Described,
    reads: tuple[Operand, ...],
    writes: tuple[Operand, ...],
    dims: tuple[Dim, ...],
) -> tuple[SavedTensor, ...]:
    """Tensors kept for backward; what only a graph without gradients would keep is left out."""
    result = []
    for saved in described.node.saved:
        elements = math.prod(saved.shape)
        width = DTYPE_BYTES[saved.dtype]
        position = _position(space, saved.value, reads, writes) if saved.value else None
        if saved.value is not None and position is None and saved.value not in space.data:
            continue
        if position is None:
            labels = _match(saved.shape, dims)
        else:
            operand = reads[position] if position >= 0 else writes[~position]
            labels = tuple(label for axis in operand.axes for label in axis)
        if math.prod(d.size for d in dims if d.label in labels) != elements:
            labels = _match(saved.shape, dims)
        result.append(SavedTensor(operand=position, labels=labels, element_bytes=width, elements=elements))
    return tuple(result)


def _position(space: Space, name: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...]) -> int | None:
    """Which operand shares the storage of a saved value."""
    root = space.roots.get(name, name)
    for i, operand in enumerate(reads):
        if space.roots[operand.tensor] == root:
            return i
    for i, operand in enumerate(writes):
        if operand.tensor == name or space.roots[operand.tensor] == root:
            return ~i
    return None


def _match(shape: tuple[int, ...], dims: tuple[Dim, ...]) -> tuple[str, ...]:
    """Dims whose sizes spell out a shape, in order: how internal storage scales."""
    labels: list[str] = []
    position = 0
    for size in shape:
        remaining = size
        while remaining > 1 and position < len(dims):
            dim = dims[position]
            position += 1
            if remaining % dim.size == 0:
                labels.append(dim.label)
                remaining //= dim.size
    return tuple(labels)
