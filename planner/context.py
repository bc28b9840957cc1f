"""Which sizes of context parallelism are tried, and which cannot be run.

In: a graph, the cluster's size, a framework. Out: sizes of `cp` worth trying; or why a model cannot be
split so. This project's runtime cuts the sequence where token ids are looked up, lets every operation
on activations keep that cut, and gathers keys and values in attention: an operation that needs the
whole sequence has no place in it, nor have experts outside a module that works token by token (`routed`).
"""

from __future__ import annotations

from .divisibility import sequence_multiple
from .errors import OptionError
from .estimate.frameworks import OWN_FRAMEWORK
from .graph import Graph, Op
from .routed import obstacle as routing_obstacle
from .rules.choices import BATCH, SEQUENCE, divides

FRAMEWORKS = (OWN_FRAMEWORK, "megatron", "torch")
"""Frameworks with context parallelism by gathering keys and values, which is what is priced."""
LEAST_TOKENS = 8192
"""Tokens of a sequence per rank below which no size is tried on its own accord: Llama 3 kept so many, cp=16
at 131,072 (arXiv:2407.21783, table 4). A pinned size may leave fewer."""


def context_sizes(graph: Graph, *, devices: int, framework: str) -> tuple[int, ...]:
    """Sizes to try: divisors of the cluster and of the sequence that leave each rank `LEAST_TOKENS`."""
    most = graph.seq_len // LEAST_TOKENS
    sizes = [n for n in range(2, most + 1) if devices % n == 0 and graph.seq_len % n == 0]
    return (1, *(n for n in sizes if obstacle(graph, n, framework) is None))


def check_context(graph: Graph, cp: int, framework: str) -> None:
    """Raise `OptionError` when a chosen size cannot be run."""
    reason = obstacle(graph, cp, framework) if cp > 1 else None
    if reason is not None:
        raise OptionError(f"cp={cp}: {reason}; available: cp=1")


def obstacle(graph: Graph, cp: int, framework: str) -> str | None:
    """Why the framework cannot split this model's sequences over `cp` ranks; None if it can."""
    if framework not in FRAMEWORKS:
        return f"{framework} has no context parallelism that is priced ({', '.join(FRAMEWORKS)} have)"
    multiple = sequence_multiple(cp=cp, halves=framework != OWN_FRAMEWORK)
    if graph.seq_len % multiple:
        return f"sequences of {graph.seq_len} tokens are no multiple of {multiple}"
    if framework != OWN_FRAMEWORK:
        return None
    ops = [op for block in graph.blocks.values() for op in block.ops]
    routed = routing_obstacle(graph, cp, framework)
    if routed is not None:
        return routed
    if not any(_looks_up_tokens(op) for op in ops):
        return "no token ids (batch, sequence) are looked up, where the sequence could be cut"
    whole = next((op for op in ops if _needs_all(op, cp)), None)
    return (
        None if whole is None else f"{whole.module or whole.name} ({whole.target}) needs the whole sequence"
    )


def _looks_up_tokens(op: Op) -> bool:
    if op.table is None:
        return False
    names = {dim.label: dim.name for dim in op.dims}
    return [[names[label] for label in axis] for axis in op.reads[1].axes] == [[BATCH], [SEQUENCE]]


def _needs_all(op: Op, cp: int) -> bool:
    """Whether an operation on activations has a sequence dim and cannot be split along any."""
    along = [dim for dim in op.dims if dim.name == SEQUENCE]
    if not along or not any(write.grad for write in op.writes):
        return False
    sizes = {dim.label: float(dim.size) for dim in op.dims}
    return not any(divides(op, dim.label, cp, sizes) for dim in along)
