"""Choose one state per node so that node costs plus pairwise edge costs are least.

In: nodes with a cost per state, edges with a cost per pair of states (infinity forbids a pair).
Out: the optimal states and their cost. Three exact steps:

1. States that no state of some neighbour goes with are dropped, until there are none. A node with one
   state left is settled: its edges become costs of its neighbours.
2. Nodes are eliminated one after the other (`elimination`), usually all of them.
3. Where that would take too large a table, only nodes with at most two neighbours are eliminated, and the
   rest is an ILP over the local polytope: binary one-hots per node, *continuous* edge variables whose
   marginals equal them. Its linear relaxation is nearly always integral.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SolverError
from .elimination import Elimination, Order, greedy_orders, series_parallel_order

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


@dataclass(slots=True)
class ChoiceGraph:
    """The problem, built up node by node; `solve` leaves it as it is."""

    costs: dict[int, Matrix] = field(default_factory=dict)
    edges: dict[int, dict[int, Matrix]] = field(default_factory=dict)

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

    def pairs(self) -> Iterator[tuple[int, int, Matrix]]:
        """Every edge once, from the lower id to the higher."""
        return ((u, v, w) for u, row in self.edges.items() for v, w in row.items() if u < v)

    def cost_of(self, states: dict[int, int]) -> float:
        """The cost of a complete assignment."""
        nodes = sum(float(costs[states[n]]) for n, costs in self.costs.items())
        return nodes + sum(float(w[states[u], states[v]]) for u, v, w in self.pairs())


def solve(graph: ChoiceGraph, *, reduce: bool = True, time_limit_s: float | None = None) -> Assignment:
    """The optimal assignment. Raises `SolverError` when no assignment is possible.

    `reduce=False` hands the whole problem to the ILP.
    """
    states, bound, optimal, core = (_reduced if reduce else _whole)(graph, time_limit_s)
    cost = graph.cost_of(states)
    if not math.isfinite(cost):
        raise SolverError(IMPOSSIBLE)
    return Assignment(states=states, cost=cost, bound=min(bound, cost), optimal=optimal, core=core)


Found = tuple[dict[int, int], float, bool, int]
"""States, a lower bound, whether they are proven best, and how many nodes the ILP had."""


def _whole(graph: ChoiceGraph, time_limit_s: float | None) -> Found:
    """By the ILP alone."""
    return *_ilp(graph.costs, graph.edges, time_limit_s), len(graph.costs)


def _reduced(graph: ChoiceGraph, time_limit_s: float | None) -> Found:
    """By elimination, and by the ILP where that does not suffice."""
    kept = _possible(graph)
    small = _settled(graph, kept)
    elimination = Elimination(small.costs, small.pairs())
    for node in _order(small).nodes:
        elimination.eliminate(node)
    states, bound, optimal = dict[int, int](), 0.0, True
    costs, edges = elimination.left()
    if costs:
        states, bound, optimal = _ilp(costs, edges, time_limit_s)
    elimination.restore(states)
    found = {n: int(kept[n][states[n]]) for n in graph.costs}
    return found, bound + elimination.constant, optimal, len(costs)


def _order(graph: ChoiceGraph) -> Order:
    """The cheapest order of all nodes, or one of those with few neighbours where it costs too much."""
    sizes = {n: len(costs) for n, costs in graph.costs.items()}
    cheapest = min(greedy_orders(sizes, graph.edges), key=lambda order: order.work)
    if cheapest.work <= MAX_WORK and cheapest.largest <= MAX_TABLE:
        return cheapest
    return series_parallel_order(sizes, graph.edges)


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


def _settled(graph: ChoiceGraph, kept: dict[int, Matrix]) -> ChoiceGraph:
    """The problem over the states that were kept; nodes with a single one have no edges any more."""
    small = ChoiceGraph(costs={n: c[kept[n]] for n, c in graph.costs.items()}, edges={n: {} for n in kept})
    for u, v, w in graph.pairs():
        costs = w[np.ix_(kept[u], kept[v])]
        if len(kept[u]) == 1:
            small.costs[v] = small.costs[v] + costs[0]
        elif len(kept[v]) == 1:
            small.costs[u] = small.costs[u] + costs[:, 0]
        else:
            small.edge(u, v, costs)
    return small


def _ilp(
    costs: dict[int, Matrix], edges: dict[int, dict[int, Matrix]], time_limit_s: float | None
) -> tuple[dict[int, int], float, bool]:
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
    solution = solver.solve(model, time_limit_s=time_limit_s)
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
