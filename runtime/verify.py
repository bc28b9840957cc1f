"""A plan on CPU ranks against one process: loss, every gradient, one optimizer step, every collective.

In: a model in fp32 and a global batch, or how to make them, a loss, a plan. Out: a `Verdict`. A model too
large for this machine is made narrow first, where it can be (`narrow`).
One gloo rank per device of the plan is forked here. Relative errors compare Euclidean norms:
|found - expected| / |expected|. With dropout two runs never agree, so models are put in eval mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..planner.errors import OptionError
from ..planner.plan import Plan
from .api import auto_parallelize
from .batch import call_of
from .executed import Executed, record
from .fidelity import Row, compare
from .forked import on_ranks
from .forward import LossFunction, own_loss
from .gather import whole
from .narrow import narrowed

TOLERANCE = 1e-4
"""Largest relative error of fp32 sums added in another order."""
LARGEST_PARAMETERS = 50_000_000
"""More would not fit a machine once per rank in fp32."""
MOST_RANKS = 64
LEARNING_RATE, EPS, MAX_NORM = 1e-2, 1e-2, 1.0
"""Of the step that is compared: an eps at which AdamW does not magnify rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found."""

    ranks: int
    loss: float
    expected_loss: float
    gradient_error: float
    """The largest of any parameter."""
    worst_gradient: str
    step_error: float
    """The largest of any parameter after one clipped AdamW step."""
    collectives: tuple[Row, ...]
    """Compared on every rank; the amounts are the busiest one's."""
    same_order: bool
    """Whether all ranks of each group ran its collectives in the same order."""
    differences: tuple[str, ...]
    """What the runtime knows to run otherwise than priced."""
    width: str
    """At which sizes it ran, in words."""

    @property
    def equal(self) -> bool:
        """Whether the plan computes what one process does."""
        close = abs(self.loss - self.expected_loss) <= TOLERANCE * abs(self.expected_loss)
        return close and max(self.gradient_error, self.step_error) <= TOLERANCE and self.same_order

    @property
    def faithful(self) -> bool:
        """Whether what ran is what was planned, but for what `differences` announces."""
        return all(row.agrees or row.announced for row in self.collectives)


Values = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Task:
    model: nn.Module
    batch: Any
    loss: LossFunction
    plan: Plan


@dataclass(frozen=True, slots=True)
class _Found:
    loss: float
    gradients: Values
    parameters: Values
    executed: list[Executed]
    differences: tuple[str, ...]


def reduced(plan: Plan, ranks: int | None) -> Plan:
    """The plan in fp32, on fewer data-parallel ranks if `ranks` says so.

    An axis of one rank then has no collectives.
    Raises `OptionError` when that number of ranks cannot be reached by cutting `dp` alone.
    """
    rest = plan.mesh.devices // plan.mesh.dp
    wanted = ranks or plan.mesh.devices
    if wanted < 1 or wanted % rest or plan.mesh.dp % (wanted // rest or plan.mesh.dp + 1):
        raise OptionError(
            f"--ranks {wanted}: only dp={plan.mesh.dp} can be cut, to multiples of {rest} ranks"
        )
    if wanted > MOST_RANKS:
        raise OptionError(
            f"the plan has {wanted} ranks, more than {MOST_RANKS}: give --ranks a multiple of {rest}"
        )
    mesh = replace(plan.mesh, dp=wanted // rest)
    axes = [(c, [axis for axis in c.axis.split("+") if mesh.size(axis) > 1]) for c in plan.communications]
    communications = tuple(replace(c, axis="+".join(left)) for c, left in axes if left)
    return replace(plan, mesh=mesh, communications=communications, job=replace(plan.job, dtype="fp32"))


def samples(plan: Plan) -> int:
    """Samples of one step."""
    return plan.micro_batch * plan.num_microbatches * plan.mesh.batch_ways


def verify_built(
    build: Callable[[], nn.Module],
    inputs: Callable[[int, int], Any],
    plan: Plan,
    *,
    loss: LossFunction | None,
    planned: Plan,
) -> Verdict:
    """`verify` of what a model file makes: at full width if it fits this machine, or made narrow.

    Raises `OptionError` for a large model that cannot be made narrow enough, saying why.
    """
    with torch.device("meta"):
        hollow = build()
    parameters, length = _count(hollow), plan.job.seq_len
    if parameters <= LARGEST_PARAMETERS:
        return verify(build(), inputs(samples(plan), length), plan, loss=loss, planned=planned)
    narrow = narrowed(hollow, plan)
    if isinstance(narrow, str):
        raise _too_large(parameters, f"it runs at full width ({narrow})")
    if narrow.parameters > LARGEST_PARAMETERS:
        raise _too_large(narrow.parameters, f"even with its widths divided by {narrow.divisor}")
    plan = narrow.plan
    batch = narrow.batch(inputs(samples(plan), plan.job.seq_len))
    found = verify(narrow.build(), batch, plan, loss=loss, planned=planned)
    width = (
        f"widths divided by {narrow.divisor}, {plan.num_microbatches} microbatches, "
        f"sequences of {plan.job.seq_len}"
    )
    return replace(found, width=width)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _too_large(parameters: int, why: str) -> OptionError:
    return OptionError(
        f"the model has {parameters:,} parameters, {why}; verify runs it once per rank on this machine: "
        f"give a small factory, at most {LARGEST_PARAMETERS:,}"
    )


def verify(model: nn.Module, batch: Any, plan: Plan, *, loss: LossFunction | None, planned: Plan) -> Verdict:
    """Run `plan` (see `reduced`) on forked ranks and compare.

    `planned` is the plan as it was made: whether its bytes can be compared depends on its dtype and
    size. Raises `PlanError` when a rank fails or does not answer, with what it said.
    """
    if _count(model) > LARGEST_PARAMETERS:
        raise _too_large(_count(model), "as it was given")
    task = _Task(model.float().eval(), batch, loss or own_loss, plan)
    found = on_ranks(_step, task, size=plan.mesh.devices)
    expected = _alone(task)  # after the fork: autograd's threads do not survive one
    rows = compare(plan, [rank.executed for rank in found])
    if planned.job.dtype != "fp32" or (planned.mesh, planned.parameters) != (plan.mesh, plan.parameters):
        rows = tuple(replace(row, agrees=row.as_often) for row in rows)
    name, gradient_error = _worst([f.gradients for f in found], expected.gradients)
    return Verdict(
        ranks=plan.mesh.devices,
        loss=found[0].loss,
        expected_loss=expected.loss,
        gradient_error=gradient_error,
        worst_gradient=name,
        step_error=_worst([f.parameters for f in found], expected.parameters)[1],
        collectives=rows,
        same_order=same_order([f.executed for f in found]),
        differences=found[0].differences,
        width="full width",
    )


def _worst(found: Sequence[Values], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """Name and relative error of the parameter that is most wrong on any rank; a missing one is all wrong."""
    errors = {name: 1.0 for name in expected}
    for name in expected:
        every = [values[name] for values in found if name in values]
        size = expected[name].norm() + torch.finfo(torch.float32).tiny
        if every:
            errors[name] = max(((v - expected[name]).norm() / size).item() for v in every)
    worst = max(errors, key=errors.__getitem__)
    return worst, errors[worst]


def same_order(executed: Sequence[Sequence[Executed]]) -> bool:
    """Whether the members of each group agree on the kinds and order of its collectives."""
    by_group: dict[tuple[int, ...], list[list[str]]] = {}
    for rank, found in enumerate(executed):
        for group in {e.ranks for e in found if rank in e.ranks}:
            kinds = [str(e.collective) for e in found if e.ranks == group and e.collective != "send/recv"]
            by_group.setdefault(group, []).append(kinds)
    return all(kinds == every[0] for every in by_group.values() for kinds in every)


# --------------------------------------------------------------------------- one process


def _alone(task: _Task) -> _Found:
    model = copy.deepcopy(task.model)
    call = call_of(task.batch)
    loss = task.loss(model(*call.args, **call.kwargs), call.inputs)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS).step()
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return _Found(loss.item(), gradients, parameters, [], ())


# --------------------------------------------------------------------------- many


def _step(task: _Task) -> _Found:
    parallel = auto_parallelize(task.model, task.batch, plan=task.plan, loss_fn=task.loss)
    with record() as executed:
        loss = parallel.train_step(task.batch).item()
    gradients = {n: whole(p.grad).clone() for n, p in parallel.named_parameters() if p.grad is not None}
    with record() as clipping:
        parallel.clip_grad_norm_(MAX_NORM)
    torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE, eps=EPS).step()
    parameters = {n: whole(p.detach()) for n, p in parallel.named_parameters()}
    return _Found(loss, gradients, parameters, executed + clipping, parallel.differences)
