"""A PyTorch model -> `TracedGraph`: the only room of the planner that imports torch.

`source` and `huggingface` load what the user named, `repeats` cuts repeated layers to a prefix, `export`
runs `torch.export`, `read` turns its graph into ours, `saved` finds what autograd keeps for backward.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError, TraceError
from ..graph import Node, Repeat, TracedGraph, Value
from ..graph_cache import DEFAULT_SEQ_LEN, TraceOptions, content_hash, find_source, split_factory
from .export import LossFunction, WithLoss, export
from .huggingface import from_config, listen_to_layers
from .read import Program, flatten, read
from .repeats import Cut, differing_layers, find_cuts, idle_layers, observed_repeats
from .saved import with_saved_tensors
from .source import (
    Loaded,
    from_file,
    load_export,
    meta_copy,
    own_seq_len,
    prepare,
    python_file,
    split_inputs,
)


def trace_source(
    source: str | nn.Module,
    *,
    seq_len: int | None = None,
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
        seq_len: sequence length given to `example_inputs`; default what the model says.
        example_inputs: for an `nn.Module`: a tuple of arguments, a dict of keyword arguments, or a
            function of (batch, seq) that returns one.
        loss: for an `nn.Module`: a function of (outputs, inputs); default as in a model file.
        batch: batch size given to `example_inputs`.
        dtype: `bf16`, `fp16` or `fp32`: parameters and floating-point inputs are cast to it.
        mode: `train`, or `serve`: no loss, nothing kept for backward.

    Raises:
        ModelError: the source cannot be loaded. TraceError: it loads but cannot be traced.
    """
    options = TraceOptions(seq_len=seq_len, batch=batch, dtype=dtype, mode=mode)
    training = mode == "train"
    with contextlib.ExitStack() as stack:
        if isinstance(source, nn.Module):
            traced = _trace(_from_module(source, example_inputs, loss, options), training=training)
        elif (path := find_source(source)).suffix == ".pt2":
            traced = _read_export(path, options, training=training)
        elif path.suffix == ".json":
            traced = _trace(from_config(path, options), training=training)
        else:
            module = stack.enter_context(python_file(path))  # its imports must work until the end
            traced = _trace(from_file(module, path, split_factory(source)[1], options), training=training)
    graph = _graph(traced, source if isinstance(source, str) else type(source).__name__, options)
    return replace(graph, content_hash=content_hash(graph))


def _from_module(model: nn.Module, inputs: Any, loss: LossFunction | None, options: TraceOptions) -> Loaded:
    if inputs is None:
        raise ModelError("a model given as nn.Module needs example_inputs: a tuple, a dict or a function")
    seq_len = options.seq_len or DEFAULT_SEQ_LEN
    if callable(inputs):
        seq_len = options.seq_len or own_seq_len(inputs)
        with torch.device("meta"):
            inputs = inputs(options.batch, seq_len)
    args, kwargs = split_inputs(inputs, "example_inputs")
    name = type(model).__name__
    return prepare(name, meta_copy(model), args, kwargs, loss, dtype=options.dtype, seq_len=seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    name: str
    values: dict[str, Value]
    nodes: tuple[Node, ...]
    output: str
    parameters: int
    trainable_parameters: int
    seq_len: int = DEFAULT_SEQ_LEN
    repeats: tuple[Repeat, ...] = ()
    warnings: tuple[str, ...] = ()


def _graph(traced: _Traced, source: str, options: TraceOptions) -> TracedGraph:
    return TracedGraph(
        name=traced.name,
        source=source,
        batch=options.batch,
        seq_len=traced.seq_len,
        dtype=options.dtype,
        values=traced.values,
        nodes=traced.nodes,
        inputs=tuple(name for name, value in traced.values.items() if value.kind == "input"),
        output=traced.output,
        repeats=traced.repeats,
        parameters=traced.parameters,
        trainable_parameters=traced.trainable_parameters,
        torch_version=torch.__version__,
        content_hash="",
        warnings=traced.warnings,
    )


def _trace(loaded: Loaded, *, training: bool) -> _Traced:
    """Trace with the repeats cut down as far as the model bears it."""
    listen_to_layers(loaded.module)
    cuts = tuple(find_cuts(loaded.module))
    attempts = tuple(dict.fromkeys((cuts, *_one_tower(cuts), ())))
    reason = ""
    for strict, attempt in itertools.product((False, True), attempts):
        try:
            traced = _trace_cut(loaded, attempt, training=training, strict=strict)
        except TraceError as error:
            reason = reason or str(error)
            continue
        return _traced_whole(traced, reason) if cuts and not attempt else traced
    raise TraceError(reason)


def _traced_whole(traced: _Traced, reason: str) -> _Traced:
    """The repeats that show in the graph, and a word about why none was left out."""
    warning = f"all layers were traced one by one: {reason}"
    repeats = observed_repeats(traced.values, traced.nodes)
    return replace(traced, repeats=repeats, warnings=(*traced.warnings, warning))


def _one_tower(cuts: tuple[Cut, ...]) -> tuple[tuple[Cut, ...], ...]:
    """Of two towers, one may bear being cut where the other does not; the later is the larger as a rule."""
    return (cuts[1:], cuts[:1]) if len(cuts) == 2 else ()


def _trace_cut(loaded: Loaded, cuts: tuple[Cut, ...], *, training: bool, strict: bool) -> _Traced:
    """Trace with some lists of layers cut; an error if the cut changed what the layers do."""
    parameters = list(loaded.module.parameters())
    wrapped = WithLoss(loaded.module, loaded.loss if training else None).train(training)
    for cut in cuts:
        cut.apply()
    try:
        program = flatten(export(wrapped, loaded.args, loaded.kwargs, strict=strict))
    finally:
        for cut in cuts:
            cut.undo()
    traced = _read(loaded.name, program, parameters, training=training)
    repeats = tuple(cut.repeat for cut in cuts)
    fault = differing_layers(repeats, traced.values, traced.nodes) or idle_layers(
        loaded.module, repeats, traced.nodes
    )
    if fault:
        raise TraceError(fault)
    if cuts:
        repeats += observed_repeats(traced.values, traced.nodes, known=repeats)
    warnings = (*loaded.warnings, *traced.warnings)
    return replace(traced, repeats=repeats, seq_len=loaded.seq_len, warnings=warnings)


def _read_export(path: Path, options: TraceOptions, *, training: bool) -> _Traced:
    """Read a `.pt2` file; its output should be the loss."""
    exported = load_export(path)
    program = flatten(exported, wrapped=False)
    traced = _read(path.stem, program, list(exported.parameters()), training=training)
    warnings = traced.warnings
    if training and traced.values[traced.output].shape:
        warnings += (f"{path.name} does not end in a loss: the backward pass starts at {traced.output}",)
    repeats = observed_repeats(traced.values, traced.nodes)
    seq_len = options.seq_len or _exported_seq_len(traced.values)
    return replace(traced, repeats=repeats, warnings=warnings, seq_len=seq_len)


def _exported_seq_len(values: dict[str, Value]) -> int:
    """Columns of the first input that holds token ids: whole numbers, batch by sequence."""
    ids = (v for v in values.values() if v.kind == "input" and v.dtype == "int64" and len(v.shape) == 2)
    return next((value.shape[1] for value in ids), DEFAULT_SEQ_LEN)


def _read(name: str, program: Program, parameters: list[nn.Parameter], *, training: bool) -> _Traced:
    graph = read(program)
    if training:
        nodes, warnings = with_saved_tensors(program, graph.values, graph.nodes)
    else:
        nodes, warnings = tuple(replace(node, differentiable=False) for node in graph.nodes), ()
    unlinked = [node for node in nodes if node.name in graph.view_writes and node.differentiable]
    return _Traced(
        name=name,
        values=graph.values,
        nodes=nodes,
        output=graph.output,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        warnings=(*warnings, *dict.fromkeys(map(_view_write_warning, unlinked))),
    )


def _view_write_warning(node: Node) -> str:
    place = node.source or node.module
    return (
        f"{node.target} at {place} writes into a part of a tensor through a view: "
        "what later reads the tensor is not linked to it"
    )
