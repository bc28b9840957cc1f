"""A model file as something that runs: real weights and inputs, not meta ones.

In: `model.py[:factory]`. Out: the built model, a maker of inputs, the loss. Only model files have a
way to make inputs for a real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ModelError
from ..graph_cache import find_source, split_factory
from .source import DEFAULT_FACTORY, call, function_of, python_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """What a model file offers."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Any]
    """(batch, seq) -> a tuple of arguments or a dict of keyword arguments."""
    loss: Callable[[Any, Any], Any] | None


@contextmanager
def runnable(source: str) -> Iterator[Runnable]:
    """The functions of a model file, whose imports work meanwhile.

    Raises:
        ModelError: no model file, or it lacks a function.
    """
    path, factory = find_source(source), split_factory(source)[1] or DEFAULT_FACTORY
    if path.suffix != ".py":
        raise ModelError(f"{path.name} cannot be run: only a model file makes inputs for a real step")
    with python_file(path) as module:
        build = function_of(module, factory, path)
        inputs = function_of(module, "example_inputs", path)
        yield Runnable(
            build=lambda: call(build, path),
            inputs=lambda batch, seq: call(inputs, path, batch, seq),
            loss=getattr(module, "loss", None),
        )
