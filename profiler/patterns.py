"""Which rank groups a plan can form on nested levels.

In: the sizes of the levels, innermost first. Out: `Pattern`s: how many units of each level a group spans,
and all groups of that kind, side by side. They are measured at the same time, as a step runs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Groups with `members[i]` children of one level-i unit each (as `GroupSpan` counts them)."""

    members: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks in one group."""
        return math.prod(self.members)

    @property
    def level(self) -> int:
        """The outermost level that the groups cross."""
        return max(i for i, count in enumerate(self.members) if count > 1)

    @property
    def inside(self) -> tuple[int, ...]:
        """Members in one unit of each level below."""
        return self.members[: self.level]

    def __str__(self) -> str:
        return "x".join(map(str, self.members))


def patterns(sizes: Sequence[int], *, quick: bool) -> tuple[Pattern, ...]:
    """All kinds of groups, those of one level first, inner ones before; quick: spans are whole or none."""
    choices = [(1, size) if quick else divisors(size) for size in sizes]
    found = {members for members in product(*choices) if math.prod(members) > 1}
    return tuple(pattern(sizes, members) for members in sorted(found, key=_levels_crossed))


def _levels_crossed(members: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    crossed = [i for i, count in enumerate(members) if count > 1]
    return len(crossed), crossed[-1], members


def pairs(sizes: Sequence[int]) -> tuple[Pattern, ...]:
    """Two neighbours at each level, for send/recv."""
    levels = [i for i, size in enumerate(sizes) if size > 1]
    return tuple(pattern(sizes, [2 if i == level else 1 for i in range(len(sizes))]) for level in levels)


def pattern(sizes: Sequence[int], members: Sequence[int]) -> Pattern:
    """The groups of one kind: ranks that agree on everything but their place among the members.

    Where a level's size is no multiple of the members, the odd ranks form no group.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes)):
        key, rest = [], rank
        for size, count in zip(sizes, members, strict=True):
            rest, place = divmod(rest, size)
            key.append(place if count == 1 else place // count)
        groups.setdefault(tuple(key), []).append(rank)
    whole = math.prod(members)
    return Pattern(members=tuple(members), groups=tuple(tuple(g) for g in groups.values() if len(g) == whole))


def divisors(number: int) -> tuple[int, ...]:
    """1 and all others, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)
