"""The choice graph against exhaustive enumeration, with and without the presolve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.errors import SolverError
from tpplan.planner.solve.choice_graph import ChoiceGraph, Presolved, solve
from tpplan.planner.solve.elimination import greedy_orders


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


def cost_of(graph: ChoiceGraph, states: Mapping[int, int], prices: np.ndarray | None = None) -> float:
    """The cost of a complete assignment, term by term."""
    nodes = sum(float(costs[states[n]]) for n, costs in graph.costs.items())
    pairs = sum(float(w[states[u], states[v]]) for u, v, w in graph.pairs())
    counted = (
        sum(
            float(term.counts[tuple(states[n] for n in term.scope)] @ prices[term.item])
            for term in graph.priced
        )
        if prices is not None
        else 0.0
    )
    return nodes + pairs + counted


def cheapest(graph: ChoiceGraph, prices: np.ndarray | None = None) -> float:
    """The least cost over every assignment."""
    ranges = [range(len(graph.costs[n])) for n in range(len(graph.costs))]
    return min(cost_of(graph, dict(enumerate(states)), prices) for states in product(*ranges))


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
    assert cost_of(graph, found.states) == found.cost
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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), nodes=st.integers(4, 6), density=st.floats(0, 1))
def test_what_is_too_wide_to_eliminate_is_left_to_the_ilp(seed: int, nodes: int, density: float) -> None:
    graph = random_graph(seed, nodes, density)
    best = cheapest(graph)
    if best == np.inf:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpplan.planner.solve.choice_graph.MAX_WORK", 0)
        found = solve(graph)
    assert found.cost == pytest.approx(best, abs=1e-9)
    assert found.core == 0 or 4 <= found.core <= nodes, "three nodes are always series-parallel"


def test_a_complete_graph_is_a_core() -> None:
    graph = ChoiceGraph()
    rng = np.random.default_rng(7)
    for _ in range(6):
        graph.node(rng.random(3))
    for u, v in combinations(range(6), 2):
        graph.edge(u, v, rng.random((3, 3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tpplan.planner.solve.choice_graph.MAX_TABLE", 3**4)
        found = solve(graph)
    assert found.core == 6
    assert found.cost == pytest.approx(cheapest(graph), abs=1e-9)
    assert solve(graph).core == 0


def test_states_that_cannot_be_are_dropped_along_a_chain_before_anything_is_solved() -> None:
    """Only equal states go together, and the first node has one: a clique of 40 nodes is no work at all."""
    graph = ChoiceGraph()
    nodes = [graph.node([0.0, 1.0, 2.0] if i else [0.0, np.inf, np.inf]) for i in range(40)]
    equal = np.where(np.eye(3, dtype=bool), 0.25, np.inf)
    for u, v in combinations(nodes, 2):
        graph.edge(u, v, equal)
    found = solve(graph)
    assert set(found.states.values()) == {0}
    assert found.cost == 0.25 * 40 * 39 / 2
    assert found.core == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), nodes=st.integers(1, 9), density=st.floats(0, 1))
def test_an_order_foretells_the_work_and_the_tables(seed: int, nodes: int, density: float) -> None:
    graph = random_graph(seed, nodes, density)
    sizes = {n: len(costs) for n, costs in graph.costs.items()}
    for order in greedy_orders(sizes, graph.edges):
        assert sorted(order.nodes) == sorted(graph.costs)
        near = {n: set(row) for n, row in graph.edges.items()}
        work = largest = 0
        for node in order.nodes:
            around = near.pop(node)
            table = math.prod(sizes[n] for n in around)
            work, largest = work + sizes[node] * table, max(largest, table)
            for other in around:
                near[other] = (near[other] | around) - {node, other}
        assert (order.work, order.largest) == (work, largest)


@pytest.mark.parametrize("at_once", [1, 2**15])
def test_large_tables_are_summed_a_state_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpplan.planner.solve.elimination.MAX_AT_ONCE", at_once)
    for seed in range(20):
        graph = random_graph(seed, 6, 1.0)
        if (best := cheapest(graph)) < np.inf:
            assert solve(graph).cost == pytest.approx(best, abs=1e-9)


def test_parallel_edges_add_up() -> None:
    graph = ChoiceGraph()
    u, v = graph.node([0.0, 1.0]), graph.node([0.0, 0.0])
    graph.edge(u, v, np.array([[5.0, 5.0], [0.0, 1.0]]))
    graph.edge(v, u, np.array([[0.0, 3.0], [0.0, 0.0]]))
    assert solve(graph).states == {u: 1, v: 1}
    assert solve(graph).cost == 2.0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), nodes=st.integers(1, 6), density=st.floats(0, 1))
def test_one_presolve_serves_all_costs_and_prices(seed: int, nodes: int, density: float) -> None:
    """Counts of three things on any nodes and pairs; two items have prices of their own."""
    graph, rng = random_graph(seed, nodes, density), np.random.default_rng(seed)
    for n, costs in list(graph.costs.items()):
        if rng.random() < 0.5:
            graph.price_node(n, rng.integers(0, 3, size=(len(costs), 3)), int(rng.integers(2)))
    for u, v, w in list(graph.pairs()):
        counts = rng.integers(0, 3, size=(*w.shape, 3))
        if rng.random() < 0.5:
            graph.price_edge(u, v, counts, int(rng.integers(2)))
        else:
            graph.price_edge(v, u, counts.transpose(1, 0, 2), int(rng.integers(2)))
    graph.price_edge(0, 0, rng.integers(0, 3, size=(len(graph.costs[0]), len(graph.costs[0]), 3)), 1)
    if cheapest(graph) == np.inf:
        with pytest.raises(SolverError):
            Presolved(graph)
        return
    presolved = Presolved(graph)
    for _ in range(3):
        prices = rng.integers(0, 20, size=(2, 3)) / 8
        beside = {n: rng.integers(0, 20, size=len(kept)) / 8 for n, kept in presolved.kept.items()}
        whole = ChoiceGraph(costs=dict(graph.costs), edges=graph.edges, priced=graph.priced)
        for n, kept in presolved.kept.items():
            whole.costs[n] = graph.costs[n].copy()
            whole.costs[n][kept] += beside[n]
        rows = np.array([np.concatenate(list(beside.values())) * factor for factor in (1, 0)])
        found, without = presolved.solve(rows, prices)
        assert found.cost == cheapest(whole, prices) == cost_of(whole, found.states, prices)
        assert without.cost == cheapest(graph, prices) == cost_of(graph, without.states, prices)
        assert found.bound == pytest.approx(found.cost, abs=1e-9)
