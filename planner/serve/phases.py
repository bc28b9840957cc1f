"""The two passes of a server, as graphs: a prompt at once, and one token for every sequence.

In: a decoder's `Graph`, traced over whole sequences. Out: the same graph with other extents: sequences of
one token whose attention reads the cached keys (`decoding`), or of the prompt's length (`filling`). What
follows the last layer runs for the last token alone. No gradient flows and nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ModelError
from ..graph import DTYPE_BYTES, Block, Dim, Graph, Op, Operand
from ..rules.choices import SEQUENCE
from ..solve.reshards import distinct_share

FP8_WEIGHTS = "float8_e4m3fn"
KEYS, VALUES = 1, 2
"""Which reads of an attention op the cache holds."""


def check_decoder(graph: Graph) -> None:
    """Raise `ModelError` for a model that does not make its output token by token."""
    if not any(_is_decoding(op) for block in graph.blocks.values() for op in block.ops):
        raise ModelError(
            f"{graph.name}: serving plans the decoding of tokens, and there is no causal attention in this "
            "model (scaled_dot_product_attention with is_causal or a mask); plan it with --mode train"
        )


def _is_decoding(op: Op) -> bool:
    """Attention of a sequence to itself that a mask may make causal."""
    return op.family == "attention" and (bool(op.causal) or len(op.reads) > VALUES + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One pass through the model."""

    tokens: int
    """New tokens of every sequence."""
    keys: int
    """Tokens that attention looks back on, the new ones included."""
    sequences: int
    """In this pass, on all devices of the replica together."""


def decoding(*, cached: int, sequences: int) -> Phase:
    """One more token for each of `sequences`, which have `cached` tokens on average."""
    return Phase(tokens=1, keys=cached, sequences=sequences)


def filling(*, prompt: int, sequences: int) -> Phase:
    """Whole prompts of `prompt` tokens each."""
    return Phase(tokens=prompt, keys=prompt, sequences=sequences)


def cache_bytes(op: Op, sizes: dict[str, float]) -> float:
    """Bytes of keys and values that attention keeps for one token of one sequence, at local extents."""
    if op.family != "attention":
        return 0.0
    lead = {label for axis in op.reads[0].axes[:-3] for label in axis}
    total = 0.0
    for read in (op.reads[KEYS], op.reads[VALUES]):
        skipped = lead | set(_key_labels(op))
        count = 1.0
        for label in (label for label in read.labels if label not in skipped):
            count *= sizes[label]
        total += count * DTYPE_BYTES[read.dtype]
    return total


def _key_labels(op: Op) -> tuple[str, ...]:
    return op.reads[KEYS].axes[-2]


def in_phase(graph: Graph, phase: Phase, *, dtype: str) -> Graph:
    """The graph of one pass; `dtype` fp8: products with parameters inside layers are 8 bit."""
    last = max((i for i, name in enumerate(graph.chain) if graph.blocks[name].repeated), default=-1)
    after = set(graph.chain[last + 1 :]) - set(graph.chain[: last + 1])
    blocks = {
        name: _block(
            block,
            tokens=1 if name in after else phase.tokens,
            keys=phase.keys,
            rows=float(phase.sequences * phase.tokens),
            dtype=dtype,
        )
        for name, block in graph.blocks.items()
    }
    return replace(graph, blocks=blocks, seq_len=phase.tokens)


def _block(block: Block, *, tokens: int, keys: int, rows: float, dtype: str) -> Block:
    eight_bit = dtype == "fp8" and block.repeated
    ops = tuple(_op(op, tokens=tokens, keys=keys, rows=rows, eight_bit=eight_bit) for op in block.ops)
    stored = {r.tensor: r.dtype for op in ops for r in op.reads if r.kind == "parameter"}
    parameters = tuple(
        replace(value, trainable=False, dtype=stored.get(value.name, value.dtype))
        for value in block.parameters
    )
    return replace(block, ops=ops, parameters=parameters)


def _op(op: Op, *, tokens: int, keys: int, rows: float, eight_bit: bool) -> Op:
    product = op.gemm is not None and any(read.kind == "parameter" for read in op.reads)
    eight_bit = eight_bit and product
    resized = replace(
        op,
        dims=_dims(op, tokens, keys),
        reads=tuple(_operand(read, eight_bit) for read in op.reads),
        writes=tuple(_operand(write, False) for write in op.writes),
        saved=(),
        compute_dtype="fp8" if eight_bit else op.compute_dtype,
    )
    if tokens == 1 and op.causal:
        doubled = tuple((2 * factor, labels) for factor, labels in op.flops)
        resized = replace(resized, flops=doubled, causal=())  # the newest token sees every key
    return _touched_experts(resized, rows) if op.experts else resized


def _dims(op: Op, tokens: int, keys: int) -> tuple[Dim, ...]:
    """Sequence dims at their new extents; where factors share one axis the first stands for all."""
    cached = set(_key_labels(op)) if op.family == "attention" else set()
    seen: set[bool] = set()
    dims = []
    for dim in op.dims:
        if dim.name == SEQUENCE:
            is_key = dim.label in cached
            size = (keys if is_key else tokens) if is_key not in seen or not _is_factor(dim) else 1
            seen.add(is_key)
            dim = replace(dim, size=size)
        dims.append(dim)
    return tuple(dims)


def _is_factor(dim: Dim) -> bool:
    return "." in dim.label


def _operand(operand: Operand, eight_bit: bool) -> Operand:
    stored = FP8_WEIGHTS if eight_bit and operand.kind == "parameter" else operand.dtype
    return replace(operand, grad=False, dtype=stored)


def _touched_experts(op: Op, rows: float) -> Op:
    """A few tokens pick a few experts: the weights of the others are not read."""
    assert op.experts is not None
    experts = op.size(op.experts)
    picked = rows * experts_per_token(op)
    return replace(op, traffic=op.traffic * distinct_share(picked, experts) * picked / experts)


def experts_per_token(op: Op) -> float:
    """Rows of a grouped product over the tokens they come from."""
    names = [dim for dim in op.dims if op.gemm is not None and dim.label in op.gemm.m]
    count = 1.0
    for dim in names:
        if dim.name not in ("batch", SEQUENCE):
            count *= dim.size
    return count
