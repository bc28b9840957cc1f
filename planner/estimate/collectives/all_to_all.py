"""All-to-all: every rank sends to every other at once; each level carries what crosses it.

Of each rank's buffer S, the part for members outside its unit but inside the next one goes over that
level: S * (unit_outer - unit_inner) / n, over the device's own share of the link. Levels work at the
same time, so the slowest decides; in practice that is the NIC.
"""

from __future__ import annotations

import math

from .group import FEED, Group, Stream

AGAINST_GATHER = 0.886
"""An all-to-all's bandwidth relative to an all-gather's on the same links, which is what a level's efficiency
states: 0.597 / 0.674 of NVLink (SimuMax, fitted on 8 B200)."""

PEER_S = 0.5e-6
"""Posting one more send and receive to a peer across the network. Judgement, from small NCCL all-to-alls."""


def pairwise(group: Group, nbytes: float) -> Stream:
    """Direct sends between all pairs; `nbytes` is one rank's whole send buffer."""
    latency_s, core_s, hops_s = 0.0, 0.0, 0.0
    if group.core is not None:
        core_s = group.core.whole.at(nbytes * group.core.ranks / group.size).seconds / FEED
    for hop in group.hops:
        outside = hop.inside * (hop.members - 1)
        hops_s = max(hops_s, nbytes * outside / group.size / (hop.speed * AGAINST_GATHER))
        latency_s += math.ceil(math.log2(hop.members)) * hop.latency_s + outside * PEER_S
    return Stream(latency_s, core_s, hops_s)
