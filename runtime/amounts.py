"""How often a collective runs on a rank in a step, planned and by rule."""

from __future__ import annotations

from dataclasses import dataclass

from ..planner.layout import Collective


@dataclass(frozen=True, slots=True)
class Amount:
    """Executions in a step on one rank, and their bytes together."""

    count: float = 0.0
    bytes: float = 0.0
    again: float = 0.0
    """How many of `count` are of forwards that backward runs again."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.count + other.count, self.bytes + other.bytes, self.again + other.again)


NOTHING = Amount()
Key = tuple[str, Collective, str]
"""Label, collective, axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One kind of collective on a rank."""

    planned: Amount
    runs: Amount
    rule: str = ""
    """In words, where the two differ by rule."""
    sound: bool = True
    """Whether the plan's row is what its own parameters and mesh make of it."""
