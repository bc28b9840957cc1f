"""The `tpplan` command. In: arguments, TPPLAN_CACHE_DIR. Out: a report or one JSON document.

Reports and JSON go to stdout, everything else (progress, notes, errors, what a model file prints)
to stderr. Exit codes: 0 done, 1 a bug in tpplan or a solver that failed, 2 bad input, 3 infeasible,
130 interrupted. Whatever is heavy is imported inside the command that needs it: `--help` loads
typer alone.
"""

from __future__ import annotations

from .app import app
from .main import main
