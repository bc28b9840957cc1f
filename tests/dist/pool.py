"""Gloo ranks that are forked once and run one function after another.

torch is imported before the fork, so that a pool of 8 ranks stands in well under a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60
AFTER_A_FAILURE_S = 2


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
        answers: dict[int, tuple[bool, Any]] = {}
        patience_s = TIMEOUT_S
        while len(answers) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            ready = wait(list(waiting), patience_s)
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[waiting[pipe]] = pipe.recv()
                if not answers[waiting[pipe]][0]:
                    patience_s = AFTER_A_FAILURE_S
        self.broken = len(answers) < self.size
        silent = [rank for rank in range(self.size) if rank not in answers]
        failures = [f"rank {rank}:\n{answer}" for rank, (good, answer) in answers.items() if not good]
        if failures or silent:
            raise AssertionError("\n".join([*failures[:1], *[f"rank {r} did not answer" for r in silent]]))
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if not self.broken:
                pipe.send(None)
                process.join(5)
            process.kill()
        if os.path.exists(self._store):
            os.remove(self._store)
