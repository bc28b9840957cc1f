"""What an op keeps for backward, by the labels that scale it."""

from __future__ import annotations

import math
from dataclasses import replace

from ..graph import DTYPE_BYTES, Dim, Operand, Saved, SavedTensor
from ..space import Described, Space
from .segments import Segment


def kept_by_maker(segments: tuple[Segment, ...], chain: tuple[int, ...]) -> tuple[Segment, ...]:
    """What all layers of a class share, kept once by the op outside the layers that made it.

    A trace names the first layer as its keeper, and another layer stands for the class.
    """
    standing = {segments[index].name: segments[index] for index in chain}
    outside = {name for s in segments if s.list_path is None for d in s.nodes for name in d.node.outputs}
    shared: dict[str, Saved] = {}
    for segment in segments:
        other = standing[segment.name]
        if segment is not other and len(segment.nodes) == len(other.nodes):
            for mine, theirs in zip(segment.nodes, other.nodes, strict=True):
                kinds = {(saved.shape, saved.dtype) for saved in theirs.node.saved}
                for saved in mine.node.saved:
                    if saved.value in outside and (saved.shape, saved.dtype) not in kinds:
                        shared[saved.value] = saved
    return tuple(_keeping(segment, shared) for segment in segments) if shared else segments


def _keeping(segment: Segment, shared: dict[str, Saved]) -> Segment:
    nodes = tuple(
        replace(d, node=replace(d.node, saved=(*d.node.saved, *(shared[name] for name in own))))
        if (own := [name for name in d.node.outputs if name in shared])
        else d
        for d in segment.nodes
    )
    return replace(segment, nodes=nodes)


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
        labels: tuple[str, ...] = ()
        if position is not None:
            operand = reads[position] if position >= 0 else writes[~position]
            labels = operand.labels
        if elements % _elements(labels, dims) or not labels:
            labels = _match(saved.shape, dims)
        result.append(
            SavedTensor(
                operand=position,
                labels=labels,
                element_bytes=width,
                elements=elements,
                multiple=elements / _elements(labels, dims),
            )
        )
    return tuple(result)


def _elements(labels: tuple[str, ...], dims: tuple[Dim, ...]) -> int:
    return math.prod(dim.size for dim in dims if dim.label in labels)


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
        found = _run_of(size, dims, position)
        if found is not None:
            labels += [dim.label for dim in dims[found]]
            position = found.stop
    return tuple(labels)


def _run_of(size: int, dims: tuple[Dim, ...], position: int) -> slice | None:
    """The run of neighbouring dims from a position on that spells out most of a size; of equals the first."""
    runs = (
        slice(start, stop) for start in range(position, len(dims)) for stop in range(start + 1, len(dims) + 1)
    )
    elements = {(run.start, run.stop): math.prod(dim.size for dim in dims[run]) for run in runs}
    whole = {run: count for run, count in elements.items() if count > 1 and size % count == 0}
    best = max(whole, key=lambda run: (whole[run], -run[0], -run[1]), default=None)
    return best and slice(*best)
