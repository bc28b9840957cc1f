"""Where a command line starts and where its errors end: messages and exit codes."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
from typing import Any, cast

import typer

from ..planner.errors import TpplanError, UserError
from .app import app
from .exits import BAD_INPUT, DONE, FAILED, INTERRUPTED
from .streams import say_error

YOUNG_OBJECTS = 200_000
"""Objects made between two looks for garbage. A plan is made of many small objects that live until the end:
with Python's 700 a tenth of the time goes into looking, and memory grows by 1 to 4% without."""
SHOW_CURSOR = b"\x1b[?25h\n"
"""Terminal escape: progress hides the cursor while it runs."""

ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""Base of the errors raised for arguments that cannot be parsed; typer does not export it."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code."""
    if argv is None:
        _leave_at_once_on_interrupt()
        gc.set_threshold(YOUNG_OBJECTS)
    arguments = sys.argv[1:] if argv is None else argv
    try:
        code = app(arguments, prog_name="tpplan", standalone_mode=False)
        sys.stdout.flush()
        return code or DONE
    except ClickException as error:
        return _usage_error(error)
    except UserError as error:
        return say_error(str(error), code=BAD_INPUT)
    except TpplanError as error:
        return say_error(str(error), code=FAILED)
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
    return say_error(f"{error.format_message().rstrip('.')} (see {command} --help)", code=BAD_INPUT)


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
