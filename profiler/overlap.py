"""What a collective and a matrix product cost each other when they run together.

sigma = time of both / time of the longer alone   (1: free overlap; 2: no overlap if both are equal)
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from .settings import MIB, Sample, Settings
from .timing import sample
from .world import World

MESSAGE_BYTES = 4 * MIB
SIDE = {"cpu": 256}
ACCELERATOR_SIDE = 4096
MOST_PRODUCTS = 512
PARTS = ("collective", "compute", "both")


def measure(world: World, settings: Settings) -> dict[str, Sample]:
    """Samples of `compute`, `collective` and `both`: an all-reduce over all ranks beside equal compute."""
    side = SIDE.get(world.device.type, ACCELERATOR_SIDE)
    a = torch.randn(side, side, device=world.device)
    out = torch.empty_like(a)
    buffer = torch.zeros(MESSAGE_BYTES // 4, device=world.device)

    def timed(work: Callable[[], None]) -> Sample:
        def run(count: int) -> float:
            world.settle()
            start = time.perf_counter()
            for _ in range(count):
                work()
            world.settle()
            return time.perf_counter() - start

        return sample(run, settings, agree=world.slowest)

    def reduce() -> None:
        dist.all_reduce(buffer)

    def product() -> None:
        torch.mm(a, a, out=out)

    alone = timed(reduce)
    one = timed(product)
    products = min(MOST_PRODUCTS, max(1, round(alone.seconds / one.seconds)))

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, a, out=out)

    def both() -> None:
        pending = dist.all_reduce(buffer, async_op=True)
        compute()
        if pending is not None:
            pending.wait()

    return {"collective": alone, "compute": timed(compute), "both": timed(both)}


def sigma(samples: dict[str, Sample]) -> float:
    """Time together over the longer of the two alone; at least 1."""
    longer = max(samples["collective"].seconds, samples["compute"].seconds)
    return max(1.0, samples["both"].seconds / longer)
