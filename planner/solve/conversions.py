"""Which collectives hand a tensor from its producer to its consumers, whatever they cost.

In: the choices of the ops at the ends of an edge. Out: for every pair of layouts, or every set of layouts
that a tensor with several consumers may be kept in, how many of each collective it takes, forward and
backward. Nothing of this depends on sizes or prices, so it is worked out once for all microbatches,
links and weights under which the same choices are legal (`Conversions`). With prices p per collective,

    cost = counts . p
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ..graph import Edge
from ..layout import Collective, Placement, Replicate, conversion, gradient_needed
from ..rules.choices import Choice
from .choice_graph import ChoiceGraph

Matrix = np.ndarray
COLLECTIVES = (
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
)
"""What a conversion may be; `counts` and prices are in this order."""
MAX_LAYOUTS = 3
"""In how many layouts one tensor is kept at a time. No known block wants more than two."""

Want = tuple[Placement, Placement | None]
"""The layout in which a consumer reads a tensor, and the one of the gradient that it yields."""
End = tuple[tuple[Choice, ...], int]
"""The choices of an op, and which of its operands the tensor is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """Who may convert a tensor."""

    together: bool
    """Whether all consumers may share one conversion, into the one layout that all of them read."""
    by: tuple[bool, ...] | None
    """For each consumer whether it may convert what it reads; None: all may."""
    never: frozenset[Placement] = frozenset()
    """Layouts that nobody can convert from or into."""
    gradients: bool = True
    """Whether what may not be converted may not have its gradient converted either."""
    parameter: bool = False
    """Whether it is one, or a view of one. Of what is stored whole the gradient is summed once per step, with
    the others (`cost.ParameterGroup`): how many microbatches share it is not known when splits are chosen."""


ANYWHERE = Stated(together=True, by=None)
PARAMETER = replace(ANYWHERE, parameter=True)


def as_made(consumers: int) -> Stated:
    """A view of a parameter is read as it is stored; its gradient is summed as the parameter's."""
    return Stated(together=False, by=(False,) * consumers, gradients=False, parameter=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """A tensor with one consumer."""

    counts: Matrix
    """(source, want, collective)."""
    barred: Matrix
    """(source, want): infinite where no conversion leads from one to the other, else 0."""
    once: Matrix | None = None
    """Like `counts`: what is done once per step, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sets:
    """A tensor with several consumers. A state: made in one layout, kept in a set of wanted ones."""

    counts: Matrix
    """(state, collective); each layout is paid once, however many read it."""
    sources: Matrix
    """(source, state): 0 where the state is made from the source, else infinite."""
    wants: tuple[Matrix, ...]
    """Per consumer (state, its choice): 0 where the state has what the choice wants, else infinite."""
    once: Matrix | None = None
    """Like `counts`: what is done once per step, if anything."""


class Conversions:
    """What has been worked out for one graph."""

    def __init__(self) -> None:
        self._found: dict[tuple, tuple[list[End], Pairs | Sets]] = {}
        self._stated: dict[Edge, Stated] = {}

    def stated(self, edge: Edge, make: Callable[[], Stated]) -> Stated:
        """Who may convert an edge's tensor."""
        if edge not in self._stated:
            self._stated[edge] = make()
        return self._stated[edge]

    def between(
        self,
        sources: Sequence[Placement],
        producer: End | None,
        consumers: list[End],
        stated: Stated = ANYWHERE,
    ) -> Pairs | Sets:
        """`Pairs` for one consumer, `Sets` for several.

        `sources`: the layouts that the tensor is made in. They must follow from `producer`, or from the
        consumers where that is None (a parameter is stored in any layout that one of them reads).
        """
        ends = [*([producer] if producer else []), *consumers]
        key = (stated, len(consumers), *((id(choices), operand) for choices, operand in ends))
        if key not in self._found:  # the ends are kept, so that no other choices get their ids
            wants = [wanted(end) for end in consumers]
            found = pairs(sources, wants[0], stated) if len(wants) == 1 else sets(sources, wants, stated)
            self._found[key] = (ends, found)
        return self._found[key][1]


def connect(
    graph: ChoiceGraph,
    producer: int,
    consumers: Sequence[int],
    found: Pairs | Sets,
    item: int,
    once: int | None = None,
) -> None:
    """Tie a producer's node to its consumers'; several share each conversion through a node of their own.

    `item`: which row of prices, in the order of `COLLECTIVES`, this tensor's conversions will have; `once`:
    the one of those that are done once per step.
    """
    if isinstance(found, Pairs):
        graph.edge(producer, consumers[0], found.barred)
        graph.price_edge(producer, consumers[0], found.counts, item)
        if once is not None and found.once is not None:
            graph.price_edge(producer, consumers[0], found.once, once)
        return
    shared = graph.node(np.zeros(len(found.counts)))
    graph.price_node(shared, found.counts, item)
    if once is not None and found.once is not None:
        graph.price_node(shared, found.once, once)
    graph.edge(producer, shared, found.sources)
    for consumer, allowed in zip(consumers, found.wants, strict=True):
        graph.edge(shared, consumer, allowed)


def wanted(end: End) -> list[Want]:
    """What each choice of a consumer wants."""
    choices, read = end
    return [(choice.reads[read], choice.read_gradients[read]) for choice in choices]


def pairs(sources: Sequence[Placement], wants: Sequence[Want], stated: Stated = ANYWHERE) -> Pairs:
    """Every source with every want."""
    steps = _steps(sources, wants)
    barred = steps[..., -1] > 0
    if stated.by is not None:
        may = np.array([[_may(source, want, stated) for want in wants] for source in sources])
        moves = steps if stated.gradients else _steps_forward(sources, wants)
        barred |= moves.any(axis=-1) & ~(may & (stated.together or stated.by[0]))
    counts, once = steps[..., :-1], None
    if stated.parameter:
        whole = np.array([isinstance(source, Replicate) for source in sources])
        once = (steps - _steps_forward(sources, wants))[..., :-1] * whole[:, None, None]
        counts = counts - once
    return Pairs(counts=counts, barred=np.where(barred, np.inf, 0.0), once=once)


def _may(source: Placement, want: Want, stated: Stated) -> bool:
    return source not in stated.never and want[0] not in stated.never


def _steps(sources: Sequence[Placement], wants: Sequence[Want]) -> Matrix:
    """(source, want, collective), with a last column for what is impossible."""
    return np.array(
        [[_step(source, want) + _step_back(source, want) for want in wants] for source in sources]
    )


def _steps_forward(sources: Sequence[Placement], wants: Sequence[Want]) -> Matrix:
    """`_steps` of the tensor alone, its gradient aside."""
    return np.array([[_step(source, want) for want in wants] for source in sources])


def sets(sources: Sequence[Placement], wants: Sequence[Sequence[Want]], stated: Stated = ANYWHERE) -> Sets:
    """Every source with every set of wants that is worth keeping: see `_worthwhile`."""
    distinct = list(dict.fromkeys(want for options in wants for want in options))
    kept = _subsets(len(distinct), min(MAX_LAYOUTS, len(wants)))
    states, counts, once = [], [], []
    for source in dict.fromkeys(sources):
        forward, back = (_steps_of_sets(source, distinct, kept, side) for side in (0, 1))
        steps = forward + back
        worth = _worthwhile(kept, steps) if stated.by is None else np.flatnonzero(steps[:, -1] == 0)
        states += [(source, kept[i]) for i in worth]
        later = stated.parameter and isinstance(source, Replicate)
        counts.append((forward if later else steps)[worth, :-1])
        once.append(back[worth, :-1] * later)
    made = np.array([[0.0 if source == s else np.inf for s, _ in states] for source in sources])
    held = np.array([row for _, row in states]).reshape(len(states), len(distinct))
    position = {want: i for i, want in enumerate(distinct)}
    return Sets(
        counts=np.concatenate(counts),
        once=np.concatenate(once) if stated.parameter else None,
        sources=made.reshape(len(sources), len(states)),
        wants=tuple(
            np.where(legible[:, [position[want] for want in options]], 0.0, np.inf)
            for options, legible in zip(
                wants, _legible(states, distinct, held, stated, len(wants)), strict=True
            )
        ),
    )


def _legible(
    states: list, distinct: Sequence[Want], held: Matrix, stated: Stated, consumers: int
) -> list[Matrix]:
    """For each consumer which of `distinct` it can read in which state: held, and reached where allowed."""
    if stated.by is None:
        return [held] * consumers
    step = _steps if stated.gradients else _steps_forward
    moves = np.any(step([source for source, _ in states], distinct), axis=-1)
    targets = [{want[0] for want, has in zip(distinct, row, strict=True) if has} for _, row in states]
    several = np.array([len(found) > 1 for found in targets]) | (not stated.together)
    may = np.array([[_may(source, want, stated) for want in distinct] for source, _ in states])
    return [held & ~(moves & (~may | (several[:, None] & (not by)))) for by in stated.by]


def _subsets(items: int, most: int) -> Matrix:
    """Every set of one to `most` items, the smallest first, as rows of booleans."""
    chosen = [kept for size in range(1, most + 1) for kept in combinations(range(items), size)]
    rows = np.zeros((len(chosen), items), dtype=bool)
    for row, kept in zip(rows, chosen, strict=True):
        row[list(kept)] = True
    return rows


def _steps_of_sets(source: Placement, wants: Sequence[Want], kept: Matrix, side: int) -> Matrix:
    """What each set takes of the tensor (side 0) or of its gradient (1), with a last column for what is
    impossible; layouts that are equal count once."""
    total, step = np.zeros((len(kept), len(COLLECTIVES) + 1)), (_step, _step_back)[side]
    users: dict[Placement | None, list[int]] = {}
    for i, want in enumerate(wants):
        users.setdefault(want[side], []).append(i)
    for indices in users.values():
        needed = kept[:, indices].any(axis=1).astype(float)
        total += np.outer(needed, step(source, wants[indices[0]]))
    return total


def _worthwhile(kept: Matrix, steps: Matrix) -> Matrix:
    """Possible sets, but for those that a larger one costs no more than: indices."""
    possible = np.flatnonzero(steps[:, -1] == 0)
    members, costs = kept[possible].astype(int), steps[possible]
    size = members.sum(axis=1)
    inside = np.equal(members @ members.T, size[:, None]) & np.less(size[:, None], size)
    equal = np.equal(costs[:, None], costs).all(axis=2)
    return possible[~(inside & equal).any(axis=1)]


def _step(source: Placement, want: Want) -> Matrix:
    """The forward conversion, one-hot; the last place is for what is impossible."""
    return _one_hot(source, want[0])


def _step_back(source: Placement, want: Want) -> Matrix:
    """The conversion of the gradient, if there is one."""
    needed = gradient_needed(source)
    return _one_hot(needed if want[1] is None else want[1], needed)


def _one_hot(before: Placement, after: Placement) -> Matrix:
    row = np.zeros(len(COLLECTIVES) + 1)
    try:
        collective = conversion(before, after)
    except ValueError:
        row[-1] = 1.0
    else:
        if collective is not None:
            row[COLLECTIVES.index(collective)] = 1.0
    return row
