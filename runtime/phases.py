"""Where the time of a step goes on one rank.

In: code run inside `watch`. Out: seconds by phase, each moment counted once, for the innermost phase:

    forward         the step, where nothing below applies
    backward        inside autograd's engine
    communication   waiting for a collective or for a neighbour in the pipeline
    gradients       what is owed after backward, and clipping
    optimizer       the update

On CPU ranks a wait blocks and is seen. On an accelerator the device is waited for at each border, and
collectives count for the phase that they run in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd
import torch.distributed as dist

FORWARD, BACKWARD, COMMUNICATION = "forward", "backward", "communication"
GRADIENTS, OPTIMIZER = "gradients", "optimizer"
PHASES = (FORWARD, BACKWARD, COMMUNICATION, GRADIENTS, OPTIMIZER)


class PhaseClock:
    """Seconds by phase."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._device, self._open, self._since = device, [], 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside for `name`, and no longer for the phase around it."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted for `name`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return counted

    def _charge(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def watch(clock: PhaseClock) -> Iterator[None]:
    """Count autograd's engine as backward, and what blocks until a collective is done as communication."""
    functional = torch.ops._c10d_functional
    seams = (
        (torch.autograd, "_engine_run_backward", BACKWARD),
        (dist.Work, "wait", COMMUNICATION),
        (functional, "wait_tensor", COMMUNICATION),
    )
    originals = [getattr(owner, name) for owner, name, _ in seams]
    for (owner, name, phase), original in zip(seams, originals, strict=True):
        setattr(owner, name, clock.within(phase, original))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(seams, originals, strict=True):
            setattr(owner, name, original)
