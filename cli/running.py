"""Commands that run a plan: `verify`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from .exits import FAILED
from .options import Json, Model, Ranks, SavedPlan
from .streams import console, print_json, stdout_to_stderr

commands = typer.Typer()


@commands.command(
    epilog="""Examples:

    tpplan suggest small.py -t cpu-gloo:2 -o plan.yaml; tpplan verify small.py plan.yaml

    tpplan verify small.py plan.yaml --ranks 4 --json"""
)
def verify(model: Model, plan: SavedPlan, ranks: Ranks = None, json_: Json = False) -> None:
    """Run a plan on CPU ranks, in fp32: does it compute what one process does, and run what it planned?"""
    from ..planner.plan_file import load

    found = load(plan)
    with stdout_to_stderr():
        from ..planner.trace.runnable import runnable
        from ..runtime import verify as run

        smaller = run.reduced(found, ranks)
        with runnable(model) as file:
            batch = file.inputs(run.samples(smaller), found.job.seq_len)
            verdict = run.verify(file.build(), batch, smaller, loss=file.loss, planned=found)
    if json_:
        print_json({**asdict(verdict), "equal": verdict.equal, "faithful": verdict.faithful})
    else:
        from ..report.terminal.verification import render_verdict

        console().print(render_verdict(verdict))
    if not verdict.equal:
        raise typer.Exit(FAILED)
