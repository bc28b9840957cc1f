"""Commands that search: `suggest`, `estimate`, `why`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..planner.errors import OptionError, PlanError
from .exits import INFEASIBLE
from .options import (
    Compare,
    Dtype,
    FrameworkName,
    FromArgs,
    GlobalBatch,
    Json,
    Mode,
    Model,
    ModelOfPlan,
    NoCache,
    Nodes,
    Objective,
    OptimizerName,
    Output,
    OutputLen,
    Pareto,
    PlanFile,
    Quiet,
    Report,
    SavedPlan,
    Sensitivity,
    SeqLen,
    Sets,
    SplitPins,
    Strict,
    TimeLimit,
    Top,
    TopologyOfPlan,
    TopologySpec,
)
from .output import answer_document, check_output, check_page, print_answer, save_plan, write_page
from .request import cache_dir, leave, make_request, parse_sets, solve, solve_unpinned
from .streams import console, print_json, progress_line, stdout_to_stderr

if TYPE_CHECKING:
    from ..planner.options import Pins
    from ..planner.plan import Plan
    from .request import Answer

commands = typer.Typer()


@commands.command(
    epilog="""Examples:

    tpplan suggest examples/llama3_8b.py -t dgx-h100:8

    tpplan suggest model.py:build_small -t cluster.yaml --global-batch 512 --seq-len 8192 -o plan.yaml

    tpplan suggest config.json -t dgx-a100-80:128 --set tp=8,zero=1 --json

    tpplan suggest config.json -t dgx-h100 --mode serve --seq-len 1024 --output-len 256"""
)
def suggest(
    model: Model,
    topology: TopologySpec,
    nodes: Nodes = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    output_len: OutputLen = None,
    mode: Mode = None,
    objective: Objective = None,
    sets: Sets = None,
    pin: SplitPins = None,
    framework: FrameworkName = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    top: Top = 5,
    time_limit: TimeLimit = None,
    strict: Strict = False,
    sensitivity: Sensitivity = False,
    pareto: Pareto = False,
    no_cache: NoCache = False,
    output: Output = None,
    report: Report = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the best plan for a model on a cluster, and say why it is the best."""
    options = {
        "global_batch": global_batch, "seq_len": seq_len, "output_len": output_len,
        "mode": mode, "objective": objective,
        "framework": framework, "dtype": dtype, "optimizer": optimizer, "splits": pin,
        "top": top, "time_limit_s": time_limit, "strict": strict or None, "cache": not no_cache,
        "sensitive": sensitivity or None, "pareto": pareto or None,
    }  # fmt: skip
    check_output(output)
    check_page(report, "--report")
    request = make_request(model, topology, nodes, pins=parse_sets(sets), options=options, quiet=quiet)
    answer = solve(request)
    _write(answer, output, report, quiet=quiet)
    if json_:
        print_json(answer_document(answer))
    else:
        print_answer(answer)
    leave(answer)


@commands.command(
    epilog="""Examples:

    tpplan estimate examples/gpt3_175b.py -t dgx-a100-80:128 --set tp=8,pp=8,dp=16,zero=1

    tpplan estimate model.py -t dgx-h100:8 --plan plan.yaml --json

    tpplan estimate model.py -t dgx-h100:8 --set tp=8,pp=1,dp=8 -o mine.yaml --report mine.html

    tpplan estimate model.py -t dgx-h100:8 --from-args "pretrain_gpt.py --tensor-model-parallel-size 8 ..."
"""
)
def estimate(
    model: Model,
    topology: TopologySpec,
    plan: PlanFile = None,
    from_args: FromArgs = None,
    nodes: Nodes = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    output_len: OutputLen = None,
    mode: Mode = None,
    objective: Objective = None,
    sets: Sets = None,
    pin: SplitPins = None,
    framework: FrameworkName = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    compare: Compare = True,
    no_cache: NoCache = False,
    output: Output = None,
    report: Report = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check your own plan: how long a step takes, what memory it needs, and what would be better."""
    from ..report.best import against_best, best_document

    options = {
        "global_batch": global_batch, "seq_len": seq_len, "output_len": output_len,
        "mode": mode, "objective": objective,
        "framework": framework, "dtype": dtype, "optimizer": optimizer, "splits": pin, "cache": not no_cache,
    }  # fmt: skip
    check_output(output)
    check_page(report, "--report")
    theirs, pins, job = choices_to_check(plan, sets, from_args, quiet=quiet)
    if job:
        options = job | {key: value for key, value in options.items() if value is not None}
    request = make_request(model, topology, nodes, pins=pins, options=options, quiet=quiet)
    answer = solve(request)
    if theirs and answer.plan:
        _check_same_model(theirs, answer.plan, file=plan)
    _write(answer, output, report, quiet=quiet)
    if not json_:
        print_answer(answer)
    best = solve_unpinned(request) if compare else None
    if json_:
        print_json(answer_document(answer) | ({"best": best_document(best)} if best else {}))
    elif best:
        console().print(against_best(answer.plan, best), markup=False, highlight=False)
    leave(answer)


@commands.command(
    epilog="""Examples:

    tpplan why plan.yaml --set tp=4

    tpplan why plan.yaml --set zero=3,pp=1 --json"""
)
def why(
    plan: SavedPlan,
    sets: Sets = None,
    model: ModelOfPlan = None,
    topology: TopologyOfPlan = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say why a plan is not another: fix some choices, search again, and tell what that changes."""
    from ..planner.plan import Infeasible
    from ..planner.plan_file import load
    from ..planner.why import why as ask
    from ..report.terminal.pages import render_why
    from ..report.why import why_document

    with stdout_to_stderr(), progress_line(quiet, "searching again under these choices"):
        found = ask(load(plan), parse_sets(sets), model=model, topology=topology, cache_dir=cache_dir())
    for note in () if quiet else found.notes:
        print(f"tpplan: note: {note}", file=sys.stderr)
    if json_:
        print_json(why_document(found.plan, found.pinned, found.pins))
    else:
        console().print(render_why(found.plan, found.pinned, found.pins))
    if isinstance(found.pinned, Infeasible):
        raise typer.Exit(INFEASIBLE)


def _write(answer: Answer, output: Path | None, report: Path | None, *, quiet: bool) -> None:
    """The plan file and the page of an answer, where they were asked for and there is a plan."""
    if output and answer.plan:
        save_plan(answer.plan, output, quiet=quiet)
    if report and answer.plan:
        write_page(answer.plan, report, plan_file=output, quiet=quiet)


def choices_to_check(
    file: Path | None, sets: list[str] | None, line: str | None, *, quiet: bool
) -> tuple[Plan | None, Pins, dict[str, Any]]:
    """The plan of `--plan`, if that is what was given; the choices to check; the job they come with."""
    from ..planner.options import pins_of
    from ..planner.plan_file import load

    ways = {"--plan": file, "--set": sets, "--from-args": line}
    given = [name for name, value in ways.items() if value]
    if len(given) != 1:
        found = f"both {' and '.join(given)}" if given else "neither --plan nor --set nor --from-args"
        raise OptionError(
            f"{found}: give the choices to check as --plan plan.yaml or as --set tp=8,pp=4,dp=2"
        )
    if line:
        return None, *_launch_line(line, quiet=quiet)
    if file is None:
        return None, parse_sets(sets), {}
    plan = load(file)
    return plan, pins_of(plan), _options_of(plan)


def _launch_line(text: str, *, quiet: bool) -> tuple[Pins, dict[str, Any]]:
    """Choices and job of another framework's launch line; what is not carried over is said."""
    from ..planner.launch_lines import read

    line = read(text)
    for note in () if quiet else line.notes:
        print(f"tpplan: {line.dialect}: {note}", file=sys.stderr)
    return line.pins, line.options


def _options_of(plan: Plan) -> dict[str, Any]:
    job = plan.job
    return {
        "global_batch": job.global_batch, "seq_len": job.seq_len,
        "output_len": job.output_len or None, "mode": job.mode, "dtype": job.dtype,
        "objective": job.objective, "framework": job.framework, "optimizer": job.optimizer,
    }  # fmt: skip


def _check_same_model(theirs: Plan, ours: Plan, *, file: Path | None) -> None:
    if theirs.model.parameters == ours.model.parameters:
        return
    raise PlanError(
        f"{file}: the plan is for {theirs.model.name} with {theirs.model.parameters:,} parameters, "
        f"but {ours.model.source} has {ours.model.parameters:,}"
    )
