"""Settings of the whole suite: a private cache, fixed terminal, repeatable property tests, shared workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

SMALL_OBJECTS = 200_000
IDLE_S = 0.065
"""Processor seconds to make them on the machine on which limits were set, with nothing else on it."""
RANKS = "tests/dist/"
"""Tests that share pools of ranks."""


class ByFile(LoadFileScheduling):
    """One worker runs a file's tests, which share fixtures, and all tests that need ranks."""

    def _split_scope(self, nodeid: str) -> str:
        return RANKS if nodeid.startswith(RANKS) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point the graph cache of this process and its children at a directory of the session."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPPLAN_CACHE_DIR", str(directory))
        patch.setenv("COLUMNS", "100")
        patch.delenv("FORCE_COLOR", raising=False)
        patch.setenv("NO_COLOR", "1")
        yield directory


@pytest.fixture(scope="session")
def on_this_machine() -> Callable[[float], float]:
    """A function of processor seconds on an idle machine -> what they may be on this one at this moment.

    Processor time grows when the other half of a core is busy, as with several workers, on slower machines,
    and with the objects that a long session leaves to the garbage collector.
    """
    return lambda seconds: seconds * max(1.0, statistics.median(making_s() for _ in range(5)) / IDLE_S)


def making_s() -> float:
    """Processor seconds to make many small objects, of which plans consist."""
    start_s, made = time.process_time(), {}
    for i in range(SMALL_OBJECTS):
        made[i, i + 1] = (i,)
    return time.process_time() - start_s
