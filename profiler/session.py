"""What the steps of one profile share: the ranks, the journal, the clock, and how to measure several things.

Measurements of one curve are taken in turns (`timing.in_turns`) and kept together. What a journal already
holds is not measured again; when the budget is spent, nothing new begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .discovery import Layout
from .journal import Journal
from .settings import Measurement, Settings
from .timing import Batch, Run, in_turns, warm_up
from .world import World

Say = Callable[[str], None]


def _nothing() -> None:
    """A kernel's result is not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing to measure, ready to run."""

    key: str
    kind: str
    facts: Mapping[str, Any]
    run: Run
    joint: bool = False
    """Whether ranks work together: then a batch lasts until the slowest of them is done."""
    check: Callable[[], None] = _nothing
    """Raises `ProfileError` for a wrong result."""


@dataclass(slots=True)
class Session:
    """What the steps of one run share."""

    world: World
    settings: Settings
    layout: Layout
    journal: Journal
    say: Say
    started_s: float = field(default_factory=time.monotonic)
    skipped: int = 0
    """Measurements that were left out because the budget had ended."""

    def in_time(self, wanted: int = 1) -> bool:
        """Whether all ranks may begin with `wanted` more measurements; counts them as left out if not."""
        if self.world.slowest(time.monotonic() - self.started_s) <= self.settings.budget_s:
            return True
        self.skipped += wanted
        return False

    def tell(self, what: str) -> None:
        """Say what is being measured, and when."""
        self.say(f"{time.monotonic() - self.started_s:4.0f} s  {what}")

    def warm_up(self, item: Item) -> Batch:
        """Check the item's result and find how many executions make a batch."""
        self.world.doing(item.key)
        item.check()
        return warm_up(item.run, self.settings, self.world.slowest)

    def take(self, items: Sequence[Item], batches: Mapping[str, Batch]) -> None:
        """Measure items in turns and keep them. They are warm; results are checked once more at the end."""
        if not items:
            return

        def run(item: Item) -> Run:
            def announced(count: int) -> float:
                self.world.doing(item.key)
                seconds = item.run(count)
                return self.world.slowest(seconds) if item.joint else seconds

            return announced

        samples = in_turns(
            {item.key: run(item) for item in items}, batches, self.settings, agree=self.world.slowest
        )
        for item in items:
            item.check()
        self.journal.add(
            *(
                Measurement(key=item.key, kind=item.kind, facts=dict(item.facts), sample=samples[item.key])
                for item in items
            )
        )
