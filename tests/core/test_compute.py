"""Kernel times: a roofline whose utilisation follows size and shape, for every device and dtype."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpplan import topologies
from tpplan.planner.cost import Origin, Work
from tpplan.planner.estimate.compute import (
    COMPUTE_FAMILIES,
    FAMILIES,
    SIDE_LOSS,
    interpolate,
    kernel_time,
    peak_flops,
    utilisation,
)
from tpplan.planner.topology import Device, Efficiency

H100 = topologies.load_device("h100-sxm5-80gb")
A100 = topologies.load_device("a100-sxm4-80gb")
V100 = topologies.load_device("v100-sxm2-32gb")

FLAT = {
    family: Efficiency(curve=((1.0, 0.5),), origin="modelled", source="a round number") for family in FAMILIES
}
TOY = Device(
    name="toy",
    vendor="generic",
    memory_bytes=10**9,
    memory_bytes_per_s=1e9,
    peak_flops={"fp16": 8e12, "fp32": 1e12},
    efficiency=FLAT,
    kernel_latency_s=1e-6,
    sources={},
)


def matmul(m: float, n: float, k: float, dtype: str = "bf16") -> Work:
    return Work(
        family="gemm",
        flops=2 * m * n * k,
        bytes=2 * (m * k + n * k + m * n),
        dtype=dtype,
        m=m,
        n=n,
        k=k,
    )


# --- by hand ---------------------------------------------------------------------------------


def test_memory_bound_kernel_by_hand() -> None:
    work = Work(family="memory", flops=0, bytes=1e6, dtype="fp32")
    assert kernel_time(work, TOY).seconds == pytest.approx(1e6 / (1e9 * 0.5))


def test_compute_bound_kernel_by_hand() -> None:
    side = SIDE_LOSS * 9
    work = replace(matmul(side, side, side, dtype="fp32"), bytes=1.0)
    assert kernel_time(work, TOY).seconds == pytest.approx(2 * side**3 / (1e12 * 0.5 * 0.9**3))


def test_each_launch_takes_its_latency() -> None:
    work = Work(family="memory", flops=0, bytes=8, dtype="fp32", kernels=5)
    assert kernel_time(work, TOY).seconds == pytest.approx(5e-6)


def test_a_grouped_matmul_is_charged_for_the_sides_of_one_expert() -> None:
    dense = replace(matmul(64, 4096, 4096, dtype="fp16"), family="gemm", flops=1e12)
    grouped = replace(dense, family="grouped_gemm", batch=8)
    assert utilisation(grouped, TOY) == utilisation(dense, TOY)


def test_between_points_a_fraction_follows_a_power_law_and_is_clamped_outside() -> None:
    curve = ((1e2, 0.1), (1e4, 0.4))
    sizes = (1.0, 1e2, 1e3, 1e4, 1e9)
    assert [interpolate(curve, size) for size in sizes] == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.4])


# --- against published figures ---------------------------------------------------------------

LLAMA_3_8B_MATMULS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(n, k) of the block's qkv, output, gate with up, and down projections."""


def test_llama_3_8b_block_on_h100_reaches_a_plausible_share_of_peak() -> None:
    works = [matmul(8192, n, k) for n, k in LLAMA_3_8B_MATMULS]
    seconds = sum(kernel_time(work, H100).seconds for work in works)
    share = sum(work.flops for work in works) / seconds / H100.peak_flops["bf16"]
    assert 0.60 < share < 0.85
    assert all(kernel_time(work, H100).origin is Origin.INTERPOLATED for work in works)


@pytest.mark.parametrize(
    ("device", "clock", "table"),
    [
        (
            A100,
            0.87,
            {128: 0.451, 256: 0.677, 512: 0.693, 1024: 0.837, 2048: 0.889, 4096: 0.891, 8192: 0.941},
        ),
        (H100, 0.92, {16: 0.047, 64: 0.183, 128: 0.357, 256: 0.677, 512: 0.795, 1024: 0.848, 4096: 0.797}),
        (H100, 1.0, {8192: 0.721, 16384: 0.715}),
    ],
    ids=["a100", "h100, full clock", "h100, power limited"],
)
def test_published_matmul_table_is_followed(device: Device, clock: float, table: dict[int, float]) -> None:
    """aiconfigurator, n = k = 8192 by m; `clock`: sustained over the microbenchmark's speed."""
    for m, published in table.items():
        work = matmul(m, 8192, 8192)
        share = work.flops / kernel_time(work, device).seconds / device.peak_flops["bf16"]
        assert share == pytest.approx(published * clock, rel=0.30), m


# --- properties ------------------------------------------------------------------------------

DEVICES = [topologies.load_device(name) for name in topologies.list_devices()]
SIDES = st.integers(1, 40_000)


@given(st.sampled_from(DEVICES), SIDES, SIDES, SIDES, st.integers(0, 2))
def test_a_longer_matmul_is_never_faster(device: Device, m: int, n: int, k: int, side: int) -> None:
    doubled = [(2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)][side]
    longer = matmul(*doubled)
    assert kernel_time(matmul(m, n, k), device).seconds <= kernel_time(longer, device).seconds


@given(st.sampled_from(DEVICES), st.sampled_from(FAMILIES), st.floats(1, 1e16), st.floats(1, 1e12))
def test_never_beyond_the_data_sheet(device: Device, family: str, flops: float, nbytes: float) -> None:
    work = Work(family=family, flops=flops, bytes=nbytes, dtype="bf16")
    seconds = kernel_time(work, device).seconds
    assert seconds >= device.kernel_latency_s
    assert seconds >= nbytes / device.memory_bytes_per_s
    if family in COMPUTE_FAMILIES:
        assert seconds >= flops / max(device.peak_flops.values())


@given(st.sampled_from(DEVICES), st.floats(1e3, 1e11), st.floats(1.0, 10.0))
def test_more_bytes_are_never_faster(device: Device, nbytes: float, factor: float) -> None:
    less = Work(family="memory", flops=0, bytes=nbytes, dtype="bf16")
    more = replace(less, bytes=nbytes * factor)
    assert kernel_time(less, device).seconds <= kernel_time(more, device).seconds * (1 + 1e-12)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_no_fraction_grows_faster_than_its_size(device: Device) -> None:
    for family, efficiency in device.efficiency.items():
        for (x0, y0), (x1, y1) in pairwise(efficiency.curve):
            assert x0 < x1 and y1 / y0 < x1 / x0 and 0.0 < y1 < 1.0, family


@pytest.mark.parametrize("short", ["m", "n", "k"])
def test_a_short_side_lowers_utilisation(short: str) -> None:
    square = matmul(2048, 2048, 2048)
    skewed = replace(square, **{short: 16.0})
    assert utilisation(skewed, H100)[0] < 0.5 * utilisation(square, H100)[0]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("family", COMPUTE_FAMILIES)
def test_every_device_prices_every_family(device: Device, family: str) -> None:
    work = Work(family=family, flops=1e12, bytes=1e6, dtype="bf16", m=8192, n=8192, k=8192, batch=8)
    assert 0.0 < utilisation(work, device)[0] < 1.0
    assert kernel_time(work, device).seconds > 0.0


# --- what a device lacks ---------------------------------------------------------------------


def test_v100_runs_bf16_as_fp32() -> None:
    assert peak_flops("bf16", V100) == (V100.peak_flops["fp32"], False)
    work = matmul(4096, 4096, 4096)
    assert kernel_time(work, V100).origin is Origin.MODELLED
    assert kernel_time(work, V100).seconds > 5 * kernel_time(replace(work, dtype="fp16"), V100).seconds


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "int8", "int64"]
)
@pytest.mark.parametrize("device", [H100, V100, TOY], ids=lambda device: device.name)
def test_any_dtype_has_a_price(dtype: str, device: Device) -> None:
    assert 0.0 < kernel_time(matmul(512, 512, 512, dtype=dtype), device).seconds < 1.0


def test_torch_names_and_data_sheet_names_agree() -> None:
    assert peak_flops("bfloat16", H100) == peak_flops("bf16", H100) == (H100.peak_flops["bf16"], True)


def test_a_device_without_curves_is_modelled() -> None:
    bare = replace(TOY, efficiency={})
    estimate = kernel_time(matmul(4096, 4096, 4096, dtype="fp16"), bare)
    assert estimate.origin is Origin.MODELLED
    assert estimate.seconds > 0.0


def test_attention_backward_falls_back_to_attention() -> None:
    some = replace(
        TOY, efficiency={"attention": replace(FLAT["gemm"], curve=((1.0, 0.25),), origin="measured")}
    )
    work = Work(family="attention_backward", flops=1e12, bytes=1.0, dtype="fp16")
    assert utilisation(work, some) == (0.25, Origin.MODELLED)
    assert utilisation(replace(work, family="attention"), some) == (0.25, Origin.INTERPOLATED)


def test_an_unknown_family_is_an_error_not_free() -> None:
    with pytest.raises(ValueError, match=r"no kernel family 'convolution'.*gemm"):
        kernel_time(Work(family="convolution", flops=1.0, bytes=1.0, dtype="bf16"), H100)
