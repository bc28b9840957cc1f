"""Where a traced model is cut: runs of nodes that are one layer, and the chain of the full depth."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from ..graph import TracedGraph
from ..space import Described, Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of nodes: one traced layer, or what lies before, between or after layer lists."""

    index: int
    name: str
    """Block class name."""
    path: str
    layer: int | None
    """Traced layer index inside its list."""
    list_path: str | None
    nodes: tuple[Described, ...]


def cut_segments(traced: TracedGraph, space: Space) -> tuple[Segment, ...]:
    """Cut the node sequence by call order: a layer runs until the next layer starts."""
    tags = [_layer_of(traced, d.node.module) for d in space.nodes]
    starts = {}
    for position, tag in enumerate(tags):
        if tag is not None and tag not in starts:
            starts[tag] = position
    order = sorted(starts, key=lambda tag: starts[tag])
    cuts = []
    for i, tag in enumerate(order):
        following = starts[order[i + 1]] if i + 1 < len(order) else len(tags)
        same_list = i + 1 < len(order) and order[i + 1][0] == tag[0]
        last = max(p for p in range(starts[tag], following) if tags[p] == tag)
        cuts.append((tag, starts[tag], following if same_list else last + 1))
    pieces: list[tuple[tuple[str, int] | None, int, int]] = []
    at = 0
    for tag, start, stop in cuts:
        if start > at:
            pieces.append((None, at, start))
        pieces.append((tag, start, stop))
        at = stop
    if at < len(tags):
        pieces.append((None, at, len(tags)))
    return _named(traced, space, pieces)


def _layer_of(traced: TracedGraph, module: str) -> tuple[str, int] | None:
    """(list path, traced index) of the innermost repeated list that holds the module."""
    best = None
    for repeat in traced.repeats:
        match = re.match(rf"{re.escape(repeat.path)}\.(\d+)(?:\.|$)", module)
        if match and int(match[1]) < repeat.traced and (best is None or len(repeat.path) > len(best[0])):
            best = (repeat.path, int(match[1]))
    return best


def _named(
    traced: TracedGraph, space: Space, pieces: list[tuple[tuple[str, int] | None, int, int]]
) -> tuple[Segment, ...]:
    classes = {repeat.path: repeat.classes for repeat in traced.repeats}
    taken: Counter[str] = Counter()
    names: dict[tuple[str, int], str] = {}
    segments = []
    for index, (tag, start, stop) in enumerate(pieces):
        if tag is None:
            word = _outside_word(index, len(pieces), space.nodes[start:stop])
            name = _unique(word, taken)
            path, layer, list_path = "", None, None
        else:
            key = (tag[0], classes[tag[0]][tag[1]])
            if key not in names:
                names[key] = _unique(_layer_word(traced, tag[0]), taken)
            name, (list_path, layer) = names[key], tag
            path = f"{list_path}.{layer}"
        nodes = tuple(space.nodes[start:stop])
        segments.append(
            Segment(index=index, name=name, path=path, layer=layer, list_path=list_path, nodes=nodes)
        )
    return tuple(segments)


def _outside_word(index: int, total: int, nodes: list[Described]) -> str:
    if total == 1:
        return "model"
    if index == 0:
        looks_up = any(d.spec.table for d in nodes)
        return "embedding" if looks_up else "stem"
    return "head" if index == total - 1 else "between"


def _layer_word(traced: TracedGraph, path: str) -> str:
    """`layers` of one list is `layer`; with several lists the owner's name leads: `encoder layer`."""
    if len({repeat.path for repeat in traced.repeats}) == 1:
        return "layer"
    parts = [part for part in path.split(".")[:-1] if part != "model"]
    return " ".join((*parts[-1:], "layer"))


def _unique(word: str, taken: Counter[str]) -> str:
    taken[word] += 1
    return word if taken[word] == 1 else f"{word} {taken[word]}"


def full_chain(traced: TracedGraph, segments: tuple[Segment, ...]) -> tuple[int, ...]:
    """Representative segment of every block of the full-depth model, in order."""
    representative = _representatives(segments)
    chain: list[int] = []
    done: set[str] = set()
    for segment in segments:
        if segment.list_path is None:
            chain.append(segment.index)
        elif segment.list_path not in done:
            done.add(segment.list_path)
            classes = next(r.classes for r in traced.repeats if r.path == segment.list_path)
            by_layer = {s.layer: s.name for s in segments if s.list_path == segment.list_path}
            chain.extend(representative[by_layer[c]] for c in classes)
    return tuple(chain)


def _representatives(segments: tuple[Segment, ...]) -> dict[str, int]:
    """The last traced copy stands for its class, as what feeds it is typical of the interior.

    Where something runs between the layers of a list, nothing follows the last: an earlier, longer one does.
    """
    longest = sorted(segments, key=lambda segment: (len(segment.nodes), segment.index))
    return {segment.name: segment.index for segment in longest}
