"""Clusters in words: the list of them, one drawn as a tree of links, and the same as JSON.

In: `Topology` and `TopologySummary` values. Out: objects that rich can print, or plain dicts in SI
units (bytes, bytes per second and direction, seconds, FLOP/s).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..planner.topology import Device, Level, Topology, TopologySummary
from . import words

DTYPE_ORDER = ("fp8", "bf16", "fp16", "tf32", "fp32")


# --------------------------------------------------------------------------- the list


def summary(cluster: TopologySummary) -> dict[str, Any]:
    """What the list says of a cluster, as a JSON object."""
    return {
        "name": cluster.name,
        "device": cluster.device,
        "devices": cluster.devices,
        "devices_per_node": cluster.devices_per_node,
        "links": [{"level": x.name, "kind": x.kind, "bytes_per_s": x.bytes_per_s} for x in cluster.levels],
        "description": cluster.description,
    }


def render_list(clusters: Iterable[TopologySummary]) -> RenderableType:
    """One line for each cluster."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("device", no_wrap=True)
    table.add_column("per node", justify="right", no_wrap=True)
    table.add_column("links, innermost first")
    for cluster in clusters:
        links = ", ".join(f"{level.kind} {words.rate(level.bytes_per_s)}" for level in cluster.levels)
        table.add_row(cluster.name, cluster.device, str(cluster.devices_per_node), links)
    hint = Text("\nRates are per device and direction. name:NODES sets the size, e.g. dgx-h100:128.")
    return Group(table, hint)


# --------------------------------------------------------------------------- one cluster


def document(cluster: Topology) -> dict[str, Any]:
    """Everything known of a cluster, as a JSON document."""
    return asdict(cluster) | {
        "devices": cluster.devices,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
    }


def render(cluster: Topology) -> RenderableType:
    """The cluster's levels as a tree, its device's facts, and the source of every number."""
    nodes = words.plural(cluster.nodes, "node")
    title = Text(f"{cluster.name}: {cluster.devices} x {cluster.device.name}, {nodes}", style="bold")
    return Group(
        title,
        Text(cluster.description),
        Text(),
        _tree(cluster),
        Text(),
        _table("device", "value", _device_rows(cluster.device)),
        Text(),
        _table("links", "measured", _link_rows(cluster)),
    )


def _tree(cluster: Topology) -> Tree:
    outermost, *inner = reversed(cluster.levels)
    tree = branch = Tree(_level(outermost))
    for level in inner:
        branch = branch.add(_level(level))
    branch.add(f"{cluster.device.name}, {words.size(cluster.device.memory_bytes)}")
    return tree


def _level(level: Level) -> Text:
    return Text.assemble(
        (level.name, "bold"),
        f": {level.size} joined by {level.kind}, {words.rate(level.bytes_per_s)} per device and direction, "
        f"{level.efficiency:.0%} reached, {words.duration(level.latency_s)} a hop",
    )


Row = tuple[str, str, str]
"""What a number is, its value, and its source."""


def _table(what: str, value: str, rows: Iterable[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(what, no_wrap=True)
    table.add_column(value, max_width=30)
    table.add_column("source", overflow="fold")
    above = ""
    for name, shown, source in rows:
        table.add_row(Text(name), Text(shown), Text("" if source == above else source))
        above = source
    return table


def _device_rows(device: Device) -> Iterator[Row]:
    source = device.sources.get
    yield "memory", words.size(device.memory_bytes), source("memory_bytes", "")
    yield "memory bandwidth", words.rate(device.memory_bytes_per_s), source("memory_bytes_per_s", "")
    for dtype in sorted(device.peak_flops, key=_dtype_rank):
        peak = f"{words.digits(device.peak_flops[dtype] / 1e12)} TFLOP/s"
        yield f"{dtype} peak", peak, source("peak_flops", "")
    yield "shortest kernel", words.duration(device.kernel_latency_s), source("kernel_latency_s", "")
    for family, efficiency in device.efficiency.items():
        low, high = efficiency.curve[0][1], efficiency.curve[-1][1]
        span = f"{low:.0%} to {high:.0%} of peak, {efficiency.origin}"
        yield f"{family.replace('_', ' ')} kernels", span, efficiency.source


def _dtype_rank(dtype: str) -> tuple[int, str]:
    return (DTYPE_ORDER.index(dtype) if dtype in DTYPE_ORDER else len(DTYPE_ORDER), dtype)


def _link_rows(cluster: Topology) -> Iterator[Row]:
    for level in reversed(cluster.levels):
        yield level.name, "", level.source
        for source in dict.fromkeys(curve.source for curve in level.curves):
            curves = [curve for curve in level.curves if curve.source == source]
            names = ", ".join(dict.fromkeys(curve.collective for curve in curves))
            sizes = ", ".join(str(ranks) for ranks in sorted({curve.ranks for curve in curves}))
            yield "", f"{names} among {sizes}", source
    for field, source in cluster.sources.items():
        yield field, "", source
