"""Where answers go: a report or JSON on stdout, files of plans, pages and exports."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..planner.errors import OptionError
from .streams import console

if TYPE_CHECKING:
    from ..planner.plan import Plan
    from .request import Answer


def answer_document(answer: Answer) -> dict[str, Any]:
    """What `--json` prints of a plan, or of why there is none."""
    from ..report.json_view import infeasible_document, plan_document

    if answer.infeasible:
        return infeasible_document(answer.infeasible)
    assert answer.plan
    return plan_document(answer.plan, wall_s=answer.wall_s)


def print_answer(answer: Answer) -> None:
    """The report of a plan, or of why there is none, on stdout."""
    from ..report.terminal import print_report, render_infeasible

    if answer.infeasible:
        console().print(render_infeasible(answer.infeasible))
    if answer.plan:
        print_report(answer.plan, console())


def save_plan(plan: Plan, path: Path, *, quiet: bool) -> None:
    """Write a plan file, and say so."""
    from ..planner.plan_file import save

    save(plan, path)
    if not quiet:
        print(f"tpplan: wrote {path}", file=sys.stderr)


def write_page(plan: Plan, path: Path, *, plan_file: Path | None, quiet: bool) -> None:
    """Write the HTML page of a plan; `plan_file` is what its commands name."""
    from ..planner.timeline import plan_timeline
    from ..report.html import render

    page = render(plan, timeline=plan_timeline(plan), plan_file=str(plan_file or "plan.yaml"))
    write_files({path.name: page}, path.parent, quiet=quiet)


def write_trace(plan: Plan, path: Path, *, quiet: bool) -> None:
    """Write the timeline of a plan's pipeline. Raises OptionError without one."""
    from ..planner.timeline import plan_timeline
    from ..report.trace import trace_json

    timeline = plan_timeline(plan)
    if timeline is None:
        raise OptionError(f"--trace {path}: the plan has no pipeline (pp={plan.mesh.pp}), so no timeline")
    write_files({path.name: trace_json(timeline, plan)}, path.parent, quiet=quiet)


def write_figures(plan: Plan, directory: Path, *, quiet: bool) -> None:
    """Write the main figures of a plan, as SVG and PNG."""
    from ..planner.timeline import plan_timeline
    from ..report.figures import draw

    write_files(draw(plan, plan_timeline(plan)), directory, quiet=quiet)


def write_files(files: Mapping[str, str | bytes], directory: Path, *, quiet: bool) -> None:
    """Write files by name into a directory, made if need be, and say so."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise OptionError(f"--output {directory}: cannot write there: {error.strerror}") from None
    if not quiet:
        print(f"tpplan: wrote {', '.join(files)} to {directory}", file=sys.stderr)


def check_output(path: Path | None, option: str = "--output", example: str = "plan.yaml") -> None:
    """A plan that took minutes to find must not be lost to a misspelt directory."""
    if path is None:
        return
    if path.is_dir():
        raise OptionError(f"{option} {path}: is a directory; give a file, e.g. {path / example}")
    if not path.parent.is_dir():
        raise OptionError(f"{option} {path}: there is no directory {path.parent}")


def check_page(path: Path | None, option: str) -> None:
    """The same for the HTML page, and for what it is made with."""
    if path:
        from ..report.html import require

        check_output(path, option, "report.html")
        require()


def check_figures(directory: Path | None) -> None:
    """The same for a directory of figures, and for what they are drawn with."""
    if directory is None:
        return
    from ..report.figures import require

    if directory.exists() and not directory.is_dir():
        raise OptionError(f"--figures {directory}: is a file; give a directory")
    require()
