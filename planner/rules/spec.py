"""What a rule says about one op: labels on the axes of everything it reads and writes.

A label is an iteration dim, in the manner of an einsum: `aten.linear` is `b.. k, n k -> b.. n`
with `k` summed. Everything else follows: which dims can be split, what layout each operand then
has, what the backward pass costs. Rules never mention a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..graph import Node, Value

Axis = tuple[str, ...]
"""Labels of one tensor axis, major first; empty for an axis of size one."""


def fresh_axes(shape: tuple[int, ...], prefix: str = "d") -> tuple[Axis, ...]:
    """A label of its own for every axis of a tensor: `d0, d1, ...`."""
    return tuple((f"{prefix}{i}",) if size > 1 else () for i, size in enumerate(shape))


def axis_of(label: str, size: int) -> Axis:
    """The axis of one label; none for what has one element."""
    return (label,) if size > 1 else ()


def labels_of(*axes: Axis) -> tuple[str, ...]:
    """All labels of some axes, in order."""
    return tuple(label for axis in axes for label in axis)


def labels_at(axes: tuple[Axis, ...], *dims: int) -> frozenset[str]:
    """Labels of the axes at these positions."""
    return frozenset(labels_of(*(axes[dim] for dim in dims)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An op as a rule sees it: arguments with values in place of references."""

    node: Node
    args: tuple
    kwargs: dict[str, object]
    inputs: tuple[Value, ...]
    """Every tensor read, in argument order, repeats included."""
    outputs: tuple[Value, ...]
    permutations: frozenset[str] = frozenset()
    """Names of values that hold a sort order of routed tokens (or indices derived from one)."""
    routed: frozenset[str] = frozenset()
    """Names of values whose rows lie in expert order."""

    def arg(self, position: int, name: str, default: object = None) -> object:
        """A positional or keyword argument."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerSpec:
    """A label that may be split if the op exchanges a buffer over `labels`, `count` times."""

    label: str
    collective: str
    labels: tuple[str, ...]
    element_bytes: int = 4
    count: int = 1
    backward_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The iteration space of one op."""

    family: str
    inputs: tuple[tuple[Axis, ...] | None, ...]
    """Per tensor read; None for one that lends only its shape or dtype: no data flows."""
    outputs: tuple[tuple[Axis, ...], ...]
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of labels that share an axis with another label."""
    sums: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    """Labels absent from the output whose split leaves each rank its own, complete result (the
    token counts of a rank's own routing)."""
    blocked: frozenset[str] = frozenset()
    linear: tuple[int, ...] = ()
    inner: tuple[InnerSpec, ...] = ()
    gemm: tuple[tuple[str, ...], ...] | None = None
    """(m, n, k, batch) labels."""
    flops: tuple[tuple[float, tuple[str, ...]], ...] = ()
    backward_flops: float = 2.0
    experts: str | None = None
    table: str | None = None
    causal: tuple[str, ...] = ()
    reshape: bool = False
    """Input 0 and output 0 hold the same elements in the same order."""
    names: dict[str, str] = field(default_factory=dict)
    """What users call a label, e.g. {"n": "vocab"}."""
    sort: str = ""
    """`make`: output 0 puts rows in expert order; `undo`: takes them out; `keep`: passes on."""


Rule = Callable[[Call], Spec]
