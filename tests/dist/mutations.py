"""Wrong collectives and wrong plans, each of which a comparison has to notice.

In: a plan and what ranks ran under it, which agree. Out: in words, every change that went unnoticed: of each
kind of collective on some rank one is left out, one is run twice, one has a byte more; of each row of the
plan the count is one more, the bytes are, or it is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tpplan.planner.plan import Plan
from tpplan.runtime.exchange import COUNTS_LABEL
from tpplan.runtime.executed import Executed, axes_of
from tpplan.runtime.expected import NUMBER_BYTES
from tpplan.runtime.fidelity import compare

Ranks = list[list[Executed]]


def unnoticed(plan: Plan, executed: Sequence[Sequence[Executed]]) -> list[str]:
    """Changes after which every row still agrees."""
    ranks = [list(rank) for rank in executed]
    found = [what for what, changed in _other_runs(plan, ranks) if _all_agree(plan, changed)]
    return found + [what for what, other in _other_plans(plan) if _all_agree(other, ranks)]


def _all_agree(plan: Plan, executed: Ranks) -> bool:
    return all(row.agrees or row.announced for row in compare(plan, executed))


def _other_runs(plan: Plan, ranks: Ranks) -> Iterator[tuple[str, Ranks]]:
    """One record changed, of each kind, on the last rank that has it."""
    kinds = {}
    for rank, found in enumerate(ranks):
        for place, e in enumerate(found):
            if axes_of(e.ranks, plan.mesh) and e.bytes and not _is_greeting(e):
                kinds[_kind(e.label), e.collective, axes_of(e.ranks, plan.mesh), e.backward] = rank, place
    for rank, place in kinds.values():
        e = ranks[rank][place]
        what = f"{e.collective} of {e.bytes} B, {e.label or 'no label'}, on rank {rank}"
        more = replace(e, bytes=e.bytes + 1)
        changes = [("left out", ()), ("run twice", (e, e))]
        if e.label != COUNTS_LABEL:  # no plan prices counts: they are compared with the rows that follow
            changes.append(("a byte longer", (more,)))
        for change, instead in changes:
            found = ranks[rank]
            yield (
                f"{what}: {change}",
                [*ranks[:rank], [*found[:place], *instead, *found[place + 1 :]], *ranks[rank + 1 :]],
            )


def _kind(label: str) -> str:
    """Conversions between modules are all compared alike, forward and backward."""
    return re.sub(".*->.*?( .gradient.)?$", r"->\1", label)


def _is_greeting(e: Executed) -> bool:
    return str(e.collective) == "send/recv" and e.bytes <= NUMBER_BYTES


def _other_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    kinds = {
        (_kind(c.label), c.collective, c.axis, c.by_stage != ()): i for i, c in enumerate(plan.communications)
    }
    for i in kinds.values():
        c = plan.communications[i]
        others = [
            replace(c, count=c.count + 1, by_stage=tuple((n + 1, again, b) for n, again, b in c.by_stage)),
            replace(c, bytes=c.bytes + 1, by_stage=tuple((n, again, b + 1) for n, again, b in c.by_stage)),
            None,
        ]
        for change, other in zip(("run once more", "of a byte more", "missing"), others, strict=True):
            rest = plan.communications[:i], plan.communications[i + 1 :]
            found = (*rest[0], *([other] if other else []), *rest[1])
            yield f"planned {c.collective}, {c.label}: {change}", replace(plan, communications=found)
