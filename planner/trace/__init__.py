"""A PyTorch model -> `TracedGraph`: the only room of the planner that imports torch.

`source` loads what the user named, `repeats` cuts repeated layers to a prefix, `export` runs
`torch.export` and reads its graph, `saved` finds what autograd keeps for the backward pass.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..graph import TracedGraph
from .export import LossFunction, WithLoss, export, read_program
from .source import Loaded, from_file, meta_copy, prepare, python_file, split_inputs


def trace_source(
    source: str | nn.Module,
    *,
    seq_len: int,
    example_inputs: Any = None,
    loss: LossFunction | None = None,
    batch: int = 2,
    dtype: str = "bf16",
    mode: str = "train",
) -> TracedGraph:
    """Trace a model and return its graph.

    Args:
        source: `model.py[:factory]`, a Hugging Face `config.json` or its folder, a `.pt2` file, or an
            `nn.Module`, whose weights are neither read nor moved.
        seq_len: sequence length given to `example_inputs`.
        example_inputs: for an `nn.Module`: a tuple of arguments, a dict of keyword arguments, or a
            function of (batch, seq) that returns one.
        loss: for an `nn.Module`: a function of (outputs, inputs); default as in a model file.
        batch: batch size given to `example_inputs`.
        dtype: `bf16`, `fp16` or `fp32`: parameters and floating-point inputs are cast to it.
        mode: `train`, or `serve`: no loss, nothing kept for backward.

    Raises:
        ModelError: the source cannot be loaded. TraceError: it loads but cannot be traced.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, nn.Module):
            loaded = _from_module(source, example_inputs, loss, batch=batch, seq_len=seq_len, dtype=dtype)
        else:
            path, factory = split_factory(source)
            module = stack.enter_context(python_file(path))
            loaded = from_file(module, path, factory, batch=batch, seq_len=seq_len, dtype=dtype)
        return _trace(loaded, source=str(source), batch=batch, seq_len=seq_len, dtype=dtype, mode=mode)


def split_factory(source: str) -> tuple[Path, str | None]:
    """`model.py:factory` -> its two parts."""
    head, colon, tail = source.rpartition(":")
    if colon and tail.isidentifier() and head.endswith(".py"):
        return Path(head), tail
    return Path(source), None


def _from_module(
    model: nn.Module, inputs: Any, loss: LossFunction | None, *, batch: int, seq_len: int, dtype: str
) -> Loaded:
    if inputs is None:
        raise ModelError("a model given as nn.Module needs example_inputs: a tuple, a dict or a function")
    if callable(inputs):
        with torch.device("meta"):
            inputs = inputs(batch, seq_len)
    args, kwargs = split_inputs(inputs, "example_inputs")
    return prepare(type(model).__name__, meta_copy(model), args, kwargs, loss, dtype=dtype)


def _trace(loaded: Loaded, *, source: str, batch: int, seq_len: int, dtype: str, mode: str) -> TracedGraph:
    training = mode == "train"
    wrapped = WithLoss(loaded.module, loaded.loss if training else None).train(training)
    program = export(wrapped, loaded.args, loaded.kwargs)
    values, nodes, output = read_program(program)
    parameters = list(loaded.module.parameters())
    return TracedGraph(
        name=loaded.name,
        source=source,
        batch=batch,
        seq_len=seq_len,
        dtype=dtype,
        values=values,
        nodes=nodes,
        inputs=tuple(name for name, value in values.items() if value.kind == "input"),
        output=output,
        repeats=(),
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        torch_version=torch.__version__,
        content_hash="",
    )
