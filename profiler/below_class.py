"""Where the machine is slower than its kind, and the likely cause.

In: what was measured, and the data sheets and links that the machine should have. Out: warnings. A rank
that computes slower than the others is named with its host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ..planner.estimate.compute import kernel_time
from ..planner.topology import Device
from .check import work
from .settings import Measurement

KERNEL_SLACK = 1.33
"""A kernel may take so much longer than its class's curve says; the curves' own error is up to 25%."""
LINK_SHARE = 0.6
"""A link below this share of what its kind reaches is below class. Judgement."""
STRAGGLER = 1.25
"""A rank this much slower than the median rank. Judgement: clocks of healthy devices differ by up to 10%."""
CHECKED = ("gemm", "attention")


def slow_kernels(found: Sequence[Measurement], kind: Device) -> Iterator[str]:
    """The largest kernel of each family against the bundled curves of the device's kind."""
    for family in CHECKED:
        same = [one for one in found if one.kind == "kernel" and one.facts["family"] == family]
        same = [one for one in same if one.facts["dtype"] in kind.peak_flops]
        if not same:
            continue
        largest = max(same, key=lambda one: one.facts["flops"])
        expected = kernel_time(work(largest.facts), kind).seconds
        if largest.sample.seconds > KERNEL_SLACK * expected:
            yield (
                f"{family} ({largest.facts['dtype']}) runs at {expected / largest.sample.seconds:.0%} of "
                f"what {kind.name} usually reaches: power or clock limits, another process, or a library "
                f"without kernels for it"
            )


def slow_links(levels: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Measured levels against the levels that the links should give, by name."""
    classes = {level["name"]: level for level in expected}
    for level in levels:
        kind = classes.get(level["name"])
        if kind is None or "measured" not in level or kind["kind"] == "tcp":
            continue
        reached, usual = (one["gb_per_s"] * one["efficiency"] for one in (level, kind))
        if reached < LINK_SHARE * usual:
            yield (
                f"{level['name']}: {reached:.3g} GB/s per device where {kind['kind']} usually reaches "
                f"{usual:.3g}: {_cause(kind['kind'], reached, usual)}"
            )


def _cause(kind: str, reached: float, usual: float) -> str:
    if kind == "nvlink":
        return "the traffic goes over PCIe: peer access is off, or the links are down (nvidia-smi nvlink -s)"
    if kind == "pcie":
        return "no peer-to-peer (it goes through host memory), fewer lanes than x16, or across sockets"
    rails = round(usual / reached)
    return (
        f"about one NIC of {rails} carries the traffic: NICs are shared, only one rail is used, or they are "
        f"far from their devices (NCCL_IB_HCA, GPUDirect)"
    )


def stragglers(times_s: Sequence[float], hosts: Sequence[str]) -> Iterator[str]:
    """Ranks whose own time for the same kernel is far above the median."""
    usual = median(times_s)
    for rank, seconds in enumerate(times_s):
        if seconds > STRAGGLER * usual:
            yield f"rank {rank} ({hosts[rank]}) takes {seconds / usual:.2f} times the median rank's time"
