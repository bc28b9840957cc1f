"""How much each rank sends, and in how many dependent steps, for each collective.

`bus_factor` is what nccl-tests multiplies the algorithm bandwidth with (doc/PERFORMANCE.md): bytes
that each rank must send, as a multiple of the message size in nccl-tests' size column.
"""

from __future__ import annotations

import math

from ...layout import Collective

NAMED_STEPS = {
    Collective.ALL_REDUCE: lambda n: 2.0 * math.log2(n),
    Collective.ALL_GATHER: lambda n: n - 1.0,
    Collective.REDUCE_SCATTER: lambda n: n - 1.0,
    Collective.BROADCAST: lambda n: n - 1.0,
    Collective.ALL_TO_ALL: math.log2,
    Collective.SEND_RECV: lambda n: 1.0,
}
"""Dependent hops of a small message: a tree up and down for all-reduce, a ring for gathers."""


def bus_factor(collective: Collective, ranks: int) -> float:
    """Bytes each of `ranks` ranks sends per byte of message."""
    match collective:
        case Collective.ALL_REDUCE:
            return 2.0 * (ranks - 1) / ranks
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER | Collective.ALL_TO_ALL:
            return (ranks - 1) / ranks
        case Collective.BROADCAST | Collective.SEND_RECV:
            return 1.0
    raise ValueError(f"no traffic known for {collective!r}")


def steps(collective: Collective, ranks: int) -> float:
    """Dependent hops that a small message takes among `ranks` ranks."""
    return NAMED_STEPS[collective](ranks)
