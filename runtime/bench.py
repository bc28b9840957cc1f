"""How long a step of a plan takes here, where the time goes, how much memory it needs.

In: a model, a global batch, a loss, a plan. Out: `Measured`. A step is what training does: forward and
backward of all microbatches, clipping, the optimizer. It is timed from a barrier to the end of the
slowest rank. Phases and memory are taken in steps of their own, because watching costs time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..planner.errors import OptionError
from ..planner.plan import Plan
from .api import auto_parallelize
from .forked import on_ranks
from .forward import LossFunction
from .parallel import Parallel
from .peak import track
from .phases import FORWARD, GRADIENTS, OPTIMIZER, PHASES, PhaseClock, watch

MAX_NORM, LEARNING_RATE = 1.0, 1e-4
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=LEARNING_RATE),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=LEARNING_RATE),
}
"""By the job's name for them."""
WATCHED_STEPS = 3
"""Steps whose phases are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One plan on one machine."""

    ranks: int
    device: str
    step_s: float
    """Median over the steps of the slowest rank's time."""
    steps_s: tuple[float, ...]
    """Every timed step."""
    phases_s: dict[str, float]
    """Mean over ranks of the watched steps; waiting for others counts as communication."""
    memory_bytes: int
    """Largest of any rank at any moment: what tensors occupy, without context or allocator."""
    apply_s: float
    """Putting the model onto its mesh, on the slowest rank."""
    first_step_s: float
    """The first step, in which groups connect and buffers are made."""

    @property
    def spread(self) -> float:
        """Half the interquartile range of the steps over their median."""
        low, _, high = quantiles(self.steps_s, n=4, method="inclusive")
        return (high - low) / 2 / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is measured, and how often."""

    build: Callable[[], nn.Module]
    batch: Any
    loss: LossFunction | None
    plan: Plan
    steps: int
    warmup: int


def bench_forked(trial: Trial) -> Measured:
    """Measure on CPU ranks of this machine. Raises `PlanError` when a rank fails."""
    check(trial)
    return on_ranks(bench_here, trial, size=trial.plan.mesh.devices)[0]


def bench_here(trial: Trial) -> Measured:
    """Measure on this process group; the same answer on every rank. Collective."""
    check(trial)
    torch.manual_seed(0)
    start = time.perf_counter()
    parallel = auto_parallelize(trial.build(), trial.batch, plan=trial.plan, loss_fn=trial.loss)
    apply_s = time.perf_counter() - start
    optimizer = OPTIMIZERS[trial.plan.job.optimizer](parallel.parameters())
    step = Step(parallel, optimizer, trial.batch)
    first_s, *_ = _slowest([_timed(step, parallel.device)], parallel.device)
    for _ in range(trial.warmup):
        step()
    steps_s = _slowest([_timed(step, parallel.device) for _ in range(trial.steps)], parallel.device)
    phases_s = _phases(step, parallel)
    return Measured(
        ranks=dist.get_world_size(),
        device=_name(parallel.device),
        step_s=median(steps_s),
        steps_s=tuple(steps_s),
        phases_s=phases_s,
        memory_bytes=int(max(_slowest([float(_peak_bytes(step, parallel))], parallel.device))),
        apply_s=_slowest([apply_s], parallel.device)[0],
        first_step_s=first_s,
    )


def check(trial: Trial) -> None:
    """Raise `OptionError` for what cannot be measured."""
    if trial.plan.job.optimizer not in OPTIMIZERS:
        raise OptionError(
            f"the plan has no optimizer ({trial.plan.job.optimizer}): there is no step to measure"
        )
    if trial.steps < 2:
        raise OptionError(f"--steps {trial.steps}: at least 2, for a spread")


class Step:
    """One step of training, as users write it."""

    def __init__(self, parallel: Parallel, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.parallel, self.optimizer, self.batch = parallel, optimizer, batch

    def __call__(self, clock: PhaseClock | None = None) -> None:
        """Run it; with a clock, say which phase it is in."""
        phase = (clock or PhaseClock(torch.device("cpu"))).phase
        with phase(FORWARD):
            self.parallel.train_step(self.batch)
        with phase(GRADIENTS):
            self.parallel.clip_grad_norm_(MAX_NORM)
        with phase(OPTIMIZER):
            self.optimizer.step()
            self.optimizer.zero_grad()


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _timed(step: Step, device: torch.device) -> float:
    """Seconds of one step on this rank, all ranks starting together."""
    _settle(device)
    dist.barrier()
    start = time.perf_counter()
    step()
    _settle(device)
    return time.perf_counter() - start


def _slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of all ranks, value by value."""
    return _reduced(values, device, dist.ReduceOp.MAX)


def _reduced(values: Sequence[float], device: torch.device, operation: Any) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, operation)
    return found.tolist()


def _phases(step: Step, parallel: Parallel) -> dict[str, float]:
    clock = PhaseClock(parallel.device)
    original = parallel.finish_gradients
    parallel.finish_gradients = clock.within(GRADIENTS, original)
    try:
        with watch(clock):
            for _ in range(WATCHED_STEPS):
                dist.barrier()
                step(clock)
    finally:
        parallel.finish_gradients = original
    totals = _reduced([clock.seconds[name] for name in PHASES], parallel.device, dist.ReduceOp.SUM)
    runs = WATCHED_STEPS * dist.get_world_size()
    return {name: total / runs for name, total in zip(PHASES, totals, strict=True)}


def _peak_bytes(step: Step, parallel: Parallel) -> int:
    """What tensors occupy at the most in one step: the allocator's own count, or on the CPU each tensor's."""
    if parallel.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(parallel.device)
        step()
        return torch.accelerator.max_memory_allocated(parallel.device)
    held = [*step.optimizer.state.values(), *(p.grad for p in parallel.parameters())]
    tensors = (x for x in tree_leaves([list(parallel.state_dict().values()), held]) if isinstance(x, Tensor))
    with track(tensors, batch=step.batch) as peak:
        step()
    return peak.peak_bytes


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
