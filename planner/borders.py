"""Where a conversion between two layouts can be stated: where modules begin and end.

In: a graph. Out: the first and last ops of modules that read parameters and have no other inside, or that
route tokens to experts, and which tensors enter the first of several layers. This project's runtime hangs
conversions there (`runtime/moves.py`); between other ops it makes none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from .graph import Edge, Graph, Operand
from .layout import Shard
from .routed import routed_ops, routing_module
from .rules.choices import shard

FLOATS = ("float", "bfloat")
"""How the names of dtypes begin that have gradients."""
OpKey = tuple[str, int]
"""(block class, op index)."""


def has_gradients(operand: Operand) -> bool:
    """Whether a tensor's dtype lets it have one; ids and positions are left as they are."""
    return operand.dtype.startswith(FLOATS)


@dataclass(frozen=True, eq=False)
class Borders:
    """The borders of one graph."""

    graph: Graph

    @cached_property
    def _inside(self) -> dict[tuple[str, str], list[int]]:
        """(block, module) -> indices of the ops in it or in modules inside it."""
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for name, block in self.graph.blocks.items():
            for i, op in enumerate(block.ops):
                path = op.module.split(".") if op.module else []
                for length in range(1, len(path) + 1):
                    found[name, ".".join(path[:length])].append(i)
        return found

    @cached_property
    def _owners(self) -> frozenset[str]:
        """Modules that read parameters."""
        ops = (op for block in self.graph.blocks.values() for op in block.ops)
        return frozenset(op.module for op in ops if any(read.kind == "parameter" for read in op.reads))

    @cached_property
    def _routing(self) -> frozenset[str]:
        found = (routing_module(block) for block in self.graph.blocks.values())
        return frozenset(path for path in found if path is not None)

    @cached_property
    def _routed(self) -> frozenset[OpKey]:
        return routed_ops(self.graph)

    def _is_border(self, key: OpKey, at: int) -> bool:
        block, index = key
        ops = self.graph.blocks[block].ops
        module = ops[index].module
        inside = self._inside.get((block, module), [])
        leaf = module in self._owners and all(ops[i].module == module for i in inside)
        return bool(module) and (leaf or module in self._routing) and index == inside[at]

    def begins(self, key: OpKey) -> bool:
        """Whether the op is the first of such a module."""
        return self._is_border(key, 0)

    def ends(self, key: OpKey) -> bool:
        """Whether it is the last."""
        return self._is_border(key, -1)

    @cached_property
    def _edges(self) -> dict[tuple[str, int, int], int]:
        counts: dict[tuple[str, int, int], int] = defaultdict(int)
        for edge in self.graph.edges:
            counts[edge.producer] += 1
        return counts

    def layer_entered(self, edge: Edge) -> str | None:
        """`layers.0`, when the tensor comes from outside into the first layer of a class."""
        consumer = self.graph.blocks[edge.block]
        if not consumer.repeated or self.graph.blocks[edge.producer[0]].repeated:
            return None
        same_list = [name for name in self.graph.chain if self.graph.blocks[name].module == consumer.module]
        return consumer.module.replace("*", str(same_list.index(edge.block)))

    def stated_together(self, edge: Edge) -> bool:
        """Whether all consumers of a tensor may share one conversion: where it is made, or enters a layer."""
        if not has_gradients(self._read(edge.consumers[0])):
            return False
        if edge.producer[:2] in self._routed:
            return True
        alone = self._edges[edge.producer] == 1 and self.ends(edge.producer[:2])
        return alone or self.layer_entered(edge) is not None

    def stated_by(self, edge: Edge) -> tuple[bool, ...]:
        """For each consumer whether it may convert what it reads itself."""
        return tuple(
            has_gradients(self._read((block, op, read)))
            and (self.begins((block, op)) or (block, op) in self._routed)
            for block, op, read in edge.consumers
        )

    def never_stated(self, edge: Edge) -> frozenset[Shard]:
        """Cuts of inner factors of a dim (heads of a fused projection): no conversion names them.

        Rows on their way to experts are not converted but sent.
        """
        if edge.producer[:2] in self._routed and all((b, i) in self._routed for b, i, _ in edge.consumers):
            return frozenset()
        ends = [(op := self.graph.blocks[b].ops[i], op.reads[read]) for b, i, read in edge.consumers]
        block, index, write = edge.producer
        maker = self.graph.blocks[block].ops[index]
        ends.append((maker, maker.writes[write]))
        return frozenset(
            cut
            for op, operand in ends
            for labels in operand.axes
            for i, label in enumerate(labels)
            if math.prod(op.size(outer) for outer in labels[:i]) > 1
            if (cut := shard(op, operand, label)) is not None
        )

    def _read(self, consumer: tuple[str, int, int]) -> Operand:
        block, op, read = consumer
        return self.graph.blocks[block].ops[op].reads[read]
