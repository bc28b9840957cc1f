"""Dims shared over a graph: a union-find whose members can be refined into factors.

Every tensor axis begins as one atom. Equating two axes unites their atoms; a view that cuts
`4096` into `32 x 128` refines the atom into two, everywhere it occurs. In the end each axis is a
product of leaf atoms, and a leaf is what a plan may split.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence


class Atoms:
    """The mutable store while a graph is being built."""

    def __init__(self) -> None:
        self._size: list[int] = []
        self._parent: list[int] = []
        self._factors: dict[int, tuple[int, ...]] = {}

    def new(self, size: int) -> int:
        """A fresh atom of the given extent."""
        self._size.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def axis(self, size: int) -> tuple[int, ...]:
        """Atoms of a fresh axis: none for an axis of size one."""
        return () if size == 1 else (self.new(size),)

    def size(self, atom: int) -> int:
        """Extent of an atom."""
        return self._size[self._root(atom)]

    def extent(self, atoms: Iterable[int]) -> int:
        """Product of extents."""
        return math.prod(self.size(atom) for atom in atoms)

    def leaves(self, atoms: Iterable[int]) -> tuple[int, ...]:
        """The leaf atoms that a sequence of atoms resolves to, in order."""
        result: list[int] = []
        for atom in atoms:
            root = self._root(atom)
            result.extend(self.leaves(self._factors[root]) if root in self._factors else (root,))
        return tuple(result)

    def equate(self, left: Sequence[int], right: Sequence[int]) -> bool:
        """Say that two sequences of atoms run over the same elements in the same order.

        Refines atoms at common boundaries. Returns False, changing nothing more, when extents
        do not factor (`6 x 4` against `8 x 3`).
        """
        a, b = deque(self.leaves(left)), deque(self.leaves(right))
        if self.extent(a) != self.extent(b):
            return False
        while a and b:
            x, y = self._root(a[0]), self._root(b[0])
            if x == y:
                a.popleft(), b.popleft()
            elif x in self._factors:
                a.popleft(), a.extendleft(reversed(self.leaves((x,))))
            elif y in self._factors:
                b.popleft(), b.extendleft(reversed(self.leaves((y,))))
            elif self._size[x] == self._size[y]:
                self._parent[max(x, y)] = min(x, y)
            elif self._size[x] % self._size[y] == 0:
                self._refine(x, self._size[y])
            elif self._size[y] % self._size[x] == 0:
                self._refine(y, self._size[x])
            else:
                return False
        return not a and not b

    def _refine(self, atom: int, major: int) -> None:
        self._factors[atom] = (self.new(major), self.new(self._size[atom] // major))

    def _root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom
