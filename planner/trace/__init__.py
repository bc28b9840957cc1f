"""A PyTorch model -> `TracedGraph`: the only room of the planner that imports torch.

`source` loads what the user named, `repeats` cuts repeated layers to a prefix, `export` runs
`torch.export` and reads its graph, `saved` finds what autograd keeps for the backward pass.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError, TraceError
from ..graph import Node, Repeat, TracedGraph, Value
from .export import LossFunction, WithLoss, export, read_program
from .repeats import differing_layers, find_cuts
from .saved import saved_tensors
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
    parameters = list(loaded.module.parameters())
    read = _trace_cut(loaded, training=mode == "train")
    return TracedGraph(
        name=loaded.name,
        source=source,
        batch=batch,
        seq_len=seq_len,
        dtype=dtype,
        values=read.values,
        nodes=read.nodes,
        inputs=tuple(name for name, value in read.values.items() if value.kind == "input"),
        output=read.output,
        repeats=read.repeats,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        torch_version=torch.__version__,
        content_hash="",
        warnings=read.warnings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    values: dict[str, Value]
    nodes: tuple[Node, ...]
    output: str
    repeats: tuple[Repeat, ...] = ()
    warnings: tuple[str, ...] = ()


def _trace_cut(loaded: Loaded, *, training: bool) -> _Traced:
    """Trace with the repeats cut down; without cutting if the model does not bear it."""
    cuts = list(find_cuts(loaded.module))
    reason = None
    for cut in cuts:
        cut.apply()
    try:
        traced = _trace_once(loaded, training=training)
        reason = differing_layers((cut.repeat for cut in cuts), traced.values, traced.nodes)
    except TraceError as error:
        if not cuts:
            raise
        traced, reason = None, str(error)
    finally:
        for cut in reversed(cuts):
            cut.undo()
    if traced is not None and reason is None:
        return replace(traced, repeats=tuple(cut.repeat for cut in cuts))
    traced = _trace_once(loaded, training=training)
    return replace(traced, warnings=(*traced.warnings, f"all layers were traced one by one: {reason}"))


def _trace_once(loaded: Loaded, *, training: bool) -> _Traced:
    wrapped = WithLoss(loaded.module, loaded.loss if training else None).train(training)
    program = export(wrapped, loaded.args, loaded.kwargs)
    values, nodes, output = read_program(program)
    warnings: tuple[str, ...] = ()
    if training:
        nodes, warnings = saved_tensors(program, values, nodes)
    return _Traced(values=values, nodes=nodes, output=output, warnings=warnings)
