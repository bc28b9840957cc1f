"""The cluster and the framework profile of a published run.

In: a `Row`. Out: a `Topology` (device file, node and network of the row; memory without limit, so that
a plan which ran is never called too large) and a `Framework` profile: the product's own profile of the
family, with what that source's software generation did differently.
"""

from __future__ import annotations

from dataclasses import replace

from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.profile import Framework
from tpplan.planner.topology import Topology
from tpplan.topologies import load

from .rows import Row

UNLIMITED_BYTES = 10**15
BITS = 8
GIGA = 1e9

CLUSTERS = {
    "A100-SXM4-80GB": "dgx-a100-80",
    "A100-SXM4-40GB": "dgx-a100-40",
    "A100-SXM4 (memory size not stated)": "hgx-a100-4nic",
    "H100-SXM5-80GB": "dgx-h100",
    "H100-96GB-HBM2e-500W (Grand Teton)": "grand-teton-h100",
    "B200-SXM": "dgx-b200",
}
"""Bundled cluster for each published device name; network bandwidth is overridden where stated."""

FAMILIES = {
    "sc21": "megatron",
    "seqsel": "megatron",
    "simumax": "megatron",
    "mbridge": "megatron",
    "nemo2407": "megatron",
    "dgxc": "megatron",
    "tt": "torch",
    "automodel": "torch",
    "mpt": "torch",
    "mtnlg": "deepspeed",
    "vtrain": "deepspeed",
}
"""Framework family of each source."""


def topology_of(row: Row) -> Topology:
    """The cluster of the run. Raises `ValueError` for a device without a bundled cluster."""
    name = str(row.hardware["gpu"])
    if name not in CLUSTERS:
        raise ValueError(f"no bundled cluster for {name!r}; known are {', '.join(sorted(CLUSTERS))}")
    topology = load(CLUSTERS[name])
    nodes = -(-row.gpus // topology.devices_per_node)
    levels = topology.with_nodes(nodes).levels
    node, network = levels[0], levels[-1]
    node = replace(node, size=row.gpus // nodes)
    stated = row.hardware.get("nic_gbps"), row.hardware.get("nics_per_node")
    if all(stated):
        per_device = stated[0] * stated[1] * GIGA / BITS / row.hardware["gpus_per_node"]
        network = replace(network, bytes_per_s=per_device)
    device = replace(topology.device, memory_bytes=UNLIMITED_BYTES)
    return replace(topology, device=device, levels=(node, *levels[1:-1], network))


def framework_of(row: Row) -> Framework:
    """The profile of the run's software. Raises `ValueError` for an unknown source."""
    if row.source not in FAMILIES:
        raise ValueError(f"no framework is known for source {row.source!r}")
    return FRAMEWORKS[FAMILIES[row.source]]
