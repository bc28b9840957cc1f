"""How each block is split, in words: ops that are split alike share a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from ...planner.plan import Plan, Split
from .. import words
from .tables import literal, table
from .tables import words as column

FEW_OPS = 3
"""Up to so many ops are named even where all are split alike."""
OPS_NAMED = 6
"""Ops named on one line before the rest are counted."""


def split_table(plan: Plan) -> RenderableType | None:
    """A heading for each block class with its count, then (axis, ops, how they are split)."""
    if not plan.splits:
        return None
    return Group(
        *(part for block in dict.fromkeys(s.block for s in plan.splits) for part in _block(block, plan))
    )


def _block(block: str, plan: Plan) -> Iterator[RenderableType]:
    splits = [split for split in plan.splits if split.block == block]
    prefix = _common_prefix([split.module for split in splits])
    times = plan.blocks_of(block)
    heading = literal(block, "bold cyan").append(f" x {times}" if times else "")
    yield heading.append_text(literal(f", in {prefix}" if prefix else "", "dim"))
    made = table(column("Axis"), column("Ops", ratio=2), column("Split", ratio=3), expand=True, header=False)
    for axis in plan.mesh.order:
        for ops, how in _lines([split for split in splits if split.axis == axis], prefix):
            made.add_row(literal(f"  {axis} ", "bold"), literal(ops), literal(how))
    yield made


def _common_prefix(modules: Sequence[str]) -> str:
    """The dotted path that all modules share."""
    paths = [module.split(".") for module in modules]
    shared = [parts[0] for parts in zip(*paths, strict=False)]
    same = (len(set(parts)) == 1 for parts in zip(*paths, strict=False))
    length = next((i for i, alike in enumerate(same) if not alike), len(shared))
    return ".".join(shared[:length]) if len(set(modules)) > 1 else ""


def _lines(rows: Sequence[Split], prefix: str) -> Iterator[tuple[str, str]]:
    """(ops, words) on one axis, ops of the same words together, in the order of execution."""
    names = _names(rows, prefix)
    for how in dict.fromkeys(row.words for row in rows):
        alike = [name for name, row in zip(names, rows, strict=True) if row.words == how]
        every = len(alike) == len(rows) > FEW_OPS
        yield f"all {len(rows)} ops" if every else words.listed(alike, limit=OPS_NAMED), how


def _names(rows: Sequence[Split], prefix: str) -> list[str]:
    """The module below `prefix`; the op too where a module has several."""
    modules = Counter(row.module for row in rows)
    return [_name(row, prefix, alone=modules[row.module] == 1) for row in rows]


def _name(row: Split, prefix: str, *, alone: bool) -> str:
    below = row.module[len(prefix) :].lstrip(".") if prefix else row.module
    return below if below and alone else f"{below} {row.op}".strip()
