"""Splits that the user has decided: `lm_head=Shard(vocab)@tp`, `layers.*.mlp.up=Replicate@tp`.

In: texts and a graph. Out: the graph whose ops know what they must be on an axis (`Op.pinned`), which the
rules then offer nothing else for. A pin that no rule can keep is an `OptionError` that says which dims the
named weights have and which of them can be split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .errors import OptionError, did_you_mean
from .graph import Block, Graph, Op
from .rules.choices import can_split, matrix_labels

AXES = ("tp", "ep")
"""Mesh axes along which a weight may be split."""
FORM = re.compile(r"(?P<target>[^=@]+)=(?:Shard\((?P<dim>[^()]+)\)|(?P<whole>Replicate))@(?P<axis>\w+)")
LAYER = re.compile(r"\.\d+(?=\.|$)")
"""The number of a layer in a module's path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPin:
    """What the weights of a module, or one parameter, must be on a mesh axis."""

    target: str
    """Module path or parameter name, `*` for the layer."""
    dim: str | None
    """Name of the split dim; None: whole on every rank."""
    axis: str

    def __str__(self) -> str:
        placed = f"Shard({self.dim})" if self.dim else "Replicate"
        return f"{self.target}={placed}@{self.axis}"


def parse_split(text: str) -> SplitPin:
    """One pin. Raises `OptionError` for another form or another axis."""
    match = FORM.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"--pin {text!r}: expected NAME=Shard(DIM)@AXIS or NAME=Replicate@AXIS, as in "
                          "lm_head=Shard(vocab)@tp")  # fmt: skip
    if match["axis"] not in AXES:
        known = " or ".join(AXES)
        raise OptionError(f"--pin {text!r}: weights are split over {known}, not {match['axis']!r}")
    return SplitPin(target=match["target"].strip(), dim=match["dim"], axis=match["axis"])


def pin_splits(graph: Graph, pins: Iterable[SplitPin]) -> Graph:
    """The graph in which the ops that the pins name have no other choice."""
    for pin in pins:
        graph = _pinned(graph, pin)
    return graph


def _pinned(graph: Graph, pin: SplitPin) -> Graph:
    named = {op.name for block in graph.blocks.values() for op in block.ops if _is_named(op, pin.target)}
    if not named:
        raise OptionError(f"--pin {pin}: no weight matrix is called {pin.target!r}{_hint(graph, pin.target)}")
    blocks = {name: _pin_block(block, pin, named) for name, block in graph.blocks.items()}
    return replace(graph, blocks=blocks)


def _pin_block(block: Block, pin: SplitPin, named: set[str]) -> Block:
    ops = tuple(_pin_op(op, pin) if op.name in named else op for op in block.ops)
    return replace(block, ops=ops) if ops != block.ops else block


def _pin_op(op: Op, pin: SplitPin) -> Op:
    taken = [dim for axis, dim in op.pinned if axis == pin.axis]
    if taken and taken[0] != pin.dim:
        raise OptionError(f"--pin {pin}: {op.module} is pinned otherwise on {pin.axis} already")
    if pin.dim is not None:
        _check_dim(op, pin)
    return replace(op, pinned=(*op.pinned, (pin.axis, pin.dim)))


def _check_dim(op: Op, pin: SplitPin) -> None:
    """The dim is one of the op's weight, and a rule splits it."""
    weight = matrix_labels(op)
    dims = {dim.name: dim for dim in op.dims if dim.label in weight}
    sizes = ", ".join(f"{dim.name} ({dim.size})" for dim in dims.values() if can_split(op, dim.label))
    if pin.dim not in dims:
        hint = did_you_mean(str(pin.dim), dims)
        said = f"{op.target} in {op.module} has no dim {pin.dim!r}{hint}"
        raise OptionError(f"--pin {pin}: {said}; it can be split along {sizes}")
    if not can_split(op, dims[pin.dim].label):
        said = f"the rule of {op.target} does not split {pin.dim!r}"
        raise OptionError(f"--pin {pin}: {said}; it splits {sizes}")


def _is_named(op: Op, target: str) -> bool:
    """Whether an op multiplies by the parameter of that name, or by one inside the module of that name."""
    if not matrix_labels(op):
        return False
    names = [read.fqn for read in op.reads if read.kind == "parameter" and read.fqn]
    wanted = LAYER.sub(".*", target)
    return any(_bare(name) == _bare(wanted) or _bare(name).startswith(f"{_bare(wanted)}.") for name in names)


def _bare(path: str) -> str:
    """Without the prefix that some wrappers give every name."""
    return path.removeprefix("model.")


def _hint(graph: Graph, target: str) -> str:
    return did_you_mean(LAYER.sub(".*", target), list(_names(graph)))


def _names(graph: Graph) -> Iterator[str]:
    for block in graph.blocks.values():
        for op in block.ops:
            for read in op.reads:
                if read.kind == "parameter" and read.fqn and matrix_labels(op):
                    yield read.fqn
                    yield read.fqn.rpartition(".")[0]
