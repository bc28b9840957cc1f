"""Settings of the whole suite: a private cache, fixed terminal, repeatable property tests, shared workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

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
