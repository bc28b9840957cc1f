"""Training that goes wrong ends with the rank that is to blame, not with a wrong model or a silent machine.

    guard = Guard(parallel, timeout_s=600)
    for step, batch in enumerate(data):
        loss = parallel.train_step(batch)
        guard.after(step)                    # before the optimizer, which would spread what is wrong
        optimizer.step()
        optimizer.zero_grad()
    guard.close()

In: a `Parallel`, after each step. Out: nothing, or

- `RunError` on every rank when a loss or a gradient is not finite, naming the first rank and parameter;
- `RunError` when ranks that hold the same part of a parameter hold different values, naming both
  (compared every `compare_every` steps: it reads every parameter once);
- the end of this process, when no step has been done for `timeout_s`: a thread prints which rank it
  is, what it was doing (the collective, if it is in one) and where, so that torchrun can start again.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..planner.errors import OptionError, RunError
from .data import is_unmanaged
from .parallel import Parallel

FAILED = 1
STDERR = 2
"""Written to as a file: a main thread that hangs may hold the lock of `sys.stderr`."""
TIMEOUT_S = 600.0
"""Longer than a step, than a checkpoint, than a first step that connects all groups. Judgement."""
COMPARE_EVERY = 100
LOOKS = 20
"""How often within the timeout the thread looks at the clock."""


class Guard:
    """Watches one run. To be made on every rank."""

    def __init__(
        self, parallel: Parallel, *, timeout_s: float = TIMEOUT_S, compare_every: int = COMPARE_EVERY
    ) -> None:
        """Raises `OptionError` for numbers that are not positive."""
        if not timeout_s > 0 or compare_every < 1:
            raise OptionError(f"timeout_s={timeout_s}, compare_every={compare_every}: both must be positive")
        self._parallel, self._compare_every = parallel, compare_every
        self._watchdog = Watchdog(timeout_s)
        self._watchdog.start()

    def after(self, step: int) -> None:
        """Step number `step` has its gradients. Collective."""
        self._watchdog.alive(step + 1)
        check_finite(self._parallel, step)
        if (step + 1) % self._compare_every == 0:
            check_copies(self._parallel, step)

    def close(self) -> None:
        """End the thread."""
        self._watchdog.stop()


# --------------------------------------------------------------------------- values


def check_finite(parallel: Parallel, step: int) -> None:
    """Raise `RunError` on every rank if a rank's own loss or a gradient is not finite. Collective.

    What a rank's own samples give is blamed before gradients, which others' sums have gone into.
    """
    own, gradient = parallel.local_loss, _not_finite(parallel)
    of_loss = own is not None and not bool(torch.isfinite(own))
    flag = torch.tensor(float(of_loss or bool(gradient)), device=parallel.device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    if not flag:
        return
    words = f"the loss of its samples is {own.item() if own is not None else 0}" if of_loss else ""
    words = words or (f"the gradient of {gradient} is not finite" if gradient else "")
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, words)
    blamed = [(rank, found) for rank, found in enumerate(every) if found]
    rank, found = next(((r, f) for r, f in blamed if f.startswith("the loss")), blamed[0])
    raise RunError(f"step {step}, rank {rank}: {found}")


def _not_finite(parallel: Parallel) -> str:
    """The first parameter with such a gradient. One pass tells that there is none."""
    grads = [(name, _local(p.grad)) for name, p in parallel.named_parameters() if p.grad is not None]
    if not grads or bool(torch.isfinite(torch.stack([g.detach().float().sum() for _, g in grads]).sum())):
        return ""
    return next((name for name, grad in grads if not bool(torch.isfinite(grad).all())), "")


def check_copies(parallel: Parallel, step: int) -> None:
    """Raise `RunError` if ranks that hold the same part of a parameter hold other values. Collective."""
    problem = ""
    for group, parameters in _copies(parallel):
        names = [name for name, _ in parameters]
        sums = torch.stack([_checksum(_local(parameter)) for _, parameter in parameters])
        every = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, sums, group=group)
        for rank, theirs in zip(dist.get_process_group_ranks(group), every, strict=True):
            different = (theirs != every[0]).nonzero()
            if len(different) and not problem:
                first = dist.get_process_group_ranks(group)[0]
                problem = f"ranks {first} and {rank} hold different values of {names[int(different[0])]}"
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    if any(found):
        raise RunError(f"step {step}: {next(filter(None, found))}")


def _copies(parallel: Parallel) -> Iterator[tuple[dist.ProcessGroup, list[tuple[str, nn.Parameter]]]]:
    """Groups of ranks with the parameters of which each member has the same part."""
    by_group: dict[str, tuple[dist.ProcessGroup, list[tuple[str, nn.Parameter]]]] = {}
    for name, parameter in parallel.named_parameters():
        for group in _groups_with_copies(parameter, parallel):
            if dist.get_world_size(group) > 1:
                by_group.setdefault(group.group_name, (group, []))[1].append((name, parameter))
    yield from by_group.values()


def _groups_with_copies(parameter: nn.Parameter, parallel: Parallel) -> Iterator[dist.ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return
    for i, placed in enumerate(parameter.placements):
        if placed.is_replicate():
            yield parameter.device_mesh.get_group(i)
    if is_unmanaged(parameter):
        yield parallel.mesh.replica.get_group()


def _checksum(part: Tensor) -> Tensor:
    """A sum of the bits: equal parts have equal ones, whatever the order of addition."""
    flat = part.detach().contiguous().view(torch.uint8).flatten()
    words = torch.nn.functional.pad(flat, (0, -len(flat) % 8)).view(torch.int64)
    places = torch.arange(1, len(words) + 1, device=words.device)
    return (words * places).sum()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --------------------------------------------------------------------------- hanging


class Watchdog(threading.Thread):
    """Ends the process when its main thread has made no step for `timeout_s` seconds."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(daemon=True, name="tpplan-watchdog")
        self._timeout_s, self._main = timeout_s, threading.get_ident()
        self._over = threading.Event()
        self._step, self._since = 0, time.monotonic()

    def alive(self, step: int) -> None:
        """The main thread begins step number `step`."""
        self._step, self._since = step, time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Look at the clock now and then."""
        while not self._over.wait(self._timeout_s / LOOKS):
            if time.monotonic() - self._since > self._timeout_s:
                os.write(STDERR, self._sentence().encode())
                os._exit(FAILED)

    def _sentence(self) -> str:
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        stack = "".join(traceback.format_list(frames))
        return (
            f"tpplan: error: rank {dist.get_rank()} ({socket.gethostname()}) has not done step {self._step} "
            f"within {self._timeout_s:g} s; {doing(frames)}\n{stack}"
        )


def doing(frames: Iterable[traceback.FrameSummary]) -> str:
    """Whether a stack is in a collective, and in which: the outermost function of torch.distributed."""
    folder = Path(dist.__file__).parent
    for frame in frames:
        path = Path(frame.filename)
        if path.parent == folder and path.name == "distributed_c10d.py" and frame.name != "wrapper":
            return f"it waits in {frame.name}"
        if path.parent == folder and path.name == "_functional_collectives.py":
            return f"it waits in {frame.name}"
    return "it is in no collective"
