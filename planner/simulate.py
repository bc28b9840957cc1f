"""Event simulation of a pipeline schedule.

In: for each rank the ordered actions (`schedule.actions`, or any other order), seconds of one
microbatch's forward and backward on each stage, seconds to hand activations or their gradients
to the next rank. Out: a `Timeline`.

A rank runs its actions one at a time, in order, each as soon as what it needs is there:

    F(s, i)   the output of F(s - 1, i)
    B(s, i)   F(s, i) done, and the gradient from B(s + 1, i)       (I: the same)
    W(s, i)   I(s, i) done

What crosses ranks arrives `p2p_s` after it was made, what stays on a rank at once. Transfers run
beside computation: a sender does not wait, and links are never the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .errors import OptionError
from .schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, ActionKind, Span, Timeline

ARRIVAL, END = 0, 1
"""Priorities among events of one instant: what arrives is seen before a rank picks its next action."""


class Clock:
    """A heap of (time, priority, sequence, event); events of one time and priority run in the order made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[int], None], int]] = []
        self._sequence = 0

    def at(self, time_s: float, priority: int, event: Callable[[int], None], subject: int) -> None:
        """Run `event(subject)` at `time_s`."""
        heappush(self._heap, (time_s, priority, self._sequence, event, subject))
        self._sequence += 1

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._heap:
            return False
        self.now_s, _, _, event, subject = heappop(self._heap)
        event(subject)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A schedule as numbered jobs: job n is the n-th action, rank after rank."""

    jobs: tuple[Action, ...]
    ranks: tuple[int, ...]
    """The rank of each job."""
    first: tuple[int, ...]
    """Each rank's first job, and one past the last rank's last."""
    seconds: tuple[float, ...]
    feeds: tuple[tuple[int, ...], ...]
    """For each job, the jobs that need what it makes."""
    needs: tuple[int, ...]
    """How many jobs each job waits for."""


def simulate(
    actions: Sequence[Sequence[Action]],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_s: float = 0.0,
    weight_share: float = 0.5,
) -> Timeline:
    """Run one step of a pipeline.

    `forward_s`, `backward_s`: seconds per microbatch, for each stage in model order (pp *
    virtual_stages of them). `p2p_s`: seconds from a result to its arrival on another rank.
    `weight_share`: share of `backward_s` spent on weight gradients, where a schedule runs them
    apart. Raises OptionError for times that do not match the schedule, and for an order of
    actions that can never finish, naming what each stuck rank waits for.
    """
    _check_placement(actions)
    seconds = _durations(actions, forward_s, backward_s, weight_share)
    work = _number(actions, seconds)
    run = _Run(work=work, p2p_s=p2p_s)
    for rank in range(len(actions)):
        run.start_next(rank)
    while run.clock.step():
        pass
    if len(run.start_s) < len(work.jobs):
        raise OptionError(_deadlock(work, run))
    return _timeline(work, run)


def _check_placement(actions: Sequence[Sequence[Action]]) -> None:
    """Every rank works, and every stage lives on one rank."""
    home: dict[int, int] = {}
    for rank, order in enumerate(actions):
        if not order:
            raise OptionError(f"the schedule gives rank {rank} nothing to do")
        for action in order:
            if home.setdefault(action.stage, rank) != rank:
                raise OptionError(
                    f"the schedule runs stage {action.stage} on ranks {home[action.stage]} and {rank}"
                )


def _durations(
    actions: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_share: float,
) -> Mapping[tuple[ActionKind, int], float]:
    """Seconds of each kind of action on each stage."""
    stages = 1 + max((action.stage for rank in actions for action in rank), default=-1)
    if not len(forward_s) == len(backward_s) == stages:
        raise OptionError(
            f"the schedule has {stages} stages, but forward_s has {len(forward_s)} times"
            f" and backward_s {len(backward_s)}"
        )
    if min(*forward_s, *backward_s, weight_share, 1 - weight_share) < 0:
        raise OptionError("forward_s and backward_s must not be negative, and weight_share lies in [0, 1]")
    seconds: dict[tuple[ActionKind, int], float] = {}
    for stage, (forward, backward) in enumerate(zip(forward_s, backward_s, strict=True)):
        seconds[FORWARD, stage] = forward
        seconds[BACKWARD, stage] = backward
        seconds[BACKWARD_INPUT, stage] = backward * (1 - weight_share)
        seconds[BACKWARD_WEIGHT, stage] = backward * weight_share
    return seconds


def _number(actions: Sequence[Sequence[Action]], seconds: Mapping[tuple[ActionKind, int], float]) -> _Work:
    """Number the actions and link each to those it needs."""
    jobs = tuple(action for rank in actions for action in rank)
    number = {(job.kind, job.stage, job.microbatch): n for n, job in enumerate(jobs)}
    if len(number) < len(jobs):
        twice = next(job for n, job in enumerate(jobs) if number[job.kind, job.stage, job.microbatch] != n)
        raise OptionError(f"the schedule runs {twice} more than once")
    last = max(job.stage for job in jobs)
    feeds: list[list[int]] = [[] for _ in jobs]
    needs = [0] * len(jobs)
    for n, job in enumerate(jobs):
        for alternatives in _requirements(job, last):
            needs[n] += 1
            feeder = next((number[key] for key in alternatives if key in number), None)
            if feeder is not None:
                feeds[feeder].append(n)
    first = [0]
    for rank in actions:
        first.append(first[-1] + len(rank))
    return _Work(
        jobs=jobs,
        ranks=tuple(r for r, rank in enumerate(actions) for _ in rank),
        first=tuple(first),
        seconds=tuple(seconds[job.kind, job.stage] for job in jobs),
        feeds=tuple(tuple(feed) for feed in feeds),
        needs=tuple(needs),
    )


_Key = tuple[ActionKind, int, int]


def _requirements(job: Action, last: int) -> Iterator[tuple[_Key, ...]]:
    """What `job` waits for; each requirement is met by whichever alternative the schedule has."""
    kind, stage, i = job.kind, job.stage, job.microbatch
    if kind is FORWARD:
        if stage > 0:
            yield ((FORWARD, stage - 1, i),)
    elif kind is BACKWARD_WEIGHT:
        yield ((BACKWARD_INPUT, stage, i),)
    else:
        yield ((FORWARD, stage, i),)
        if stage < last:
            yield ((BACKWARD, stage + 1, i), (BACKWARD_INPUT, stage + 1, i))


@dataclass(slots=True, kw_only=True)
class _Run:
    """The simulation's state: which job each rank is at, and what is still missing."""

    work: _Work
    p2p_s: float
    clock: Clock = field(default_factory=Clock)
    missing: list[int] = field(init=False)
    at: list[int] = field(init=False)
    """The job each rank runs, or waits to run."""
    start_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing = list(self.work.needs)
        self.at = list(self.work.first[:-1])

    def start_next(self, rank: int) -> None:
        """Start the job that `rank` is at, if there is one and all it needs is there."""
        job = self.at[rank]
        if job < self.work.first[rank + 1] and not self.missing[job]:
            self.start_s[job] = self.clock.now_s
            self.clock.at(self.clock.now_s + self.work.seconds[job], END, self.end, job)

    def end(self, job: int) -> None:
        """A job is done: send what it made and go on."""
        rank = self.work.ranks[job]
        for fed in self.work.feeds[job]:
            if self.work.ranks[fed] == rank:
                self.missing[fed] -= 1
            else:
                self.clock.at(self.clock.now_s + self.p2p_s, ARRIVAL, self.arrive, fed)
        self.at[rank] = job + 1
        self.start_next(rank)

    def arrive(self, job: int) -> None:
        """Something that `job` needs is there: start it if its rank waits for nothing else."""
        self.missing[job] -= 1
        rank = self.work.ranks[job]
        if self.at[rank] == job:
            self.start_next(rank)


def _timeline(work: _Work, run: _Run) -> Timeline:
    spans = [Span(run.start_s[n], run.start_s[n] + work.seconds[n], job) for n, job in enumerate(work.jobs)]
    bounds = zip(work.first[:-1], work.first[1:], strict=True)
    return Timeline(spans=tuple(tuple(spans[start:stop]) for start, stop in bounds))


def _deadlock(work: _Work, run: _Run) -> str:
    """Name what each stuck rank waits for, and where that is."""
    last = max(job.stage for job in work.jobs)
    place = {(job.kind, job.stage, job.microbatch): (n, work.ranks[n]) for n, job in enumerate(work.jobs)}
    waits = []
    for rank, job in enumerate(run.at):
        if job == work.first[rank + 1]:
            continue
        for alternatives in _requirements(work.jobs[job], last):
            found = [place[key] for key in alternatives if key in place]
            if not found or found[0][0] not in run.start_s:
                where = f"on rank {found[0][1]}" if found else "which no rank runs"
                waits.append(f"rank {rank} at {work.jobs[job]} waits for {Action(*alternatives[0])}, {where}")
    return "the schedule deadlocks: " + "; ".join(waits)
