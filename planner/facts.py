"""Facts about model and cluster as a plan states them.

In: graph, topology, job, splits. Out: `ModelInfo`, `ClusterInfo`, and reasons for splits without which a
parameter fits no device.
"""

from __future__ import annotations

from typing import Any

from ..topologies import topology_hash
from .coverage import in_words, uncovered
from .describe import (
    layer_lists,
    module_layouts,
    parameter_placements,
    planned_reshards,
    splits_in_words,
)
from .divisibility import vocabulary_warnings
from .graph import Graph
from .plan import ClusterInfo, Link, ModelInfo
from .profile import Job
from .routed import routing_modules
from .solve.intra_op import Splits
from .topology import Topology

GIB = 2.0**30


def model_info(graph: Graph, job: Job, source: str) -> ModelInfo:
    """Size and identity of the model."""
    return ModelInfo(
        name=graph.name,
        source=source,
        graph_hash=graph.content_hash,
        parameters=graph.parameters,
        trainable_parameters=graph.trainable_parameters,
        layers=sum(graph.blocks[name].repeated for name in graph.chain),
        tokens_per_sample=job.seq_len,
        forward_flops_per_sample=forward_flops_per_sample(graph),
    )


def forward_flops_per_sample(graph: Graph) -> float:
    """Of the whole model, at the length that was traced."""
    return sum(op.forward_flops for name in graph.chain for op in graph.blocks[name].ops) / graph.batch


def cluster_info(topology: Topology) -> ClusterInfo:
    """Size, links and identity of the cluster."""
    return ClusterInfo(
        topology=topology.name,
        topology_hash=topology_hash(topology),
        device=topology.device.name,
        devices=topology.devices,
        nodes=topology.nodes,
        devices_per_node=topology.devices_per_node,
        device_memory_bytes=topology.device.memory_bytes,
        price_per_device_hour=topology.usd_per_device_hour,
        links=tuple(
            Link(level=level.name, size=level.size, kind=level.kind, bytes_per_s=level.bytes_per_s)
            for level in topology.levels
        ),
    )


def layout_facts(graph: Graph, splits: Splits) -> dict[str, Any]:
    """Fields of a `Plan` that say how ops, parameters and modules are split."""
    return {
        "splits": splits_in_words(graph, splits),
        "parameters": parameter_placements(graph, splits),
        "modules": module_layouts(graph, splits),
        "reshards": planned_reshards(graph, splits),
        "layer_lists": layer_lists(graph),
        "routing_modules": routing_modules(graph),
    }


def model_warnings(graph: Graph, topology: Topology, tp: int) -> tuple[str, ...]:
    """What of the model a plan warns of, whatever else it chooses: ops without a rule, odd vocabularies."""
    return (
        *graph.warnings,
        *map(in_words, uncovered(graph, topology.device)),
        *vocabulary_warnings(graph, tp),
    )


def size_reasons(graph: Graph, topology: Topology, splits: Splits) -> list[str]:
    """Parameters that no single device could hold, and along which dim they are split."""
    reasons = []
    limit = topology.device.memory_bytes
    for placement in parameter_placements(graph, splits):
        value = next(
            v for b in graph.blocks.values() for v in b.parameters if (v.fqn or v.name) == placement.fqn
        )
        if value.bytes <= limit:
            continue
        cuts = [
            f"{text[2 : text.index(')')]} over {axis}={degree}"
            for (axis, text), degree in zip(
                placement.placements, _degrees(splits, placement.placements), strict=True
            )
            if text.startswith("S(")
        ]
        where = " and ".join(cuts) or "by ZeRO sharding only"
        reasons.append(
            f"{placement.fqn} is {value.bytes / GIB:.1f} GiB, more than one {topology.device.name} holds "
            f"({limit / GIB:.1f} GiB): it is split along {where}"
        )
    return reasons


def _degrees(splits: Splits, placements: tuple[tuple[str, str], ...]) -> list[int]:
    sizes = {"ep": splits.ep.degree, "tp": splits.tp.degree}
    return [sizes[axis] for axis, _ in placements]
