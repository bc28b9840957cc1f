"""Edges inside and between block classes, counted over the full-depth chain."""

from __future__ import annotations

from collections import Counter, defaultdict

from ..graph import Edge, Op
from ..space import Space
from .segments import Segment


def make_edges(
    space: Space, segments: tuple[Segment, ...], chain: tuple[int, ...], ops: dict[int, tuple[Op, ...]]
) -> tuple[tuple[Edge, ...], dict[str, tuple[int, int] | None]]:
    """All edges with their counts over the full-depth model."""
    places = {
        write.tensor: (segment.index, i, j)
        for segment in segments
        for i, op in enumerate(ops[segment.index])
        for j, write in enumerate(op.writes)
    }
    slots = _handed_on(segments, ops, places)
    counts: Counter[tuple] = Counter()
    exact = _exact(segments, chain)
    for position, rep in enumerate(chain):
        actual = exact.get(position, rep)
        previous = chain[position - 1] if position else None
        for source, consumers in _reads_of(ops[actual], places, actual).items():
            producer = _producer(source, actual, previous, slots, segments)
            counts[(producer, consumers, segments[rep].name)] += 1
    edges = tuple(
        Edge(
            producer=(segments[producer[0]].name, *producer[1:]),
            consumers=tuple((block, *consumer) for consumer in consumers),
            count=float(count),
            block=block,
        )
        for (producer, consumers, block), count in counts.items()
    )
    boundary = {segment.name: next(iter(slots.get(segment.index, ())), None) for segment in segments}
    return edges, {name: (slot[0], slot[1]) if slot else None for name, slot in boundary.items()}


def _exact(segments: tuple[Segment, ...], chain: tuple[int, ...]) -> dict[int, int]:
    """Positions of the full chain whose very layer was traced."""
    result, first_of_list = {}, {}
    for position, rep in enumerate(chain):
        path = segments[rep].list_path
        if path is None:
            result[position] = rep
        else:
            first_of_list.setdefault(path, position)
    for segment in segments:
        if segment.list_path is not None:
            result[first_of_list[segment.list_path] + segment.layer] = segment.index
    return result


def _reads_of(
    ops: tuple[Op, ...], places: dict[str, tuple[int, int, int]], here: int
) -> dict[tuple[int, int, int], tuple[tuple[int, int], ...]]:
    """Per producing place: the (op, read) pairs of this segment that consume it."""
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for i, op in enumerate(ops):
        for j, read in enumerate(op.reads):
            if read.kind != "constant" and read.tensor in places:
                found[places[read.tensor]].append((i, j))
    return {place: tuple(consumers) for place, consumers in found.items()}


def _handed_on(
    segments: tuple[Segment, ...], ops: dict[int, tuple[Op, ...]], places: dict[str, tuple[int, int, int]]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Per segment: what the next one reads of it, as (op, write), in order of first use."""
    result = {}
    for segment in segments[1:]:
        sources = _reads_of(ops[segment.index], places, segment.index)
        result[segment.index - 1] = tuple(s[1:] for s in sources if s[0] == segment.index - 1)
    return result


def _producer(
    source: tuple[int, int, int],
    actual: int,
    previous: int | None,
    slots: dict[int, tuple[tuple[int, int], ...]],
    segments: tuple[Segment, ...],
) -> tuple[int, int, int]:
    """Where a tensor comes from in the full-depth chain."""
    if source[0] == actual or source[0] != actual - 1 or previous is None:
        last = max(s.index for s in segments if s.name == segments[source[0]].name)
        return (last, *source[1:])
    if segments[previous].name == segments[source[0]].name:
        return (previous, *source[1:])
    ordinal = slots[source[0]].index((source[1], source[2]))
    handed = slots.get(previous, ())
    return (previous, *handed[min(ordinal, len(handed) - 1)]) if handed else (source[0], *source[1:])
