"""The one place that runs a PuLP model: HiGHS in process, CBC where HiGHS is missing.

In: a `pulp.LpProblem`. Out: a `Solution` in one vocabulary, with the values left in the model's
variables. PuLP reports a run that was stopped by its time limit as optimal, for both solvers, so
native statuses are read here and PuLP's summary is not trusted. Runs are silent and deterministic:
one thread, a fixed seed, gaps set by the caller. Only a time limit brings in the wall clock.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SolverError

if TYPE_CHECKING:
    import pulp

RANDOM_SEED = 0
MIP_FEASIBILITY_TOLERANCE = 1e-9
"""How far an integer may be from a whole number; HiGHS's default of 1e-6 is coarser than our oracles."""


class Status(StrEnum):
    """How a run ended."""

    OPTIMAL = "optimal"
    """Proven, within the requested gap."""
    STOPPED = "stopped at a limit"
    """The incumbent, if there is one, is feasible; `bound` says how far it may be from the best."""
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    """Unbounded, or numerical trouble: the model or the solver is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Outcome of one run; the values are in the PuLP variables (`variable.value()`)."""

    status: Status
    objective: float
    """Of the incumbent, constants included; infinite (in the bad direction) if there is none."""
    bound: float
    """Proven bound on the objective: nothing can be better than this."""
    solver: str

    @property
    def gap(self) -> float:
        """(objective - bound) / |objective|, in [0, inf]."""
        if self.objective == self.bound:
            return 0.0
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-300)

    @property
    def has_values(self) -> bool:
        """Whether the variables hold a feasible point."""
        return self.status in (Status.OPTIMAL, Status.STOPPED) and math.isfinite(self.objective)


def solve(
    model: pulp.LpProblem,
    *,
    time_limit_s: float | None = None,
    gap: float = 0.0,
    solver: str | None = None,
    relaxed: bool = False,
) -> Solution:
    """Run `model` to within the relative `gap`, or until `time_limit_s`.

    `solver` is `highs` or `cbc` (default: HiGHS when it can be imported). `relaxed` solves the
    linear relaxation. Raises `SolverError` when the named solver, or every solver, is missing.
    """
    name = solver or _default_solver()
    run = {"highs": _solve_highs, "cbc": _solve_cbc}.get(name)
    if run is None:
        raise SolverError(f"no solver {name!r}; known: cbc, highs")
    return run(model, time_limit_s=time_limit_s, gap=gap, mip=not relaxed)


def _default_solver() -> str:
    import pulp

    if pulp.HiGHS(msg=False).available():
        return "highs"
    if _cbc_program():
        return "cbc"
    raise SolverError("neither HiGHS (pip install highspy) nor CBC (shipped with PuLP) can be run")


def _solve_highs(model: pulp.LpProblem, *, time_limit_s: float | None, gap: float, mip: bool) -> Solution:
    """Drive PuLP's in-process HiGHS step by step, reading the native status and bound."""
    import pulp

    options = {"random_seed": RANDOM_SEED, "parallel": "off"}
    if any(variable.cat == pulp.LpInteger for variable in model.variables()) and mip:
        options |= {"mip_feasibility_tolerance": MIP_FEASIBILITY_TOLERANCE}
    runner = pulp.HiGHS(
        msg=False, mip=mip, threads=1, gapRel=gap, gapAbs=0.0, timeLimit=time_limit_s, **options
    )
    _print_banner_to_nowhere()
    was_constant, dummy = model.fixObjective()
    try:
        runner.createAndConfigureSolver(model)
        runner.buildSolverModel(model)
        runner.callSolver(model)
        return _read_highs(model, mip=mip)
    finally:
        model.restoreObjective(was_constant, dummy)


@cache
def _print_banner_to_nowhere() -> None:
    """Construct HiGHS once with standard output closed: the first construction in a process prints."""
    import highspy

    sys.stdout.flush()
    saved, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        highspy.Highs()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(null)


def _read_highs(model: pulp.LpProblem, *, mip: bool) -> Solution:
    import highspy
    import pulp

    native, ended = model.solverModel, highspy.HighsModelStatus
    assert native is not None
    model.solverModel = None  # the native model is large and must not outlive this call
    info = native.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    status = {
        ended.kOptimal: Status.OPTIMAL,
        ended.kModelEmpty: Status.OPTIMAL,
        ended.kTimeLimit: Status.STOPPED,
        ended.kIterationLimit: Status.STOPPED,
        ended.kSolutionLimit: Status.STOPPED,
        ended.kInterrupt: Status.STOPPED,
        ended.kInfeasible: Status.INFEASIBLE,
        ended.kUnboundedOrInfeasible: Status.INFEASIBLE,
    }.get(native.getModelStatus(), Status.FAILED)
    sign = -1.0 if model.sense == pulp.LpMaximize else 1.0
    objective = sign * math.inf
    if status is Status.OPTIMAL or (status is Status.STOPPED and feasible):
        values = native.getSolution().col_value
        for variable, value in zip(model.variables(), values, strict=True):
            variable.varValue = value
        objective = _objective(model)
    integer = mip and any(variable.cat == pulp.LpInteger for variable in model.variables())
    bound = _bound(status, objective, sign)
    if integer and status in (Status.OPTIMAL, Status.STOPPED):
        # the native objective lacks constants: sign, then shift by them
        bound = sign * info.mip_dual_bound + _constant(model)
        bound = min(bound, objective) if sign > 0 else max(bound, objective)
    return Solution(status=status, objective=objective, bound=bound, solver="highs")


def _solve_cbc(model: pulp.LpProblem, *, time_limit_s: float | None, gap: float, mip: bool) -> Solution:
    """Run the CBC program that PuLP ships; its log is the only place that tells the bound."""
    import pulp

    if _cbc_program() is None:
        raise SolverError("CBC cannot be run: no `cbc` program on the path or inside PuLP")
    with tempfile.TemporaryDirectory(prefix="tpplan-cbc-") as folder:
        log = Path(folder) / "log.txt"
        # with messages off PuLP drops CBC's output; the log file gets it instead of the terminal
        runner = pulp.COIN_CMD(
            path=_cbc_program(), msg=False, mip=mip, gapRel=gap, timeLimit=time_limit_s, logPath=str(log),
            options=[f"randomCbcSeed {RANDOM_SEED + 1}"],
        )  # fmt: skip
        runner.tmpDir = folder
        try:
            model.solve(runner)
        except pulp.PulpSolverError as error:
            raise SolverError(f"CBC failed: {error}") from error
        text = log.read_text() if log.exists() else ""
    status = {
        (pulp.LpStatusOptimal, pulp.LpSolutionOptimal): Status.OPTIMAL,
        (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible): Status.STOPPED,
        (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound): Status.STOPPED,
        (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible): Status.INFEASIBLE,
        (pulp.LpStatusInfeasible, pulp.LpSolutionNoSolutionFound): Status.INFEASIBLE,
    }.get((model.status, model.sol_status), Status.FAILED)
    sign = -1.0 if model.sense == pulp.LpMaximize else 1.0
    found = model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    objective = _objective(model) if found else sign * math.inf
    bound = _bound(status, objective, sign)
    logged = re.findall(r"(?:Lower|Upper) bound:\s*(\S+)", text)
    if logged and status is Status.STOPPED:
        bound = float(logged[-1]) + _constant(model)
    elif status is Status.OPTIMAL and gap > 0:
        bound = objective - sign * gap * abs(objective)
    return Solution(status=status, objective=objective, bound=bound, solver="cbc")


@cache
def _cbc_program() -> str | None:
    """Path of the CBC program: one on the search path, else the one inside PuLP's wheel."""
    import pulp
    from pulp.apis import coin_api

    for path in ("cbc", getattr(coin_api, "pulp_cbc_path", "")):
        if path and pulp.COIN_CMD(path=path, msg=False).available():
            return path
    return None


def _bound(status: Status, objective: float, sign: float) -> float:
    """The trivial bound that a status implies: tight when optimal, none when stopped."""
    return {
        Status.OPTIMAL: objective,
        Status.INFEASIBLE: sign * math.inf,
    }.get(status, -sign * math.inf)


def _objective(model: pulp.LpProblem) -> float:
    assert model.objective is not None
    value = model.objective.value()
    return 0.0 if value is None else float(value)


def _constant(model: pulp.LpProblem) -> float:
    return 0.0 if model.objective is None else float(model.objective.constant)
