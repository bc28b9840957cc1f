"""Ops that make tensors from shapes and literals: their result is the same on every rank."""

from __future__ import annotations

FACTORIES = frozenset(
    f"aten.{name}"
    for name in (
        "arange", "zeros", "ones", "full", "empty", "eye", "scalar_tensor", "rand", "randn", "linspace",
        "tensor", "randint", "randperm", "logspace", "tril_indices", "triu_indices", "empty_permuted",
        "empty_strided", "normal", "rand_like", "randn_like", "randint_like", "zeros_like", "ones_like",
        "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    )
)  # fmt: skip
"""Their tensor arguments, if any, give shapes only, so no data flows through them."""


def is_factory(target: str) -> bool:
    """Whether `aten.name.overload` only makes a tensor."""
    return target.rsplit(".", 1)[0] in FACTORIES
