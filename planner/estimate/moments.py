"""The fullest moment of a step on one rank, action by action of its schedule.

In: what each piece (virtual stage) of a rank consists of, block by block, and the schedule. Out: the bytes
of the fullest moment beside what stays for the whole step. For each action of the schedule, and each block
that runs in it,

    activations   of the microbatches whose backward has not begun, and of the blocks that this one's
                  backward has not reached
    gradients     of the pieces whose first backward is done, and of the blocks that it has passed; whole,
                  or a shard where they have been reduced
    working       what is alive beside that while the block runs (`cost.Live`), and what recomputation
                  brings back of it
    buffers       activations handed over between stages; gradients that wait for the weights' part of a
                  backward that is run in two; parameters gathered for the block; gradients being reduced

Eager PyTorch frees a tensor as soon as nothing refers to it: so does this project's runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from operator import ge

from ..cost import BlockCost, Recompute
from ..schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    ActionKind,
    Schedule,
    actions,
    stages_of,
)

ROUNDS = 4
"""Microbatches per rank that are followed: later ones see nothing new, save where all are held at once."""
BOUNDARIES_IN_BACKWARD = 2
"""A stage's output and the gradient it received, both held while its backward runs."""
Held = tuple[int, ...]
"""Microbatches that are held of each piece, then those that wait."""


class Reduced(StrEnum):
    """When a layer's gradients are reduced over data-parallel ranks."""

    AFTERWARDS = "afterwards"
    """Once every backward of the piece is done, or never."""
    LAST = "last"
    """As the last microbatch's backward passes it."""
    EACH = "each"
    """As every backward passes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One action of a rank, and what it finds there."""

    kind: ActionKind
    piece: int
    held: tuple[int, ...]
    """Microbatches of each piece between forward and backward, the action's own aside."""
    waiting: tuple[int, ...]
    """Those between the two parts of their backward, likewise."""
    done: tuple[bool, ...]
    """Pieces of which some backward is over: their parameters have gradients."""
    over: tuple[bool, ...]
    """Pieces of which every backward is."""
    last: bool
    """Whether it is the piece's last microbatch."""


def in_one_part(order: Iterable[Action], stages: frozenset[int]) -> Iterator[Action]:
    """The same order with the whole backward in place of its first part on `stages`."""
    for action in order:
        if action.stage not in stages or action.kind in (FORWARD, BACKWARD):
            yield action
        elif action.kind is BACKWARD_INPUT:
            yield replace(action, kind=BACKWARD)


@cache
def moments(
    schedule: str,
    pp: int,
    virtual_stages: int,
    microbatches: int,
    rank: int,
    whole: frozenset[int] = frozenset(),
) -> tuple[Moment, ...]:
    """Every one that may be the fullest. `whole`: stages whose backward runs in one part in any schedule."""
    if pp == 1:
        few = min(microbatches, 3)
        order = [Action(kind, 0, i) for i in range(few) for kind in (FORWARD, BACKWARD)]
        return tuple(_most(_follow(order, (0,), few)))
    few = microbatches if schedule == Schedule.GPIPE else min(microbatches, ROUNDS * pp)
    order = _orders(schedule, pp, virtual_stages, few)[rank]
    stages = stages_of(schedule, pp=pp, virtual_stages=virtual_stages, rank=rank)
    return tuple(_most(_follow(list(in_one_part(order, whole)), stages, few)))


@lru_cache(maxsize=2)
def _orders(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> Sequence[Sequence[Action]]:
    """The actions of every rank; ranks of one candidate ask one after the other."""
    return actions(schedule, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)


def _most(found: Iterable[Moment]) -> Iterator[Moment]:
    """Of moments that differ in what is held or waits alone, those that no other has more of everywhere."""
    alike: dict[tuple, dict[Held, Moment]] = {}
    for moment in found:
        key = (moment.kind, moment.piece, moment.done, moment.over, moment.last)
        alike.setdefault(key, {}).setdefault(moment.held + moment.waiting, moment)
    for moments_of in alike.values():
        kept: list[Held] = []
        for counts in sorted(moments_of, key=sum, reverse=True):
            if not any(all(map(ge, more, counts)) for more in kept):
                kept.append(counts)
                yield moments_of[counts]


def _follow(order: Sequence[Action], stages: Sequence[int], microbatches: int) -> Iterator[Moment]:
    held, waiting, done = [0] * len(stages), [0] * len(stages), [0] * len(stages)
    for action in order:
        piece, kind = stages.index(action.stage), action.kind
        if kind is BACKWARD_INPUT and action.stage == 0:
            continue  # no stage waits for it: it runs with the weights' part
        if kind is BACKWARD_WEIGHT and action.stage == 0:
            kind = BACKWARD
        if kind in (BACKWARD, BACKWARD_INPUT):
            held[piece] -= 1
        elif kind is BACKWARD_WEIGHT:
            waiting[piece] -= 1
        yield Moment(
            kind=kind,
            piece=piece,
            held=tuple(held),
            waiting=tuple(waiting),
            done=tuple(n > 0 for n in done),
            over=tuple(n == microbatches for n in done),
            last=action.microbatch == microbatches - 1,
        )
        if kind is FORWARD:
            held[piece] += 1
        elif kind is BACKWARD_INPUT:
            waiting[piece] += 1
        else:
            done[piece] += 1


@cache
def most_waiting(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> int:
    """Most microbatches of any rank between the two parts of their backward, over all its pieces."""
    ranks = (moments(schedule, pp, virtual_stages, microbatches, rank) for rank in range(pp))
    return 1 + max(sum(moment.waiting) for found in ranks for moment in found)


def forward_bytes(cost: BlockCost, mode: Recompute) -> float:
    """Alive in a block's forward beside what is kept in the end."""
    live = cost.live
    return live.forward if mode is Recompute.NONE else live.whole_forward - cost.saved_bytes[mode]


def backward_bytes(cost: BlockCost, mode: Recompute, *, gradients_stay: bool) -> float:
    """Alive in its backward beside what is kept, with what recomputation brings back."""
    again = max(cost.saved_bytes.get(Recompute.NONE, 0.0) - cost.saved_bytes[mode], 0.0)
    return again + (cost.live.first_backward if gradients_stay else cost.live.backward)


def most_alive(cost: BlockCost, mode: Recompute) -> float:
    """Alive at the most while a block runs, beside what is kept."""
    backward = (backward_bytes(cost, mode, gradients_stay=stay) for stay in (True, False))
    return max(forward_bytes(cost, mode), *backward, cost.live.input_gradients, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Blocks of one class that follow each other in a piece. All sizes are one block's, in bytes."""

    cost: BlockCost
    mode: Recompute
    count: int
    gradients: float
    """Whole, from its first backward on."""
    reduced: float
    """What is left of them once they are reduced."""
    root: bool = False
    """Whether it is no repeated layer: reduced when all of backward is done."""
    reducing: float = 0.0
    """The buffer in which its gradients are reduced."""
    copy: float = 0.0
    """Parameters that are copies beside stored ones, given up as the last backward passes."""
    gathered: float = 0.0
    """Parameters gathered while it runs."""

    @property
    def saved(self) -> float:
        """Kept for a microbatch."""
        return self.cost.saved_bytes[self.mode]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One virtual stage of a rank. All sizes are of one microbatch, in bytes."""

    runs: tuple[Run, ...]
    """In the order of forward."""
    handed: float
    """The activation that it hands on; 0 for the last stage."""
    reduces: Reduced = Reduced.AFTERWARDS
    gathering: float = 0.0
    """The buffer in which all parameters were gathered, through forward, where nothing else is gathered."""

    @property
    def saved(self) -> float:
        """Kept for backward, its output aside."""
        return sum(run.count * run.saved for run in self.runs)

    @property
    def gradients(self) -> float:
        """Of all parameters, whole."""
        return sum(run.count * run.gradients for run in self.runs)

    @property
    def reduced(self) -> float:
        """Of all parameters, once reduced."""
        return sum(run.count * run.reduced for run in self.runs)

    @property
    def waiting(self) -> float:
        """Gradients between the two parts of a backward."""
        return sum(run.count * run.cost.live.waiting for run in self.runs)

    @property
    def lingers(self) -> float:
        """The buffer in which gradients were reduced last, when that is done after every backward."""
        roots = sum(run.count * run.reducing for run in self.runs if run.root)
        return roots if self.reduces is Reduced.EACH else 0.0

    def between(self, *, over: bool) -> float:
        """Gradients that stay once some backward, or every one, is done."""
        return self.reduced if over or self.reduces is Reduced.EACH else self.gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Fullest:
    """What one moment takes, in bytes, beside what stays for the whole step."""

    activations: float
    gradients: float
    working: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.activations + self.gradients + self.working + self.buffers


def fullest(pieces: Sequence[Piece], found: Iterable[Moment]) -> Fullest:
    """The fullest moment of a rank: what its action takes, and what the others have left there."""
    resting = [_Resting(piece) for piece in pieces]
    acting: dict[tuple, Fullest] = {}

    def own(moment: Moment) -> Fullest:
        done = moment.done[moment.piece]
        key = (moment.kind, moment.piece, done, moment.last)
        if key not in acting:
            each = ACTIONS[moment.kind](pieces[moment.piece], done, moment.last)
            acting[key] = max(each, key=lambda found: found.total)
        return acting[key]

    moment = max(found, key=lambda moment: own(moment).total + sum(_others(resting, moment)))
    activations, gradients, buffers = _others(resting, moment)
    return Fullest(
        activations=activations + own(moment).activations,
        gradients=gradients + own(moment).gradients,
        working=own(moment).working,
        buffers=buffers + own(moment).buffers,
    )


class _Resting:
    """What a piece leaves in memory while another action runs, worked out once."""

    __slots__ = ("gradients", "handed", "over", "saved", "waiting")

    def __init__(self, piece: Piece) -> None:
        self.saved, self.handed, self.waiting = piece.saved, piece.handed, piece.waiting
        self.gradients, self.over = piece.between(over=False), piece.between(over=True)


def _others(pieces: Sequence[_Resting], moment: Moment) -> tuple[float, float, float]:
    """Activations, gradients and buffers that a moment's action finds."""
    activations = gradients = buffers = 0.0
    for index, piece in enumerate(pieces):
        held, waiting = moment.held[index], moment.waiting[index]
        activations += (held + waiting) * piece.saved
        buffers += held * piece.handed + waiting * piece.waiting
        if moment.done[index] and index != moment.piece:
            gradients += piece.over if moment.over[index] else piece.gradients
    return activations, gradients, buffers


def _forward(piece: Piece, done: bool, last: bool) -> Iterator[Fullest]:
    before, buffers = 0.0, piece.gathering + piece.lingers * done
    for run in piece.runs:
        yield Fullest(
            activations=before + run.count * run.saved,
            gradients=piece.between(over=False) if done else 0.0,
            working=forward_bytes(run.cost, run.mode),
            buffers=run.gathered + buffers,
        )
        before += run.count * run.saved


def _backward(piece: Piece, done: bool, last: bool) -> Iterator[Fullest]:
    """Gradients of blocks behind the one that runs are there; of those before it, only if some were made.

    A buffer in which gradients were reduced stays until it is needed for the next ones; what is no layer is
    reduced at the end, so that its buffer stays into the next microbatch's backward. The last microbatch
    gives up the copies that it computed with.
    """
    each = piece.reduces is Reduced.EACH
    reduces = each or (last and piece.reduces is Reduced.LAST)
    roots = sum(run.count * run.reducing for run in piece.runs if run.root)
    reducing = piece.lingers * done
    handed = BOUNDARIES_IN_BACKWARD * piece.handed
    ahead = piece.between(over=False) if done else 0.0
    passed, freed, saved = 0.0, 0.0, piece.saved
    for run in reversed(piece.runs):
        at_once = reduces and not run.root
        before = (run.reduced if each else run.gradients) * done
        behind = run.gradients if not at_once else run.reduced
        copy = run.copy * (last and at_once)
        for position in dict.fromkeys((0, run.count - 1)):  # blocks of this run that are behind already
            yield Fullest(
                activations=saved - position * run.saved,
                gradients=passed + position * behind + ahead - position * before,
                working=backward_bytes(run.cost, run.mode, gradients_stay=not done or each),
                buffers=handed
                + run.gathered
                + (run.reducing if position and at_once else reducing)
                - (freed + position * copy),
            )
        saved -= run.count * run.saved
        passed += run.count * behind
        freed += run.count * copy
        ahead -= run.count * before
        if at_once:
            yield Fullest(
                activations=saved,
                gradients=passed - behind + run.gradients + before * each + ahead,
                working=0.0,
                buffers=handed + run.gathered + run.reducing - freed,
            )
            reducing = run.reducing
    if reduces:
        earlier = sum(run.count * run.reduced for run in piece.runs if run.root) * (each and done)
        freed += sum(run.count * run.copy for run in piece.runs if run.root) * last
        yield Fullest(activations=0.0, gradients=passed + earlier, working=0.0, buffers=roots - freed)


def _input(piece: Piece, done: bool, last: bool) -> Iterator[Fullest]:
    """Nothing is let go of, and gradients gather that those of weights are made from."""
    waiting = 0.0
    for run in reversed(piece.runs):
        waiting += (run.count - 1) * run.cost.live.waiting
        yield Fullest(
            activations=piece.saved,
            gradients=piece.between(over=False) if done else 0.0,
            working=run.cost.live.input_gradients,
            buffers=BOUNDARIES_IN_BACKWARD * piece.handed + waiting + run.gathered,
        )
        waiting += run.cost.live.waiting


def _weight(piece: Piece, done: bool, last: bool) -> Iterator[Fullest]:
    yield Fullest(
        activations=piece.saved,
        gradients=piece.between(over=False) if done else 0.0,
        working=max(run.cost.live.weight_gradient for run in piece.runs),
        buffers=piece.handed + piece.waiting,
    )


ACTIONS: dict[ActionKind, Callable[[Piece, bool, bool], Iterator[Fullest]]] = {
    FORWARD: _forward,
    BACKWARD: _backward,
    BACKWARD_INPUT: _input,
    BACKWARD_WEIGHT: _weight,
}
"""Of an action, the first and the last block of each run: in between things change evenly."""
