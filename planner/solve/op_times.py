"""Seconds of an op's kernels, forward and backward: worked out once for all splits that cut it alike.

In: what a kernel takes, an op, its extents on one device. Out: estimates. Whatever axis cut the op, kernels
of the same extents take the same time.
"""

from __future__ import annotations

from collections.abc import Callable

from ..cost import Estimate, Work, worst
from ..estimate.op_work import Sizes, backward_work, forward_work
from ..graph import Op

KernelTime = Callable[[Work], Estimate]


class OpTimes:
    """The memo, for the ops of one graph, which has to outlive it."""

    def __init__(self, kernel_time: KernelTime, *, fused: bool) -> None:
        """`fused`: whether pointwise ops run in the kernels of their neighbours."""
        self.kernel_time = kernel_time
        self._fused = fused
        self._known: dict[tuple, tuple[Estimate, Estimate]] = {}

    def __call__(self, op: Op, local: Sizes, skew: float) -> tuple[Estimate, Estimate]:
        """Forward and backward on the busiest device, which does `skew` times the mean work."""
        key = (id(op), skew, *local.values())
        if key not in self._known:
            self._known[key] = (
                self._total(forward_work(op, local, imbalance=skew, fused=self._fused)),
                self._total(backward_work(op, local, imbalance=skew, fused=self._fused)),
            )
        return self._known[key]

    def _total(self, kernels: tuple[Work, ...]) -> Estimate:
        found = [self.kernel_time(work) for work in kernels]
        return Estimate(sum(each.seconds for each in found), worst(*(each.origin for each in found)))
