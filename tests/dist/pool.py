"""Gloo ranks that are forked once and run one function after another.

torch is imported before the fork, so that a pool of 8 ranks stands in well under a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 40


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class RankPool:
    """`size` processes, one gloo rank each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._store = tempfile.mktemp(prefix="ranks-")
        context = multiprocessing.get_context("fork")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(*args)` returns on each rank; a rank's exception fails the caller."""
        for pipe in self._pipes:
            pipe.send((function, args))
        failures, results = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(1 if failures else TIMEOUT_S):
                failures.append(f"rank {rank} did not answer")
                continue
            good, answer = pipe.recv()
            results.append(answer)
            if not good:
                failures.append(f"rank {rank}:\n{answer}")
        if failures:
            self.broken = len(results) < self.size
            raise AssertionError("\n".join(failures[:2]))
        return results

    def close(self) -> None:
        """End the ranks."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if not self.broken:
                pipe.send(None)
                process.join(5)
            process.kill()
        if os.path.exists(self._store):
            os.remove(self._store)
