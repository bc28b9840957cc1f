"""Longest paths through a pipeline schedule, in closed form: how long one step must take.

In: seconds of one microbatch's forward and backward on each stage, microbatches, `p2p_s` from
one rank to the next. Out: seconds. Nothing else is known here; `planner.schedule` picks the form.

A schedule is a graph of actions; a step takes as long as its longest path, so the length of ANY
path is a lower bound. The paths tried all have one shape: go down the pipeline with the first
microbatch to some rank, follow that rank's own order through all of its work, and leave upstream
with the last microbatch's gradient. On the way a path may take a *detour*: instead of following
its rank's order from a forward to a later backward, it follows the microbatch to deeper ranks and
back. A detour gains the deeper ranks' time and loses that of the actions it skips; where the ranks
are even and transfers are free, the gains are what is known as the pipeline's bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def gpipe_path(
    forward_s: Sequence[float], backward_s: Sequence[float], *, microbatches: int, p2p_s: float
) -> float:
    """All forwards, then all backwards: each phase takes every stage once and the slowest m - 1 times more.

    This is exact for any stages.
    """
    transfers = 2 * (len(forward_s) - 1) * p2p_s
    repeats = (microbatches - 1) * (max(forward_s) + max(backward_s))
    return sum(forward_s) + sum(backward_s) + repeats + transfers


# --------------------------------------------------------------------------- 1f1b and zb-h1


def one_f_one_b_path(
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    *,
    microbatches: int,
    p2p_s: float,
) -> float:
    """1f1b with the backward in two parts; weight gradients lag `rank` microbatches (none: 1f1b).

    For even stages without lag this is (m + p - 1) (f + b) and 2 (p - 1) transfers for every p
    microbatches or part of them: a rank that holds p microbatches waits for p2p each time round.
    """
    down, up = _arrivals(forward_s, p2p_s), _arrivals(input_s, p2p_s)
    round_trip = [d + u for d, u in zip(down, up, strict=True)]
    longest = 0.0
    for rank, (forward, inputs, weights) in enumerate(zip(forward_s, input_s, weight_s, strict=True)):
        detours = [seconds - round_trip[rank + 1] for seconds in round_trip[rank + 1 :]]
        if microbatches > len(detours):
            gain = _warmup_and_drain_gain(detours, forward, inputs + weights)
            gain += _steady_gain(detours, forward + inputs + weights, microbatches - 1 - len(detours))
        else:
            gain = _single_gain(detours, min(forward, inputs + weights), microbatches)
        own = microbatches * (forward + inputs + weights)
        tail = _tail(up, weight_s, rank, microbatches)
        longest = max(longest, down[rank] + own + gain + tail)
    return longest


def _arrivals(seconds: Sequence[float], p2p_s: float) -> list[float]:
    """When the first microbatch reaches each stage, and what lies past the last."""
    return list(accumulate((s + p2p_s for s in seconds), initial=0.0))


def _tail(up: Sequence[float], weight_s: Sequence[float], rank: int, microbatches: int) -> float:
    """From `rank`'s last input gradient up to some rank and through the weight gradients left there."""
    left = [min(lag + 1, microbatches) * weight_s[lag] for lag in range(rank + 1)]
    return up[rank] + max([left[lag] - up[lag] for lag in range(rank + 1)]) - left[rank]


def _warmup_and_drain_gain(detours: Sequence[float], forward: float, backward: float) -> float:
    """One detour that skips warm-up forwards, and one that skips the last backwards."""
    warmup = max([seconds - depth * forward for depth, seconds in enumerate(detours)])
    drain = max([seconds - depth * backward for depth, seconds in enumerate(detours)])
    return warmup + drain


def _steady_gain(detours: Sequence[float], whole: float, between: int) -> float:
    """Detours one after the other over the microbatches in between: depth d skips d out of d + 1."""
    best = 0.0
    for depth, seconds in enumerate(detours):
        gain = seconds - depth * whole
        if gain > 0:
            times, rest = divmod(between, depth + 1)
            last = max(0.0, detours[rest - 1] - (rest - 1) * whole) if rest else 0.0
            best = max(best, times * gain + last)
    return best


def _single_gain(detours: Sequence[float], cheapest: float, microbatches: int) -> float:
    """With no more microbatches than warm-up forwards there is one way round."""
    depths = len(detours) - 1
    skipped = [microbatches - 1 - min(depths - depth, microbatches - 1) for depth in range(len(detours))]
    return max(seconds - n * cheapest for n, seconds in zip(skipped, detours, strict=True))


# --------------------------------------------------------------------------- interleaved


def interleaved_path(
    forward_s: Sequence[float], backward_s: Sequence[float], *, pp: int, microbatches: int, p2p_s: float
) -> float:
    """Interleaved 1f1b; times by stage in model order, stage modulo `pp` is the rank.

    For even stages of v per rank this is (v m + p - 1) (f + b) + 2 (v p - 1) p2p, f and b per stage;
    transfers longer than f or b are waited for once more per stage and group of p microbatches (exact
    up to p2p = (f + b) / 2).
    """
    down, up = _arrivals(forward_s, p2p_s), _arrivals(backward_s, p2p_s)
    longest = down[-1] + up[-1] - 2 * p2p_s
    for rank in range(pp):
        forwards, backwards = forward_s[rank::pp], backward_s[rank::pp]
        there = [down[s + pp] - down[s + 1] + p2p_s for s in range(rank, len(forward_s) - pp, pp)]
        back = [up[s + pp] - up[s + 1] + p2p_s for s in range(rank, len(forward_s) - pp, pp)]
        gain = _outer_wraps(there, forwards, pp) + _outer_wraps(back, backwards, pp)
        steady = max(
            _inner_wraps(there, forwards, backwards, pp), _inner_wraps(back, backwards, forwards, pp)
        )
        gain += (microbatches // pp - 1) * steady
        last = len(forward_s) - pp + rank
        detour = down[-1] + up[-1] - down[last + 1] - up[last + 1]
        warmup = max(0.0, detour - _skipped(forwards, rank, pp, microbatches))
        drain = max(0.0, detour - _skipped(backwards, rank, pp, microbatches))
        gain += warmup + drain if microbatches > pp else max(warmup, drain)
        own = microbatches * (sum(forwards) + sum(backwards))
        longest = max(longest, down[rank] + own + gain + up[rank])
    return longest


def _outer_wraps(around: Sequence[float], own: Sequence[float], pp: int) -> float:
    """In warm-up or drain: follow one microbatch round all ranks to the next own stage, not pp - 1 others."""
    return sum(max(0.0, seconds - (pp - 1) * own[k]) for k, seconds in enumerate(around))


def _inner_wraps(around: Sequence[float], own: Sequence[float], other: Sequence[float], pp: int) -> float:
    """The same in between, once per group, where it skips up to pp actions of the other kind as well."""
    beside = pp * max(other)
    return sum(max(0.0, seconds - (pp - 1) * own[k + 1] - beside) for k, seconds in enumerate(around))


def _skipped(own: Sequence[float], rank: int, pp: int, microbatches: int) -> float:
    """What a rank does while its group's first microbatch is on deeper ranks: two actions per rank."""
    actions = 2 * (pp - 1 - rank)
    same_group = min(actions, pp - 1)
    next_group = actions - same_group if microbatches > pp else 0
    return same_group * own[-1] + next_group * own[0]


# --------------------------------------------------------------------------- the V: zbv and dualpipev


def zbv_path(
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    *,
    microbatches: int,
    p2p_s: float,
) -> float:
    """Two stages per rank in a V; times by stage in model order. The turn of the V moves nothing."""
    stages = len(forward_s)
    down = _arrivals(forward_s, p2p_s)
    transfers = 2 * (stages - 2) * p2p_s
    longest = sum(forward_s) + sum(input_s) + transfers + weight_s[0]
    for rank in range(stages // 2):
        back = stages - 1 - rank
        own = sum(forward_s[s] + input_s[s] + weight_s[s] for s in (rank, back))
        skipped = (back - rank - 1) * forward_s[rank]
        wrap = max(0.0, down[back] - down[rank + 1] - skipped)
        longest = max(longest, down[rank] + microbatches * own + wrap)
    return longest


def zbv_even(
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    *,
    microbatches: int,
    p2p_s: float,
) -> float:
    """The slowest rank's work, and the bubble that even stages of the same mean would have.

    Read off simulations of even stages with equal input and weight gradients: the bubble is
    (p - 1) max(f, i) + (p - 2) max(0, f - i), and 5 p - 7 transfers are exposed.
    """
    stages = len(forward_s)
    pp = stages // 2
    slowest = _slowest_pair(forward_s, input_s, weight_s)
    forward, inputs = sum(forward_s) / stages, sum(input_s) / stages
    bubble = (pp - 1) * max(forward, inputs) + max(0, pp - 2) * max(0.0, forward - inputs)
    return microbatches * slowest + bubble + max(0, 5 * pp - 7) * p2p_s


def dualpipev_even(
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    *,
    microbatches: int,
    p2p_s: float,
) -> float:
    """The slowest rank's work, and the bubble that even stages of the same mean would have.

    Read off simulations of even stages: the bubble is (p - 1) max(f, f + i - w) + (p - 2) max(0, i - f),
    and 4 (p - 1) transfers are exposed.
    """
    stages = len(forward_s)
    pp = stages // 2
    forward, inputs, weights = (sum(times) / stages for times in (forward_s, input_s, weight_s))
    bubble = (pp - 1) * max(forward, forward + inputs - weights) + max(0, pp - 2) * max(0.0, inputs - forward)
    slowest = _slowest_pair(forward_s, input_s, weight_s)
    return microbatches * slowest + bubble + 4 * (pp - 1) * p2p_s


def _slowest_pair(*seconds: Sequence[float]) -> float:
    """The most that a rank of a V does for one microbatch."""
    whole = [sum(parts) for parts in zip(*seconds, strict=True)]
    return max(first + second for first, second in zip(whole, reversed(whole), strict=True))
