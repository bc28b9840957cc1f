"""Choose one state per node so that node costs plus pairwise edge costs are least.

In: nodes with a cost per state, edges with a cost per pair of states (infinity forbids a pair), and costs
that are counts of things whose prices are told later. Out: the optimal states and their cost.
Three exact steps, the first and the order of the second once for all prices (`Presolved`):

1. States that no state of some neighbour goes with are dropped, until there are none. A node with one
   state left is settled: its edges become costs of its neighbours.
2. Nodes are eliminated one after the other (`elimination`), usually all of them.
3. Where that would take too large a table, only nodes with at most two neighbours are eliminated, and the
   rest is an ILP over the local polytope: binary one-hots per node, *continuous* edge variables whose
   marginals equal them. Its linear relaxation is nearly always integral.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SolverError
from .elimination import Eliminated, Elimination, Scope, greedy_orders, series_parallel_order

if TYPE_CHECKING:
    import pulp

Matrix = np.ndarray
MAX_WORK = 2**30
"""Most additions per table (some seconds) that eliminating all nodes may take."""
MAX_TABLE = 2**22
"""Most numbers in one table (32 MiB). A problem that needs more of either goes to the ILP."""
IMPOSSIBLE = "no combination of splits is possible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The best state of every node, the cost, and a proven lower bound of it."""

    states: dict[int, int]
    cost: float
    bound: float
    optimal: bool
    core: int
    """Nodes that were left to the ILP."""
    costs: tuple[float, ...] = ()
    """The cost under every row of costs that was solved, of which `cost` is the row's that it is best for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Costs on a node, or on a pair of nodes, that are counts of things with a price."""

    scope: Scope
    counts: Matrix
    """(a state per node of the scope, thing)."""
    item: int
    """Which row of prices these things have."""


@dataclass(slots=True)
class ChoiceGraph:
    """The problem, built up node by node; solving leaves it as it is."""

    costs: dict[int, Matrix] = field(default_factory=dict)
    edges: dict[int, dict[int, Matrix]] = field(default_factory=dict)
    priced: list[Priced] = field(default_factory=list)

    def node(self, costs: Iterable[float]) -> int:
        """Add a node; returns its id."""
        index = len(self.costs)
        self.costs[index] = np.fromiter(costs, dtype=float)
        self.edges[index] = {}
        return index

    def edge(self, u: int, v: int, costs: Matrix) -> None:
        """Add costs on a pair of nodes; `costs[i, j]` for state i of u and j of v. Accumulates."""
        if u == v:
            self.costs[u] = self.costs[u] + np.diagonal(costs)
            return
        present = self.edges[u].get(v)
        total = costs if present is None else present + costs
        self.edges[u][v] = total
        self.edges[v][u] = total.T

    def price_node(self, node: int, counts: Matrix, item: int) -> None:
        """Add counts (state, thing) to a node's cost, at the prices that `item` will have."""
        self.priced.append(Priced(scope=(node,), counts=counts, item=item))

    def price_edge(self, u: int, v: int, counts: Matrix, item: int) -> None:
        """Add counts (state of u, state of v, thing) to a pair's cost, at the prices of `item`."""
        if u == v:
            self.price_node(u, np.diagonal(counts).T, item)
        elif u < v:
            self.priced.append(Priced(scope=(u, v), counts=counts, item=item))
        else:
            self.priced.append(Priced(scope=(v, u), counts=counts.transpose(1, 0, 2), item=item))

    def pairs(self) -> Iterator[tuple[int, int, Matrix]]:
        """Every edge with costs of its own once, from the lower id to the higher."""
        return ((u, v, w) for u, row in self.edges.items() for v, w in row.items() if u < v)


def solve(graph: ChoiceGraph, *, prices: Matrix | None = None, reduce: bool = True) -> Assignment:
    """The optimal assignment at these prices (item, thing), if anything has a price.

    `reduce=False` hands the whole problem to the ILP. Raises `SolverError` when no assignment is possible.
    """
    (found,) = Presolved(graph, reduce=reduce).solve(np.zeros((1, 0)), prices)
    return found


class Presolved:
    """A choice graph made ready to be solved under many costs and prices.

    All tables lie in one row of numbers: first those of nodes, then those of pairs, each over the states that
    were kept.
    """

    def __init__(self, graph: ChoiceGraph, *, reduce: bool = True) -> None:
        """Raises `SolverError` when some node has no possible state."""
        self.kept = _possible(graph) if reduce else {n: np.arange(len(c)) for n, c in graph.costs.items()}
        self._settled = [n for n, kept in self.kept.items() if len(kept) == 1] if reduce else []
        self._places: dict[Scope, slice] = {}
        self._length = 0
        for n in graph.costs:
            self._place((n,))
        settled = frozenset(self._settled)
        terms = [
            *(((n,), costs) for n, costs in graph.costs.items()),
            *(((u, v), w) for u, v, w in graph.pairs()),
        ]
        fixed = [self._reduced(scope, table, settled) for scope, table in terms]
        counted = [(*self._reduced(p.scope, p.counts, settled), p.item) for p in graph.priced]
        self._base = np.zeros(self._length)
        for place, table in fixed:
            self._base[place] += table.ravel()
        self._counts, self._items, self._targets = _stacked(counted)
        self._sizes = {n: len(kept) for n, kept in self.kept.items() if n not in settled}
        self._pairs = [scope for scope in self._places if len(scope) == 2]
        self._elimination = Elimination(self._sizes, self._pairs, self._cheapest_order() if reduce else ())
        self._lookups = self._where_to_look()

    def _place(self, scope: Scope) -> slice:
        """Where the table of a scope lies; the next free place if it is new."""
        if scope not in self._places:
            end = self._length + math.prod(len(self.kept[n]) for n in scope)
            self._places[scope] = slice(self._length, end)
            self._length = end
        return self._places[scope]

    def _reduced(self, scope: Scope, table: Matrix, settled: frozenset[int]) -> tuple[slice, Matrix]:
        """A table over the states that were kept, and its place: beside others a settled node has no axis."""
        small = table[np.ix_(*(self.kept[n] for n in scope))]
        left = tuple(n for n in scope if n not in settled) or scope[:1]
        return self._place(left), small.reshape(-1, *small.shape[len(scope) :])

    def _where_to_look(self) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """Per table its first and last node, where it starts, and how far its rows lie apart."""
        tables = [
            (scope[0], scope[-1], place.start, len(self.kept[scope[1]]) if len(scope) == 2 else 0)
            for scope, place in self._places.items()
        ]
        rows, columns, starts, widths = np.array(tables).T
        return rows, columns, starts, widths

    def _cheapest_order(self) -> tuple[int, ...]:
        """The cheapest order of all nodes, or one of those with few neighbours where it costs too much."""
        neighbours: dict[int, set[int]] = {n: set() for n in self._sizes}
        for u, v in self._pairs:
            neighbours[u].add(v)
            neighbours[v].add(u)
        cheapest = min(greedy_orders(self._sizes, neighbours), key=lambda order: order.work)
        if cheapest.work <= MAX_WORK and cheapest.largest <= MAX_TABLE:
            return cheapest.nodes
        return series_parallel_order(self._sizes, neighbours).nodes

    def solve(self, costs: Matrix, prices: Matrix | None = None) -> list[Assignment]:
        """The optimal assignment for each row of `costs`, at prices (item, thing).

        A row has the costs of the kept states of the first nodes, one node after the other.

        Raises `SolverError` when no assignment is possible.
        """
        return self.solve_and_bound(costs, prices, ())[0]

    def solve_and_bound(
        self, costs: Matrix, prices: Matrix | None, parts: Sequence[tuple[Matrix, frozenset[int]]]
    ) -> tuple[list[Assignment], list[float]]:
        """The same, and what any assignment takes at least in each of `parts`: by other costs, and where only
        some items have prices (nodes that would be left to an ILP count for nothing)."""
        alone = [self._tables(part[None], _only(items, prices)) for part, items in parts]
        rows = np.concatenate([self._tables(costs, prices), *alone])
        scopes = [*((n,) for n in self._sizes), *self._pairs]
        eliminated = self._elimination.run([self._table(rows, scope) for scope in scopes], len(rows))
        solved, least = rows[: len(costs)], range(len(costs), len(rows))
        return (
            [self._assignment(eliminated, row, solved) for row in range(len(solved))],
            [self._constant(eliminated, row, rows[row]) for row in least],
        )

    def _constant(self, eliminated: Eliminated, row: int, tables: Matrix) -> float:
        """Least cost of the nodes that went, and the cost of those that had no choice."""
        settled = sum(float(tables[self._places[n,]][0]) for n in self._settled)
        return float(eliminated.constants[row]) + settled

    def _assignment(self, eliminated: Eliminated, row: int, rows: Matrix) -> Assignment:
        states, bound, optimal = dict[int, int](), 0.0, True
        left, edges = eliminated.left(row)
        if left:
            states, bound, optimal = _ilp(left, edges)
        eliminated.restore(row, states)
        states |= dict.fromkeys(self._settled, 0)
        costs = self._costs_of(states, rows)
        cost = costs[row]
        if not math.isfinite(cost):
            raise SolverError(IMPOSSIBLE)
        bound += self._constant(eliminated, row, rows[row])
        found = {n: int(kept[states[n]]) for n, kept in self.kept.items()}
        return Assignment(
            states=found, cost=cost, bound=min(bound, cost), optimal=optimal, core=len(left), costs=costs
        )

    def _tables(self, costs: Matrix, prices: Matrix | None) -> Matrix:
        """All tables, one after the other, for each row of costs."""
        common = self._base
        if prices is not None and len(self._items):
            priced = np.einsum("et,et->e", self._counts, prices[self._items])
            common = common + np.bincount(self._targets, weights=priced, minlength=len(common))
        tables = np.tile(common, (len(costs), 1))
        tables[:, : costs.shape[1]] += costs
        return tables

    def _costs_of(self, states: dict[int, int], rows: Matrix) -> tuple[float, ...]:
        """The sum over all tables, for each row."""
        chosen = np.array([states[n] for n in range(len(states))])
        firsts, lasts, starts, widths = self._lookups
        places = starts + chosen[firsts] * widths + chosen[lasts]
        return tuple(rows[:, places].sum(axis=1).tolist())

    def _table(self, rows: Matrix, scope: Scope) -> Matrix:
        """(row, a state per node of the scope)."""
        return rows[:, self._places[scope]].reshape(-1, *(len(self.kept[n]) for n in scope))


def _only(items: frozenset[int], prices: Matrix | None) -> Matrix | None:
    """Prices of some items, 0 for all others."""
    if prices is None:
        return None
    some = np.zeros_like(prices)
    places = sorted(items)
    some[places] = prices[places]
    return some


def _stacked(counted: list[tuple[slice, Matrix, int]]) -> tuple[Matrix, Matrix, Matrix]:
    """Counts (number, thing) of all tables, which item's prices each has, and where it is added."""
    if not counted:
        return np.zeros((0, 0)), np.zeros(0, dtype=int), np.zeros(0, dtype=int)
    counts = np.concatenate([rows for _, rows, _ in counted])
    items = np.concatenate([np.full(len(rows), item) for _, rows, item in counted])
    targets = np.concatenate([np.arange(place.start, place.stop) for place, _, _ in counted])
    some = counts.any(axis=1)
    return counts[some], items[some], targets[some]


def _possible(graph: ChoiceGraph) -> dict[int, Matrix]:
    """Per node the states that some state of every neighbour goes with.

    Raises `SolverError` when a node has none.
    """
    alive = {n: np.isfinite(costs) for n, costs in graph.costs.items()}
    limits: dict[int, list[tuple[int, Matrix]]] = {n: [] for n in graph.costs}
    for u, v, w in graph.pairs():
        finite = np.isfinite(w)
        if not finite.all():
            limits[u].append((v, finite))
            limits[v].append((u, finite.T))
    waiting = dict.fromkeys(graph.costs)
    while waiting:
        node, _ = waiting.popitem()
        mask = alive[node].copy()
        for other, finite in limits[node]:
            mask &= finite[:, alive[other]].any(axis=1)
        if not mask.any():
            raise SolverError(IMPOSSIBLE)
        if not np.array_equal(mask, alive[node]):
            alive[node] = mask
            waiting |= dict.fromkeys(other for other, _ in limits[node])
    return {n: np.flatnonzero(mask) for n, mask in alive.items()}


def _ilp(costs: dict[int, Matrix], edges: dict[int, dict[int, Matrix]]) -> tuple[dict[int, int], float, bool]:
    """One-hot binaries per node, continuous edge variables with equality marginals."""
    import pulp

    from . import solver

    model = pulp.LpProblem("choices", pulp.LpMinimize)
    nodes = {
        n: [model.add_variable(f"s_{n}_{i}", cat="Binary") for i in range(len(c))] for n, c in costs.items()
    }
    objective = [
        float(c) * nodes[n][i]
        for n, row in costs.items()
        for i, c in enumerate(row)
        if math.isfinite(c) and c
    ]
    for n, row in costs.items():
        model += pulp.lpSum(nodes[n]) == 1
        for i, c in enumerate(row):
            if not math.isfinite(c):
                model += nodes[n][i] == 0
    for u in sorted(costs):
        for v, w in sorted(edges[u].items()):
            if u < v:
                objective.extend(_edge_rows(model, nodes[u], nodes[v], w, f"e_{u}_{v}"))
    model += pulp.lpSum(objective)
    solution = solver.solve(model)
    if not solution.has_values:
        raise SolverError(f"the split ILP ended {solution.status} ({solution.solver})")
    states = {n: max(range(len(v)), key=lambda i, v=v: v[i].value() or 0.0) for n, v in nodes.items()}
    return states, solution.bound, solution.status is solver.Status.OPTIMAL


def _edge_rows(
    model: pulp.LpProblem, left: list, right: list, w: Matrix, name: str
) -> list[pulp.LpAffineExpression]:
    """Variables for the finite pairs of one edge, tied to both ends; returns its objective terms."""
    import pulp

    finite = np.isfinite(w)
    pairs = {
        (i, j): model.add_variable(f"{name}_{i}_{j}", lowBound=0)
        for i in range(w.shape[0])
        for j in range(w.shape[1])
        if finite[i, j]
    }
    for i, state in enumerate(left):
        model += pulp.lpSum(pairs[i, j] for j in range(w.shape[1]) if finite[i, j]) == state
    for j, state in enumerate(right):
        model += pulp.lpSum(pairs[i, j] for i in range(w.shape[0]) if finite[i, j]) == state
    return [float(w[i, j]) * variable for (i, j), variable in pairs.items() if w[i, j]]
