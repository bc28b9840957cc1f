"""Reduce-scatter: a flat ring, (n-1)/n of the whole buffer through every rank (NCCL runs no other)."""

from __future__ import annotations

from .group import Group, Stream
from .group import ring as flat_ring


def ring(group: Group, nbytes: float) -> Stream:
    """A flat ring; `nbytes` is the whole buffer before the scatter."""
    return flat_ring(group, nbytes, laps=1)
