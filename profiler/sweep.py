"""What a profile measures: kernels, collectives, and their overlap.

In: a `Session`. Out: measurements in its journal. A collective's sizes grow until they take too long;
between any two sizes one is held back, to tell how well the curve predicts what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from ..planner.layout import Collective
from . import collective, compute, overlap
from .patterns import Pattern, pairs, patterns
from .session import Item, Session
from .settings import Measurement
from .timing import Batch
from .world import World

# --------------------------------------------------------------------------- kernels


def kernels(session: Session, *, priced: bool) -> None:
    """Those whose family the planner prices, or those that only check it."""
    wanted = compute.kernels(session.world.device, session.settings, free_bytes=session.layout.free_bytes)
    chosen = [kernel for kernel in (compute.launch_gap(), *wanted) if (kernel.family != "other") == priced]
    families: dict[str, list[compute.Kernel]] = {}
    for kernel in chosen:
        families.setdefault(kernel.family_key, []).append(kernel)
    for name, family in families.items():
        _family(session, name, [one for one in family if one.key not in session.journal.measurements])


def _family(session: Session, name: str, wanted: Sequence[compute.Kernel]) -> None:
    if not wanted or not session.in_time(len(wanted)):
        return
    session.tell(f"{name}: {len(wanted)} sizes")
    items = [_kernel_item(kernel, session.world) for kernel in wanted]
    session.take(items, {item.key: session.warm_up(item) for item in items})


def _kernel_item(kernel: compute.Kernel, world: World) -> Item:
    facts = {
        "name": kernel.name, "family": kernel.family, "dtype": kernel.dtype, "flops": kernel.flops,
        "bytes": kernel.nbytes, "shape": kernel.shape,
    }  # fmt: skip
    kind = "kernel check" if kernel.held_back else "kernel"
    run = compute.runner(kernel, world.device, ranks_per_core=world.ranks_per_core)
    return Item(key=kernel.key, kind=kind, facts=facts, run=run)


def own_speed(world: World) -> list[float]:
    """Each rank's own time for one kernel, to find a slow device."""
    side = 256 if world.device.type == "cpu" else 4096
    a = torch.randn(side, side, device=world.device)
    share = world.ranks_per_core
    seconds = min(compute.timed(lambda: a @ a, 10, world.device, ranks_per_core=share) for _ in range(5))
    return [float(facts["seconds"]) for facts in world.gather("own speed", {"seconds": seconds})]


# --------------------------------------------------------------------------- collectives


def collectives(session: Session) -> None:
    """Every collective among every kind of group, all groups of a kind at once."""
    sizes, quick = session.layout.sizes, session.settings.quick
    for pattern in pairs(sizes):
        _pattern(session, pattern, (Collective.SEND_RECV,))
    for pattern in patterns(sizes, quick=quick):
        _pattern(session, pattern, collective.GROUPED)


def _pattern(session: Session, pattern: Pattern, which: Sequence[Collective]) -> None:
    group, ranks = session.world.groups(pattern.groups)
    standing = ranks or pattern.groups[0]
    for one in which:
        if session.in_time():
            _curve(session, pattern, one, group, standing)


def _curve(
    session: Session,
    pattern: Pattern,
    which: Collective,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
) -> None:
    """One collective over growing sizes: those of the curve, then those held back, all in turns."""
    known, settings = session.journal.measurements, session.settings
    items: dict[str, Item] = {}
    batches: dict[str, Batch] = {}

    def warm(nbytes: int, kind: str) -> float:
        """Seconds of one execution, about; from the journal if it is there."""
        key = _key(which, pattern, nbytes)
        if key in known:
            return known[key].sample.seconds
        items[key] = _collective_item(session.world, pattern, which, group, ranks, nbytes, kind)
        batches[key] = session.warm_up(items[key])
        return batches[key].seconds

    taken: list[int] = []
    first_s = None
    for nbytes in collective.sizes(settings, free_bytes=session.layout.free_bytes):
        seconds = warm(nbytes, "collective")
        taken.append(nbytes)
        first_s = seconds if first_s is None else first_s
        if first_s + (seconds - first_s) * settings.growth > settings.longest_s:
            break  # the part that grows with the message would make the next size too slow
    for smaller, larger in pairwise(taken):
        warm(round(math.sqrt(smaller * larger)), "collective check")
    if items:
        session.tell(f"{which}/{pattern}: {len(items)} sizes")
        session.take(list(items.values()), batches)


def _key(which: Collective, pattern: Pattern, nbytes: int) -> str:
    return f"{which}/{pattern}/{collective.exact_bytes(nbytes, pattern.size)} bytes"


def _collective_item(
    world: World,
    pattern: Pattern,
    which: Collective,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    nbytes: int,
    kind: str,
) -> Item:
    case = collective.prepare(world, which, group, ranks, nbytes)
    exact = collective.exact_bytes(nbytes, pattern.size)
    facts = {"collective": str(which), "members": list(pattern.members), "bytes": exact}
    key = _key(which, pattern, nbytes)
    return Item(key=key, kind=kind, facts=facts, run=case.run, joint=True, check=case.check)


# --------------------------------------------------------------------------- both at once


def overlaps(session: Session) -> None:
    """All three or none: they belong together."""
    keys = [f"overlap/{part}" for part in overlap.PARTS]
    if all(key in session.journal.measurements for key in keys) or not session.in_time(len(keys)):
        return
    session.world.doing("overlap of an all-reduce with matrix products")
    found = overlap.measure(session.world, session.settings)
    session.journal.add(
        *(
            Measurement(key=f"overlap/{part}", kind="overlap", facts={"part": part}, sample=sample)
            for part, sample in found.items()
        )
    )
