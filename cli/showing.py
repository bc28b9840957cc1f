"""Commands that show what there is: `trace`, `report`, `explain`, `compare`, `export`."""

from __future__ import annotations

import sys

import typer

from .options import (
    Directory,
    Dtype,
    Figures,
    Json,
    Model,
    NoCache,
    Ops,
    OtherPlan,
    Page,
    Quiet,
    SavedPlan,
    SeqLen,
    Strict,
    Target,
    Trace,
)
from .output import (
    check_figures,
    check_output,
    check_page,
    write_figures,
    write_files,
    write_page,
    write_trace,
)
from .request import cache_dir
from .streams import console, print_json, progress_line, stdout_to_stderr

commands = typer.Typer()


@commands.command(
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
    from ..planner import coverage
    from ..planner.options import DTYPES, check_names, check_sizes
    from ..report import trace_table

    check_sizes(seq_len=seq_len)
    check_names(dtype=dtype)
    with stdout_to_stderr(), progress_line(quiet):
        from ..planner.suggest import load_graph

        chosen = dtype or DTYPES[0]
        graph = load_graph(model, seq_len=seq_len, dtype=chosen, cache=not no_cache, cache_dir=cache_dir())
    groups = coverage.by_target(graph), coverage.by_module(graph)
    covered = coverage.covered_flops(graph)
    if json_:
        print_json(trace_table.document(graph, *groups, covered_flops=covered))
    else:
        console().print(trace_table.render(graph, *groups, covered_flops=covered, ops=ops))
    if strict:
        coverage.check_covered(graph)


@commands.command(
    epilog="""Examples:

    tpplan report plan.yaml

    tpplan report plan.yaml -o report.html --trace trace.json

    tpplan report plan.yaml --figures figures

    tpplan report plan.yaml --json"""
)
def report(
    plan: SavedPlan,
    output: Page = None,
    figures: Figures = None,
    trace: Trace = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a plan: in the terminal, as one HTML page, as figures, or as a timeline for Perfetto."""
    from ..planner.plan_file import load
    from ..report.json_view import plan_document
    from ..report.terminal import print_report

    check_page(output, "--output")
    check_figures(figures)
    check_output(trace, "--trace")
    found = load(plan)
    if output:
        write_page(found, output, plan_file=plan, quiet=quiet)
    if figures:
        write_figures(found, figures, quiet=quiet)
    if trace:
        write_trace(found, trace, quiet=quiet)
    if json_:
        print_json(plan_document(found, wall_s=None))
    elif not (output or figures or trace):
        print_report(found, console())


@commands.command(epilog="Example:  tpplan explain plan.yaml")
def explain(plan: SavedPlan, json_: Json = False) -> None:
    """Say in a page what each axis of a plan does, why these sizes, and what would change it."""
    from ..planner.plan_file import load
    from ..report.explain import explain as paragraphs
    from ..report.terminal.pages import render_explanation

    found = load(plan)
    if json_:
        told = paragraphs(found)
        print_json({"paragraphs": [{"title": p.title, "sentences": list(p.sentences)} for p in told]})
    else:
        console().print(render_explanation(found))


@commands.command(epilog="Example:  tpplan compare plan.yaml other.yaml")
def compare(plan: SavedPlan, other: OtherPlan, json_: Json = False) -> None:
    """Put two plans side by side: their choices, their step time by part, their memory by kind."""
    from ..planner.plan_file import load
    from ..report.compare import compare as compared
    from ..report.compare import comparison_document
    from ..report.terminal.pages import render_comparison

    left, right = load(plan), load(other)
    if json_:
        print_json(comparison_document(compared(left, right)))
    else:
        alike = plan.name == other.name
        names = (str(plan), str(other)) if alike else (plan.name, other.name)
        console().print(render_comparison(left, right, names))


@commands.command(
    epilog="""Examples:

    tpplan export plan.yaml --to megatron -o launch

    tpplan export plan.yaml --to hf --json"""
)
def export(
    plan: SavedPlan, to: Target, output: Directory = None, json_: Json = False, quiet: Quiet = False
) -> None:
    """Write a plan in another framework's words; what it cannot express is said, or refused."""
    from ..planner.plan_file import load
    from ..report.exporters import export as exported_to

    exported = exported_to(load(plan), to)
    if output:
        write_files(exported.files | {"plan.yaml": plan.read_text()}, output, quiet=quiet)
    if json_:
        print_json({"to": to, "files": exported.files, "deviations": list(exported.deviations)})
        return
    if not output:
        print("\n".join(f"# ==> {name} <==\n{text}" for name, text in exported.files.items()), end="")
    for deviation in exported.deviations:
        print(f"tpplan: deviation: {deviation}", file=sys.stderr)
