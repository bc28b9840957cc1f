"""Every exception that tpplan raises on purpose, and the word "did you mean".

    TpplanError
    +-- UserError              something the user gave is wrong: exit code 2, no traceback
    |   +-- ModelError         the model file, factory or config
    |   |   +-- TraceError     the model loads but cannot be traced
    |   +-- TopologyError      a topology or device file, or its name
    |   +-- OptionError        an option's value, alone or against another
    |   +-- PlanError          a plan file that cannot be read or does not match
    +-- SolverError            a solver gave no usable answer
    +-- ProfileError           a measurement failed: a rank died, hung or answered wrongly
    +-- RunError               training went wrong: a loss that is not finite, ranks that disagree

"Does not fit" is an answer, not an exception: see `planner.plan.Infeasible`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TpplanError(Exception):
    """Base of all exceptions raised on purpose."""


class UserError(TpplanError):
    """An input is wrong. The message names the thing, the value found and what is allowed."""


class ModelError(UserError):
    """The model file, its factory, its inputs or its configuration cannot be used."""


class TraceError(ModelError):
    """The model was built but could not be turned into a graph."""


class TopologyError(UserError):
    """A topology or device file is malformed, or no such topology exists."""


class OptionError(UserError):
    """A command-line option or keyword argument has an impossible value."""


class PlanError(UserError):
    """A plan file cannot be read, has an unknown version, or belongs to another model."""


class SolverError(TpplanError):
    """A solver returned no usable solution; the message names its status."""


class ProfileError(TpplanError):
    """A measurement failed; the message names the rank, its host and what it was doing."""


class RunError(TpplanError):
    """Training went wrong; the message names the step, the rank and the parameter."""


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """`"; did you mean 'dgx-h100'?"` for a near miss, else an empty string."""
    close = get_close_matches(value, sorted(choices), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
