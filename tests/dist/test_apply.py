"""Plans on real gloo ranks: what they compute is what one process computes, what runs is what was planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from pool import RankPool
from torch.distributed.tensor import DTensor
from tpplan.planner.plan import Plan
from tpplan.runtime.api import auto_parallelize
from tpplan.runtime.executed import record
from tpplan.runtime.fidelity import compare
from tpplan.runtime.gather import whole

TOLERANCE = 1e-5
"""Relative, fp32."""
Ranks = Callable[[int], RankPool]


@functools.cache
def plan_of(case: str) -> Plan:
    """The plans of this file by name."""
    llama2, gpt2 = cases.planned("llama", tp=2), cases.planned("gpt", tp=2)
    llama1, gpt1 = cases.planned("llama"), cases.planned("gpt")
    mixtral2 = cases.planned("mixtral", ep=2, tp=1, bytes_per_s=1e12)
    step, cut = cases.stepped, cases.staged
    made = {
        "mlp tp2": lambda: cases.planned("mlp", tp=2),
        "llama tp2": lambda: llama2,
        "gpt tp2": lambda: gpt2,
        "llama tp4": lambda: cases.planned("llama", tp=4),
        "gpt tp4": lambda: cases.planned("gpt", tp=4),
        "llama dp2 zero0": lambda: step(llama1, dp=2, zero=0, microbatches=2),
        "llama dp2 zero1": lambda: step(llama1, dp=2, zero=1, microbatches=2),
        "llama dp2 zero2": lambda: step(llama1, dp=2, zero=2, microbatches=2),
        "gpt dp2 zero3": lambda: step(gpt1, dp=2, zero=3, microbatches=2),
        "llama dp4 zero3": lambda: step(llama1, dp=4, zero=3),
        "gpt dp2 tp2 zero0": lambda: step(gpt2, dp=2, zero=0),
        "gpt dp2 tp2 zero1": lambda: step(gpt2, dp=2, zero=1, microbatches=2),
        "llama dp2 tp2 zero3": lambda: step(llama2, dp=2, zero=3, microbatches=2),
        "llama dp4 tp2 zero2": lambda: step(llama2, dp=4, zero=2),
        "llama recompute full": lambda: cases.recomputed(step(llama2, dp=2, zero=3), "full"),
        "gpt recompute selective": lambda: cases.recomputed(gpt2, "selective"),
        "llama pp2 gpipe": lambda: cut(step(llama1, microbatches=4), "gpipe", (2, 2)),
        "llama pp4 1f1b": lambda: cut(step(llama1, microbatches=4), "1f1b", (1, 1, 1, 1)),
        "gpt pp2 1f1b uneven": lambda: cut(step(gpt1, microbatches=4), "1f1b", (3, 1)),
        "gpt pp2 interleaved": lambda: cut(step(gpt1, microbatches=4), "interleaved", (1, 1, 1, 1), 2),
        "llama pp2 zb-h1": lambda: cut(step(llama1, microbatches=4), "zb-h1", (2, 2)),
        "gpt pp2 zbv": lambda: cut(step(gpt1, microbatches=4), "zbv", (1, 1, 1, 1), 2),
        "llama pp2 tp2 zbv": lambda: cut(step(llama2, microbatches=4), "zbv", (1, 1, 1, 1), 2),
        "gpt pp2 dp2 tp2": lambda: cut(step(gpt2, dp=2, zero=1, microbatches=2), "1f1b", (2, 2)),
        "llama pp2 dp2 tp2": lambda: cut(step(llama2, dp=2, zero=3, microbatches=2), "1f1b", (3, 1)),
        "mixtral ep2": lambda: step(mixtral2),
        "mixtral ep4": lambda: step(cases.planned("mixtral", ep=4, tp=1, bytes_per_s=1e12), zero=1),
        "mixtral dp2 ep2 zero0": lambda: step(mixtral2, dp=2, microbatches=2),
        "mixtral dp2 ep2 zero3": lambda: step(mixtral2, dp=2, zero=3),
        "mixtral pp2 ep2": lambda: cut(step(mixtral2, microbatches=2), "1f1b", (3, 1)),
        "recommender ep2": lambda: step(cases.planned("recommender", ep=2, tp=1, bytes_per_s=1e12)),
        "recommender dp2 ep4": lambda: step(
            cases.planned("recommender", ep=4, tp=1, bytes_per_s=1e12), dp=2, zero=1
        ),
    }
    return made[case]()


CASES = (
    "mlp tp2", "llama tp2", "gpt tp2", "llama tp4", "gpt tp4", "llama dp2 zero0", "llama dp2 zero1",
    "llama dp2 zero2", "gpt dp2 zero3", "llama dp4 zero3", "gpt dp2 tp2 zero0", "gpt dp2 tp2 zero1",
    "llama dp2 tp2 zero3", "llama dp4 tp2 zero2", "llama recompute full", "gpt recompute selective",
    "llama pp2 gpipe", "llama pp4 1f1b", "gpt pp2 1f1b uneven", "gpt pp2 interleaved", "llama pp2 zb-h1",
    "gpt pp2 zbv", "llama pp2 tp2 zbv", "gpt pp2 dp2 tp2", "llama pp2 dp2 tp2", "mixtral ep2", "mixtral ep4",
    "mixtral dp2 ep2 zero0", "mixtral dp2 ep2 zero3", "mixtral pp2 ep2", "recommender ep2",
    "recommender dp2 ep4",
)  # fmt: skip


def train(name: str, plan: Plan) -> tuple[list[float], dict[str, Any], dict[str, Any], list[bool]]:
    """On one rank: losses, first gradients, last parameters, whether each parameter is this rank's part only."""
    parallel = auto_parallelize(cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name])
    optimizer = cases.optimizer_of(parallel.parameters())
    losses, first = [], {}
    for step in range(cases.STEPS):
        losses.append(parallel.train_step(cases.inputs(name, seed=step)).item())
        if not step:
            first = {n: whole(p.grad).clone() for n, p in parallel.named_parameters() if p.grad is not None}
        parallel.clip_grad_norm_(cases.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    last = {n: whole(p.detach()) for n, p in parallel.named_parameters()}
    return losses, first, last, [isinstance(p, DTensor) for p in parallel.parameters()]


@functools.cache
def trained(name: str) -> Any:
    return cases.trained(name)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, tensor in found.items():
        if name in expected:
            error = (tensor - expected[name]).norm() / (expected[name].norm() + 1e-12)
            assert error < TOLERANCE, f"{what} of {name}: relative error {error:.1e}"


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_one_process(case: str, ranks: Ranks) -> None:
    name = case.split()[0]
    plan = plan_of(case)
    results = ranks(plan.mesh.devices).run(train, name, plan)
    losses, gradients, parameters = trained(name)
    for found, first, last, _ in results:
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert_equal(first, gradients, "gradient")
        assert_equal(last, parameters, "last value")
    seen = set().union(*(first for _, first, _, _ in results))
    assert set(gradients) <= seen


def executed(name: str, plan: Plan) -> list[Any]:
    """The collectives of a second step on one rank."""
    parallel = auto_parallelize(cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name])
    parallel.train_step(cases.inputs(name))
    for parameter in parallel.parameters():
        parameter.grad = None
    with record() as found:
        parallel.train_step(cases.inputs(name))
        parallel.clip_grad_norm_(1.0)
    return found


FAITHFUL = {
    "mlp tp2": {"tp": 2},
    "llama tp2": {"tp": 2},
    "llama dp2 tp2": {"tp": 2, "dp": 2, "zero": 1},
    "llama dp2 zero3": {"tp": 1, "dp": 2, "zero": 3, "micro_batch": 1},
    "gpt dp4 zero2": {"tp": 1, "dp": 4, "zero": 2},
    "mixtral ep2": {"tp": 1, "ep": 2, "zero": 0, "bytes_per_s": 1e12},
    "mixtral dp2 ep2": {"tp": 1, "ep": 2, "dp": 2, "zero": 0, "bytes_per_s": 1e12},
}


@pytest.mark.parametrize("case", FAITHFUL)
def test_what_runs_is_what_was_planned(case: str, ranks: Ranks) -> None:
    name = case.split()[0]
    plan = cases.planned(name, **FAITHFUL[case])
    for found in ranks(plan.mesh.devices).run(executed, name, plan):
        rows = compare(plan, found)
        assert rows and [row for row in rows if not row.agrees] == []
