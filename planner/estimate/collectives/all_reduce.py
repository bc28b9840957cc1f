"""All-reduce: the better of a flat ring and a tree of nodes.

Ring: 2 (n-1)/n S per rank. Tree (Sanders, Speck and Traff 2009; NCCL's Tree and NVLSTree): reduce up and
broadcast down, a double binary tree between nodes in 2 log2(nodes) hops, a chain or a measured switch inside
them. 2 S cross each node's links; only S when there are two nodes, so that their bus bandwidth may exceed the
network's (NVIDIA/nccl-tests#196; p4d and H100 reports agree, two reports of 2 x 8 A100 over InfiniBand and
RoCE, 86 and 75 GB/s, look like a ring).

A composition of reduce-scatter inside, all-reduce across and all-gather inside is not offered: NCCL does not
run one, and over 3 and 4 nodes of AWS p4d (NVIDIA/nccl#527) it would promise 36 and 33 GB/s bus bandwidth
where 31.8 and 29.6 were measured; the ring says 30.
"""

from __future__ import annotations

import math

from ..compute import interpolate
from .group import FEED, Group, Stream
from .group import ring as flat_ring

TREE_SHARE = ((4096.0, 1.0), (131072.0, 0.55), (1048576.0, 0.55), (8388608.0, 0.83), (134217728.0, 1.0))
"""(bytes, share of the bandwidth): trees of middling messages fall short. NCCL corrects its own model so
(src/graph/tuning.cc, treeCorrectionFactor, the Simple protocol's row, relative to its largest sizes)."""


def ring(group: Group, nbytes: float) -> Stream:
    """A flat ring, twice round; `nbytes` is each rank's buffer."""
    return flat_ring(group, nbytes, laps=2)


def tree(group: Group, nbytes: float) -> Stream:
    """A tree across units, with the measured core (a switch that reduces, perhaps) inside them."""
    latency_s, core_s, hops_s = 0.0, 0.0, 0.0
    if group.core is not None:
        core_s = group.core.whole.at(nbytes).seconds / FEED
    share = interpolate(TREE_SHARE, nbytes)
    for hop in group.hops:
        crossings = 1.0 if hop.network and hop.members == 2 else 2.0
        hops_s = max(hops_s, crossings * nbytes / share / (hop.inside * hop.speed))
        depth = math.ceil(math.log2(hop.members)) if hop.network else hop.members - 1
        latency_s += 2 * depth * hop.latency_s
    return Stream(latency_s, core_s, hops_s)
