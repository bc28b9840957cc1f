"""Random little models: the splits found through choice graphs against every combination, priced by hand.

Ops have random choices of layouts, tensors have one to three consumers, graphs are any DAG. What the
solver does with sets of layouts, shared conversions and elimination is done here by plain enumeration.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from tpplan.planner.errors import SolverError
from tpplan.planner.layout import PARTIAL, REPLICATE, Placement, Shard, conversion, gradient_needed
from tpplan.planner.rules.choices import Choice
from tpplan.planner.solve.choice_graph import ChoiceGraph, solve
from tpplan.planner.solve.conversions import COLLECTIVES, Conversions, connect

PROBLEMS = 600
LAYOUTS = (REPLICATE, PARTIAL, Shard(0, "batch"), Shard(1, "sequence"), Shard(2, "hidden"))
GRADIENTS = (None, *LAYOUTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One edge: who makes it, who reads it (op, operand), what each conversion of it costs."""

    producer: int
    consumers: tuple[tuple[int, int], ...]
    prices: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Ops with their choices and what these cost, and tensors between them."""

    choices: list[tuple[Choice, ...]]
    costs: list[list[float]]
    tensors: list[Tensor]


def random_model(seed: int) -> Model:
    """Four to six ops with two or three choices each."""
    rng = random.Random(seed)
    ops = rng.randint(4, 6)
    reads: list[int] = [0] * ops
    tensors = []
    for producer in range(ops - 1):
        count = rng.choice((1, 1, 2, 3))
        later = sorted(rng.choices(range(producer + 1, ops), k=count))  # an op may read a tensor twice
        consumers = []
        for op in later:
            consumers.append((op, reads[op]))
            reads[op] += 1
        prices = {c: rng.choice((0.0, rng.uniform(0.5, 4.0))) for c in COLLECTIVES}
        tensors.append(Tensor(producer=producer, consumers=tuple(consumers), prices=prices))
    choices = [tuple(random_choice(rng, reads[op]) for _ in range(rng.randint(2, 3))) for op in range(ops)]
    return Model(
        choices=choices, costs=[[rng.uniform(0, 5) for _ in options] for options in choices], tensors=tensors
    )


def random_choice(rng: random.Random, reads: int) -> Choice:
    """A choice with any layouts; partial sums are wanted seldom, since nothing else turns into them."""
    weights = (3, 1, 2, 2, 2)
    return Choice(
        kind="split",
        label=None,
        reads=tuple(rng.choices(LAYOUTS, weights, k=reads)),
        read_gradients=tuple(rng.choices(GRADIENTS, (2, *weights), k=reads)),
        writes=(rng.choice(LAYOUTS),),
    )


def price(before: Placement, after: Placement, prices: dict[str, float]) -> float:
    """Of one conversion; infinite where there is none."""
    try:
        collective = conversion(before, after)
    except ValueError:
        return math.inf
    return 0.0 if collective is None else prices[collective]


def cost(model: Model, chosen: tuple[Choice, ...]) -> float:
    """Every tensor's conversions, each once for all who need it."""
    total = 0.0
    for tensor in model.tensors:
        source = chosen[tensor.producer].writes[0]
        targets = {chosen[op].reads[read] for op, read in tensor.consumers}
        gradients = {chosen[op].read_gradients[read] for op, read in tensor.consumers} - {None}
        total += sum(price(source, target, tensor.prices) for target in targets)
        total += sum(price(g, gradient_needed(source), tensor.prices) for g in gradients if g is not None)
    return total


def best_by_enumeration(model: Model) -> float:
    """The least cost over every combination of choices."""
    return min(
        sum(row[i] for row, i in zip(model.costs, states, strict=True))
        + cost(model, tuple(options[i] for options, i in zip(model.choices, states, strict=True)))
        for states in product(*(range(len(options)) for options in model.choices))
    )


def choice_graph(model: Model, known: Conversions) -> tuple[ChoiceGraph, np.ndarray]:
    """The model as the solver sees it, and what every tensor's conversions cost."""
    graph = ChoiceGraph()
    nodes = [graph.node(row) for row in model.costs]
    for item, tensor in enumerate(model.tensors):
        options = model.choices[tensor.producer]
        ends = [(model.choices[op], read) for op, read in tensor.consumers]
        found = known.between([choice.writes[0] for choice in options], (options, 0), ends)
        connect(graph, nodes[tensor.producer], [nodes[op] for op, _ in tensor.consumers], found, item)
    return graph, np.array([[tensor.prices[c] for c in COLLECTIVES] for tensor in model.tensors])


def test_enumeration_finds_nothing_better() -> None:
    known = Conversions()
    impossible = 0
    for seed in range(PROBLEMS):
        model = random_model(seed)
        (graph, prices), best = choice_graph(model, known), best_by_enumeration(model)
        if math.isinf(best):
            impossible += 1
            with pytest.raises(SolverError):
                solve(graph, prices=prices)
            continue
        found = solve(graph, prices=prices)
        assert found.cost == pytest.approx(best, abs=1e-9), seed
        assert found.core == 0
    assert 0 < impossible < PROBLEMS / 2


@pytest.mark.parametrize("seed", range(12))
def test_the_ilp_alone_agrees(seed: int) -> None:
    model = random_model(seed)
    best = best_by_enumeration(model)
    graph, prices = choice_graph(model, Conversions())
    if math.isinf(best):
        with pytest.raises(SolverError):
            solve(graph, prices=prices, reduce=False)
    else:
        assert solve(graph, prices=prices, reduce=False).cost == pytest.approx(best, abs=1e-9)


def test_a_structure_is_worked_out_once() -> None:
    model, known = random_model(1), Conversions()
    tensor = model.tensors[0]
    options = model.choices[tensor.producer]
    ends = [(model.choices[op], read) for op, read in tensor.consumers]
    sources = [choice.writes[0] for choice in options]
    assert known.between(sources, (options, 0), ends) is known.between(sources, (options, 0), ends)
