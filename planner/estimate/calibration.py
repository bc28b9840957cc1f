"""One scale per device and framework, fitted on published runs, and the device that it describes.

In: `calibration.yaml`: by framework and device, how much longer kernels take over minutes of training
(sustained clocks, stragglers, all that no kernel benchmark shows) than the efficiency curves say. Out:
`sustained`: the device with its curves lowered so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from ..plan import Prediction
from ..profile import Framework
from ..topology import Device, Efficiency

FILE = Path(__file__).with_name("calibration.yaml")
ATTENTION = ("attention", "attention_backward")
STANDS_ON = {"tpplan": "torch"}
"""Frameworks that run another one's kernels and have no measurements of their own."""


FITTED_INTERVAL = (0.060, 0.114)
"""How far below and above the prediction four in five runs lie once the scale is fitted: the 10% and 90%
quantiles of 253 published runs (docs/accuracy.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How much longer kernels take than the efficiency curves say, and where that was fitted."""

    framework: str
    device: str
    scale: float
    fitted: str
    """Date of the fit, ISO 8601."""
    rows: tuple[str, ...]
    """Published runs that it was fitted on."""
    error: float
    """Mean absolute relative error of the step time on these rows."""

    def __str__(self) -> str:
        return (
            f"kernels on {self.device} under {self.framework} take {self.scale:.3f} times what their curves "
            f"say (fitted {self.fitted} on {len(self.rows)} published runs, {100 * self.error:.1f}% error)"
        )


@cache
def calibrations() -> tuple[Calibration, ...]:
    """All entries of the data file."""
    document = yaml.safe_load(FILE.read_text("utf-8")) or {}
    return tuple(
        Calibration(framework=framework, device=device, **{**entry, "rows": tuple(entry["rows"])})
        for framework, devices in document.items()
        for device, entry in devices.items()
    )


def calibration(device: Device, framework: Framework) -> Calibration | None:
    """The entry for this pair, or None when nothing was fitted."""
    name = STANDS_ON.get(framework.name, framework.name)
    return next((c for c in calibrations() if (c.framework, c.device) == (name, device.name)), None)


def scale_of(device: Device, framework: Framework) -> float:
    """How much longer kernels take than their curves say; 1 when nothing was fitted."""
    found = calibration(device, framework)
    return found.scale if found else 1.0


def fitted_interval(prediction: Prediction) -> Prediction:
    """The prediction with the interval of fitted scales."""
    step, (below, above) = prediction.step_time_s, FITTED_INTERVAL
    return replace(prediction, step_time_interval_s=(step * (1 - below), step * (1 + above)))


def sustained(device: Device, framework: Framework, *, scale: float = 1.0) -> Device:
    """The device with `scale` times slower kernels, and with this framework's attention kernels."""
    efficiency = {
        family: _slower(curve, scale / (framework.attention_efficiency if family in ATTENTION else 1.0))
        for family, curve in device.efficiency.items()
    }
    return replace(device, efficiency=efficiency)


def _slower(efficiency: Efficiency, factor: float) -> Efficiency:
    return replace(efficiency, curve=tuple((size, share / factor) for size, share in efficiency.curve))
