"""All-gather: a flat ring, (n-1)/n of the gathered buffer through every rank (NCCL runs no other)."""

from __future__ import annotations

from .group import Group, Stream
from .group import ring as flat_ring


def ring(group: Group, nbytes: float) -> Stream:
    """A flat ring; `nbytes` is the whole gathered buffer."""
    return flat_ring(group, nbytes, laps=1)
