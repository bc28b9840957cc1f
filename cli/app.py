"""The command `tpplan`: all commands, in the order in which `--help` lists them."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from . import calibrating, clusters, planning, running, showing
from .options import GROUP, Debug

app = typer.Typer(
    name="tpplan",
    help="Plan how to split any PyTorch model over a cluster: splits, group sizes, time, memory, and why.",
    epilog="Start with:  tpplan suggest examples/llama3_8b.py --topology dgx-h100:8",
    pretty_exceptions_enable=False,
    **GROUP,
)
for file in (planning, showing, running, clusters, calibrating):
    app.add_typer(file.commands)


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
