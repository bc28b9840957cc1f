"""The `tpplan` command. In: arguments, TPPLAN_CACHE_DIR. Out: a report or one JSON document.

Reports and JSON go to stdout, everything else (progress, notes, errors, what a model file prints)
to stderr. Exit codes: 0 done, 1 a bug in tpplan or a solver that failed, 2 bad input, 3 infeasible,
130 interrupted. Whatever is heavy is imported inside the command that needs it: `--help` loads
typer alone.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from . import __version__
from .planner.errors import OptionError, PlanError, TpplanError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from .planner.options import Pins
    from .planner.plan import Infeasible, Plan
    from .planner.topology import Topology
    from .topologies.importers.read import Imported

DONE, FAILED, BAD_INPUT, INFEASIBLE, INTERRUPTED = 0, 1, 2, 3, 130

COMPARE_LIMIT_S = 10.0
"""Longest search, seconds, for the plan that `estimate` compares yours with."""

SHOW_CURSOR = b"\x1b[?25h\n"
"""Terminal escape: progress hides the cursor while it runs."""

ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""Base of the errors raised for arguments that cannot be parsed; typer does not export it."""

SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(
    name="tpplan",
    help="Plan how to split any PyTorch model over a cluster: splits, group sizes, time, memory, and why.",
    epilog="Start with:  tpplan suggest examples/llama3_8b.py --topology dgx-h100:8",
    add_completion=False,
    pretty_exceptions_enable=False,
    **SETTINGS,
)
topology_app = typer.Typer(help="List and show the clusters that can be planned for.", **SETTINGS)
app.add_typer(topology_app, name="topology")


# --------------------------------------------------------------------------- arguments


def _option(names: str, metavar: str | None, help: str, **settings: Any) -> Any:
    """An option under one or several names; metavar None: a flag."""
    return typer.Option(*names.split("/"), metavar=metavar, help=help, show_default=False, **settings)


def _number(name: str, metavar: str, help: str, kind: type[int] | type[float] = int) -> Any:
    """An option with a number; unlike typer's own, its error names the value found."""

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise OptionError(f"{name} {text}: expected {what}") from None

    return _option(name, metavar, help, parser=parse)


MODEL_HELP = "model.py or model.py:factory, a Hugging Face config.json or its folder, or a .pt2 export."
TOPOLOGY_HELP = "A bundled name, name:NODES, or a YAML file."
SET_HELP = (
    "Fix some of pp, dp, cp, ep, tp, zero, shard_group, micro_batch, recompute, schedule, virtual_stages."
)
BATCH_HELP = "Samples per step; without it, about 4 Mi tokens."
SEQ_HELP = "Tokens per sample; without it, what the model says."
PASTE_HELP = "A paste of `nvidia-smi topo -m`, logs of nccl-tests; - is the standard input."
DTYPE_HELP = "bf16 (default where the device has it), fp16, fp32."

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
TopologySpec = Annotated[str, _option("--topology/-t", "T", TOPOLOGY_HELP)]
TopologyShown = Annotated[str, typer.Argument(metavar="T", help=TOPOLOGY_HELP, show_default=False)]
Nodes = Annotated[int | None, _number("--nodes", "N", "Number of nodes.")]
GlobalBatch = Annotated[int | None, _number("--global-batch", "N", BATCH_HELP)]
SeqLen = Annotated[int | None, _number("--seq-len", "N", SEQ_HELP)]
Mode = Annotated[str | None, _option("--mode", "M", "train (default).")]
Objective = Annotated[str | None, _option("--objective", "O", "throughput (default), latency, memory, cost.")]
Sets = Annotated[list[str] | None, _option("--set", "K=V,...", SET_HELP)]
FrameworkName = Annotated[
    str | None, _option("--framework", "F", "tpplan (default), torch, megatron, deepspeed.")
]
Dtype = Annotated[str | None, _option("--dtype", "D", DTYPE_HELP)]
OptimizerName = Annotated[
    str | None, _option("--optimizer", "O", "adamw (default), sgd, adagrad, adafactor, none.")
]
Top = Annotated[int, _number("--top", "K", "How many runner-ups to list (default 5).")]
TimeLimit = Annotated[float | None, _number("--time-limit", "S", "Seconds to search at most.", float)]
PlanFile = Annotated[Path | None, _option("--plan", "FILE", "A plan file whose choices to check.")]
FROM_ARGS_HELP = "The launch line of a Megatron-LM, torchtitan, DeepSpeed or vLLM run whose choices to check."
FromArgs = Annotated[str | None, _option("--from-args", "LINE", FROM_ARGS_HELP)]
Compare = Annotated[
    bool, typer.Option("--compare/--no-compare", help="Also search for a better plan, briefly.")
]
Sensitivity = Annotated[
    bool, _option("--sensitivity", None, "Also tell what would change the plan (a few more searches).")
]
Strict = Annotated[bool, _option("--strict", None, "An op without a sharding rule is an error.")]
Ops = Annotated[bool, _option("--ops", None, "List the ops by kind and by module.")]
NoCache = Annotated[bool, _option("--no-cache", None, "Trace the model again and keep no graph.")]
Output = Annotated[Path | None, _option("--output/-o", "FILE", "Write the plan (YAML) to this file.")]
ProfileOutput = Annotated[
    Path, _option("--output/-o", "FILE", "Write the measured topology here (default cluster.yaml).")
]
Quick = Annotated[bool, _option("--quick", None, "Fewer sizes and repetitions: under two minutes.")]
Resume = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Go on from FILE.partial if it is there (default).")
]
Budget = Annotated[float | None, _number("--budget", "S", "Seconds to measure at most.", float)]
Redact = Annotated[bool, _option("--redact", None, "Keep host names out of the file.")]
TopologyOutput = Annotated[Path | None, _option("--output/-o", "FILE", "Write the topology to this file.")]
Pastes = Annotated[list[Path], typer.Argument(metavar="FILE...", help=PASTE_HELP, show_default=False)]
DeviceName = Annotated[str | None, _option("--device", "NAME", "The device, where the paste does not say.")]
NicGbit = Annotated[float | None, _number("--nic-gbit", "G", "What one NIC carries, Gb/s.", float)]
Report = Annotated[
    Path | None, _option("--report", "FILE", "Write the report as one HTML page to this file.")
]
Page = Annotated[Path | None, _option("--output/-o", "FILE", "Write one HTML page to this file.")]
Trace = Annotated[Path | None, _option("--trace", "FILE", "Write the pipeline's timeline, for Perfetto.")]
Json = Annotated[bool, _option("--json", None, "Print one JSON document instead of a report.")]
Quiet = Annotated[bool, _option("--quiet/-q", None, "No progress and no notes on stderr.")]
SavedPlan = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
OtherPlan = Annotated[Path, typer.Argument(metavar="OTHER", help="Another plan file.", show_default=False)]
ModelOfPlan = Annotated[
    str | None, _option("--model", "MODEL", "Where the model is; without it, where the plan says.")
]
TopologyOfPlan = Annotated[
    str | None, _option("--topology/-t", "T", "The cluster; without it, the bundled one of the plan's name.")
]
Target = Annotated[str, _option("--to", "X", "megatron, torchtitan, deepspeed, accelerate, hf, ...")]
Directory = Annotated[Path | None, _option("--output/-o", "DIR", "Write the files into this directory.")]
Ranks = Annotated[int | None, _number("--ranks", "N", "Run on fewer data-parallel ranks, N in all.")]
Debug = Annotated[bool, _option("--debug", None, "Show the traceback of an internal error.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `suggest` or `estimate` was asked, each option checked."""

    model: str
    topology: Topology
    options: dict[str, Any]
    """Keyword arguments of `planner.suggest.suggest` that the user gave."""
    pins: Pins
    quiet: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan, or why there is none; one of the two is None."""

    plan: Plan | None
    infeasible: Infeasible | None
    wall_s: float
    """How long it took, model loading included, seconds."""


# --------------------------------------------------------------------------- commands


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tpplan {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]


@app.callback()
def _globals(version: Version = False, debug: Debug = False) -> None:
    """`--debug` is read by `main`, which is where errors end."""


@app.command(
    epilog="""Examples:

    tpplan suggest examples/llama3_8b.py -t dgx-h100:8

    tpplan suggest model.py:build_small -t cluster.yaml --global-batch 512 --seq-len 8192 -o plan.yaml

    tpplan suggest config.json -t dgx-a100-80:128 --set tp=8,zero=1 --json"""
)
def suggest(
    model: Model,
    topology: TopologySpec,
    nodes: Nodes = None,
    global_batch: GlobalBatch = None,
    seq_len: SeqLen = None,
    mode: Mode = None,
    objective: Objective = None,
    sets: Sets = None,
    framework: FrameworkName = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    top: Top = 5,
    time_limit: TimeLimit = None,
    strict: Strict = False,
    sensitivity: Sensitivity = False,
    no_cache: NoCache = False,
    output: Output = None,
    report: Report = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the best plan for a model on a cluster, and say why it is the best."""
    options = {
        "global_batch": global_batch, "seq_len": seq_len, "mode": mode, "objective": objective,
        "framework": framework, "dtype": dtype, "optimizer": optimizer,
        "top": top, "time_limit_s": time_limit, "strict": strict or None, "cache": not no_cache,
        "sensitive": sensitivity or None,
    }  # fmt: skip
    _check_output(output)
    _check_report(report, "--report")
    request = _request(model, topology, nodes, pins=_parse_sets(sets), options=options, quiet=quiet)
    answer = _answer(request)
    if output and answer.plan:
        _save(answer.plan, output, quiet=quiet)
    if report and answer.plan:
        _write_page(answer.plan, report, plan_file=output, quiet=quiet)
    if json_:
        _print_json(_document(answer))
    else:
        _print_report(answer)
    _leave(answer)


@app.command(
    epilog="""Examples:

    tpplan trace examples/llama3_8b.py

    tpplan trace config.json --ops --strict"""
)
def trace(
    model: Model,
    seq_len: SeqLen = None,
    dtype: Dtype = None,
    ops: Ops = False,
    strict: Strict = False,
    no_cache: NoCache = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what planning sees of a model: its blocks, its ops, and which of them have a sharding rule."""
    from .planner import coverage
    from .planner.options import DTYPES, check_names, check_sizes
    from .report import trace_table

    check_sizes(seq_len=seq_len)
    check_names(dtype=dtype)
    with _stdout_to_stderr(), _progress(quiet):
        from .planner.suggest import load_graph

        chosen = dtype or DTYPES[0]
        graph = load_graph(model, seq_len=seq_len, dtype=chosen, cache=not no_cache, cache_dir=_cache_dir())
    groups = coverage.by_target(graph), coverage.by_module(graph)
    covered = coverage.covered_flops(graph)
    if json_:
        _print_json(trace_table.document(graph, *groups, covered_flops=covered))
    else:
        _console().print(trace_table.render(graph, *groups, covered_flops=covered, ops=ops))
    if strict:
        coverage.check_covered(graph)


@app.command(
    epilog="""Examples:

    tpplan estimate examples/gpt3_175b.py -t dgx-a100-80:128 --set tp=8,pp=8,dp=16,zero=1

    tpplan estimate model.py -t dgx-h100:8 --plan plan.yaml --json

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
    mode: Mode = None,
    objective: Objective = None,
    sets: Sets = None,
    framework: FrameworkName = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    compare: Compare = True,
    no_cache: NoCache = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check your own plan: how long a step takes, what memory it needs, and what would be better."""
    from .report.best import against_best, best_document

    options = {
        "global_batch": global_batch, "seq_len": seq_len, "mode": mode, "objective": objective,
        "framework": framework, "dtype": dtype, "optimizer": optimizer, "cache": not no_cache,
    }  # fmt: skip
    theirs, pins, job = _choices(plan, sets, from_args, quiet=quiet)
    if job:
        options = job | {key: value for key, value in options.items() if value is not None}
    request = _request(model, topology, nodes, pins=pins, options=options, quiet=quiet)
    answer = _answer(request)
    if theirs and answer.plan:
        _check_same_model(theirs, answer.plan, file=plan)
    if not json_:
        _print_report(answer)
    best = _best(request) if compare else None
    if json_:
        _print_json(_document(answer) | ({"best": best_document(best)} if best else {}))
    elif best:
        _console().print(against_best(answer.plan, best), markup=False, highlight=False)
    _leave(answer)


@app.command(
    epilog="""Examples:

    tpplan report plan.yaml

    tpplan report plan.yaml -o report.html --trace trace.json"""
)
def report(plan: SavedPlan, output: Page = None, trace: Trace = None, quiet: Quiet = False) -> None:
    """Show a plan: in the terminal, as one HTML page, or as a timeline for Perfetto."""
    from .planner.plan_file import load
    from .report.terminal import print_report

    _check_report(output, "--output")
    _check_output(trace, "--trace")
    found = load(plan)
    if output:
        _write_page(found, output, plan_file=plan, quiet=quiet)
    if trace:
        _write_trace(found, trace, quiet=quiet)
    if not output and not trace:
        print_report(found, _console())


@app.command(epilog="Example:  tpplan explain plan.yaml")
def explain(plan: SavedPlan, json_: Json = False) -> None:
    """Say in a page what each axis of a plan does, why these sizes, and what would change it."""
    from .planner.plan_file import load
    from .report.explain import explain as paragraphs
    from .report.terminal.pages import render_explanation

    found = load(plan)
    if json_:
        told = paragraphs(found)
        _print_json({"paragraphs": [{"title": p.title, "sentences": list(p.sentences)} for p in told]})
    else:
        _console().print(render_explanation(found))


@app.command(epilog="Example:  tpplan compare plan.yaml other.yaml")
def compare(plan: SavedPlan, other: OtherPlan, json_: Json = False) -> None:
    """Put two plans side by side: their choices, their step time by part, their memory by kind."""
    from .planner.plan_file import load
    from .report.compare import compare as compared
    from .report.compare import comparison_document
    from .report.terminal.pages import render_comparison

    left, right = load(plan), load(other)
    if json_:
        _print_json(comparison_document(compared(left, right)))
    else:
        alike = plan.name == other.name
        names = (str(plan), str(other)) if alike else (plan.name, other.name)
        _console().print(render_comparison(left, right, names))


@app.command(
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
) -> None:
    """Say why a plan is not another: fix some choices, search again, and tell what that changes."""
    from .planner.plan import Infeasible
    from .planner.plan_file import load
    from .planner.why import why as ask
    from .report.terminal.pages import render_why
    from .report.why import why_document

    with _stdout_to_stderr():
        found = ask(load(plan), _parse_sets(sets), model=model, topology=topology, cache_dir=_cache_dir())
    for note in found.notes:
        print(f"tpplan: note: {note}", file=sys.stderr)
    if json_:
        _print_json(why_document(found.plan, found.pinned, found.pins))
    else:
        _console().print(render_why(found.plan, found.pinned, found.pins))
    if isinstance(found.pinned, Infeasible):
        raise typer.Exit(INFEASIBLE)


@app.command(
    epilog="""Examples:

    tpplan suggest small.py -t cpu-gloo:2 -o plan.yaml; tpplan verify small.py plan.yaml

    tpplan verify small.py plan.yaml --ranks 4 --json"""
)
def verify(model: Model, plan: SavedPlan, ranks: Ranks = None, json_: Json = False) -> None:
    """Run a plan on CPU ranks, in fp32: does it compute what one process does, and run what it planned?"""
    from .planner.plan_file import load

    found = load(plan)
    with _stdout_to_stderr():
        from .planner.trace.runnable import runnable
        from .runtime import verify as run

        smaller = run.reduced(found, ranks)
        with runnable(model) as file:
            batch = file.inputs(run.samples(smaller), found.job.seq_len)
            verdict = run.verify(file.build(), batch, smaller, loss=file.loss, planned=found)
    if json_:
        _print_json({**asdict(verdict), "equal": verdict.equal, "faithful": verdict.faithful})
    else:
        from .report.terminal.verification import render_verdict

        _console().print(render_verdict(verdict))
    if not verdict.equal:
        raise typer.Exit(FAILED)


@app.command(
    epilog="""Examples:

    tpplan export plan.yaml --to megatron -o launch

    tpplan export plan.yaml --to hf --json"""
)
def export(
    plan: SavedPlan, to: Target, output: Directory = None, json_: Json = False, quiet: Quiet = False
) -> None:
    """Write a plan in another framework's words; what it cannot express is said, or refused."""
    from .planner.plan_file import load
    from .report.exporters import export as exported_to

    exported = exported_to(load(plan), to)
    if output:
        _write_files(exported.files | {"plan.yaml": plan.read_text()}, output, quiet=quiet)
    if json_:
        _print_json({"to": to, "files": exported.files, "deviations": list(exported.deviations)})
        return
    if not output:
        print("\n".join(f"# ==> {name} <==\n{text}" for name, text in exported.files.items()), end="")
    for deviation in exported.deviations:
        print(f"tpplan: deviation: {deviation}", file=sys.stderr)


@topology_app.command("list", epilog="Example:  tpplan topology list --json")
def topology_list(json_: Json = False) -> None:
    """List the bundled clusters."""
    from .report.hardware import render_list, summary
    from .topologies.load import list_topologies

    clusters = list_topologies()
    if json_:
        _print_json({"topologies": [summary(cluster) for cluster in clusters]})
    else:
        _console().print(render_list(clusters))


@topology_app.command("show", epilog="Example:  tpplan topology show dgx-h100:4")
def topology_show(topology: TopologyShown, nodes: Nodes = None, json_: Json = False) -> None:
    """Draw a cluster: its levels, its links, its device, and where each number comes from."""
    from .report.hardware import document, render

    cluster = _load_topology(topology, nodes)
    if json_:
        _print_json(document(cluster))
    else:
        _console().print(render(cluster))


@topology_app.command(
    "import",
    epilog="Example:  nvidia-smi topo -m > topo.txt; tpplan topology import topo.txt -o cluster.yaml",
)
def topology_import(
    files: Pastes,
    device: DeviceName = None,
    nodes: Nodes = None,
    nic_gbit: NicGbit = None,
    output: TopologyOutput = None,
    json_: Json = False,
) -> None:
    """Make a topology of an `nvidia-smi topo -m` paste and nccl-tests logs, or curves of the logs alone."""
    from .planner.options import check_sizes
    from .topologies.importers.read import import_files

    check_sizes(nodes=nodes)
    if nic_gbit is not None and not nic_gbit > 0.0:
        raise OptionError(f"--nic-gbit {nic_gbit:g}: must be greater than 0")
    _check_output(output)
    found = import_files(files, device=device, nodes=nodes or 1, nic_gbit=nic_gbit)
    _write_imported(found, output, json_=json_)


@topology_app.command("detect", epilog="Example:  tpplan topology detect -o here.yaml")
def topology_detect(
    device: DeviceName = None, nodes: Nodes = None, output: TopologyOutput = None, json_: Json = False
) -> None:
    """Look at this machine: its devices, links and network ports, without measuring anything."""
    from .planner.options import check_sizes
    from .topologies.importers.detect import detect

    check_sizes(nodes=nodes)
    _check_output(output)
    _write_imported(detect(device=device, nodes=nodes or 1), output, json_=json_)


def _write_imported(found: Imported, output: Path | None, *, json_: bool) -> None:
    from .topologies.importers.draft import to_yaml
    from .topologies.importers.read import document
    from .topologies.write import write_text

    for note in found.notes:
        print(f"tpplan: note: {note}", file=sys.stderr)
    text = to_yaml(found.data)
    if output:
        write_text(output, text)
        print(f"tpplan: wrote {output}", file=sys.stderr)
    if json_:
        _print_json(document(found))
    elif not output:
        print(text, end="")


@app.command(
    epilog="""Examples:

    tpplan profile --quick -o cluster.yaml

    torchrun --nnodes 2 --nproc-per-node 8 ... -m tpplan profile -o cluster.yaml"""
)
def profile(
    output: ProfileOutput = Path("cluster.yaml"),
    quick: Quick = False,
    resume: Resume = True,
    budget: Budget = None,
    redact: Redact = False,
    quiet: Quiet = False,
) -> None:
    """Measure this cluster (one process, or every rank under torchrun) and write it as a topology."""
    from .planner.errors import ProfileError

    if budget is not None and not budget > 0.0:
        raise OptionError(f"--budget {budget:g}: must be greater than 0")
    _check_output(output)
    from .profiler.run import profile as measure
    from .profiler.settings import FULL, QUICK

    settings = QUICK if quick else FULL
    if budget is not None:
        settings = replace(settings, budget_s=budget)
    try:
        wrote = measure(output, settings, resume=resume, redact=redact, say=_say_on_first_rank(quiet))
    except ProfileError as error:
        _say_error(str(error), code=FAILED)
        os._exit(FAILED)  # a thread may be stuck in a collective for ever
    if wrote:
        _show_profile(output)


def _say_on_first_rank(quiet: bool) -> Callable[[str], None]:
    silent = quiet or os.environ.get("RANK", "0") != "0"
    return lambda text: None if silent else print(f"tpplan: {text}", file=sys.stderr, flush=True)


def _show_profile(path: Path) -> None:
    from .report.hardware import render
    from .topologies.load import load_file

    _console().print(render(load_file(path)))
    print(f"tpplan: wrote {path}", file=sys.stderr)


# --------------------------------------------------------------------------- from options to a request


def _request(
    model: str, spec: str, nodes: int | None, *, pins: Pins, options: dict[str, Any], quiet: bool
) -> Request:
    """Everything that can be checked without the model is checked here, before the model is loaded."""
    from .planner.options import check_names, check_pins, check_sizes, choose_dtype

    given = {key: value for key, value in options.items() if value is not None}
    words = ("mode", "objective", "dtype", "optimizer", "framework")
    check_names(**{key: given[key] for key in words if key in given})
    sizes = ("global_batch", "seq_len", "top", "time_limit_s")
    check_sizes(**{key: given[key] for key in sizes if key in given})
    topology = _load_topology(spec, nodes)
    check_pins(
        pins,
        devices=topology.devices,
        global_batch=given.get("global_batch"),
        cluster=spec if nodes is None else f"{spec} with {nodes} nodes",
    )
    given["dtype"] = choose_dtype(given.get("dtype"), topology.device)
    return Request(model=model, topology=topology, options=given, pins=pins, quiet=quiet)


def _load_topology(spec: str, nodes: int | None) -> Topology:
    from .planner.options import check_sizes
    from .topologies.load import load

    check_sizes(nodes=nodes)
    return load(spec, nodes=nodes)


def _parse_sets(texts: list[str] | None) -> Pins:
    from .planner.options import parse_set

    return parse_set(",".join(texts)) if texts else {}


def _choices(
    file: Path | None, sets: list[str] | None, line: str | None, *, quiet: bool
) -> tuple[Plan | None, Pins, dict[str, Any]]:
    """The plan of `--plan`, if that is what was given; the choices to check; the job they come with."""
    from .planner.options import pins_of
    from .planner.plan_file import load

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
        return None, _parse_sets(sets), {}
    plan = load(file)
    return plan, pins_of(plan), _options_of(plan)


def _launch_line(text: str, *, quiet: bool) -> tuple[Pins, dict[str, Any]]:
    """Choices and job of another framework's launch line; what is not carried over is said."""
    from .planner.launch_lines import read

    line = read(text)
    for note in () if quiet else line.notes:
        print(f"tpplan: {line.dialect}: {note}", file=sys.stderr)
    return line.pins, line.options


def _options_of(plan: Plan) -> dict[str, Any]:
    job = plan.job
    return {
        "global_batch": job.global_batch, "seq_len": job.seq_len, "mode": job.mode, "dtype": job.dtype,
        "objective": job.objective, "framework": job.framework, "optimizer": job.optimizer,
    }  # fmt: skip


def _check_output(path: Path | None, option: str = "--output", example: str = "plan.yaml") -> None:
    """A plan that took minutes to find must not be lost to a misspelt directory."""
    if path is None:
        return
    if path.is_dir():
        raise OptionError(f"{option} {path}: is a directory; give a file, e.g. {path / example}")
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no directory {path.parent}")


def _check_report(path: Path | None, option: str) -> None:
    """The same for the HTML page, and for what it is made with."""
    if path:
        from .report.html import require

        _check_output(path, option, "report.html")
        require()


def _check_same_model(theirs: Plan, ours: Plan, *, file: Path | None) -> None:
    if theirs.model.parameters == ours.model.parameters:
        return
    raise PlanError(
        f"{file}: the plan is for {theirs.model.name} with {theirs.model.parameters:,} parameters, "
        f"but {ours.model.source} has {ours.model.parameters:,}"
    )


# --------------------------------------------------------------------------- planning


def _answer(request: Request) -> Answer:
    start = time.perf_counter()
    with _stdout_to_stderr(), _progress(request.quiet) as progress:
        from .planner.plan import Plan
        from .planner.suggest import suggest as find

        found = find(
            request.model,
            topology=request.topology,
            pins=request.pins or None,
            cache_dir=_cache_dir(),
            progress=progress,
            **request.options,
        )
    plan, infeasible = (found, None) if isinstance(found, Plan) else (None, found)
    return Answer(plan=plan, infeasible=infeasible, wall_s=time.perf_counter() - start)


def _best(request: Request) -> Plan | None:
    """The best plan when nothing is fixed, as far as a short search finds it."""
    options = request.options | {"time_limit_s": COMPARE_LIMIT_S}
    return _answer(replace(request, pins={}, options=options)).plan


def _cache_dir() -> Path:
    if directory := os.environ.get("TPPLAN_CACHE_DIR"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpplan"


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what a model file, or a library below Python, prints while we plan."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str], None] | None]:
    """A line on stderr that says what is being done, if someone is there to read it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("loading the model") as status:
        yield status.update


# --------------------------------------------------------------------------- answers


def _console() -> Console:
    from .report.terminal import open_console

    return open_console(sys.stdout)


def _document(answer: Answer) -> dict[str, Any]:
    from .report.json_view import infeasible_document, plan_document

    if answer.infeasible:
        return infeasible_document(answer.infeasible)
    assert answer.plan
    return plan_document(answer.plan, wall_s=answer.wall_s)


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _save(plan: Plan, path: Path, *, quiet: bool) -> None:
    from .planner.plan_file import save

    save(plan, path)
    if not quiet:
        print(f"tpplan: wrote {path}", file=sys.stderr)


def _write_page(plan: Plan, path: Path, *, plan_file: Path | None, quiet: bool) -> None:
    from .planner.timeline import plan_timeline
    from .report.html import render

    page = render(plan, timeline=plan_timeline(plan), plan_file=str(plan_file or "plan.yaml"))
    _write_files({path.name: page}, path.parent, quiet=quiet)


def _write_trace(plan: Plan, path: Path, *, quiet: bool) -> None:
    from .planner.timeline import plan_timeline
    from .report.trace import trace_json

    timeline = plan_timeline(plan)
    if timeline is None:
        raise OptionError(f"--trace {path}: the plan has no pipeline (pp={plan.mesh.pp}), so no timeline")
    _write_files({path.name: trace_json(timeline, plan)}, path.parent, quiet=quiet)


def _write_files(files: dict[str, str], directory: Path, *, quiet: bool) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--output {directory}: cannot write there: {error.strerror}") from None
    if not quiet:
        print(f"tpplan: wrote {', '.join(files)} to {directory}", file=sys.stderr)


def _print_report(answer: Answer) -> None:
    from .report.terminal import print_report, render_infeasible

    if answer.infeasible:
        _console().print(render_infeasible(answer.infeasible))
    if answer.plan:
        print_report(answer.plan, _console())


def _leave(answer: Answer) -> None:
    if answer.infeasible:
        raise typer.Exit(INFEASIBLE)


# --------------------------------------------------------------------------- errors end here


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    if argv is None:
        _leave_at_once_on_interrupt()
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = app(arguments, prog_name="tpplan", standalone_mode=False)
        sys.stdout.flush()
        return code or DONE
    except ClickException as error:
        return _usage_error(error)
    except UserError as error:
        return _say_error(str(error), code=BAD_INPUT)
    except TpplanError as error:
        return _say_error(str(error), code=FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _bug(error, arguments)


def _leave_at_once_on_interrupt() -> None:
    """For a process of our own: a KeyboardInterrupt raised while torch loads would abort in C++."""

    def leave(*_: object) -> None:
        if sys.stderr.isatty():
            os.write(2, SHOW_CURSOR)
        os._exit(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def _usage_error(error: Any) -> int:
    """Arguments that typer refused; an empty message means that it has shown the help instead."""
    if not error.format_message():
        return BAD_INPUT
    command = error.ctx.command_path if error.ctx else "tpplan"
    return _say_error(f"{error.format_message().rstrip('.')} (see {command} --help)", code=BAD_INPUT)


def _say_error(message: str, *, code: int) -> int:
    print(f"tpplan: error: {message}", file=sys.stderr)
    return code


def _bug(error: Exception, arguments: list[str]) -> int:
    """Keep the traceback of an internal error in a file, or show it under `--debug`."""
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    headline = f"tpplan: this is a bug in tpplan: {type(error).__name__}: {error}"
    if "--debug" in arguments:
        print(text + headline, file=sys.stderr)
        return FAILED
    with tempfile.NamedTemporaryFile("w", prefix="tpplan-", suffix=".txt", delete=False) as file:
        file.write(f"{shlex.join(['tpplan', *arguments])}\n\n{text}")
    print(
        f"{headline}\ntpplan: the traceback is in {file.name}; `tpplan --debug ...` shows it", file=sys.stderr
    )
    return FAILED
