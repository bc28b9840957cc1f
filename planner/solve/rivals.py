"""Plans that the answer is compared with: what experts would try, and the best plans of other meshes.

In: an `Exploration`. Out: prices in it, and the member that stands for each expert plan's family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..problem import Candidate, Priced
from .exploration import Entry, Exploration, mesh_sizes
from .space import EXPERTS, Expert

FAMILY_TRIES = 3
"""Candidates tried of an expert plan's family or of another mesh, the most promising first."""


def seed_experts(run: Exploration) -> None:
    """Price the most promising member of every family, for an early incumbent."""
    for expert in EXPERTS:
        for bound, candidate in run.by_bound(_family(run, expert)):
            if not run.late and not math.isinf(bound):
                run.price_candidate(candidate)
            break


def compare_experts(run: Exploration) -> dict[str, Candidate]:
    """By name, the best member found of every family, or its most promising one if none fits."""
    chosen = {}
    for expert in EXPERTS:
        family = _family(run, expert)
        best = _best_of(run, family)
        if best is None and family and not run.late:
            leanest = min((e.candidate for e in family), key=lambda c: (c.micro_batch, c.key))
            best = run.price_candidate(leanest)
            chosen[expert.name] = leanest
        if best is not None:
            chosen[expert.name] = best.candidate
    return chosen


def price_runners_up(run: Exploration, top: int) -> None:
    """Find the best plan of each mesh of as many devices that comes next by price or bound, up to `top`."""
    assert run.best is not None
    devices = run.best.candidate.mesh.devices
    done = {mesh_sizes(run.best.candidate)}
    order = [mesh_sizes(p.candidate) for p in sorted(run.priced.values(), key=run.rank)]
    order += [mesh_sizes(e.candidate) for e in sorted(run.queue)]
    for sizes in dict.fromkeys(order):
        if len(done) > top or run.late:
            return
        if math.prod(sizes) != devices or sizes in done:
            continue
        if _best_of(run, run.members[sizes], ask=False):
            done.add(sizes)


def _family(run: Exploration, expert: Expert) -> list[Entry]:
    """The entries that are such plans."""
    return [e for e in run.entries if expert.holds(e.candidate, run.problem)]


def _best_of(run: Exploration, family: Sequence[Entry], *, ask: bool = True) -> Priced | None:
    """The best member, proven unless `FAMILY_TRIES` candidates were not enough.

    Without `ask`, once a member has a price, only members whose intra-op frontier is at hand are tried.
    """
    known = [p for e in family if (p := run.found(e.candidate))]
    best = min(known, key=run.rank, default=None)
    tries = FAMILY_TRIES
    for bound, candidate in run.by_bound(family):
        if not tries or run.late or math.isinf(bound) or (best and bound >= run.weighted_s(best)):
            break
        if run.found(candidate) or (best and run.floor_s(candidate) >= run.weighted_s(best)):
            continue
        if best and not ask and not run.knows(candidate):
            continue
        tries -= 1
        found = run.price_candidate(candidate, below_s=run.weighted_s(best) if best else math.inf)
        if found and (best is None or run.rank(found) < run.rank(best)):
            best = found
    return best
