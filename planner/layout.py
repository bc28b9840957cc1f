"""How one tensor lies along ONE mesh axis, and what it costs to move between two layouts.

The duality table (`gradient_needed`, `gradient_yielded`) gives the backward pass from the
forward layouts alone; together with `conversion` it produces Megatron's f and g operators,
sequence parallelism's all-gather / reduce-scatter pairs and data-parallel gradient sync.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Collective(StrEnum):
    """The collective operations a plan can contain."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    SEND_RECV = "send/recv"


@dataclass(frozen=True, slots=True)
class Shard:
    """Split evenly along tensor axis `axis`, cutting its factor named `dim`.

    An axis may be a product of factors (`heads * head_dim`, or `3 * heads * head_dim` of a fused
    projection); cutting an inner factor is DTensor's strided shard.
    """

    axis: int
    dim: str

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    hands_on_terms: bool = False
    """Whether its maker takes a term of its gradient from every rank and hands terms on, unsummed."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a term; the tensor is their sum."""

    def __str__(self) -> str:
        return "P"


Placement = Shard | Replicate | Partial
REPLICATE = Replicate()
PARTIAL = Partial()
UNSUMMED = Replicate(hands_on_terms=True)

FREE = None
"""The conversion that moves no bytes between devices."""


def conversion(source: Placement, target: Placement) -> Collective | None:
    """The collective that turns `source` into `target`; None when it is local.

    Raises `ValueError` for a conversion no plan should contain (anything into Partial).
    """
    match source, target:
        case _ if source == target:
            return FREE
        case Replicate(), Replicate():
            return FREE
        case Shard(), Replicate():
            return Collective.ALL_GATHER
        case Shard(), Shard():
            return Collective.ALL_TO_ALL
        case Replicate(), Shard():
            return FREE
        case Partial(), Replicate():
            return Collective.ALL_REDUCE
        case Partial(), Shard():
            return Collective.REDUCE_SCATTER
    raise ValueError(f"no conversion from {source} to {target}")


def gradient_needed(produced: Placement) -> Placement:
    """The layout in which a producer needs the gradient of what it made."""
    if produced == UNSUMMED:
        return PARTIAL
    return produced if isinstance(produced, Shard) else REPLICATE


def gradient_yielded(consumed: Placement, *, split_elsewhere: bool) -> Placement:
    """The layout in which a consumer yields the gradient of what it read.

    `split_elsewhere`: the consumer is split along a dim that this input lacks, so that each rank
    holds only its term of the gradient.
    """
    if isinstance(consumed, Shard):
        return consumed
    if isinstance(consumed, Replicate) and split_elsewhere:
        return PARTIAL
    return REPLICATE
