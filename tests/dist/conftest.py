"""Real gloo ranks, forked once per session and number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples")]

from pool import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """A function of a number of ranks that returns their pool."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools or pools[size].broken:
            if size in pools:
                pools[size].close()
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for made in pools.values():
        made.close()
