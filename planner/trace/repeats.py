"""Repeated layers -> a short prefix that holds one of every kind.

A list of layers (`nn.ModuleList`, `nn.Sequential`) is cut to its shortest prefix that contains every
distinct structural key, plus one layer more where the next layer repeats the last key: the step from
one layer to an equal one is then in the graph too. A prefix, because models index their
configuration by position; where the last layer is of its own kind, that is the whole list. The cut is
undone if the model cannot run without its other layers, or if two traced layers with one key turn out
to run different ops, in the layers or between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..graph import Node, Repeat, Value

LEAST_EQUAL = 3
"""Lists with fewer equal layers than this are traced whole: nothing would be gained."""
INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "idx", "index"})
"""Attributes that say where a layer stands; ignored unless the layer's own methods read them."""
RATE_NAMES = frozenset({"p", "drop_prob", "drop_path_prob", "dropout", "dropout_p", "training"})
"""Attributes that grow with depth in some models (stochastic depth) and change no shape."""
SCALARS = (int, float, bool, str, type(None), torch.dtype)


@dataclass(frozen=True, slots=True)
class Cut:
    """A list of layers that can be cut, and what it takes to cut and restore it."""

    container: nn.Module
    repeat: Repeat
    children: tuple[tuple[str, nn.Module], ...]

    def apply(self) -> None:
        """Leave only the traced prefix in the list."""
        self._set(self.children[: self.repeat.traced])

    def undo(self) -> None:
        """Put all layers back."""
        self._set(self.children)

    def _set(self, children: Iterable[tuple[str, nn.Module]]) -> None:
        self.container._modules.clear()
        self.container._modules.update(children)


def structural_key(module: nn.Module) -> tuple:
    """What makes two layers alike: classes, parameters, buffers and scalar attributes, all the way down."""
    tensors = tuple(
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    )
    children = tuple(
        (name, structural_key(child)) for name, child in module._modules.items() if child is not None
    )
    return type(module), tensors, tuple(_attributes(module)), children


def _attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in sorted(vars(module).items()):
        if name in RATE_NAMES or name.startswith("_"):
            continue
        if name in INDEX_NAMES and not _reads(type(module), name):
            continue
        if _is_scalar(value):
            yield name, repr(value)
        elif callable(value) and hasattr(value, "__qualname__"):
            yield name, value.__qualname__


def _reads(cls: type, name: str) -> bool:
    """Whether a method other than `__init__` reads an attribute; it may then behave differently by layer.

    The layers of transformers read their index only to address the cache of keys and values.
    """
    if cls.__module__.startswith("transformers."):
        return False
    own = (base for base in cls.__mro__ if not base.__module__.startswith("torch."))
    methods = (thing for base in own for key, thing in vars(base).items() if key != "__init__")
    return any(isinstance(method, FunctionType) and name in method.__code__.co_names for method in methods)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_scalar(item) for item in value)
    return isinstance(value, SCALARS)


def find_cuts(model: nn.Module, path: str = "") -> Iterator[Cut]:
    """The outermost lists worth cutting; what is inside their layers is traced as it is."""
    children = [(name, child) for name, child in model._modules.items() if child is not None]
    if isinstance(model, nn.ModuleList | nn.Sequential):
        repeat = _prefix(path, [structural_key(child) for _, child in children])
        if repeat is not None:
            yield Cut(model, repeat, tuple(children))
            return
    for name, child in children:
        yield from find_cuts(child, f"{path}.{name}" if path else name)


def _prefix(path: str, keys: list[tuple]) -> Repeat | None:
    if not any(count >= LEAST_EQUAL for key, count in Counter(keys).items() if _has_tensors(key)):
        return None
    first: dict[tuple, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    traced = max(first.values()) + 1
    if traced < len(keys) and keys[traced] == keys[traced - 1]:
        traced += 1
    return Repeat(path=path, traced=traced, classes=tuple(first[key] for key in keys))


def _has_tensors(key: tuple) -> bool:
    """Whether a structure holds parameters or buffers; activations between layers are no layers."""
    _, tensors, _, children = key
    return bool(tensors) or any(_has_tensors(child) for _, child in children)


def differing_layers(
    repeats: Iterable[Repeat], values: dict[str, Value], nodes: tuple[Node, ...]
) -> str | None:
    """A sentence if two traced layers of one class ran different ops or shapes, else None."""
    for repeat in repeats:
        runs = _runs(repeat.path, repeat.traced, values, nodes)
        for index, stands_for in enumerate(repeat.classes[: repeat.traced]):
            if not runs[index].equals(runs[stands_for]):
                return (
                    f"{repeat.path}.{stands_for} and {repeat.path}.{index} look alike but run different ops"
                )
    return None


def idle_layers(model: nn.Module, cut: tuple[Repeat, ...], nodes: tuple[Node, ...]) -> str | None:
    """A sentence if cutting some lists left layers of others out (they are run in step), else None."""
    traced = {repeat.path: repeat.traced for repeat in cut}
    ran = {f"{node.module}." for node in nodes}
    for path, container in model.named_modules():
        if not cut or not isinstance(container, nn.ModuleList):
            continue
        children = list(container.named_children())[: traced.get(path)]
        layers = [name for name, child in children if any(True for _ in child.parameters())]
        idle = [name for name in layers if not any(place.startswith(f"{path}.{name}.") for place in ran)]
        if 0 < len(idle) < len(layers):
            others = " and ".join(other for other in traced if other != path)
            return f"{path}.{idle[0]} does not run when fewer layers of {others} are traced"
    return None


def observed_repeats(
    values: dict[str, Value], nodes: tuple[Node, ...], *, known: tuple[Repeat, ...] = ()
) -> tuple[Repeat, ...]:
    """The outermost lists that were traced whole and whose layers ran the same ops on the same shapes.

    `known` lists were cut: neither they nor what is inside their layers is looked at.
    """
    lengths: dict[str, int] = {}
    for node in nodes:
        parts = node.module.split(".")
        for at, part in enumerate(parts):
            if part.isdigit():
                path = ".".join(parts[:at])
                lengths[path] = max(lengths.get(path, 0), int(part) + 1)
    found: list[Repeat] = []
    for path, length in sorted(lengths.items(), key=lambda item: item[0].count(".")):
        inside_another = any(f"{path}.".startswith(f"{repeat.path}.") for repeat in (*known, *found))
        runs = _runs(path, length, values, nodes)
        classes = tuple(next(i for i, other in enumerate(runs) if run.equals(other)) for run in runs)
        if not inside_another and max(Counter(classes).values()) >= LEAST_EQUAL:
            found.append(Repeat(path=path, traced=length, classes=classes))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Run:
    """What a layer ran, and what ran between it and the next layer; None after the last."""

    inside: tuple
    gap: tuple | None
    foreign: bool = False
    """Whether other modules than those that hold the list run in the gap: layers of their own."""

    def equals(self, other: _Run) -> bool:
        """Whether one can stand for the other."""
        unknown = None in (self.gap, other.gap) and not (self.foreign or other.foreign)
        return self.inside == other.inside and (unknown or self.gap == other.gap)


def _runs(path: str, length: int, values: dict[str, Value], nodes: tuple[Node, ...]) -> list[_Run]:
    """By call order: ops of a layer's modules that run after a later layer has begun are not its own."""
    places = [
        [i for i, node in enumerate(nodes) if f"{node.module}.".startswith(f"{path}.{index}.")]
        for index in range(length)
    ]
    starts = sorted(own[0] for own in places if own)
    runs = []
    for own in places:
        if not own:
            runs.append(_Run((), None))
            continue
        end = next((start for start in starts if start > own[0]), None)
        last = max(i for i in own if end is None or i < end)
        between = nodes[last + 1 : end]
        gap = None if end is None else _ops(between, values)
        foreign = end is not None and not all(f"{path}.".startswith(node.module) for node in between)
        runs.append(_Run(_ops(nodes[own[0] : last + 1], values), gap, foreign))
    return runs


def _ops(nodes: Iterable[Node], values: dict[str, Value]) -> tuple:
    return tuple((node.target, tuple(values[name].shape for name in node.outputs)) for node in nodes)
