"""Combinations of every kind of model and split on real ranks: equal to one process, and as planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import cases
import held
import peaks
import pytest
import torch
import traced
import zoo
from combinations import EVERY, QUICK, Combination
from pool import RankPool
from tpplan.planner.plan import Plan
from tpplan.runtime.api import auto_parallelize
from tpplan.runtime.executed import Executed, record
from tpplan.runtime.gather import whole

TOLERANCE = 1e-5
"""Relative, fp32."""
VANISHING = 1e-3
"""Of the model's largest gradient (or parameter): below it rounding is all there is, as in the bias of a key
projection, which softmax cancels."""
Ranks = Callable[[int], RankPool]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Three clipped steps on one rank, and what a fourth backward takes."""

    losses: list[float]
    gradients: Values
    """Of the first step."""
    parameters: Values
    """After the last."""
    between: held.Held
    executed: list[Executed]
    """In the last step."""
    fullest: int
    """Bytes at the fullest moment; 0 where it is not followed."""


def train(name: str, plan: Plan, followed: bool) -> Trained:
    """On one rank."""
    parallel = auto_parallelize(zoo.built(name), zoo.inputs(name), plan=plan, loss_fn=zoo.MODELS[name].loss)
    optimizer = cases.optimizer_of(parallel.parameters())
    losses, first, found, between = [], {}, [], []
    for step in range(cases.STEPS):
        with record() as executed:
            losses.append(parallel.train_step(zoo.inputs(name, seed=step)).item())
        if not step:
            first = {n: whole(p.grad).clone() for n, p in parallel.named_parameters() if p.grad is not None}
        with record() as clipping:
            parallel.clip_grad_norm_(cases.MAX_NORM)
        optimizer.step()
        between.append(held.held(parallel, optimizer))
        optimizer.zero_grad()
        found = executed + clipping
    return Trained(
        losses=losses,
        gradients=first,
        parameters={n: whole(p.detach()) for n, p in parallel.named_parameters()},
        between=between[-1],
        executed=found,
        fullest=peaks.fullest(parallel, optimizer, zoo.inputs(name)) if followed else 0,
    )


@functools.cache
def trained(name: str) -> tuple[list[float], Values, Values]:
    """The same on one process."""
    model = zoo.built(name)
    optimizer = cases.optimizer_of(model.parameters())
    losses, first = [], {}
    for step in range(cases.STEPS):
        loss = zoo.loss_of(name, model, zoo.inputs(name, seed=step))
        loss.backward()
        if not step:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), cases.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, {n: p.detach() for n, p in model.named_parameters()}


def check(combination: Combination, ranks: Ranks) -> None:
    """Losses, first gradients and last parameters of every rank; what it holds; every collective."""
    plan, followed = zoo.planned(combination.model, **combination.pins), peaks.is_followed(combination)
    results = ranks(combination.ranks).run(train, combination.model, plan, followed)
    losses, gradients, parameters = trained(combination.model)
    for each in results:
        assert each.losses == pytest.approx(losses, rel=TOLERANCE)
        for what, values, expected in (
            ("gradient", each.gradients, gradients),
            ("value", each.parameters, parameters),
        ):
            for name in values.keys() & expected.keys():
                size = max(expected[name].norm(), VANISHING * max(e.norm() for e in expected.values()))
                error = (values[name] - expected[name]).norm() / size
                assert error < TOLERANCE, f"{what} of {name}: relative error {error:.1e}"
    assert set(gradients) <= set().union(*(each.gradients for each in results))
    holdings = [each.between for each in results]
    assert held.disagreements(plan, holdings, dtype=zoo.MODELS[combination.model].dtype) == []
    assert not followed or peaks.outside_band(plan, [each.fullest for each in results]) == []
    executed = [each.executed for each in results]
    assert traced.disagreements(combination.model, plan, executed, ranks(combination.ranks)) == []


@pytest.mark.parametrize("combination", QUICK, ids=str)
def test_what_is_planned_runs_and_equals_one_process(combination: Combination, ranks: Ranks) -> None:
    check(combination, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("combination", [c for c in EVERY if c not in QUICK], ids=str)
def test_every_combination(combination: Combination, ranks: Ranks) -> None:
    check(combination, ranks)
