"""Choose one state per node so that node costs plus pairwise edge costs are least.

In: nodes with a cost per state, edges with a cost per pair of states (infinity forbids a pair).
Out: the optimal states and their cost. It is an ILP over the local polytope: binary one-hots per
node, *continuous* edge variables whose marginals equal them. Its linear relaxation is nearly always
integral. Before it is written, an exact presolve shrinks it, usually to nothing:

1. A node with one neighbour is folded into it; a node with two becomes an edge between them,
   `w[u, v] = min over x of c[x] + a[u, x] + b[x, v]`. Ops that merely follow others vanish.
2. Where none is left, the node that is cheapest to fold into all its neighbours is: these become one
   node of joint states first, so that a residual stream with its skip connections goes on reducing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SolverError

if TYPE_CHECKING:
    import pulp

Matrix = np.ndarray
MAX_ELIMINATION_WORK = 2**24
"""Largest min-plus product that the presolve takes on, in additions (some 50 ms); a problem that needs a
larger one goes to the ILP as it was before merging."""


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
    small = _Presolve(graph)
    if reduce:
        small.eliminate()
        small = small.merged() or small
    core = {n for n in small.costs if small.edges[n]}
    states = {n: int(np.argmin(c)) for n, c in small.costs.items() if n not in core}
    bound, optimal = sum(float(small.costs[n][s]) for n, s in states.items()), True
    if core:
        found, core_bound, optimal = _ilp({n: small.costs[n] for n in core}, small.edges, time_limit_s)
        bound += core_bound
        states |= found
    small.restore(states)
    cost = graph.cost_of(states)
    if not math.isfinite(cost):
        raise SolverError("no combination of splits is possible")
    return Assignment(states=states, cost=cost, bound=min(bound, cost), optimal=optimal, core=len(core))


class _Presolve:
    """Exact reductions, and the way back from a solution of what is left."""

    def __init__(self, graph: ChoiceGraph | _Presolve) -> None:
        self.costs = dict(graph.costs)
        self.edges = {u: dict(row) for u, row in graph.edges.items()}
        self._undo: list[Callable[[dict[int, int]], None]] = []
        self._fresh = max(self.costs, default=0) + 1

    def eliminate(self) -> None:
        """Fold away nodes of degree one and two, everywhere."""
        self._eliminate(sorted(self.costs))

    def merged(self) -> _Presolve | None:
        """This problem solved to the end by merging, or None where a joint node would be too large.

        Half-merged problems are of no use: their dense core is far harder for the ILP than the sparse
        one it came from.
        """
        whole = _Presolve(self)
        whole._undo, whole._fresh = list(self._undo), self._fresh
        while any(whole.edges.values()):
            node = min((n for n in whole.costs if whole.edges[n]), key=whole._joint_states)
            if whole._elimination_work(node) > MAX_ELIMINATION_WORK:
                return None
            while len(whole.edges[node]) > 2:
                u, v, *_ = sorted(whole.edges[node], key=lambda n: (len(whole.costs[n]), n))
                whole._merge(u, v)
            whole._eliminate(sorted({node, *whole.edges[node]}))
        return whole

    def _joint_states(self, node: int) -> tuple[int, int]:
        """States of the node that folding this one away would make of its neighbours; ties by id."""
        return math.prod(len(self.costs[n]) for n in self.edges[node]), node

    def _elimination_work(self, node: int) -> int:
        """Sums and comparisons it takes to fold a node into all its neighbours at once."""
        return math.prod(len(self.costs[n]) for n in (node, *self.edges[node]))

    def restore(self, states: dict[int, int]) -> None:
        """Extend the states of the remaining nodes to all original ones."""
        for undo in reversed(self._undo):
            undo(states)

    def _eliminate(self, queue: list[int]) -> None:
        """Fold away nodes of degree one and two."""
        while queue:
            node = queue.pop(0)
            if node not in self.costs or not 0 < len(self.edges[node]) <= 2:
                continue
            neighbours = list(self.edges[node].items())
            self._undo.append(partial(_best_response, node, self.costs[node], neighbours))
            if len(neighbours) == 1:
                (u, w) = neighbours[0]
                self.costs[u] = self.costs[u] + (self.costs[node][:, None] + w).min(axis=0)
            else:
                (u, a), (v, b) = neighbours
                self._add(u, v, _join(self.costs[node], a, b))
            self._drop(node)
            queue.extend(other for other, _ in neighbours)

    def _merge(self, u: int, v: int) -> None:
        """Replace two nodes by one of joint states."""
        width = len(self.costs[v])
        joint = self.costs[u][:, None] + self.costs[v][None, :] + self.edges[u].get(v, 0.0)
        node, self._fresh = self._fresh, self._fresh + 1
        edges = [(x, np.repeat(w, width, axis=0)) for x, w in self.edges[u].items() if x != v]
        edges += [(x, np.tile(w, (len(self.costs[u]), 1))) for x, w in self.edges[v].items() if x != u]
        kept = _possible(joint.reshape(-1), [w for _, w in edges])
        self._undo.append(partial(_split_joint, node, u, v, width, kept))
        self._drop(u)
        self._drop(v)
        self.costs[node], self.edges[node] = joint.reshape(-1)[kept], {}
        for x, w in edges:
            self._add(node, x, w[kept])

    def _add(self, u: int, v: int, w: Matrix) -> None:
        present = self.edges[u].get(v)
        self.edges[u][v] = w if present is None else present + w
        self.edges[v][u] = self.edges[u][v].T

    def _drop(self, node: int) -> None:
        for other in self.edges[node]:
            del self.edges[other][node]
        del self.costs[node], self.edges[node]


def _best_response(
    node: int, costs: Matrix, neighbours: list[tuple[int, Matrix]], states: dict[int, int]
) -> None:
    """The state of an eliminated node, given its neighbours'."""
    total = costs
    for other, w in neighbours:
        total = total + w[:, states[other]]
    states[node] = int(np.argmin(total))


def _possible(costs: Matrix, edges: list[Matrix]) -> Matrix:
    """Indices of the states that some state of every neighbour goes with; the first if there is none."""
    finite = np.isfinite(costs)
    for w in edges:
        finite &= np.isfinite(w).any(axis=1)
    kept = np.flatnonzero(finite)
    return kept if len(kept) else np.zeros(1, dtype=int)


def _split_joint(node: int, u: int, v: int, width: int, kept: Matrix, states: dict[int, int]) -> None:
    """The states of two merged nodes, given the joint one."""
    states[u], states[v] = divmod(int(kept[states.pop(node)]), width)


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
