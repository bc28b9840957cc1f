"""Commands that run a plan: `verify`, `run`, `bench`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from ..planner.errors import OptionError
from .exits import FAILED
from .options import (
    Address,
    BatchSystem,
    Directory,
    DryRun,
    Json,
    MaxRestarts,
    Model,
    OnCpu,
    Quiet,
    Ranks,
    Runs,
    SavedPlan,
    Script,
    ScriptArguments,
    Steps,
    Warmup,
)
from .output import check_output, write_files
from .streams import console, print_json, progress_line, stdout_to_stderr

if TYPE_CHECKING:
    from ..planner.plan import Plan
    from ..runtime.bench import Measured

commands = typer.Typer()

CPU = "cpu"
"""The device of plans whose ranks are processes, which can be forked here."""


@commands.command(
    epilog="""Examples:

    tpplan suggest small.py -t cpu-gloo:2 -o plan.yaml; tpplan verify small.py plan.yaml

    tpplan verify small.py plan.yaml --ranks 4 --json"""
)
def verify(
    model: Model, plan: SavedPlan, ranks: Ranks = None, json_: Json = False, quiet: Quiet = False
) -> None:
    """Run a plan on CPU ranks, in fp32: does it compute what one process does, and run what it planned?"""
    from ..planner.plan_file import load

    found = load(plan)
    with stdout_to_stderr(), progress_line(quiet) as progress:
        from ..planner.trace.runnable import runnable
        from ..report import words
        from ..runtime import verify as run

        smaller = run.reduced(found, ranks)
        with runnable(model) as file:
            if progress:
                progress(
                    f"running a step on {words.plural(smaller.mesh.devices, 'CPU rank')} and on one process"
                )
            verdict = run.verify_built(file.build, file.inputs, smaller, loss=file.loss, planned=found)
    if json_:
        print_json({**asdict(verdict), "equal": verdict.equal, "faithful": verdict.faithful})
    else:
        from ..report.terminal.verification import render_verdict

        console().print(render_verdict(verdict))
    if not verdict.equal:
        raise typer.Exit(FAILED)


@commands.command(
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    epilog="""Examples:

    tpplan run plan.yaml train.py --lr 3e-4

    tpplan run --address node0:29500 plan.yaml train.py      on every node

    tpplan run --to slurm -o job plan.yaml train.py""",
)
def run(
    plan: SavedPlan,
    script: Script,
    arguments: ScriptArguments = None,
    address: Address = None,
    max_restarts: MaxRestarts = 3,
    on_cpu: OnCpu = False,
    dry_run: DryRun = False,
    to: BatchSystem = None,
    output: Directory = None,
    quiet: Quiet = False,
) -> None:
    """Start a training script under torchrun with the plan's ranks (options come before PLAN).

    The script finds the plan file in the environment variable PLAN.
    """
    from ..planner.plan_file import load
    from ..report.exporters import launch

    if script.startswith("-"):
        raise OptionError(f"{script} stands where the script should: options come before the plan")
    if max_restarts < 0:
        raise OptionError(f"--max-restarts {max_restarts}: must be 0 or more")
    found, command = load(plan), [script, *(arguments or [])]
    if to is not None:
        files = launch.launch_files(found, command, to=to, max_restarts=max_restarts)
        _give(files.files | {"plan.yaml": plan.read_text("utf-8")}, files.deviations, output, quiet=quiet)
        return
    if output is not None:
        raise OptionError(f"--output {output}: only launch files are written; give --to slurm or kubernetes")
    how = launch.launch_of(found, address=address, max_restarts=max_restarts, one_node=on_cpu)
    line = launch.arguments(how, command)
    if dry_run:
        variables = _variables(plan).items()
        print(*(f"{name}={shlex.quote(value)}" for name, value in variables), f"torchrun {shlex.join(line)}")
        return
    if not Path(script).is_file():
        raise OptionError(f"no file {script}: give the training script, then its arguments")
    if not on_cpu:
        from ..runtime.launch import check_devices

        check_devices(found, how.per_node)
    _become_torchrun(line, plan=plan, on_cpu=on_cpu)


def _give(files: dict[str, str], notes: Sequence[str], directory: Path | None, *, quiet: bool) -> None:
    for note in () if quiet else notes:
        print(f"tpplan: note: {note}", file=sys.stderr)
    if directory:
        write_files(files, directory, quiet=quiet)
        return
    for name, text in files.items():
        if name != "plan.yaml":
            print(f"# {name}\n{text}")


def _variables(plan: Path | None) -> dict[str, str]:
    """What the environment of torchrun has to say."""
    from ..report.exporters.launch import PLAN_VARIABLE
    from ..report.exporters.shell import OWN_STORE

    return ({PLAN_VARIABLE: str(plan.resolve())} if plan else {}) | OWN_STORE


def _become_torchrun(line: Sequence[str], *, plan: Path | None, on_cpu: bool) -> NoReturn:
    """This process goes on as torchrun: signals, output and exit code are its own."""
    variables = os.environ | _variables(plan)
    if on_cpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "torch.distributed.run", *line], variables)


@commands.command(
    epilog="""Examples:

    tpplan bench plan.yaml small.py --steps 20

    tpplan bench plan.yaml small.py --runs runs.yaml --json

    torchrun --nnodes 2 --nproc-per-node 8 ... -m tpplan bench plan.yaml model.py"""
)
def bench(
    plan: SavedPlan,
    model: Model,
    steps: Steps = 10,
    warmup: Warmup = 2,
    runs: Runs = None,
    json_: Json = False,
) -> None:
    """Measure a plan's step here: time, phases and memory, beside what was predicted."""
    from ..planner.plan_file import load

    check_output(runs, "--runs", "runs.yaml")
    found = load(plan)
    if "RANK" not in os.environ and found.cluster.device != CPU:
        _bench_under_torchrun(found)
    with stdout_to_stderr():
        measured = _measured(found, model, steps=steps, warmup=warmup)
    if os.environ.get("RANK", "0") == "0":
        _show_measured(found, measured, json_=json_)
        if runs:
            from datetime import date

            from ..runtime.record import add_run

            add_run(runs, measured, model=model, plan=plan, today=date.today())


def _measured(plan: Plan, model: str, *, steps: int, warmup: int) -> Measured:
    from ..planner.trace.runnable import runnable
    from ..runtime import bench as run
    from ..runtime.verify import samples

    with runnable(model) as file:
        trial = run.Trial(
            build=file.build,
            batch=file.inputs(samples(plan), plan.job.seq_len),
            loss=file.loss,
            plan=plan,
            steps=steps,
            warmup=warmup,
        )
        return run.bench_here(trial) if "RANK" in os.environ else run.bench_forked(trial)


def _bench_under_torchrun(plan: Plan) -> NoReturn:
    """Start again with one rank for each device. Raises when that takes more than this machine."""
    from ..report.exporters.launch import arguments, launch_of
    from ..runtime.launch import check_devices

    if plan.cluster.nodes > 1:
        raise OptionError(
            f"the plan is for {plan.cluster.nodes} nodes: start it on each of them, "
            "torchrun --nnodes ... -m tpplan bench ..."
        )
    how = launch_of(plan, address=None, max_restarts=0, one_node=True)
    check_devices(plan, how.per_node)
    _become_torchrun(arguments(how, ["-m", "tpplan", *sys.argv[1:]]), plan=None, on_cpu=False)


def _show_measured(plan: Plan, measured: Measured, *, json_: bool) -> None:
    from ..report.terminal.measurement import measurement_document, render_measurement

    if json_:
        print_json(measurement_document(plan, measured))
    else:
        console().print(render_measurement(plan, measured))
