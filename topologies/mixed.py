"""Clusters of several kinds of nodes: a file that names other clusters and the link that joins them.

In: `mixed.yaml`. Out: a `MixedTopology` whose parts are read by `load`, so that every number of a kind has
one home, the file of that kind.

    name: lab
    kinds:
      - topology: dgx-h100        # a bundled name, or a file beside this one
        nodes: 2
      - topology: dgx-a100-80
        nodes: 4
    link: {kind: infiniband, gb_per_s: 25, latency_us: 5, efficiency: 0.85}
"""

from __future__ import annotations

from pathlib import Path

from ..planner.errors import TopologyError
from ..planner.topology import Cluster, Level, MixedTopology, Topology
from .document import Document, read
from .find import bundled, find, split
from .load import GB, MICRO, load, load_file
from .schema import MixedFile, check

LINK = "between kinds"
"""Name of the level that joins nodes of different kinds."""


def load_cluster(spec: str, *, nodes: int | None = None) -> Cluster:
    """What `load` gives, or a cluster of several kinds when the file lists `kinds`.

    Raises `TopologyError` as `load` does, and when a number of nodes is asked of a file that has its own.
    """
    name, asked = split(spec)
    if name in bundled("clusters"):
        return load(spec, nodes=nodes)
    path = find("topology", name, "clusters")
    if "kinds" not in read(path).data:
        return load(spec, nodes=nodes)
    if asked is not None or nodes is not None:
        raise TopologyError(f"topology {spec!r}: {path} says how many nodes of each kind there are")
    return load_mixed(path)


def load_mixed(path: Path) -> MixedTopology:
    """The cluster of one file that lists `kinds`. Raises `TopologyError`."""
    document = read(path)
    file = check(document, MixedFile)
    parts = tuple(_part(document, i, kind.topology, kind.nodes) for i, kind in enumerate(file.kinds))
    link = file.link
    return MixedTopology(
        name=file.name,
        description=file.description,
        parts=parts,
        link=Level(
            name=LINK,
            size=len(parts),
            kind=link.kind,
            bytes_per_s=link.gb_per_s * GB,
            latency_s=link.latency_us * MICRO,
            efficiency=link.efficiency,
            source=link.source or f"given in {path}",
        ),
    )


def _part(document: Document, index: int, name: str, nodes: int) -> Topology:
    try:
        path = find("topology", name, "clusters", beside=document.path.parent)
    except TopologyError as error:
        raise document.error(("kinds", index, "topology"), str(error)) from error
    return load_file(path).with_nodes(nodes)
