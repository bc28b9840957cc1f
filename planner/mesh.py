"""The device mesh: five named axes, their sizes, and which ranks form which group.

Ranks are laid out row-major over `order`: the first axis of `order` varies slowest, the last
fastest, so the last axis always holds neighbouring ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

AXES = ("pp", "dp", "cp", "ep", "tp")
DEFAULT_ORDER = ("pp", "dp", "cp", "ep", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the five axes. Their product is the number of devices.

    What Megatron calls the data-parallel size is `dp * ep` here: dense parameters are
    replicated over both, expert parameters over `dp` alone.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    order: tuple[str, ...] = DEFAULT_ORDER

    def __post_init__(self) -> None:
        assert sorted(self.order) == sorted(AXES), self.order
        assert all(self.size(axis) >= 1 for axis in AXES), self

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return getattr(self, axis)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes in the canonical order pp, dp, cp, ep, tp."""
        return {axis: self.size(axis) for axis in AXES}

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return self.pp * self.dp * self.cp * self.ep * self.tp

    @property
    def batch_ways(self) -> int:
        """Into how many parts the global batch is cut (`dp * ep`)."""
        return self.dp * self.ep

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        inner = self.order[self.order.index(axis) + 1 :]
        return math.prod(self.size(name) for name in inner)

    def groups(self, *axes: str) -> Iterator[tuple[int, ...]]:
        """Rank groups along one axis or several flattened ones, in rank order."""
        fixed = [axis for axis in self.order if axis not in axes]
        free = [axis for axis in self.order if axis in axes]
        for base in product(*(range(self.size(axis)) for axis in fixed)):
            origin = sum(i * self.stride(a) for i, a in zip(base, fixed, strict=True))
            yield tuple(
                origin + sum(i * self.stride(a) for i, a in zip(point, free, strict=True))
                for point in product(*(range(self.size(axis)) for axis in free))
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of `rank` along every axis."""
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in AXES}

    def __str__(self) -> str:
        return " x ".join(f"{axis}{size}" for axis, size in self.sizes.items() if size > 1) or "1 device"
