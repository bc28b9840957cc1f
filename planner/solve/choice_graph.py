"""Choose one state per node so that node costs plus pairwise edge costs are least.

In: nodes with a cost per state, edges with a cost per pair of states (infinity forbids a pair).
Out: the optimal states and their cost. Two exact steps:

1. Reduction. A node with one neighbour is folded into it; a node with two becomes an edge between
   them: `w[u, v] = min over x of c[x] + a[u, x] + b[x, v]`. Ops that merely follow others vanish,
   and residual blocks are series-parallel, so most blocks reduce to a single node.
2. What is left is an ILP over its local polytope: binary one-hots per node, *continuous* edge
   variables whose marginals equal them. Its linear relaxation is nearly always integral.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..errors import SolverError

Matrix = np.ndarray


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
    """The mutable problem; `solve` consumes a copy."""

    costs: dict[int, Matrix] = field(default_factory=dict)
    edges: dict[int, dict[int, Matrix]] = field(default_factory=dict)

    def node(self, costs: Iterable[float]) -> int:
        """Add a node; returns its id."""
        index = len(self.costs)
        self.costs[index] = np.asarray(tuple(costs), dtype=float)
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

    def cost_of(self, states: dict[int, int]) -> float:
        """The cost of a complete assignment."""
        nodes = sum(float(costs[states[n]]) for n, costs in self.costs.items())
        pairs = sum(
            float(w[states[u], states[v]]) for u, row in self.edges.items() for v, w in row.items() if u < v
        )
        return nodes + pairs


def solve(graph: ChoiceGraph, *, reduce: bool = True, time_limit_s: float | None = None) -> Assignment:
    """The optimal assignment. Raises `SolverError` when no assignment is possible."""
    costs = dict(graph.costs)
    edges = {u: dict(row) for u, row in graph.edges.items()}
    eliminated = _reduce(costs, edges) if reduce else []
    core = {n for n in costs if edges[n]}
    states = {n: int(np.argmin(costs[n])) for n in costs if n not in core}
    bound = math.nan
    optimal = True
    if core:
        found, bound, optimal = _ilp({n: costs[n] for n in core}, edges, time_limit_s)
        bound += sum(float(costs[n][s]) for n, s in states.items())
        states |= found
    for node, node_costs, neighbours in reversed(eliminated):
        total = node_costs.copy()
        for other, w in neighbours:
            total = total + w[:, states[other]]
        states[node] = int(np.argmin(total))
    cost = graph.cost_of(states)
    if not math.isfinite(cost):
        raise SolverError("no combination of splits is possible")
    return Assignment(
        states=states, cost=cost, bound=bound if core else cost, optimal=optimal, core=len(core)
    )


def _reduce(
    costs: dict[int, Matrix], edges: dict[int, dict[int, Matrix]]
) -> list[tuple[int, Matrix, list[tuple[int, Matrix]]]]:
    """Eliminate nodes of degree one and two, exactly; returns what back-substitution needs."""
    eliminated = []
    queue = sorted(costs)
    while queue:
        node = queue.pop(0)
        if node not in costs or not 0 < len(edges[node]) <= 2:
            continue
        neighbours = list(edges[node].items())
        eliminated.append((node, costs[node], neighbours))
        if len(neighbours) == 1:
            (u, w) = neighbours[0]
            costs[u] = costs[u] + (costs[node][:, None] + w).min(axis=0)
        else:
            (u, a), (v, b) = neighbours
            joint = _join(costs[node], a, b)
            present = edges[u].get(v)
            edges[u][v] = joint if present is None else present + joint
            edges[v][u] = edges[u][v].T
        for other, _ in neighbours:
            del edges[other][node]
            queue.append(other)
        del costs[node], edges[node]
    return eliminated


def _join(middle: Matrix, a: Matrix, b: Matrix) -> Matrix:
    """`min over x of middle[x] + a[x, u] + b[x, v]` as a (u, v) matrix."""
    left = middle[:, None] + a
    result = np.full((a.shape[1], b.shape[1]), np.inf)
    for x in range(len(middle)):
        np.minimum(result, left[x][:, None] + b[x][None, :], out=result)
    return result


def _ilp(
    costs: dict[int, Matrix], edges: dict[int, dict[int, Matrix]], time_limit_s: float | None
) -> tuple[dict[int, int], float, bool]:
    """One-hot binaries per node, continuous edge variables with equality marginals."""
    import pulp

    from . import solver

    model = pulp.LpProblem("choices", pulp.LpMinimize)
    nodes = {n: [pulp.LpVariable(f"s_{n}_{i}", cat="Binary") for i in range(len(c))] for n, c in costs.items()}
    objective = [
        float(c) * nodes[n][i] for n, row in costs.items() for i, c in enumerate(row) if math.isfinite(c) and c
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


def _edge_rows(model, left: list, right: list, w: Matrix, name: str) -> list:  # noqa: ANN001
    """Variables for the finite pairs of one edge, tied to both ends; returns its objective terms."""
    import pulp

    finite = np.isfinite(w)
    pairs = {
        (i, j): pulp.LpVariable(f"{name}_{i}_{j}", lowBound=0)
        for i in range(w.shape[0])
        for j in range(w.shape[1])
        if finite[i, j]
    }
    for i, state in enumerate(left):
        model += pulp.lpSum(pairs[i, j] for j in range(w.shape[1]) if finite[i, j]) == state
    for j, state in enumerate(right):
        model += pulp.lpSum(pairs[i, j] for i in range(w.shape[0]) if finite[i, j]) == state
    return [float(w[i, j]) * variable for (i, j), variable in pairs.items() if w[i, j]]
