"""The choice graph against exhaustive enumeration, with and without the presolve."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.errors import SolverError
from tpplan.planner.solve.choice_graph import ChoiceGraph, solve


def random_graph(seed: int, nodes: int, density: float) -> ChoiceGraph:
    """Random costs; about one pair in eight is forbidden."""
    rng = np.random.default_rng(seed)
    graph = ChoiceGraph()
    for _ in range(nodes):
        graph.node(rng.integers(0, 50, size=rng.integers(1, 5)) / 8)
    for u in range(nodes):
        for v in range(u + 1, nodes):
            if v == u + 1 or rng.random() < density:
                shape = len(graph.costs[u]), len(graph.costs[v])
                costs = rng.integers(0, 50, size=shape) / 8
                costs[rng.random(shape) < 0.125] = np.inf
                graph.edge(u, v, costs)
    return graph


def cheapest(graph: ChoiceGraph) -> float:
    """The least cost over every assignment."""
    ranges = [range(len(graph.costs[n])) for n in range(len(graph.costs))]
    return min(graph.cost_of(dict(enumerate(states))) for states in product(*ranges))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), nodes=st.integers(1, 6), density=st.floats(0, 1))
def test_presolve_finds_the_least_cost(seed: int, nodes: int, density: float) -> None:
    graph = random_graph(seed, nodes, density)
    best = cheapest(graph)
    if best == np.inf:
        with pytest.raises(SolverError):
            solve(graph)
        return
    found = solve(graph)
    assert found.cost == pytest.approx(best, abs=1e-9)
    assert graph.cost_of(found.states) == found.cost
    assert found.bound == pytest.approx(best, abs=1e-9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), nodes=st.integers(2, 6), density=st.floats(0, 1))
def test_the_ilp_alone_finds_the_least_cost(seed: int, nodes: int, density: float) -> None:
    graph = random_graph(seed, nodes, density)
    best = cheapest(graph)
    if best == np.inf:
        with pytest.raises(SolverError):
            solve(graph, reduce=False)
        return
    found = solve(graph, reduce=False)
    assert found.cost == pytest.approx(best, abs=1e-9)
    assert found.bound <= found.cost + 1e-9
    assert found.optimal
    assert found.core == nodes


def test_a_limit_on_merging_leaves_a_core_to_the_ilp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpplan.planner.solve.choice_graph.MAX_ELIMINATION_WORK", 0)
    graph = random_graph(7, 6, 1.0)
    found = solve(graph)
    assert found.core > 2
    assert found.cost == pytest.approx(cheapest(graph), abs=1e-9)


def test_parallel_edges_add_up() -> None:
    graph = ChoiceGraph()
    u, v = graph.node([0.0, 1.0]), graph.node([0.0, 0.0])
    graph.edge(u, v, np.array([[5.0, 5.0], [0.0, 1.0]]))
    graph.edge(v, u, np.array([[0.0, 3.0], [0.0, 0.0]]))
    assert solve(graph).states == {u: 1, v: 1}
    assert solve(graph).cost == 2.0
