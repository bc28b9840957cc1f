"""Which ops of a model lie under a sharding rule, and what the others weigh.

In: a `Graph`. Out: the ops of the whole model counted by kind and by module, with forward FLOPs and
the bytes kept for backward; the ops without a rule with their share of the computing time, all ops
unsplit on one device. An op without a rule is never free: it is priced by the bytes it touches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .errors import ModelError
from .estimate.compute import kernel_time
from .estimate.op_work import backward_work, forward_work, saved_bytes
from .graph import Graph, Op, Operand
from .topology import Device

HOW_TO_ADD = "add one with @rule from tpplan.planner.rules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ops of the whole model that have something in common."""

    key: str
    """An op's name, or a module's path with `*` for layer indices."""
    kind: str
    """The rule's family, `none` without a rule, `constant` for what has no input; or the module's class."""
    count: int
    """Executions in one forward pass."""
    flops: float
    """Forward FLOPs of one sample."""
    saved_bytes: float
    """Kept for backward, one sample."""
    source: str
    """`file.py:line` of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncovered:
    """Ops of one kind without a rule."""

    target: str
    where: str
    """Source line or module of the first."""
    count: int
    time_share: float
    """Of the computing time of a step, everything on one device."""


def by_target(graph: Graph) -> tuple[Group, ...]:
    """Ops by name, the most FLOPs first."""
    missing = _missing(graph)
    return _groups(graph, lambda op: (op.target, _kind(op, missing)))


def by_module(graph: Graph) -> tuple[Group, ...]:
    """Ops by the module that runs them, the most FLOPs first."""
    return _groups(graph, lambda op: (op.module or graph.name, op.module_class))


def covered_flops(graph: Graph) -> float:
    """Share of the forward FLOPs under a rule; ops without one count by a FLOP for each element made."""
    missing = _missing(graph)
    counted = uncounted = 0.0
    for op, count in _ops(graph):
        if op.target in missing:
            uncounted += count * sum(_elements(op, write) for write in op.writes)
        else:
            counted += count * op.forward_flops
    return counted / (counted + uncounted) if counted else float(not uncounted)


def uncovered(graph: Graph, device: Device) -> tuple[Uncovered, ...]:
    """Ops without a rule, the most time first."""
    missing = _missing(graph)
    if not missing:
        return ()
    seconds: dict[str, float] = defaultdict(float)
    found: dict[str, list[tuple[Op, int]]] = defaultdict(list)
    for op, count in _ops(graph):
        seconds[op.target] += count * _seconds(op, device)
        if op.target in missing:
            found[op.target].append((op, count))
    total = sum(seconds.values()) or 1.0
    ops = (
        Uncovered(
            target=target,
            where=_where(members[0][0]),
            count=sum(count for _, count in members),
            time_share=seconds[target] / total,
        )
        for target, members in found.items()
    )
    return tuple(sorted(ops, key=lambda op: (-op.time_share, op.target)))


def in_words(op: Uncovered) -> str:
    """A warning that names the op, its line, its weight, and what to do."""
    return (
        f"no sharding rule for {op.target} at {op.where} ({op.time_share:.1%} of the computing time): "
        f"planned whole on every rank of tp and priced by its memory traffic; {HOW_TO_ADD}"
    )


def check_covered(graph: Graph) -> None:
    """Raise `ModelError` if an op has no rule: what `--strict` asks for."""
    if graph.unknown:
        listed = ", ".join(sorted(graph.unknown))
        raise ModelError(f"no sharding rule for {listed}: {HOW_TO_ADD}, or plan without --strict")


def _missing(graph: Graph) -> frozenset[str]:
    """Names of the ops without a rule."""
    return frozenset(op.partition(" at ")[0] for op in graph.unknown)


def _kind(op: Op, missing: frozenset[str]) -> str:
    if op.target in missing:
        return "none"
    return "constant" if op.family == "opaque" else op.family


def _ops(graph: Graph) -> Iterator[tuple[Op, int]]:
    for block in graph.blocks.values():
        for op in block.ops:
            yield op, block.count


def _groups(graph: Graph, key: Callable[[Op], tuple[str, str]]) -> tuple[Group, ...]:
    members: dict[tuple[str, str], list[tuple[Op, int]]] = defaultdict(list)
    for op, count in _ops(graph):
        members[key(op)].append((op, count))
    groups = [
        Group(
            key=name,
            kind=kind,
            count=sum(count for _, count in ops),
            flops=sum(count * op.forward_flops for op, count in ops) / graph.batch,
            saved_bytes=sum(count * sum(saved_bytes(op, _sizes(op))) for op, count in ops) / graph.batch,
            source=next((op.source for op, _ in ops if op.source), ""),
        )
        for (name, kind), ops in members.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.flops, -group.saved_bytes, group.key)))


def _sizes(op: Op) -> dict[str, float]:
    return {dim.label: float(dim.size) for dim in op.dims}


def _elements(op: Op, operand: Operand) -> int:
    return math.prod(op.size(label) for label in operand.labels)


def _seconds(op: Op, device: Device) -> float:
    sizes = _sizes(op)
    work = (*forward_work(op, sizes), *backward_work(op, sizes))
    return sum(kernel_time(item, device).seconds for item in work)


def _where(op: Op) -> str:
    return op.source or op.module or "an unknown line"
