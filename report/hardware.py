"""Clusters in words: the list of them, one drawn as a tree of links, and the same as JSON.

In: `Topology` values. Out: objects that rich can print, or plain dicts in SI units (bytes, bytes
per second and direction, seconds, FLOP/s).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..planner.topology import Device, Level, Topology
from . import words

DTYPE_ORDER = ("fp8", "bf16", "fp16", "tf32", "fp32")


# --------------------------------------------------------------------------- the list


def summary(cluster: Topology) -> dict[str, Any]:
    """What the list says of a cluster."""
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "devices": cluster.devices,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "device_memory_bytes": cluster.device.memory_bytes,
        "links": [level.kind for level in cluster.levels],
    }


def render_list(clusters: Iterable[Topology]) -> RenderableType:
    """One line for each cluster."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("device")
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("nodes x devices", justify="right", no_wrap=True)
    table.add_column("links, innermost first")
    for cluster in clusters:
        table.add_row(
            cluster.name,
            cluster.device.name,
            words.size(cluster.device.memory_bytes),
            f"{cluster.nodes} x {cluster.devices_per_node}",
            ", ".join(f"{level.kind} {words.rate(level.bytes_per_s)}" for level in cluster.levels),
        )
    hint = Text(
        "\nname:NODES sets the number of nodes, e.g. dgx-h100:128; rates are per device and direction"
    )
    return Group(table, hint)


# --------------------------------------------------------------------------- one cluster


def document(cluster: Topology) -> dict[str, Any]:
    """Everything known of a cluster, as a JSON document."""
    return summary(cluster) | {
        "levels": [asdict(level) for level in cluster.levels],
        "device_facts": asdict(cluster.device),
        "sources": dict(cluster.sources),
    }


def render(cluster: Topology) -> RenderableType:
    """The cluster's levels as a tree, its device's facts, and the source of every number."""
    nodes = words.plural(cluster.nodes, "node")
    title = Text(f"{cluster.name}: {cluster.devices} x {cluster.device.name}, {nodes}", style="bold")
    return Group(title, Text(), _levels(cluster), Text(), _device(cluster.device), Text(), _sources(cluster))


def _levels(cluster: Topology) -> Tree:
    outermost, *inner = reversed(cluster.levels)
    tree = branch = Tree(_level(outermost))
    for level in inner:
        branch = branch.add(_level(level))
    branch.add(f"{cluster.device.name}, {words.size(cluster.device.memory_bytes)}")
    return tree


def _level(level: Level) -> Text:
    text = Text.assemble(
        (level.name, "bold"),
        f": {level.size} joined by {level.kind}, {words.rate(level.bytes_per_s)} per device and direction, "
        f"{words.duration(level.latency_s)} a hop, {level.efficiency:.0%} reached",
    )
    for curve in level.curves:
        text.append(f"\n  measured: {curve.collective} among {curve.ranks}, {len(curve.points)} sizes")
    return text


def _device(device: Device) -> Table:
    table = Table(box=None, pad_edge=False, title=device.name, title_justify="left", title_style="bold")
    table.add_column("fact", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_column("source", overflow="fold")
    for field, name, value in _facts(device):
        table.add_row(name, value, device.sources.get(field, ""))
    for family, efficiency in device.efficiency.items():
        low, high = efficiency.curve[0][1], efficiency.curve[-1][1]
        span = f"{low:.0%} to {high:.0%} of peak ({efficiency.origin})"
        table.add_row(f"{family} kernels", span, efficiency.source)
    return table


def _facts(device: Device) -> Iterator[tuple[str, str, str]]:
    """(field, what it is called, its value) of the plain numbers of a device."""
    yield "memory_bytes", "memory", words.size(device.memory_bytes)
    yield "memory_bytes_per_s", "memory bandwidth", words.rate(device.memory_bytes_per_s)
    for dtype in sorted(device.peak_flops, key=_dtype_rank):
        yield "peak_flops", f"{dtype} peak", f"{words.digits(device.peak_flops[dtype] / 1e12)} TFLOP/s"
    yield "kernel_latency_s", "shortest kernel", words.duration(device.kernel_latency_s)


def _dtype_rank(dtype: str) -> tuple[int, str]:
    return (DTYPE_ORDER.index(dtype) if dtype in DTYPE_ORDER else len(DTYPE_ORDER), dtype)


def _sources(cluster: Topology) -> RenderableType:
    lines = [f"{level.name}: {level.source}" for level in reversed(cluster.levels) if level.source]
    lines += [f"{curve.collective} among {curve.ranks}: {curve.source}" for curve in _curves(cluster)]
    lines += [f"{field}: {source}" for field, source in cluster.sources.items()]
    body = Padding(Text("\n".join(dict.fromkeys(lines)), overflow="fold"), (0, 0, 0, 2))
    return Group(Text("sources of the links", style="bold"), body)


def _curves(cluster: Topology) -> Iterator[Any]:
    for level in cluster.levels:
        yield from level.curves
