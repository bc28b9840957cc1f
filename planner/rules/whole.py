"""Ops that are known and have no dim to split: raw strides, factorisations, ordering by value."""

from __future__ import annotations

from .index import unsplit
from .registry import rule
from .spec import Call, Spec


@rule(
    "aten.as_strided", "aten.as_strided_", "aten.as_strided_scatter", "aten.take", "aten.put", "aten.trace",
    "aten.kron", "aten.block_diag", "aten.cartesian_prod", "aten.combinations", "aten.ctc_loss",
    "aten.histogram",
)  # fmt: skip
def whole(call: Call) -> Spec:
    """Every element may depend on, or lie in the storage of, any other."""
    return unsplit(call)
