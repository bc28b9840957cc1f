"""A sum of tables over the states of nodes, minimised by eliminating one node after the other.

In: tables, each over the states of a few nodes. Out: the least sum and the states that give it. Of the
tables that mention node x, over x and its neighbours N,

    t[N] = min over x of their sum

takes the place of all; on the way back x is the state that gave the minimum. This is exact whatever the
order (bucket elimination: R. Dechter, Artificial Intelligence 113, 1999, 41-85). The order decides how large
the tables become: finding the best one is hard, and greedy ones do well on graphs that are nearly chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heapify, heappop, heappush

import numpy as np

Matrix = np.ndarray
Scope = tuple[int, ...]
"""The nodes of a table, ascending, one to an axis."""
MAX_AT_ONCE = 2**15
"""Largest sum of tables that is laid out whole, in numbers; of larger ones one state of x at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Nodes in the order in which they go."""

    nodes: tuple[int, ...]
    work: int
    """Additions it takes, per table that is summed."""
    largest: int
    """Numbers in the largest table that is made."""


def greedy_orders(sizes: Mapping[int, int], neighbours: Mapping[int, Collection[int]]) -> tuple[Order, ...]:
    """Orders of all nodes by which the one with the smallest new table goes first, or with the least work.

    `sizes`: number of states of each node.
    """
    return (
        _greedy(sizes, neighbours, lambda table, states: (table, table * states)),
        _greedy(sizes, neighbours, lambda table, states: (table * states, table)),
    )


def series_parallel_order(sizes: Mapping[int, int], neighbours: Mapping[int, Collection[int]]) -> Order:
    """An order of the nodes that can go while they have two neighbours at most."""
    return _greedy(sizes, neighbours, lambda table, states: (table, table * states), most=2)


def _greedy(
    sizes: Mapping[int, int],
    neighbours: Mapping[int, Collection[int]],
    score: Callable[[int, int], tuple[int, int]],
    *,
    most: int | None = None,
) -> Order:
    """The order by least `score(numbers in the new table, states)`; ties go to the older node."""
    near = {n: set(others) for n, others in neighbours.items()}

    def entry(n: int) -> tuple[tuple[int, int], int, int]:
        table = math.prod(sizes[v] for v in near[n])
        return score(table, sizes[n]), n, table

    current = {n: entry(n) for n in near}
    heap = list(current.values())
    heapify(heap)
    nodes, work, largest = [], 0, 0
    while heap:
        found = heappop(heap)
        _, node, table = found
        if current.get(node) != found or (most is not None and len(near[node]) > most):
            continue
        nodes.append(node)
        work, largest = work + table * sizes[node], max(largest, table)
        around = near.pop(node)
        del current[node]
        for other in around:
            near[other] |= around
            near[other] -= {other, node}
        for other in around:
            if (fresh := entry(other)) != current[other]:
                current[other] = fresh
                heappush(heap, fresh)
    return Order(nodes=tuple(nodes), work=work, largest=largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A table that mentions a node, and how it is laid out beside the others: the node's axis first, then one
    per neighbour, of length one where it lacks that."""

    table: int
    axes: tuple[int, ...] | None
    """The order of its axes, rows of problems first; None: as they are."""
    shape: tuple[int, ...] | None
    """Its shape then, but for the rows; None: as it is."""

    def laid(self, tables: Sequence[Matrix]) -> Matrix:
        """(row, state of the node, a state per neighbour)."""
        found = tables[self.table]
        if self.axes is not None:
            found = found.transpose(self.axes)
        return found if self.shape is None else found.reshape(len(found), *self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A node goes: the tables that mention it are replaced by their least sum over its states."""

    node: int
    around: Scope
    parts: tuple[_Part, ...]
    """The smallest first."""
    into: int
    """Which table the least sum is, or is added to."""
    adds: bool
    at_once: bool
    """Whether the sum is laid out whole, else one state of the node at a time."""


class Elimination:
    """The steps by which nodes go, whatever the numbers in their tables."""

    def __init__(self, sizes: Mapping[int, int], pairs: Iterable[Scope], nodes: Sequence[int]) -> None:
        """`sizes`: number of states of each node. `pairs`: those with a table of their own, which come after
        one table of each node. `nodes`: those that go, in this order."""
        self._sizes = sizes
        self._scopes: list[Scope] = [(), *((n,) for n in sizes), *pairs]
        """Of each table that is made; the first is the sum that no node is mentioned in."""
        self._live: dict[int, dict[Scope, int]] = {n: {} for n in sizes}
        for index, scope in enumerate(self._scopes):
            for n in scope:
                self._live[n][scope] = index
        self._steps = [self._step(node) for node in nodes]

    def _step(self, node: int) -> _Step:
        mentions = self._live.pop(node)
        for scope in mentions:
            for other in scope:
                if other != node:
                    del self._live[other][scope]
        around = tuple(sorted({other for scope in mentions for other in scope} - {node}))
        into = self._live[around[0]].get(around) if around else 0
        adds = into is not None
        if into is None:
            into = len(self._scopes)
            self._scopes.append(around)
            for n in around:
                self._live[n][around] = into
        by_size = sorted(mentions, key=self._numbers)
        return _Step(
            node=node,
            around=around,
            parts=tuple(self._part(mentions[scope], scope, node, around) for scope in by_size),
            into=into,
            adds=adds,
            at_once=self._numbers((node, *around)) <= MAX_AT_ONCE,
        )

    def _numbers(self, scope: Scope) -> int:
        return math.prod(self._sizes[n] for n in scope)

    def _part(self, table: int, scope: Scope, node: int, around: Scope) -> _Part:
        place = scope.index(node)
        axes = (0, place + 1, *(i + 1 for i in range(len(scope)) if i != place)) if place else None
        shape = (self._sizes[node], *(self._sizes[n] if n in scope else 1 for n in around))
        return _Part(table=table, axes=axes, shape=shape if len(scope) <= len(around) else None)

    def run(self, tables: Sequence[Matrix], rows: int) -> Eliminated:
        """Let the nodes go. `tables` are of (row, a state per node): every row is a problem of its own."""
        made = [np.zeros(rows), *tables]
        sums = []
        for step in self._steps:
            laid = [part.laid(made) for part in step.parts]
            if step.at_once:
                laid = [reduce(np.add, laid)]
            least = laid[0].min(axis=1) if step.at_once else _least(laid, self._sizes[step.node])
            if step.adds:
                made[step.into] = made[step.into] + least
            else:
                made.append(least)
            sums.append(laid)
        return Eliminated(constants=made[0], tables=made, sums=sums, steps=self._steps, live=self._live)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eliminated:
    """What is left of several problems, and the sums that nodes went by."""

    constants: Matrix
    """Per problem the least sum over the nodes that have gone, as far as it depends on no other."""
    tables: Sequence[Matrix]
    sums: Sequence[Sequence[Matrix]]
    steps: Sequence[_Step]
    live: Mapping[int, Mapping[Scope, int]]

    def left(self, row: int) -> tuple[dict[int, Matrix], dict[int, dict[int, Matrix]]]:
        """Costs of the nodes that are left of a problem, and of pairs; no larger table may be left."""
        costs = {n: self.tables[tables[n,]][row] for n, tables in self.live.items()}
        edges: dict[int, dict[int, Matrix]] = {n: {} for n in costs}
        for tables in self.live.values():
            for (u, v), index in ((scope, i) for scope, i in tables.items() if len(scope) > 1):
                edges[u][v], edges[v][u] = self.tables[index][row], self.tables[index][row].T
        return costs, edges

    def restore(self, row: int, states: dict[int, int]) -> None:
        """Add the best states of the nodes that went to those of the nodes that were left of a problem."""
        for step, laid in zip(reversed(self.steps), reversed(self.sums), strict=True):
            around = [states[n] for n in step.around]
            total = sum(
                table[row][
                    :, *(min(state, width - 1) for state, width in zip(around, table.shape[2:], strict=True))
                ]
                for table in laid
            )
            states[step.node] = int(np.argmin(total))


def _least(laid: Sequence[Matrix], states: int) -> Matrix:
    """The least sum of tables over the states of a node, one state at a time."""
    return reduce(np.minimum, (reduce(np.add, (table[:, i] for table in laid)) for i in range(states)))
