"""Send/recv between two ranks: one hop over the outermost level between them."""

from __future__ import annotations

from .group import Group, Stream


def direct(group: Group, nbytes: float) -> Stream:
    """One message over each device's own link; `nbytes` is the message."""
    hop = group.hops[-1]
    return Stream(hop.latency_s, 0.0, nbytes / hop.bytes_per_s)
