"""What goes to stdout and what to stderr while planning."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
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
def progress_line(quiet: bool, first: str = "loading the model") -> Iterator[Callable[[str], None] | None]:
    """A line on stderr that says what is being done, `first` at first, if someone is there to read it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield status.update


def console() -> Console:
    """Standard output as rich writes to it: as wide as the terminal, plain when piped."""
    from ..report.terminal import open_console

    return open_console(sys.stdout)


def print_json(document: dict[str, Any]) -> None:
    """The one JSON document of a command, on stdout."""
    print(json.dumps(document, indent=2, allow_nan=False))


def say_error(message: str, *, code: int) -> int:
    """Tell of an error on stderr; returns the exit code."""
    print(f"tpplan: error: {message}", file=sys.stderr)
    return code
