"""What real runs on a cluster told about its predictions, put to use.

In: a topology with `scales`, a framework profile. Out: the topology and framework that searches price with,
and what to say of it.

    kernels       every kernel takes `value` times what its efficiency curve says
    collectives   every curve, latency and bandwidth of every level is `value` times slower
    memory        allocated bytes are `value` times what is predicted: the allocator's reserve is scaled, and
                  never below none

What a framework hides of its communication is at most what was measured to be hidden there (the profile's
`overlap`), and nothing on CPUs: it hides behind computation on a stream of its own, and CPUs have none. A
collective there blocks the rank that starts it. Measured host times go with the framework.

A scale measured on the cluster takes the place of one fitted on published runs; without either it is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..plan import Plan
from ..profile import Framework
from ..topology import CollectiveCurve, Level, MeasuredScale, Topology
from .calibration import Calibration, calibration, fitted_interval, sustained

NAMES = ("kernels", "collectives", "memory")
OVERLAPS = ("dp_overlap", "gather_overlap", "tp_overlap", "cp_overlap", "ep_overlap", "p2p_overlap")
"""Shares of a framework profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A cluster and a framework at the speeds that runs have shown."""

    topology: Topology
    framework: Framework
    measured: tuple[MeasuredScale, ...]
    """Scales measured on this cluster."""
    published: Calibration | None
    """The scale of published runs, where the cluster has none of its own for kernels."""

    def annotate(self, plan: Plan) -> Plan:
        """The plan with the interval that its scales give, and with what it rests on."""
        told = tuple(map(str, (*self.measured, *([self.published] if self.published else []))))
        if not told:
            return plan
        predicted = fitted_interval(plan.predicted) if self.published else plan.predicted
        timed = [scale.uncertainty for scale in self.measured if scale.name != "memory"]
        if timed:
            step, width = predicted.step_time_s, max(timed)
            predicted = replace(predicted, step_time_interval_s=(step / (1 + width), step * (1 + width)))
        return replace(plan, predicted=predicted, assumptions=(*plan.assumptions, *told))


def calibrated(topology: Topology, framework: Framework) -> Calibrated:
    """The cluster and framework to price with."""
    own = {scale.name: scale for scale in topology.scales if scale.framework == framework.name}
    published = None if "kernels" in own else calibration(topology.device, framework)
    kernels = own["kernels"].value if "kernels" in own else published.scale if published else 1.0
    slower = own["collectives"].value if "collectives" in own else 1.0
    larger = own["memory"].value if "memory" in own else 1.0
    return Calibrated(
        topology=replace(
            topology,
            device=sustained(topology.device, framework, scale=kernels),
            levels=tuple(_slower_level(level, slower) for level in topology.levels),
        ),
        framework=replace(
            _overlapping(framework, _hideable(topology)),
            allocator_reserve=_reserve(framework, larger),
            host=topology.host,
        ),
        measured=tuple(own[name] for name in NAMES if name in own),
        published=published,
    )


def _hideable(topology: Topology) -> float:
    """The largest share of a collective that computation can hide on this cluster."""
    if topology.device.architecture == "cpu":
        return 0.0
    return 1.0 if topology.overlap is None else topology.overlap


def _overlapping(framework: Framework, most: float) -> Framework:
    shares = {name: min(getattr(framework, name), most) for name in OVERLAPS}
    return replace(framework, **shares)


def _reserve(framework: Framework, larger: float) -> tuple[float, float]:
    if larger == 1.0:
        return framework.allocator_reserve
    typical, upper = framework.allocator_reserve
    return max(1.0, typical * larger), max(1.0, upper * larger)


def _slower_level(level: Level, factor: float) -> Level:
    if factor == 1.0:
        return level
    return replace(
        level,
        bytes_per_s=level.bytes_per_s / factor,
        latency_s=level.latency_s * factor,
        curves=tuple(_slower_curve(curve, factor) for curve in level.curves),
    )


def _slower_curve(curve: CollectiveCurve, factor: float) -> CollectiveCurve:
    return replace(curve, points=tuple((size, seconds * factor) for size, seconds in curve.points))
