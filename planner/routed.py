"""Which modules route tokens to experts, and whether they may run beside split sequences.

In: a graph. Out: per block the module that holds its router and its experts, and the ops inside. This
project's runtime runs such a module on each rank's own part of the sequences (`rules.choices.token_choices`),
along tp and cp alike, so that rows are sorted and counted where they are: all it holds has to work token by
token. Rows then go to their experts by all-to-all, or to every rank that holds a part of each expert.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import OptionError
from .estimate.frameworks import OWN_FRAMEWORK
from .graph import Block, Graph, Op
from .layer_kinds import of_kind
from .rules.choices import BATCH, SEQUENCE, can_split, matrix_labels

TOKENS = (BATCH, SEQUENCE)
INTEGERS = ("int", "uint")
"""How the names of dtypes begin that rows are picked with."""


def routing_modules(graph: Graph) -> tuple[str, ...]:
    """Paths of the modules that route, once each, with the layers they are in (`layer_kinds`)."""
    found = ((name, routing_module(block)) for name, block in graph.blocks.items())
    return tuple(dict.fromkeys(of_kind(graph, name, path) for name, path in found if path is not None))


def routing_module(block: Block) -> str | None:
    """The innermost module with a block's router and experts; None where there is none below the layer."""
    routers = _routers(block)
    paths = [op.module.split(".") for i, op in enumerate(block.ops) if op.experts or i in routers]
    common = _common(paths)
    layer = block.module.split(".") if block.module else []
    return ".".join(common) if has_experts(block) and len(common) > len(layer) else None


def has_experts(block: Block) -> bool:
    """Whether a block has grouped products of experts."""
    return any(op.experts for op in block.ops)


def routed_ops(graph: Graph) -> frozenset[tuple[str, int]]:
    """(block, op index) of everything that runs inside a routing module."""
    return frozenset(
        (name, i)
        for name, block in graph.blocks.items()
        if (path := routing_module(block)) is not None
        for i, op in enumerate(block.ops)
        if _inside(op, path)
    )


def check_routing(graph: Graph, tp: int, allowed: Sequence[int], framework: str) -> None:
    """Raise `OptionError` when experts cannot run beside a chosen tensor-parallel size."""
    reason = obstacle(graph, tp, framework)
    if reason is not None:
        raise OptionError(f"tp={tp}: {reason}; available: tp={', '.join(map(str, allowed))}")


def obstacle(graph: Graph, ways: int, framework: str) -> str | None:
    """Why the framework cannot run the model's experts on sequences in so many parts; None if it can."""
    if ways == 1 or framework != OWN_FRAMEWORK:
        return None
    for block in graph.blocks.values():
        path = routing_module(block)
        if not has_experts(block):
            continue
        if path is None:
            return f"the router and the experts of {block.name} lie in no module of their own"
        mixing = next((op for op in block.ops if _inside(op, path) and _mixes_tokens(op)), None)
        if mixing is not None:
            return f"{mixing.module} ({mixing.target}) does not work token by token"
        if not any(dim.name == SEQUENCE for op in block.ops for dim in op.dims):
            return f"{path} has no sequence to split"
        if graph.seq_len % ways:
            return f"{path} routes parts of sequences, and {graph.seq_len} tokens do not divide"
    return None


def _routers(block: Block) -> frozenset[int]:
    """Indices of the products that score experts: those with a weight that the order of rows follows from,
    with no other such product between."""
    makers = {write.tensor: i for i, op in enumerate(block.ops) for write in op.writes}
    waiting = [
        read.tensor
        for op in block.ops
        if op.sort == "make"
        for read in op.reads
        if read.dtype.startswith(INTEGERS)
    ]
    seen: set[int] = set()
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is None or maker in seen:
            continue
        seen.add(maker)
        if not _has_weight(block.ops[maker]):
            waiting += [read.tensor for read in block.ops[maker].reads]
    return frozenset(i for i in seen if _has_weight(block.ops[i]))


def _has_weight(op: Op) -> bool:
    return op.gemm is not None and bool(matrix_labels(op))


def _common(paths: Sequence[list[str]]) -> list[str]:
    """The longest path that all begin with."""
    first = min(paths, default=[])
    last = max(paths, default=[])
    same = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(same, min(len(first), len(last)))]


def _inside(op: Op, path: str) -> bool:
    return op.module == path or op.module.startswith(f"{path}.")


def _mixes_tokens(op: Op) -> bool:
    """Whether an activation with a gradient depends on several tokens."""
    if not any(write.grad for write in op.writes):
        return False
    along = [dim.label for dim in op.dims if dim.name in TOKENS]
    unsplit = any(dim.name == SEQUENCE and not can_split(op, dim.label) for dim in op.dims)
    return op.family == "attention" or unsplit or bool(op.sums.intersection(along))
