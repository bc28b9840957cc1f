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
from functools import cached_property

from .layout import Collective

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
    differentiable: bool = True
    """False when no gradient passes through it: masks, positions, routing by sorting, serving."""

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
    """SHA-256 over the graph itself: values, ops and repeats, wherever the model came from."""
    warnings: tuple[str, ...] = ()


# --------------------------------------------------------------------------- as planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One iteration dim of one op.

    `label` is unique inside the op; `name` is what a user sees and is shared over the graph
    (`batch`, `sequence`, `heads`, `ffn`, ...). The two differ when an op has a name twice: a
    square projection reads `hidden` and makes `hidden`.
    """

    label: str
    name: str
    size: int
    """Extent as traced; `batch` dims are scaled to the microbatch when priced."""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A tensor as one op reads or writes it: per axis the op's dim labels, major first."""

    tensor: str
    axes: tuple[tuple[str, ...], ...]
    dtype: str
    kind: str
    """As in `Value.kind`."""
    grad: bool
    """Whether a gradient flows through it."""
    fqn: str | None = None
    sorted_by_expert: bool = False
    """Rows lie in expert order, so axis 0 may also be cut by expert."""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Labels of all axes, in order."""
        return tuple(label for axis in self.axes for label in axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A dim that may be split at the price of a collective inside the op."""

    label: str
    collective: Collective
    forward_labels: tuple[str, ...]
    """Dims whose product is the element count of the exchanged buffer."""
    element_bytes: int
    count: int
    backward_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Which dims of an op are the rows, columns, contraction and batch of a matrix product."""

    m: tuple[str, ...]
    n: tuple[str, ...]
    k: tuple[str, ...]
    batch: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage kept for backward: the op's dims it spans, or a fixed size when it has none.

    `operand` indexes `reads` (i >= 0) or `writes` (~i); None for internal storage.
    """

    operand: int | None
    labels: tuple[str, ...]
    element_bytes: int
    elements: int
    """Element count as traced; `labels` say how it scales."""
    multiple: float = 1.0
    """Stored elements for each of its labels': 3 where one of a fused query, key and value keeps them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op of a block with its iteration space."""

    name: str
    target: str
    family: str
    """`gemm`, `grouped_gemm`, `attention`, `pointwise`, `memory`, `view` (moves nothing), `opaque`."""
    dims: tuple[Dim, ...]
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    sums: frozenset[str]
    """Dims that are summed over, linearly: splitting one leaves partial sums."""
    local: frozenset[str]
    """Dims whose split leaves each rank its own complete result."""
    blocked: frozenset[str]
    """Dims that no rule can split."""
    linear: tuple[int, ...]
    """Reads in which the op is jointly linear: partial sums may pass through."""
    inner: tuple[Inner, ...]
    gemm: Gemm | None
    flops: tuple[tuple[float, tuple[str, ...]], ...]
    """Forward FLOPs: sum of coefficient x product of dims."""
    backward_flops: float
    """Backward FLOPs over forward FLOPs when every gradient is needed."""
    experts: str | None
    """Label of the expert dim of a grouped matmul."""
    table: str | None
    """Label of the row dim of an embedding lookup."""
    sort: str
    """`make`, `keep` or `undo` when rows enter, stay in or leave expert order; else empty."""
    causal: tuple[str, ...]
    """Dims whose contiguous split loads ranks unevenly (causal attention)."""
    fused_reads: frozenset[int]
    """Reads that come straight from a pointwise op and need no memory traffic once fused."""
    fused_writes: frozenset[int]
    saved: tuple[SavedTensor, ...]
    module: str
    module_class: str
    source: str
    compute_dtype: str | None = None
    """Precision of its matrix products where it is not that of what it reads (`fp8`)."""
    materialised: bool = False
    """Attention that writes its scores to memory."""
    traffic: float = 1.0
    """Memory traffic over one read of each input and one write of each output."""
    pinned: tuple[tuple[str, str | None], ...] = ()
    """(mesh axis, name of the dim it must be split along; None: whole), as the user decided."""

    def size(self, label: str) -> int:
        """Extent of one dim as traced."""
        return next(dim.size for dim in self.dims if dim.label == label)

    @property
    def forward_flops(self) -> float:
        """FLOPs of its forward at the extents that were traced."""
        return sum(factor * math.prod(self.size(label) for label in labels) for factor, labels in self.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A class of structurally identical layers, or the part before, between or after them."""

    name: str
    ops: tuple[Op, ...]
    count: int
    repeated: bool
    parameters: tuple[Value, ...]
    module: str
    """Module path with `*` for the layer index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor made in one place and read in others.

    `producer` is (block, op index, write index); each consumer is (block, op index, read index).
    `count` is how often it occurs over the whole model, `block` the class that pays for it.
    """

    producer: tuple[str, int, int]
    consumers: tuple[tuple[str, int, int], ...]
    count: float
    block: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The whole model as block classes and the edges inside and between them."""

    name: str
    content_hash: str
    batch: int
    seq_len: int
    dtype: str
    blocks: dict[str, Block]
    chain: tuple[str, ...]
    """Block class of every block of the full model in execution order."""
    edges: tuple[Edge, ...]
    boundary: dict[str, tuple[int, int] | None]
    """Per class: (op, write) of the activation handed to the next block."""
    parameters: int
    trainable_parameters: int
    table_fqns: frozenset[str]
    """Embedding tables that dominate the model: sparse parameters of the ep axis."""
    unknown: tuple[str, ...]
    """Ops without a rule, as `target at source`."""
    warnings: tuple[str, ...]
