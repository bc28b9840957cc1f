"""How fast this rank's device computes: what to run for each kernel and size.

In: a device and `Settings`. Out: `Kernel`s, each with the FLOPs and bytes that the planner counts for it (a
multiply-add is two FLOPs; bytes are what is read and written once). Between any two sizes of a family one is
held back: it becomes no point of a curve, it tells how well the curve predicts.

On a CPU a kernel takes its processor time, times the ranks that share a core: what other processes take away
for a while is no property of the machine, what ranks take from each other is.

    gemm               the products of a linear layer     2 m n k each, the mean of the three
    attention          causal, b heads s x d              2 b s^2 d (half of 4 b s^2 d)
    attention_backward                                    2.5 times the forward (five matmuls instead of two)
    grouped_gemm       e experts, m / e rows each         2 m n k
    memory             a + b                              3 tensors
    optimizer          AdamW as `tpplan bench` makes it   7 tensors, however often it reads them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as functional

from .settings import Settings
from .timing import Run

BACKWARD_FLOPS = 2.5
"""Backward of a fused attention kernel over its forward (FlashAttention-2 paper, section 4.1)."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_DIM = 64
EXPERTS = 8
VOCABULARY = 32_000
LARGEST_SHARE = 0.1
"""Of the device's free memory that one kernel's tensors may take: all sizes of a family are there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One thing to time. `build` allocates on a device and returns what to call."""

    name: str
    family: str
    """The planner's kernel family, or "other" for those that only check its predictions."""
    dtype: str
    flops: float
    nbytes: float
    build: Callable[[torch.device], Callable[[], Any]]
    shape: dict[str, int]
    held_back: bool = False
    """Measured to be predicted, not to predict from."""
    products: int = 1
    """Kernels of these FLOPs and bytes that one call runs."""

    @property
    def family_key(self) -> str:
        """What is measured in turns with it."""
        return f"kernel/{self.name}/{self.dtype}" if self.family != "other" else self.key

    @property
    def key(self) -> str:
        """A name that is unique within a run."""
        sizes = ",".join(f"{name}={size}" for name, size in self.shape.items())
        return f"kernel/{self.name}/{self.dtype}/{sizes}"


def kernels(device: torch.device, settings: Settings, *, free_bytes: int) -> tuple[Kernel, ...]:
    """What to measure on `device`, the smallest first; nothing that needs more than its share of memory."""
    accelerator = device.type != "cpu"
    dtypes = ("bf16", "fp32")
    heads, main = 32 if accelerator else 4, main_dtype(device)
    found = [
        *_with_held_back(_sides(accelerator, settings), lambda side: [_gemm(side, d) for d in dtypes]),
        *_with_held_back(_lengths(accelerator, settings), lambda n: _attention(n, heads=heads, dtype=main)),
        *_with_held_back(_counts(accelerator, settings), lambda count: [_pointwise(count)]),
        *_others(accelerator, settings),
    ]
    return tuple(kernel for kernel in found if kernel.nbytes <= LARGEST_SHARE * free_bytes)


def main_dtype(device: torch.device) -> str:
    """What training on this device computes in."""
    return "fp32" if device.type == "cpu" else "bf16"


def runner(kernel: Kernel, device: torch.device, *, ranks_per_core: float) -> Run:
    """Build the kernel's tensors and return how to run it so many times, in seconds."""
    with torch.enable_grad():
        call = kernel.build(device)

    def run(count: int) -> float:
        with torch.enable_grad():
            return timed(call, count, device, ranks_per_core=ranks_per_core) / kernel.products

    return run


def timed(call: Callable[[], Any], count: int, device: torch.device, *, ranks_per_core: float) -> float:
    """Seconds of `count` calls (see the module on CPUs)."""
    if device.type == "cpu":
        start = time.process_time()
        for _ in range(count):
            call()
        return (time.process_time() - start) * ranks_per_core
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def launch_gap() -> Kernel:
    """The smallest kernel there is: what one launch costs when many follow each other."""

    def build(device: torch.device) -> Callable[[], Any]:
        one = torch.zeros(1, device=device)
        return lambda: one.add_(1.0)

    shape = {"elements": 1}
    return Kernel(
        name="launch gap", family="latency", dtype="fp32", flops=1.0, nbytes=8.0, build=build, shape=shape
    )


# --------------------------------------------------------------------------- sizes


def _with_held_back(sizes: tuple[int, ...], make: Callable[[int], Iterable[Kernel]]) -> Iterator[Kernel]:
    """Kernels of `sizes`, and between any two of them one that is held back."""
    for size in sizes:
        yield from make(size)
    for smaller, larger in pairwise(sizes):
        yield from (replace(kernel, held_back=True) for kernel in make((smaller + larger) // 2))


def _sides(accelerator: bool, settings: Settings) -> tuple[int, ...]:
    if accelerator:
        sides = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
        return sides if settings.quick else (*sides, 12288)
    sides = (64, 96, 128, 192, 256, 384, 512)
    return sides if settings.quick else (32, 48, *sides, 768, 1024)


def _lengths(accelerator: bool, settings: Settings) -> tuple[int, ...]:
    if accelerator:
        return (512, 1024, 2048, 4096, 8192) if settings.quick else (256, 512, 1024, 2048, 4096, 8192, 16384)
    return (128, 256, 512) if settings.quick else (64, 128, 256, 512, 1024)


def _counts(accelerator: bool, settings: Settings) -> tuple[int, ...]:
    """Elements of a pointwise kernel."""
    exponents = range(16, 29) if accelerator else range(12, 24)
    return tuple(2**e for e in exponents[:: 2 if settings.quick else 1])


# --------------------------------------------------------------------------- kernels


def _randn(*shape: int, dtype: str, device: torch.device, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPES[dtype], device=device, requires_grad=grad)


def _size(dtype: str) -> int:
    return DTYPES[dtype].itemsize


def _gemm(side: int, dtype: str) -> Kernel:
    """Forward, input's and weight's gradient: libraries may run their layouts at very different speeds.

    bf16 on a Zen 3 core, side 256: 3.9, 23.8 and 1.4 ms.
    """

    def build(device: torch.device) -> Callable[[], Any]:
        x, weight, gradient = (_randn(side, side, dtype=dtype, device=device) for _ in range(3))
        return lambda: (functional.linear(x, weight), gradient @ weight, gradient.t() @ x)

    return Kernel(
        name="gemm",
        family="gemm",
        dtype=dtype,
        flops=2.0 * side**3,
        nbytes=3.0 * side**2 * _size(dtype),
        build=build,
        shape={"m": side, "n": side, "k": side},
        products=3,
    )


def _attention(length: int, *, heads: int, dtype: str) -> Iterator[Kernel]:
    shape = (1, heads, length, HEAD_DIM)
    flops = 2.0 * heads * length**2 * HEAD_DIM
    nbytes = 4.0 * heads * length * HEAD_DIM * _size(dtype)

    def forward(device: torch.device) -> Callable[[], Any]:
        q, k, v = (_randn(*shape, dtype=dtype, device=device) for _ in range(3))
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward(device: torch.device) -> Callable[[], Any]:
        q, k, v = (_randn(*shape, dtype=dtype, device=device, grad=True) for _ in range(3))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        seed = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), seed, retain_graph=True)

    sizes = {"heads": heads, "length": length, "head_dim": HEAD_DIM}
    yield Kernel(
        name="attention",
        family="attention",
        dtype=dtype,
        flops=flops,
        nbytes=nbytes,
        build=forward,
        shape=sizes,
    )
    yield Kernel(
        name="attention backward",
        family="attention_backward",
        dtype=dtype,
        flops=BACKWARD_FLOPS * flops,
        nbytes=2 * nbytes,
        build=backward,
        shape=sizes,
    )


def _pointwise(count: int) -> Kernel:
    def build(device: torch.device) -> Callable[[], Any]:
        a, b = (_randn(count, dtype="fp32", device=device) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.add(a, b, out=out)

    return Kernel(
        name="pointwise",
        family="memory",
        dtype="fp32",
        flops=float(count),
        nbytes=12.0 * count,
        build=build,
        shape={"elements": count},
    )


def _others(accelerator: bool, settings: Settings) -> Iterator[Kernel]:
    width = 4096 if accelerator else 256
    tokens = 8192 if accelerator else 256
    dtype = "bf16" if accelerator else "fp32"
    for rows in (tokens // 4, tokens) if not settings.quick else (tokens,):
        yield _grouped_gemm(rows, width, dtype)
    yield _norm(tokens, width)
    yield _embedding(tokens, width)
    yield _cross_entropy(tokens // 4)
    yield _optimizer_step(width * width * (16 if accelerator else 4))


def _grouped_gemm(rows: int, width: int, dtype: str) -> Kernel:
    def build(device: torch.device) -> Callable[[], Any]:
        tokens = _randn(EXPERTS, rows // EXPERTS, width, dtype=dtype, device=device)
        weights = _randn(EXPERTS, width, width, dtype=dtype, device=device)
        return lambda: torch.bmm(tokens, weights)

    return Kernel(
        name="grouped gemm",
        family="grouped_gemm",
        dtype=dtype,
        flops=2.0 * rows * width * width,
        nbytes=(2.0 * rows * width + EXPERTS * width * width) * _size(dtype),
        build=build,
        shape={"experts": EXPERTS, "m": rows, "n": width, "k": width},
    )


def _norm(tokens: int, width: int) -> Kernel:
    def build(device: torch.device) -> Callable[[], Any]:
        x, weight = _randn(tokens, width, dtype="fp32", device=device), torch.ones(width, device=device)
        return lambda: functional.rms_norm(x, (width,), weight)

    return Kernel(
        name="rms norm",
        family="other",
        dtype="fp32",
        flops=4.0 * tokens * width,
        nbytes=8.0 * tokens * width,
        build=build,
        shape={"tokens": tokens, "width": width},
    )


def _embedding(tokens: int, width: int) -> Kernel:
    def build(device: torch.device) -> Callable[[], Any]:
        table = torch.zeros(VOCABULARY, width, device=device)
        indices = torch.randint(VOCABULARY, (tokens,), device=device)
        return lambda: functional.embedding(indices, table)

    return Kernel(
        name="embedding",
        family="other",
        dtype="fp32",
        flops=0.0,
        nbytes=8.0 * tokens * width,
        build=build,
        shape={"tokens": tokens, "width": width, "vocabulary": VOCABULARY},
    )


def _cross_entropy(tokens: int) -> Kernel:
    def build(device: torch.device) -> Callable[[], Any]:
        logits = torch.randn(tokens, VOCABULARY, device=device)
        targets = torch.randint(VOCABULARY, (tokens,), device=device)
        return lambda: functional.cross_entropy(logits, targets)

    return Kernel(
        name="cross-entropy",
        family="other",
        dtype="fp32",
        flops=5.0 * tokens * VOCABULARY,
        nbytes=8.0 * tokens * VOCABULARY,
        build=build,
        shape={"tokens": tokens, "vocabulary": VOCABULARY},
    )


def _optimizer_step(parameters: int) -> Kernel:
    """AdamW reads parameter, gradient and two moments and writes all but the gradient: 7 tensors."""

    def build(device: torch.device) -> Callable[[], Any]:
        weight = torch.zeros(parameters, device=device, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        return torch.optim.AdamW([weight]).step

    return Kernel(
        name="adamw step",
        family="optimizer",
        dtype="fp32",
        flops=12.0 * parameters,
        nbytes=28.0 * parameters,
        build=build,
        shape={"parameters": parameters},
    )
