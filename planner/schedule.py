"""Pipeline schedules as data, what they hold in memory, and what they cost in closed form.

In: a schedule's name, the number of pipeline ranks `pp`, virtual stages per rank, microbatches.
Out: for each rank the ordered list of actions it runs (`actions`), the activations it holds at
its peak (`in_flight`), the bubble of even stages (`bubble_fraction`), a lower bound and an
estimate of one step's pipeline time for uneven stages (`step_bound`, `step_estimate`), and the
noun `Timeline` that `planner.simulate` fills and reports draw.

Stages are numbered along the model, 0 .. pp * virtual_stages - 1. Ranks hold them in a loop
(stage modulo pp), except `zbv` and `dualpipev`, where they go down the ranks and come back up (a V),
so that a rank holds one early and one late stage.

| name | order on a rank | source |
|---|---|---|
| `gpipe` | all forwards, then all backwards | Huang et al. 2019, arXiv:1811.06965 |
| `1f1b` | pp - 1 - rank forwards, then forward and backward in turn | Narayanan et al. 2019, 2021 |
| `interleaved` | 1f1b over several stages per rank | Narayanan et al. 2021, arXiv:2104.04473 |
| `zb-h1` | 1f1b; weight gradients wait until they fill the bubble | Qi et al. 2023, arXiv:2401.10241 |
| `zbv` | two stages per rank in a V; weight gradients fill the rest | Qi et al. 2024, arXiv:2405.15362 |
| `dualpipev` | a V; forward of one stage, backward of the other | DeepSeek-AI 2024, arXiv:2412.19437 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .errors import OptionError, did_you_mean
from .pipeline_paths import dualpipev_even, gpipe_path, interleaved_path, one_f_one_b_path, zbv_even, zbv_path


class ActionKind(StrEnum):
    """What a rank does with one microbatch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and weights together."""
    BACKWARD_INPUT = "I"
    """Gradient of the stage's input alone: what the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """Gradients of the stage's weights, any time after BACKWARD_INPUT."""


FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
BACKWARD_INPUT, BACKWARD_WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of a schedule: `stage` runs `kind` for `microbatch`. Printed as `F2.0`."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


Actions = tuple[tuple[Action, ...], ...]
"""For each rank, what it runs, in order."""


class Schedule(StrEnum):
    """The schedules that can be planned."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"


SPLIT_BACKWARD = (Schedule.ZB_H1, Schedule.ZBV, Schedule.DUALPIPEV)
"""Schedules that run the gradients of inputs and of weights apart."""
V_SHAPED = (Schedule.ZBV, Schedule.DUALPIPEV)
"""Schedules whose ranks hold one early and one late stage."""


# --------------------------------------------------------------------------- names and legality


def schedule_named(name: str) -> Schedule:
    """The schedule called `name`. Raises OptionError with the nearest name for an unknown one."""
    try:
        return Schedule(name)
    except ValueError:
        names = [schedule.value for schedule in Schedule]
        near = did_you_mean(name, names)
        raise OptionError(f"unknown schedule {name!r}{near} (known: {', '.join(names)})") from None


def illegality(name: str, *, pp: int, virtual_stages: int, microbatches: int) -> str | None:
    """Why a schedule cannot run with these sizes, naming the nearest sizes that can; None if it can."""
    schedule = schedule_named(name)
    for what, value in (("pp", pp), ("virtual_stages", virtual_stages), ("microbatches", microbatches)):
        if value < 1:
            return f"{schedule}: {what} is {value}, but must be at least 1"
    match schedule:
        case Schedule.INTERLEAVED if virtual_stages < 2:
            return f"interleaved: virtual_stages is {virtual_stages}, but must be at least 2 (1 is 1f1b)"
        case Schedule.INTERLEAVED if pp < 2:
            return "interleaved: pp is 1, but there is nothing to interleave below pp=2"
        case Schedule.INTERLEAVED if microbatches % pp:
            below, above = microbatches // pp * pp, -(-microbatches // pp) * pp
            nearest = f"{below} or {above}" if below else f"{above}"
            return f"interleaved: {microbatches} microbatches do not divide by pp={pp}; nearest: {nearest}"
        case Schedule.ZBV | Schedule.DUALPIPEV if virtual_stages != 2:
            return f"{schedule}: virtual_stages is {virtual_stages}, but a V has exactly 2 stages per rank"
        case Schedule.ZBV | Schedule.DUALPIPEV if microbatches < 2 * pp:
            least = f"at least {2 * pp} fill the V"
            return f"{schedule}: {microbatches} microbatches are too few for pp={pp}; {least}"
        case Schedule.GPIPE | Schedule.ONE_F_ONE_B | Schedule.ZB_H1 if virtual_stages > 1:
            return f"{schedule}: virtual_stages is {virtual_stages}, but must be 1 (interleaved takes more)"
    return None


def check(name: str, *, pp: int, virtual_stages: int, microbatches: int) -> Schedule:
    """The schedule called `name`. Raises OptionError if it cannot run with these sizes."""
    problem = illegality(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    if problem is not None:
        raise OptionError(problem)
    return Schedule(name)


def stages_of(name: str, *, pp: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """The stages that `rank` holds, in model order."""
    if schedule_named(name) in V_SHAPED:
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, pp * virtual_stages, pp))


# --------------------------------------------------------------------------- orders


def actions(name: str, *, pp: int, virtual_stages: int = 1, microbatches: int) -> Actions:
    """For each of `pp` ranks, the ordered actions of one step.

    Raises OptionError for an unknown name or sizes the schedule cannot run with.
    """
    schedule = check(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    order = _ORDERS[schedule]
    return tuple(tuple(order(pp, virtual_stages, microbatches, rank)) for rank in range(pp))


def _gpipe(pp: int, virtual_stages: int, microbatches: int, rank: int) -> Iterator[Action]:
    yield from (Action(FORWARD, rank, i) for i in range(microbatches))
    yield from (Action(BACKWARD, rank, i) for i in range(microbatches))


def _one_f_one_b(pp: int, virtual_stages: int, microbatches: int, rank: int) -> Iterator[Action]:
    forwards = [Action(FORWARD, rank, i) for i in range(microbatches)]
    backwards = [Action(BACKWARD, rank, i) for i in range(microbatches)]
    yield from _alternate(forwards, backwards, warmup=pp - 1 - rank)


def _interleaved(pp: int, virtual_stages: int, microbatches: int, rank: int) -> Iterator[Action]:
    """Groups of pp microbatches visit the rank's stages one after the other, backwards in reverse."""
    groups = range(0, microbatches, pp)
    chunks = [rank + pp * chunk for chunk in range(virtual_stages)]
    forwards = [Action(FORWARD, s, g + i) for g in groups for s in chunks for i in range(pp)]
    backwards = [Action(BACKWARD, s, g + i) for g in groups for s in reversed(chunks) for i in range(pp)]
    yield from _alternate(forwards, backwards, warmup=_interleaved_warmup(pp, virtual_stages, rank))


def _interleaved_warmup(pp: int, virtual_stages: int, rank: int) -> int:
    """Forwards before the first backward's own: the way to the last stage and back, per rank two."""
    return (virtual_stages - 1) * pp + 2 * (pp - 1 - rank)


def _alternate(forwards: list[Action], backwards: list[Action], *, warmup: int) -> Iterator[Action]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards left."""
    yield from forwards[:warmup]
    for k, backward in enumerate(backwards):
        yield from forwards[warmup + k : warmup + k + 1]
        yield backward


def _zb_h1(pp: int, virtual_stages: int, microbatches: int, rank: int) -> Iterator[Action]:
    """1f1b whose weight gradients lag `rank` microbatches behind: late ranks hurry inputs upstream."""
    for action in _one_f_one_b(pp, virtual_stages, microbatches, rank):
        if action.kind is FORWARD:
            yield action
            continue
        yield Action(BACKWARD_INPUT, rank, action.microbatch)
        if action.microbatch >= rank:
            yield Action(BACKWARD_WEIGHT, rank, action.microbatch - rank)
    for i in range(max(0, microbatches - rank), microbatches):
        yield Action(BACKWARD_WEIGHT, rank, i)


def _zbv(pp: int, virtual_stages: int, microbatches: int, rank: int) -> Iterator[Action]:
    """Down the V until its first microbatch is back, then both stages in turn.

    Weight gradients follow their input gradients at once, except in the last `2 * rank` input
    gradients, which other ranks wait for: their weight gradients come at the very end.
    """
    down, up = rank, 2 * pp - 1 - rank
    steps = [(FORWARD, down)] * (2 * (pp - rank) - 1)
    steps += [(FORWARD, up), (FORWARD, down)] * rank
    steps += [(FORWARD, up), (BACKWARD_INPUT, up), (BACKWARD_WEIGHT, up)] * (pp - rank)
    forwards_left = microbatches - (2 * pp - 1 - rank)
    for _ in range(microbatches - pp):
        steps += [(FORWARD, down)] * (forwards_left > 0)
        forwards_left -= 1
        steps += [(BACKWARD_INPUT, down), (BACKWARD_WEIGHT, down)]
        steps += [(FORWARD, up), (BACKWARD_INPUT, up), (BACKWARD_WEIGHT, up)]
    steps += [(BACKWARD_INPUT, down), (BACKWARD_INPUT, up)] * rank
    steps += [(BACKWARD_INPUT, down), (BACKWARD_WEIGHT, down)] * (pp - rank)
    steps += [(BACKWARD_WEIGHT, up), (BACKWARD_WEIGHT, down)] * rank
    yield from _numbered(steps)


def _dualpipev(pp: int, virtual_stages: int, microbatches: int, rank: int) -> Iterator[Action]:
    """A forward of one stage and a backward of the other in turn, once the V is full.

    Weight gradients wait while the V fills its end (so that the turn hurries) and in the last pp input
    gradients of each rank, which others wait for.
    """
    down, up, ahead = rank, 2 * pp - 1 - rank, pp - 1 - rank
    steps = [(FORWARD, down)] * (2 * ahead)
    steps += [(FORWARD, down), (FORWARD, up)] * (rank + 1)
    steps += [(BACKWARD_INPUT, up), (BACKWARD_WEIGHT, up), (FORWARD, up)] * ahead
    steady = [(FORWARD, down), (BACKWARD, up), (FORWARD, up), (BACKWARD, down)]
    steps += steady * (microbatches - 2 * pp + rank + 1)
    steps += [(BACKWARD, up), (FORWARD, up), (BACKWARD, down)] * ahead
    ending = [up, down] * (rank + 1)
    steps += [(BACKWARD, stage) for stage in ending[: rank + 1]]
    late = [*ending[rank + 1 :], *[down] * ahead]
    steps += [(BACKWARD_INPUT, stage) for stage in late[: rank + 1]]
    for i, stage in enumerate(late[rank + 1 :]):
        steps += [(BACKWARD_WEIGHT, late[i]), (BACKWARD_INPUT, stage)]
    steps += [(BACKWARD_WEIGHT, stage) for stage in late[ahead:]]
    yield from _numbered(steps)


def _numbered(steps: list[tuple[ActionKind, int]]) -> Iterator[Action]:
    """Give each step the next microbatch of its kind and stage; a whole backward counts as both its parts."""
    counts: dict[tuple[ActionKind, int], int] = {}
    for kind, stage in steps:
        parts = (BACKWARD_INPUT, BACKWARD_WEIGHT) if kind is BACKWARD else (kind,)
        for part in parts:
            counts[part, stage] = counts.get((part, stage), -1) + 1
        yield Action(kind, stage, counts[parts[0], stage])


_ORDERS: dict[Schedule, Callable[[int, int, int, int], Iterator[Action]]] = {
    Schedule.GPIPE: _gpipe,
    Schedule.ONE_F_ONE_B: _one_f_one_b,
    Schedule.INTERLEAVED: _interleaved,
    Schedule.ZB_H1: _zb_h1,
    Schedule.ZBV: _zbv,
    Schedule.DUALPIPEV: _dualpipev,
}


# --------------------------------------------------------------------------- memory


def in_flight(name: str, pp: int, virtual_stages: int, microbatches: int, rank: int) -> float:
    """Most microbatches whose activations `rank` holds at once, in units of all its stages.

    Activations are held from a stage's forward until its backward (its weight gradient where the
    two are apart). A rank with v stages that holds k stage-microbatches is at k / v. Raises
    OptionError for sizes the schedule cannot run with.
    """
    schedule = check(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    match schedule:
        case Schedule.GPIPE:
            return float(microbatches)
        case Schedule.ONE_F_ONE_B:
            return float(min(microbatches, pp - rank))
        case Schedule.INTERLEAVED:
            warmup = _interleaved_warmup(pp, virtual_stages, rank)
            return min(microbatches * virtual_stages, warmup + 1) / virtual_stages
        case Schedule.ZB_H1:
            return float(min(microbatches, pp))
        case Schedule.ZBV:
            return float(pp)
        case Schedule.DUALPIPEV:
            return pp + 0.5


# --------------------------------------------------------------------------- time


def fill_ways(name: str, virtual_stages: int) -> int:
    """Into how many parts a schedule cuts the time to fill and drain even stages.

    A pipeline takes (m - 1/w) max t + sum t / w; the bubbles of `bubble_fraction` are those of w = 1 for
    `gpipe` and `1f1b`, the virtual stages for `interleaved`, 3 for `zb-h1` (with at least as many
    microbatches as ranks) and 6 for `zbv` and `dualpipev`. Any other name stands for no pipeline.
    """
    match name:
        case Schedule.INTERLEAVED:
            return virtual_stages
        case Schedule.ZB_H1:
            return 3
        case Schedule.ZBV | Schedule.DUALPIPEV:
            return 6
    return 1


def bubble_fraction(name: str, *, pp: int, virtual_stages: int = 1, microbatches: int) -> float:
    """Idle share of all ranks' time when stages are even and transfers free.

    Backward is taken as twice the forward, half of it weight gradients. Holds for any ratio in
    `gpipe`, `1f1b` and `interleaved`. Raises OptionError for sizes the schedule cannot run with.
    """
    schedule = check(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    match schedule:
        case Schedule.GPIPE | Schedule.ONE_F_ONE_B | Schedule.INTERLEAVED:
            waits, work = pp - 1, microbatches * virtual_stages
        case Schedule.ZB_H1:
            waits, work = 2 * (pp - 1) - (min(microbatches, pp) - 1), 3 * microbatches
        case Schedule.ZBV | Schedule.DUALPIPEV:
            waits, work = pp - 1, 6 * microbatches
    return waits / (work + waits)


def step_bound(
    name: str,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    p2p_s: float = 0.0,
    virtual_stages: int = 1,
    weight_share: float = 0.5,
) -> float:
    """A lower bound of one step's pipeline time, seconds: no simulation is faster (up to rounding).

    Arguments as for `simulate.simulate`, times by stage in model order. Raises OptionError for
    sizes the schedule cannot run with. How near it is: see `step_estimate`.
    """
    pp = _ranks(forward_s, backward_s, virtual_stages)
    schedule = check(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    match schedule:
        case Schedule.GPIPE:
            return gpipe_path(forward_s, backward_s, microbatches=microbatches, p2p_s=p2p_s)
        case Schedule.INTERLEAVED:
            return interleaved_path(forward_s, backward_s, pp=pp, microbatches=microbatches, p2p_s=p2p_s)
    inputs, weights = _halves(backward_s, 0.0 if schedule is Schedule.ONE_F_ONE_B else weight_share)
    path = zbv_path if schedule in V_SHAPED else one_f_one_b_path
    return path(forward_s, inputs, weights, microbatches=microbatches, p2p_s=p2p_s)


def step_estimate(
    name: str,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    microbatches: int,
    p2p_s: float = 0.0,
    virtual_stages: int = 1,
    weight_share: float = 0.5,
) -> float:
    """One step's pipeline time in closed form, seconds: what `simulate` would say, nearly.

    It is `step_bound`, except for `zbv` and `dualpipev`, whose bound misses part of the bubble. Exact for
    even stages in `gpipe` and `1f1b`, in `interleaved` while p2p_s <= (f + b) / 2, in `zb-h1` and `zbv`
    while p2p_s = 0 and input and weight gradients take equally long. Error against the simulator
    over 400 random pipelines each (1-8 ranks, transfers up to a tenth of a mean forward), 95 % of
    them / the worst, stage times varying independently by +-20 % and by +-50 %:

    | | +-20 % | +-50 % |
    |---|---|---|
    | `gpipe` | exact | exact |
    | `1f1b` | 0.1 / 0.8 % | 0.1 / 2.5 % |
    | `zb-h1` | 0.4 / 7.5 % | 0.6 / 7.5 % |
    | `interleaved` | 3.4 / 6.4 % low | 8.4 / 13.4 % low |
    | `zbv` | 4.3 / 7.0 % | 4.5 / 8.0 % |

    The worst of `zb-h1` have fewer microbatches than ranks; those of `interleaved` have heavy and
    light stages on one rank, which wait in turn for other ranks' heavy ones.
    """
    bound = step_bound(
        name, forward_s=forward_s, backward_s=backward_s, microbatches=microbatches, p2p_s=p2p_s,
        virtual_stages=virtual_stages, weight_share=weight_share,
    )  # fmt: skip
    if name not in V_SHAPED:
        return bound
    inputs, weights = _halves(backward_s, weight_share)
    even = zbv_even if name == Schedule.ZBV else dualpipev_even
    return max(bound, even(forward_s, inputs, weights, microbatches=microbatches, p2p_s=p2p_s))


def _ranks(forward_s: Sequence[float], backward_s: Sequence[float], virtual_stages: int) -> int:
    """Number of ranks that stages of these times fill."""
    stages = len(forward_s)
    if not stages or len(backward_s) != stages or virtual_stages < 1 or stages % virtual_stages:
        raise OptionError(
            f"{stages} forward and {len(backward_s)} backward times are not pp * virtual_stages stages"
            f" with virtual_stages={virtual_stages}"
        )
    return stages // virtual_stages


def _halves(backward_s: Sequence[float], weight_share: float) -> tuple[list[float], list[float]]:
    """Seconds of input gradients and of weight gradients."""
    weights = [seconds * weight_share for seconds in backward_s]
    return [seconds - weight for seconds, weight in zip(backward_s, weights, strict=True)], weights


# --------------------------------------------------------------------------- timelines


@dataclass(frozen=True, slots=True)
class Span:
    """One action as it ran, seconds since the start of the step."""

    start_s: float
    end_s: float
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of a pipeline: for each rank, its spans in the order they ran."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first action's start to the last one's end, over all ranks."""
        return max(rank[-1].end_s for rank in self.spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in rank) for rank in self.spans)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds each rank waits, from the start of the step to its end."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all ranks' time."""
        return sum(self.idle_s) / (len(self.spans) * self.makespan_s)

    @property
    def in_flight(self) -> tuple[float, ...]:
        """Most microbatches each rank holds at once, in units of all its stages."""
        peaks = []
        for rank in self.spans:
            held = {span.action.stage: 1.0 for span in rank}
            peaks.append(max(level for _, level in _held(rank, held)) / len(held))
        return tuple(peaks)

    def memory(self, bytes_per_microbatch: Sequence[float]) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Activations over time: for each rank, (seconds, bytes held from then on).

        `bytes_per_microbatch`: what one microbatch keeps on each stage from its forward's start
        to its backward's end (its weight gradient's, where the two are apart).
        """
        held = dict(enumerate(bytes_per_microbatch))
        return tuple(tuple(_held(rank, held)) for rank in self.spans)

    def peak_bytes(self, bytes_per_microbatch: Sequence[float]) -> tuple[float, ...]:
        """Most activation bytes each rank holds at once (see `memory`)."""
        return tuple(max(level for _, level in rank) for rank in self.memory(bytes_per_microbatch))


def _held(spans: Sequence[Span], weight: Mapping[int, float]) -> Iterator[tuple[float, float]]:
    """(seconds, sum of the weights held from then on) at each forward's start and last backward's end."""
    level = 0.0
    for span in spans:
        if span.action.kind is FORWARD:
            level += weight[span.action.stage]
            yield span.start_s, level
        elif span.action.kind in (BACKWARD, BACKWARD_WEIGHT):
            level -= weight[span.action.stage]
            yield span.end_s, level
