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
    """One timed batch lasts at least this long, so that clocks and launches do not matter; short enough that
    most batches are not interrupted."""
    batches: tuple[int, int]
    """Fewest and most batches of one measurement."""
    enough_s: float
    """Seconds after which a measurement is not repeated any more."""
    spread: float
    """Half the interquartile range over the median at which repeating stops."""
    timeout_s: float = 45.0
    """A collective that takes longer has failed."""
    seed: int = 0


QUICK = Settings(
    quick=True,
    budget_s=95.0,
    growth=4,
    longest_s=0.1,
    batch_s=0.002,
    batches=(9, 40),
    enough_s=0.5,
    spread=0.05,
)
FULL = Settings(
    quick=False,
    budget_s=1800.0,
    growth=4,
    longest_s=1.0,
    batch_s=0.005,
    batches=(15, 100),
    enough_s=10.0,
    spread=0.02,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one execution and how far several batches lie apart."""

    seconds: float
    """The lower quartile of the batches: whatever else a machine does can only add to a time."""
    spread: float
    """Half the interquartile range over the median."""
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One line of the journal: what was measured (a key and its facts) and the sample."""

    key: str
    kind: str
    """`kernel`, `collective`, `overlap`, `block`, `host`; `kernel check`, `collective check`: held back."""
    facts: dict[str, Any] = field(default_factory=dict)
    sample: Sample
