"""The one place that runs PuLP models: honest statuses, bounds, silence, determinism."""

from __future__ import annotations

import random
import subprocess
import sys

import pulp
import pytest
from tpplan.planner.errors import SolverError
from tpplan.planner.solve.solver import Status, solve

SOLVERS = ("highs", "cbc")


def knapsack(items: int, *, sense: int = pulp.LpMaximize, constant: float = 5.0) -> pulp.LpProblem:
    """A knapsack with 20 rows: hard for its size, so that a short limit stops it."""
    draw = random.Random(1).random
    sign = 1 if sense == pulp.LpMaximize else -1
    model = pulp.LpProblem("knapsack", sense)
    take = [model.add_variable(f"take_{i}", cat="Binary") for i in range(items)]
    model += sign * pulp.lpSum(draw() * item for item in take) + constant
    for _ in range(20):
        model += pulp.lpSum(draw() * item for item in take) <= items / 8
    return model


@pytest.mark.parametrize("sense", [pulp.LpMaximize, pulp.LpMinimize])
def test_both_solvers_agree_and_close_the_gap(sense: int) -> None:
    highs, cbc = (solve(knapsack(20, sense=sense), solver=name) for name in SOLVERS)
    assert highs.status is cbc.status is Status.OPTIMAL
    assert highs.objective == pytest.approx(cbc.objective, abs=1e-9)
    assert highs.gap < 1e-9 and cbc.gap < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("sense", [pulp.LpMaximize, pulp.LpMinimize])
def test_a_run_stopped_by_its_limit_says_so(solver: str, sense: int) -> None:
    outcome = solve(knapsack(90, sense=sense), time_limit_s=0.3, solver=solver)
    assert outcome.status is Status.STOPPED
    assert outcome.has_values
    better = outcome.bound - outcome.objective
    assert (better > 0) == (sense == pulp.LpMaximize)
    assert 0 < outcome.gap < 1


@pytest.mark.parametrize("solver", SOLVERS)
def test_infeasible_and_constants(solver: str) -> None:
    none = pulp.LpProblem("none")
    whole = none.add_variable("whole", 0, 1, cat="Integer")
    none += whole
    none += whole >= 0.2
    none += whole <= 0.8
    assert solve(none, solver=solver).status is Status.INFEASIBLE

    line = pulp.LpProblem("line")
    x = line.add_variable("x", 1, 3)
    line += x + 2
    line += x >= 1.5
    outcome = solve(line, solver=solver)
    assert (outcome.objective, outcome.bound, x.value()) == (3.5, 3.5, 1.5)


def test_unbounded_is_a_failure_not_an_answer() -> None:
    model = pulp.LpProblem("unbounded")
    model += model.add_variable("x")
    outcome = solve(model, solver="highs")
    assert outcome.status is Status.FAILED
    assert not outcome.has_values


def test_unknown_solver() -> None:
    with pytest.raises(SolverError, match="gurobi"):
        solve(knapsack(3), solver="gurobi")


def test_runs_are_silent() -> None:
    code = (
        "import pulp; from tpplan.planner.solve.solver import solve\n"
        "m = pulp.LpProblem('m'); x = m.add_variable('x', 0, 9, cat='Integer'); m += x; m += 2 * x >= 3\n"
        "solve(m, solver='highs'); solve(m, solver='cbc'); print(x.value())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("2.0\n", "")
