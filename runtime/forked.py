"""A function on gloo ranks of this machine, forked for it and ended after it.

In: a function and its argument. Out: what it returned on each rank. torch is loaded before the fork,
so ranks stand at once. To be called before this process has run a backward: autograd's threads do
not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..planner.errors import PlanError

PATIENCE_S = 300.0
"""How long ranks may be silent before a collective is taken to hang."""


Task = TypeVar("Task")
Answer = TypeVar("Answer")


def on_ranks(
    function: Callable[[Task], Answer], task: Task, *, size: int, patience_s: float = PATIENCE_S
) -> list[Answer]:
    """`function(task)` on each of `size` ranks, in rank order.

    Raises `PlanError` when a rank fails, with what it said, or when none answers for `patience_s`.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(size)]
        ranks = [
            context.Process(
                target=_rank, args=(function, task, rank, size, folder, pairs[rank][1]), daemon=True
            )
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        try:
            return _answers([ours for ours, _ in pairs], patience_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(function: Callable[[Any], Any], task: Any, rank: int, size: int, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # torch's own remarks; what goes wrong is sent
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        pipe.send((True, function(task)))
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"))
    threading.Event().wait()  # until it is ended: the tensors sent are shared memory of this process


def _answers(pipes: Sequence[Any], patience_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in answers}
        ready = wait(list(waiting), patience_s)
        if not ready:
            silent = ", ".join(str(rank) for rank in waiting.values())
            raise PlanError(f"no answer from rank {silent} within {patience_s:g} s: a collective hangs")
        for rank, pipe in [(waiting[pipe], pipe) for pipe in pipes if pipe in ready]:
            try:
                good, answer = pipe.recv()
            except EOFError:
                good, answer = False, "it ended without a word"
            if not good:
                raise PlanError(f"rank {rank}: {answer}")
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]
