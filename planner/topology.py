"""Nouns for hardware: a device, the levels of links around it, and the cluster they form.

Bandwidths are bytes per second, per device and per direction; memory is bytes; times are seconds.
The files under `topologies/` are read by `topologies.load`, which converts units and checks them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How much of a data-sheet number a kernel family reaches, at best and at small sizes.

    `curve` maps a size (FLOPs of one kernel for compute families, bytes for `memory`) to the
    fraction of peak, sorted by size; between points it is interpolated over log(size), outside
    it is clamped. `origin` and `source` say where the numbers come from.
    """

    curve: tuple[tuple[float, float], ...]
    origin: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or a CPU rank)."""

    name: str
    vendor: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: dict[str, float]
    """Dense peak FLOP/s by dtype name (`bf16`, `fp16`, `fp32`, `tf32`, `fp8`)."""
    efficiency: dict[str, Efficiency]
    """By kernel family (`gemm`, `attention`, `grouped_gemm`, `memory`), or one dtype of it (`gemm/bf16`)."""
    kernel_latency_s: float
    """Smallest time one kernel takes on the device, seconds."""
    sources: dict[str, str]
    """Where each number was read, by field name."""
    architecture: str = "other"
    """`ampere`, `hopper`, `cdna3`, `cpu`, ...: selects the efficiency curves."""
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """Measured times of one collective among `ranks` devices of one level."""

    collective: str
    ranks: int
    points: tuple[tuple[float, float], ...]
    """(bytes, seconds), increasing; bytes as nccl-tests counts them (the whole buffer)."""
    source: str
    inside: tuple[int, ...] | None = None
    """Members in one unit of each level below (innermost first); None: every unit below is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One ring of the hierarchy: `size` children (devices, or the level below) joined by a link."""

    name: str
    """`pair`, `node`, `nvlink domain`, `cluster`, ..."""
    size: int
    kind: str
    """`nvlink`, `pcie`, `infiniband`, `roce`, `efa`, `xgmi`, `tcp`, ..."""
    bytes_per_s: float
    """What one device can send through this level, one direction, when all of them do."""
    latency_s: float
    """One hop's latency, seconds."""
    efficiency: float
    """Fraction of `bytes_per_s` that large collectives reach."""
    partial_efficiency: float | None = None
    """The same for groups with several, but not all, devices of each unit below; None: `efficiency`."""
    curves: tuple[CollectiveCurve, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """Where a group of equally spaced ranks lies: members per level, innermost level first.

    `members[i]` is how many children of one level-i unit hold members (1 = the group does not
    spread at that level); their product is the group's size.
    """

    members: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return math.prod(self.members)

    @property
    def outermost(self) -> int:
        """Index of the outermost level the group crosses, -1 for a group of one."""
        return max((i for i, n in enumerate(self.members) if n > 1), default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredScale:
    """How many times longer (or larger) something is on this very cluster than was predicted."""

    name: str
    """`kernels` and `collectives` scale times, `memory` the bytes that are allocated."""
    framework: str
    """The framework profile under which it was measured, and for which it holds."""
    value: float
    uncertainty: float
    """Four in five values lie between value / (1 + uncertainty) and value * (1 + uncertainty)."""
    runs: int
    """Runs (or blocks) that it was measured on."""
    source: str

    def __str__(self) -> str:
        kinds = {"kernels": "kernels take", "collectives": "collectives take", "memory": "steps allocate"}
        return (
            f"{kinds[self.name]} {self.value:.3f} (+-{100 * self.uncertainty:.0f}%) times what is predicted "
            f"under {self.framework} ({self.source})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """What the host takes for one operation of a model beyond its kernel, where nothing hides it: seconds.

    Where devices are the host's own cores; the host of an accelerator runs ahead of it.
    """

    forward_s: float
    backward_s: float
    split_forward_s: float
    """The same where tp splits the model's tensors."""
    split_backward_s: float

    def forward(self, operations: int, *, split: bool) -> float:
        """Forward of so many operations."""
        return operations * (self.split_forward_s if split else self.forward_s)

    def backward(self, operations: int, *, split: bool) -> float:
        """Backward of so many operations."""
        return operations * (self.split_backward_s if split else self.backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRun:
    """A real run's step time, and what is predicted of it without and with measured scales."""

    name: str
    measured_s: float
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster: identical devices under nested levels, innermost first."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    sources: dict[str, str] = field(default_factory=dict)
    description: str = ""
    usd_per_device_hour: float | None = None
    """Price of one device for one hour, US dollars; None if unknown."""
    scales: tuple[MeasuredScale, ...] = ()
    """What real runs on it told; they take the place of scales from published runs."""
    overlap: float | None = None
    """Share of a collective that equally long computation beside it hides, measured; None: not known."""
    host: HostTime | None = None
    """Measured on clusters of CPUs; None: hidden, or not known."""

    @property
    def devices(self) -> int:
        """Number of devices in the cluster."""
        return math.prod(level.size for level in self.levels)

    @property
    def devices_per_node(self) -> int:
        """Devices below the outermost level (all of them if there is only one level)."""
        return math.prod(level.size for level in self.levels[:-1]) if len(self.levels) > 1 else self.devices

    @property
    def nodes(self) -> int:
        """Number of nodes: the size of the outermost level."""
        return self.devices // self.devices_per_node

    def with_nodes(self, nodes: int) -> Topology:
        """The same cluster with another number of nodes."""
        outer = replace(self.levels[-1], size=nodes)
        return replace(self, levels=(*self.levels[:-1], outer))

    def has_part(self, devices: int) -> bool:
        """Whether its first so many devices are a cluster of the same levels: whole nodes or part of one."""
        unit = 1
        for level in self.levels:
            if devices <= unit * level.size:
                return devices % unit == 0
            unit *= level.size
        return False

    def part(self, devices: int) -> Topology:
        """Its first so many devices, the others idle. Raises `ValueError` where `has_part` is false."""
        if not self.has_part(devices):
            raise ValueError(f"{devices} of {self.devices} devices of {self.name} are no whole units")
        levels, left = [], devices
        for level in self.levels:
            size = min(level.size, left)
            levels.append(level if size == level.size else replace(level, size=size))
            left //= size
        return replace(self, levels=tuple(levels))

    def span(self, *, size: int, stride: int) -> GroupSpan:
        """How a group of `size` ranks spaced by `stride` spreads over the levels.

        A mesh lays such groups side by side in blocks of `size * stride` ranks. Where sizes divide,
        all of them spread alike; where they do not (tp=6 on nodes of 8), the answer is the most
        units of each level that any group touches, since the slowest group sets the pace. Members
        are counted by distinct child units, rounding up.

        Raises `ValueError` if the ranks do not fit in the cluster.
        """
        assert size >= 1 and stride >= 1, (size, stride)
        if (size - 1) * stride >= self.devices:
            raise ValueError(f"{size} ranks spaced by {stride} do not fit in {self.devices} devices")
        members = []
        unit, before = 1, size
        for level in self.levels:
            unit *= level.size
            here = 1 if unit == self.devices else _most_units(size=size, stride=stride, unit=unit)
            members.append(-(-before // here))
            before = here
        return GroupSpan(members=tuple(members))


def _most_units(*, size: int, stride: int, unit: int) -> int:
    """The most units of `unit` devices that a group of `size` ranks spaced by `stride` can touch.

    Groups start at k * size * stride + j, 0 <= j < stride. Modulo `unit` the latest such start is
    unit - g + min(stride, g) - 1 with g = gcd(size * stride, unit); from there the last rank's unit
    counts, because no unit in between is skipped while stride < unit (else each rank has its own).
    """
    g = math.gcd(size * stride, unit)
    latest = unit - g + min(stride, g) - 1
    return min(size, (latest + (size - 1) * stride) // unit + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTopology:
    """Several kinds of nodes in one cluster: each kind a `Topology` of its own, and the link that joins them.

    Nothing here is a sum or a mean over kinds but the number of devices: what a device holds and how fast it
    is are asked of the kind it belongs to.
    """

    name: str
    parts: tuple[Topology, ...]
    """One for each kind, in the order of ranks."""
    link: Level
    """Between nodes of different kinds; its size is the number of kinds."""
    description: str = ""

    @property
    def devices(self) -> int:
        """Devices of all kinds together."""
        return sum(part.devices for part in self.parts)

    @property
    def nodes(self) -> int:
        """Nodes of all kinds together."""
        return sum(part.nodes for part in self.parts)


Cluster = Topology | MixedTopology
"""What may be planned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySummary:
    """One line of the list of bundled topologies."""

    name: str
    device: str
    levels: tuple[Level, ...]
    """Innermost first, without measured curves."""
    description: str

    @property
    def devices_per_node(self) -> int:
        """Devices below the outermost level (all of them if there is only one level)."""
        return math.prod(level.size for level in self.levels[:-1]) if len(self.levels) > 1 else self.devices

    @property
    def devices(self) -> int:
        """Devices of the cluster at its default number of nodes."""
        return math.prod(level.size for level in self.levels)
