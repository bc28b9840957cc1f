"""How long one kernel takes on one device: a roofline with utilisation.

In: `Work` (FLOPs, bytes, shape, dtype) and `Device` (peaks and efficiency curves). Out: `Estimate`.

    time = max( flops / (peak[dtype] * utilisation),  bytes / (bandwidth * fraction(bytes)),
                kernels * kernel_latency )

For matrix multiplications

    utilisation = u * curve(flops per kernel / u),    u = s(m) * s(n) * s(k),    s(d) = d / (d + 48)

The curve says how well one kernel of that size fills the device; s charges a short side as if the
kernel ran 48 more rows (part-filled 128-wide tiles, and the start and end of the loop over k). A
grouped matmul fills the device with all its FLOPs; its sides are those of one expert's product.
Attention uses its curve alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from ..cost import Estimate, Origin, Work
from ..topology import Device

SIDE_LOSS = 48.0
"""Rows lost at a matmul's border. Fitted by eye to aiconfigurator's a100_sxm and h100_sxm tables
(n = k = 8192, m = 16 to 8192), whose rows it follows within 25% once the sustained clock is set aside."""

FP8_SHARE = 0.87
"""Utilisation of fp8 matmuls against their own peak, relative to 16 bit: scaling, casts and the same
power limit leave 0.65 of peak where bf16 reaches 0.745 on hopper. Judgement."""

COMPUTE_FAMILIES = ("gemm", "grouped_gemm", "attention", "attention_backward")
TRAFFIC_FAMILIES = ("memory", "optimizer")
"""Their bytes alone count. `optimizer`: the bytes that an update has to move; how often it really moves them
(kernel by kernel, or in one) is its curve's."""
FAMILIES = (*COMPUTE_FAMILIES, *TRAFFIC_FAMILIES)
"""Every kernel family that has a price."""

STANDS_IN = {
    "attention_backward": ("attention_backward", "attention", "gemm"),
    "attention": ("attention", "gemm"),
    "grouped_gemm": ("grouped_gemm", "gemm"),
    "gemm": ("gemm",),
    "memory": ("memory",),
    "optimizer": ("optimizer", "memory"),
}
"""Which curve prices a family when the device has none of its own, best first."""

UNKNOWN_FRACTION = 0.5
"""Fraction of peak when a device names no curve at all. Judgement."""

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "float64": "fp64", "double": "fp64", "tfloat32": "tf32",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8": "fp8",
}  # fmt: skip
"""Torch's dtype names as data sheets abbreviate them."""

SLOWER_PATHS = {
    "fp8": (("bf16", 1.0), ("fp16", 1.0), ("tf32", 1.0), ("fp32", 1.0)),
    "int8": (("fp8", 1.0), ("bf16", 1.0), ("fp16", 1.0), ("fp32", 1.0)),
    "fp16": (("bf16", 1.0), ("tf32", 1.0), ("fp32", 1.0)),
    "bf16": (("tf32", 1.0), ("fp32", 1.0), ("fp16", 1 / 8)),
    "tf32": (("fp32", 1.0), ("bf16", 1 / 2), ("fp16", 1 / 2)),
    "fp32": (("bf16", 1 / 16), ("fp16", 1 / 16)),
    "fp64": (("fp32", 1 / 2), ("bf16", 1 / 32), ("fp16", 1 / 32)),
}
"""What runs instead of a dtype that the device does not name, with the share of that path's peak. A V100
has no bf16 units: such matmuls run as fp32. Shares are data-sheet ratios: A100 fp32:bf16 = 19.5:312,
fp64:fp32 = 9.7:19.5, V100 fp32:fp16 = 15.7:125, tf32 half of bf16."""


def kernel_time(work: Work, device: Device) -> Estimate:
    """Seconds of `work` on `device`.

    Interpolated where the family's curve was measured, else modelled. A dtype the device lacks runs on
    the nearest slower path and is modelled. Raises `ValueError` for a family without a price.
    """
    kernels = work.kernels if work.kernels > 1.0 else 1.0
    traffic = work.family if work.family in TRAFFIC_FAMILIES else "memory"
    memory_s, origin = _memory(work.bytes, kernels, device, traffic)
    seconds = max(memory_s, kernels * device.kernel_latency_s)
    if work.family in TRAFFIC_FAMILIES:
        return Estimate(seconds, origin)
    if work.family not in STANDS_IN:
        raise ValueError(f"no kernel family {work.family!r}; priced are {', '.join(FAMILIES)}")
    if work.flops <= 0.0:
        return Estimate(seconds, origin)
    peak, exact = peak_flops(work.dtype, device)
    fraction, compute_origin = utilisation(work, device)
    compute_s = work.flops / (peak * fraction)
    if compute_s < seconds:
        return Estimate(seconds, origin)
    return Estimate(compute_s, compute_origin if exact else Origin.MODELLED)


def utilisation(work: Work, device: Device) -> tuple[float, Origin]:
    """Fraction of the dtype's peak that this kernel's arithmetic reaches, and where it comes from."""
    curve, origin = _curve(work.family, device, DTYPES.get(work.dtype, work.dtype))
    product = work.family in ("gemm", "grouped_gemm")
    useful = _side(work.m) * _side(work.n) * _side(work.k) if product else 1.0
    fraction = useful * interpolate(curve, work.flops / max(work.kernels, 1.0) / useful)
    if DTYPES.get(work.dtype, work.dtype) == "fp8":
        fraction *= FP8_SHARE
    return fraction, origin


def peak_flops(dtype: str, device: Device) -> tuple[float, bool]:
    """Peak FLOP/s of the path that runs `dtype`, and whether the device names that dtype itself."""
    name = DTYPES.get(dtype, dtype)
    peaks = device.peak_flops
    if name in peaks:
        return peaks[name], True
    for other, share in SLOWER_PATHS.get(name, SLOWER_PATHS["fp32"]):
        if other in peaks:
            return peaks[other] * share, False
    return min(peaks.values()), False


def interpolate(curve: tuple[tuple[float, float], ...], size: float) -> float:
    """The curve's fraction at `size`: a power law between points (a line in log-log), constant outside.

    So that more work is never faster, wherever fractions grow more slowly than sizes.
    """
    i = bisect_left(curve, (size,))
    if i == 0:
        return curve[0][1]
    if i == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 * (y1 / y0) ** (math.log(size / x0) / math.log(x1 / x0))


def _memory(nbytes: float, kernels: float, device: Device, family: str) -> tuple[float, Origin]:
    curve, origin = _curve(family, device, "")
    return nbytes / (device.memory_bytes_per_s * interpolate(curve, nbytes / kernels)), origin


def _curve(family: str, device: Device, dtype: str) -> tuple[tuple[tuple[float, float], ...], Origin]:
    """The curve of a family: its own for this dtype where there is one (`gemm/bf16`), else of any dtype."""
    for name in STANDS_IN[family]:
        found = device.efficiency.get(f"{name}/{dtype}") or device.efficiency.get(name)
        if found is not None:
            own = name == family or family in TRAFFIC_FAMILIES
            measured = own and found.origin != Origin.MODELLED
            return found.curve, Origin.INTERPOLATED if measured else Origin.MODELLED
    return ((1.0, UNKNOWN_FRACTION),), Origin.MODELLED


def _side(length: float) -> float:
    """Useful share of what runs along one matmul side; 1 where the side is not given."""
    return length / (length + SIDE_LOSS) if length > 0.0 else 1.0
