"""Which planned collective is being executed, for traces.

A label is pushed while a planned conversion runs, in either direction; whoever records collectives
asks for the current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

GRADIENT = " (gradient)"
"""How labels of what backward runs end."""
LOSS_LABEL = "mean of the loss"
_CURRENT: ContextVar[str] = ContextVar("label", default="")


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Attribute the collectives inside to `label`."""
    token = _CURRENT.set(label)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_label() -> str:
    """The innermost label, or an empty string."""
    return _CURRENT.get()
