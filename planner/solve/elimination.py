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
from collections.abc import Callable, Collection, Iterable, Mapping
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


class Elimination:
    """The tables that are left, and those that nodes went by."""

    def __init__(self, costs: Mapping[int, Matrix], pairs: Iterable[tuple[int, int, Matrix]]) -> None:
        """Costs per state of every node, and of pairs u < v of them."""
        self.constant = 0.0
        """The least sum over the nodes that have gone, as far as it depends on no other."""
        self._tables: dict[int, dict[Scope, Matrix]] = {n: {(n,): table} for n, table in costs.items()}
        self._gone: list[tuple[int, dict[Scope, Matrix]]] = []
        for u, v, table in pairs:
            self._add((u, v), table)

    def eliminate(self, node: int) -> None:
        """Replace all tables that mention the node by one over its neighbours."""
        mentions = self._tables.pop(node)
        for scope in mentions:
            for other in scope:
                if other != node:
                    del self._tables[other][scope]
        self._gone.append((node, mentions))
        around = tuple(sorted({other for scope in mentions for other in scope} - {node}))
        self._add(around, _least(node, mentions, around))

    def _add(self, scope: Scope, table: Matrix) -> None:
        if not scope:
            self.constant += float(table)
        for node in scope:
            present = self._tables[node].get(scope)
            self._tables[node][scope] = table if present is None else present + table

    def left(self) -> tuple[dict[int, Matrix], dict[int, dict[int, Matrix]]]:
        """Costs of the nodes that are left, and of pairs of them; no larger table may be left."""
        costs = {n: tables[n,] for n, tables in self._tables.items()}
        edges: dict[int, dict[int, Matrix]] = {n: {} for n in costs}
        for tables in self._tables.values():
            for u, v in (scope for scope in tables if len(scope) > 1):
                edges[u][v], edges[v][u] = tables[u, v], tables[u, v].T
        return costs, edges

    def restore(self, states: dict[int, int]) -> None:
        """Add the best states of the nodes that went to those of the nodes that were left."""
        for node, mentions in reversed(self._gone):
            rows = (
                table[tuple(slice(None) if n == node else states[n] for n in scope)]
                for scope, table in mentions.items()
            )
            states[node] = int(np.argmin(sum(rows)))


def _least(node: int, tables: Mapping[Scope, Matrix], around: Scope) -> Matrix:
    """The least sum over the node's states, as a table over `around`."""
    lengths = {
        n: length for scope, table in tables.items() for n, length in zip(scope, table.shape, strict=True)
    }
    laid = sorted((_laid(node, scope, table, around) for scope, table in tables.items()), key=_numbers)
    shape = tuple(lengths[n] for n in around)
    if lengths[node] * math.prod(shape) <= MAX_AT_ONCE:
        return reduce(np.add, laid).min(axis=0)
    least = np.full(shape, np.inf)
    for state in range(lengths[node]):
        np.minimum(least, reduce(np.add, (table[state] for table in laid)), out=least)
    return least


def _numbers(table: Matrix) -> int:
    return table.size


def _laid(node: int, scope: Scope, table: Matrix, around: Scope) -> Matrix:
    """The table with the node's axis first, then one per node of `around`; of length one if it lacks it."""
    axis = scope.index(node)
    first = table.transpose(axis, *(i for i in range(len(scope)) if i != axis)) if axis else table
    if len(scope) == len(around) + 1:
        return first
    lengths = dict(zip((n for n in scope if n != node), first.shape[1:], strict=True))
    return first.reshape(first.shape[0], *(lengths.get(n, 1) for n in around))
