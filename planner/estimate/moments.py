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
from typing import NamedTuple

import numpy as np

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
Table = np.ndarray


class Reduced(StrEnum):
    """When a layer's gradients are reduced over data-parallel ranks."""

    AFTERWARDS = "afterwards"
    """Once every backward of the piece is done, or never."""
    LAST = "last"
    """As the last microbatch's backward passes it."""
    EACH = "each"
    """As every backward passes it."""


class Acting(NamedTuple):
    """What a rank runs at a moment, as far as its own piece is concerned."""

    kind: ActionKind
    piece: int
    done: bool
    """Whether some backward of the piece is over: its parameters have gradients."""
    last: bool
    """Whether it is the piece's last microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """The actions of a rank in order, and what each finds there: tables of (moment, piece)."""

    acting: tuple[Acting, ...]
    """Distinct ones."""
    which: Table
    """For each moment the place of its own in `acting`."""
    held: Table
    """Microbatches of each piece between forward and backward, the action's own aside."""
    waiting: Table
    """Those between the two parts of their backward, likewise."""
    gradients: Table
    """Other pieces of which some backward is over, but not every one."""
    over: Table
    """Other pieces of which every backward is."""


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
) -> Moments:
    """All of them. `whole`: stages whose backward runs in one part in any schedule."""
    if pp == 1:
        few = min(microbatches, 3)
        return follow([Action(kind, 0, i) for i in range(few) for kind in (FORWARD, BACKWARD)], (0,))
    few = microbatches if schedule == Schedule.GPIPE else min(microbatches, ROUNDS * pp)
    order = _orders(schedule, pp, virtual_stages, few)[rank]
    stages = stages_of(schedule, pp=pp, virtual_stages=virtual_stages, rank=rank)
    return follow(in_one_part(order, whole), stages)


@lru_cache(maxsize=2)
def _orders(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> Sequence[Sequence[Action]]:
    """The actions of every rank; ranks of one candidate ask one after the other."""
    return actions(schedule, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)


def follow(order: Iterable[Action], stages: Sequence[int]) -> Moments:
    """The moments of a rank that runs `order` on its `stages`."""
    piece_of = {stage: piece for piece, stage in enumerate(stages)}
    ran = [
        (kind, piece_of[action.stage], action.microbatch)
        for action in order
        if (kind := _as_run(action)) is not None
    ]
    rows, kinds = np.arange(len(ran)), [kind for kind, _, _ in ran]
    pieces = np.array([piece for _, piece, _ in ran])
    own = np.zeros((len(ran), len(stages)), dtype=int)
    own[rows, pieces] = 1
    forward, whole, first, second = (
        own * np.array([[kind is each] for kind in kinds])
        for each in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    )
    # what an action takes from the others is gone as it begins, what it leaves is there when it has ended
    held = _before(forward) - (whole + first).cumsum(axis=0)
    waiting = _before(first) - second.cumsum(axis=0)
    done = _before(whole + second)
    microbatches = 1 + max(microbatch for _, _, microbatch in ran)
    last = [microbatch == microbatches - 1 for _, _, microbatch in ran]
    ran_as = [Acting(kind, piece, bool(done[i, piece]), last[i]) for i, (kind, piece, _) in enumerate(ran)]
    acting = {key: place for place, key in enumerate(dict.fromkeys(ran_as))}
    over = done == microbatches
    return Moments(
        acting=tuple(acting),
        which=np.array([acting[key] for key in ran_as]),
        held=held,
        waiting=waiting,
        gradients=(done > 0) & ~over & (own == 0),
        over=over & (own == 0),
    )


def _as_run(action: Action) -> ActionKind | None:
    """The first stage has nobody who waits for an input's gradient: all runs with the weights' part."""
    if action.stage == 0 and action.kind is BACKWARD_INPUT:
        return None
    return BACKWARD if action.stage == 0 and action.kind is BACKWARD_WEIGHT else action.kind


def _before(counts: Table) -> Table:
    """Sums over the moments before each."""
    return counts.cumsum(axis=0) - counts


@cache
def most_waiting(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> int:
    """Most microbatches of any rank between the two parts of their backward, over all its pieces."""
    ranks = (moments(schedule, pp, virtual_stages, microbatches, rank) for rank in range(pp))
    return 1 + max(int(found.waiting.sum(axis=1).max()) for found in ranks)


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


def fullest(pieces: Sequence[Piece], found: Moments) -> Fullest:
    """The fullest moment of a rank: what its action takes, and what the others have left there."""
    own = [_fullest_of(pieces[acting.piece], acting) for acting in found.acting]
    saved, handed, waiting, gradients, over = np.array(
        [(p.saved, p.handed, p.waiting, p.between(over=False), p.between(over=True)) for p in pieces]
    ).T
    left = (
        (found.held + found.waiting) @ saved,
        found.gradients @ gradients + found.over @ over,
        found.held @ handed + found.waiting @ waiting,
    )
    total = np.array([each.total for each in own])[found.which] + sum(left)
    moment = int(np.argmax(total))
    activations, gradients, buffers = (float(each[moment]) for each in left)
    acting = own[found.which[moment]]
    return Fullest(
        activations=activations + acting.activations,
        gradients=gradients + acting.gradients,
        working=acting.working,
        buffers=buffers + acting.buffers,
    )


def _fullest_of(piece: Piece, acting: Acting) -> Fullest:
    """The fullest that an action's own piece gets."""
    return max(ACTIONS[acting.kind](piece, acting.done, acting.last), key=lambda found: found.total)


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
