"""How long and how closely to measure: the nouns of the profiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Judgements, all of them, between a minute's look and an hour's measurement."""

    quick: bool
    budget_s: float
    """Seconds for everything; when they are spent, what is left is not measured and a note says so."""
    smallest_bytes: int = KIB
    largest_bytes: int = GIB
    growth: int
    """Factor between two message sizes."""
    longest_s: float
    """A collective that takes longer than this is not measured at larger sizes."""
    batch_s: float
    """One timed batch lasts at least this long, so that clocks and launches do not matter."""
    batches: tuple[int, int]
    """Fewest and most batches of one measurement."""
    spread: float
    """Half the interquartile range over the median at which repeating stops."""
    timeout_s: float = 45.0
    """A collective that takes longer has failed."""
    seed: int = 0


QUICK = Settings(
    quick=True, budget_s=100.0, growth=8, longest_s=0.1, batch_s=0.004, batches=(5, 12), spread=0.05
)
FULL = Settings(
    quick=False, budget_s=1800.0, growth=4, longest_s=1.0, batch_s=0.02, batches=(7, 40), spread=0.02
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one execution: the median of several batches and how far they lie apart."""

    seconds: float
    spread: float
    """Half the interquartile range over the median."""
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of the journal: what was measured (a key and its facts) and the sample."""

    key: str
    kind: str
    """`kernel`, `collective`, `overlap` or `link`."""
    facts: dict[str, Any] = field(default_factory=dict)
    sample: Sample
