"""Commands that learn from measured runs: `calibrate`."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from ..planner.errors import OptionError
from .options import Json, Quiet, TopologyOutput
from .output import check_output
from .request import cache_dir
from .streams import console, print_json, progress_line, stdout_to_stderr

commands = typer.Typer()

Profile = Annotated[
    Path,
    typer.Argument(metavar="PROFILE", help="A cluster file, such as `profile` writes.", show_default=False),
]
RunsFile = Annotated[
    Path,
    typer.Argument(metavar="RUNS", help="Measured runs, as `bench --runs` writes them.", show_default=False),
]


@commands.command(
    epilog="""Examples:

    tpplan calibrate cluster.yaml runs.yaml

    tpplan calibrate cluster.yaml runs.yaml -o calibrated.yaml --json"""
)
def calibrate(
    profile: Profile,
    runs: RunsFile,
    output: TopologyOutput = None,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit a cluster's predictions to what real steps took, and write the scales into its file."""
    from ..planner.recalibrate import recalibrate, updated
    from ..planner.run_file import load_runs
    from ..topologies.load import load_file
    from ..topologies.scales_text import with_scales
    from ..topologies.write import write_text

    check_output(output, example="calibrated.yaml")
    if not profile.is_file():
        raise OptionError(f"{profile}: there is no such cluster file; `tpplan profile` makes one")
    topology, measured = load_file(profile), load_runs(runs)
    source = f"measured on {date.today().isoformat()}, {runs.name}"
    with stdout_to_stderr(), progress_line(quiet) as tell:
        fitted = recalibrate(
            topology, measured, source=source, cache_dir=cache_dir(), tell=tell or (lambda text: None)
        )
    target = output or profile
    write_text(target, with_scales(profile.read_text(encoding="utf-8"), updated(topology, fitted)))
    told = {framework: (found.scales, found.runs) for framework, found in fitted.items()}
    if json_:
        from ..report.calibration import calibration_document

        print_json(calibration_document(told))
    else:
        from ..report.calibration import render_calibration

        console().print(render_calibration(told))
    if not quiet:
        print(f"tpplan: wrote {target}", file=sys.stderr)
