"""One of a model's repeated layers with the inputs it gets, as structure only.

In: a model as the user names it, a batch and a sequence length. Out: the layer's module path, its module on
meta and the arguments of its call, on meta too: what it takes to run it by itself on a real device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..graph_cache import TraceOptions, find_source, split_factory
from .export import describe
from .huggingface import from_config
from .repeats import find_cuts
from .source import Loaded, from_file, python_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as the model calls it."""

    path: str
    """`model.layers.0`"""
    list_path: str
    """`model.layers`"""
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seq_len: int


class _Reached(Exception):
    """The layer is called: the rest of the model is of no interest."""


def first_layer(source: str, *, batch: int, seq_len: int | None, dtype: str) -> Layer:
    """The first layer of the model's largest list of layers.

    Raises:
        ModelError: the model cannot be loaded, has no repeated layers, or cannot run without data.
    """
    options = TraceOptions(seq_len=seq_len, batch=batch, dtype=dtype, mode="train")
    path = find_source(source)
    if path.suffix == ".json":
        return _called(from_config(path, options), path.name)
    if path.suffix != ".py":
        raise ModelError(f"{path.name} cannot be run layer by layer: give a model file or a configuration")
    with python_file(path) as module:
        return _called(from_file(module, path, split_factory(source)[1], options), path.name)


def _called(loaded: Loaded, name: str) -> Layer:
    cut = max(find_cuts(loaded.module), key=lambda cut: _numel(cut.container), default=None)
    if cut is None:
        raise ModelError(f"{name} has no list of alike layers: there is no block to measure")
    child, layer = cut.children[0]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        raise _Reached

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            loaded.module.train()(*loaded.args, **loaded.kwargs)
    except _Reached:
        pass
    except Exception as error:
        raise ModelError(f"{name} cannot run without data: {describe(error)}") from None
    finally:
        handle.remove()
    if not calls:
        raise ModelError(f"{name} never calls its {cut.repeat.path}: there is no block to measure")
    args, kwargs = calls[0]
    return Layer(
        path=f"{cut.repeat.path}.{child}",
        list_path=cut.repeat.path,
        module=layer,
        args=args,
        kwargs=kwargs,
        seq_len=loaded.seq_len,
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
