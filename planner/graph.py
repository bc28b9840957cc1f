"""Graphs: what the tracer saw, and what the planner reasons about.

`TracedGraph` is a faithful record of one forward pass (ATen ops, shapes, modules, source lines,
what autograd keeps), with repeated layers cut down to a prefix. It holds no torch object and is
cached on disk. `Graph` is derived from it: ops with *named iteration dims*, folded into block
classes, from which every cost and every split is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


# --------------------------------------------------------------------------- as traced


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value inside a node's arguments."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the traced graph.

    `kind` is `input` (the user's), `parameter`, `buffer`, `constant` (made from literals) or
    `activation`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    fqn: str | None = None
    """Parameter or buffer name, e.g. `layers.0.mlp.up.weight`. Tied weights have one value."""
    trainable: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One storage that autograd keeps from a node's forward for its backward, counted once.

    `value` names the graph value whose storage it is, or is None for something internal to the
    op (an attention log-sum-exp, a norm's statistics, a dropout mask).
    """

    value: str | None
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One traced op. `args`/`kwargs` hold literals, `Ref`s and tuples of them."""

    name: str
    target: str
    """Full ATen name with overload, e.g. `aten.linear.default`."""
    args: tuple
    kwargs: tuple[tuple[str, object], ...]
    outputs: tuple[str, ...]
    """Names of the values it makes; an output that is never used is kept too."""
    module: str
    """Path of the innermost module that ran it, e.g. `layers.0.mlp.up` (as traced)."""
    module_class: str
    source: str
    """`file.py:line` of the user's code, or an empty string."""
    saved: tuple[Saved, ...] = ()

    def refs(self) -> Iterator[str]:
        """Names of all values it reads, in argument order, repeats included."""
        yield from _refs(self.args)
        for _, value in self.kwargs:
            yield from _refs(value)


def _refs(arg: object) -> Iterator[str]:
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from _refs(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A list of layers of which only the first `traced` were run.

    `classes[i]` is the index (below `traced`) of the traced layer that stands for layer i of the
    full model: `(0, 0, 0, 0)` for four identical layers, `(0, 1, 0, 1)` for alternating kinds.
    """

    path: str
    """Module path of the list, e.g. `model.layers`."""
    traced: int
    classes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """One forward pass, loss included, of a model whose repeats were cut down to a prefix."""

    name: str
    """A short name for reports, e.g. `llama3_8b`."""
    source: str
    """Where the model came from, as the user named it."""
    batch: int
    """Batch size used for the trace; costs scale it to the microbatch."""
    seq_len: int
    dtype: str
    values: dict[str, Value]
    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    output: str
    """The scalar loss (training), else the first output."""
    repeats: tuple[Repeat, ...]
    parameters: int
    """Parameter count of the full model, tied weights once."""
    trainable_parameters: int
    torch_version: str
    content_hash: str
    """SHA-256 over everything that determines this graph; also the cache key."""
    warnings: tuple[str, ...] = ()


# --------------------------------------------------------------------------- as planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a block: per axis the named dims it is a product of, major first."""

    name: str
    axes: tuple[tuple[str, ...], ...]
    dtype: str
    kind: str
    fqn: str | None = None
    trainable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """How an op reads or writes a tensor: the op's own iteration dims per tensor axis."""

    tensor: str
    axes: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Bytes kept for backward: the named dims they scale with, and what they belong to."""

    operand: str | None
    """Tensor name when it is an input or output of the op; None for internal storage."""
    dims: tuple[str, ...]
    """The op's iteration dims whose product is its element count."""
    element_bytes: int
    shared: bool = False
    """Another op already counts this storage."""
