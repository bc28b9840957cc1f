"""A profile from beginning to end.

In: where to write, `Settings`. Out: a cluster file that `topologies.load` reads, on rank 0. Measurements
go to a journal as they are made; a run that was killed continues from it. A rank that dies, hangs or
gets wrong results ends the run with a `ProfileError` that names it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..planner.errors import ProfileError
from ..planner.layout import Collective
from ..topologies.document import read as read_document
from ..topologies.find import bundled, find
from ..topologies.importers.detect import bundled_name, detect
from ..topologies.importers.draft import to_yaml
from ..topologies.load import load_device
from ..topologies.write import write_text
from . import below_class, collective, compute, journal, overlap, profile_file
from .discovery import Layout, discover
from .patterns import Pattern, pairs, patterns
from .settings import Measurement, Sample, Settings
from .world import World

Say = Callable[[str], None]


@dataclass(slots=True)
class Session:
    """What the steps of one run share."""

    world: World
    settings: Settings
    layout: Layout
    journal: journal.Journal
    say: Say
    started_s: float
    skipped: int = 0

    def take(
        self, key: str, kind: str, facts: Mapping[str, Any], measure: Callable[[], Sample]
    ) -> Sample | None:
        """The sample of `key`: from the journal, or measured now; None if the time is up."""
        known = self.journal.measurements.get(key)
        if known is not None:
            return known.sample
        spent = self.world.slowest(time.monotonic() - self.started_s)
        if spent > self.settings.budget_s:
            self.skipped += 1
            return None
        self.world.doing(key)
        self.say(f"{spent:4.0f} s  {key}")
        sample = measure()
        self.journal.add(Measurement(key=key, kind=kind, facts=dict(facts), sample=sample))
        return sample


def profile(
    output: Path,
    settings: Settings,
    *,
    resume: bool = True,
    redact: bool = False,
    say: Say = lambda text: None,
) -> bool:
    """Measure and write `output`; True on the rank that wrote it. Raises `ProfileError` and `UserError`s."""
    torch.manual_seed(settings.seed)
    world = World(timeout_s=settings.timeout_s)
    if world.watch is not None:
        world.watch.hint = f"; what was measured is kept in {journal.partial(output)}"
        world.watch.hear_out(signal.SIGTERM)
    try:
        with torch.no_grad():
            return _profile(world, output, settings, resume=resume, redact=redact, say=say)
    except RuntimeError as error:
        if world.watch is None:
            raise
        raise ProfileError(world.watch.verdict(str(error).splitlines()[0])) from error
    except Exception as error:
        if world.watch is not None:
            world.watch.leave(f"{type(error).__name__}: {error}")
        raise


def _profile(world: World, output: Path, settings: Settings, *, resume: bool, redact: bool, say: Say) -> bool:
    started_s = time.monotonic()
    layout = discover(world, settings)
    say(f"{world.size} ranks of {layout.device_name}: {' x '.join(map(str, layout.sizes))}, {world.backend}")
    book = _open_journal(world, output, layout, settings, resume=resume, say=say)
    session = Session(world, settings, layout, book, say, started_s)
    _kernels(session, priced=True)
    own_s = _own_speed(world)
    if world.size > 1:
        _collectives(session)
        _overlap(session)
    _kernels(session, priced=False)
    if world.rank == 0:
        data = _document(session, own_s, redact=redact, name=output.stem)
        write_text(output, to_yaml(data))
        book.remove()
        for warning in data["profile"]["warnings"]:
            say(f"warning: {warning}")
    world.close()
    return world.rank == 0


def _open_journal(
    world: World, output: Path, layout: Layout, settings: Settings, *, resume: bool, say: Say
) -> journal.Journal:
    """Every rank knows what is done; rank 0 alone reads and writes the file."""
    run = {
        "sizes": list(layout.sizes), "device": layout.device_name, "backend": world.backend,
        "torch": str(torch.__version__), "quick": settings.quick,
    }  # fmt: skip
    done: dict[str, Measurement] = {}
    path = journal.partial(output)
    if world.rank == 0 and resume:
        done, problem = journal.read(path, run)
        if problem:
            say(problem)
        elif done:
            say(f"continuing {path}: {len(done)} measurements are kept")
    told = world.from_first("done", [asdict(one) for one in done.values()])
    done = {one["key"]: Measurement(**{**one, "sample": Sample(**one["sample"])}) for one in told}
    return journal.Journal(path if world.rank == 0 else None, run, done)


# --------------------------------------------------------------------------- what is measured


def _kernels(session: Session, *, priced: bool) -> None:
    """Those whose family the planner prices, or (last, if time is left) those that only check it."""
    world, settings = session.world, session.settings
    wanted = compute.kernels(world.device, settings, free_bytes=session.layout.free_bytes)
    for kernel in (compute.launch_gap(), *wanted):
        if (kernel.family == "other") == priced:
            continue
        facts = {
            "name": kernel.name, "family": kernel.family, "dtype": kernel.dtype, "flops": kernel.flops,
            "bytes": kernel.nbytes, "shape": kernel.shape,
        }  # fmt: skip

        def measure(kernel: compute.Kernel = kernel) -> Sample:
            with torch.enable_grad():
                return compute.measure(kernel, world.device, settings, agree=world.slowest)

        session.take(kernel.key, "kernel", facts, measure)


def _own_speed(world: World) -> list[float]:
    """Each rank's own time for one kernel, to find a slow device."""
    side = 256 if world.device.type == "cpu" else 4096
    a = torch.randn(side, side, device=world.device)
    times = []
    for _ in range(5):
        world.settle()
        start = time.perf_counter()
        for _ in range(10):
            a @ a
        world.settle()
        times.append(time.perf_counter() - start)
    return [float(facts["seconds"]) for facts in world.gather("own speed", {"seconds": min(times)})]


def _collectives(session: Session) -> None:
    sizes, quick = session.layout.sizes, session.settings.quick
    for pattern in pairs(sizes):
        _pattern(session, pattern, (Collective.SEND_RECV,))
    for pattern in patterns(sizes, quick=quick):
        _pattern(session, pattern, collective.GROUPED)


def _pattern(session: Session, pattern: Pattern, collectives: Sequence[Collective]) -> None:
    world, settings = session.world, session.settings
    group, ranks = world.groups(pattern.groups)
    standing = ranks or pattern.groups[0]
    for which in collectives:
        first_s = None
        for nbytes in collective.sizes(settings, free_bytes=session.layout.free_bytes):
            exact = collective.exact_bytes(nbytes, pattern.size)
            facts = {"collective": str(which), "members": list(pattern.members), "bytes": exact}

            def measure(which: Collective = which, nbytes: int = nbytes) -> Sample:
                return collective.measure(world, which, group, standing, nbytes, settings)

            key = f"{which}/{pattern}/{exact} bytes"
            sample = session.take(key, "collective", facts, measure)
            if sample is None:
                break
            first_s = sample.seconds if first_s is None else first_s
            if first_s + (sample.seconds - first_s) * settings.growth > settings.longest_s:
                break  # the part that grows with the message would make the next size too slow


def _overlap(session: Session) -> None:
    """All three or none: they belong together."""
    keys = [f"overlap/{part}" for part in ("collective", "compute", "both")]
    if all(key in session.journal.measurements for key in keys):
        return
    spent = session.world.slowest(time.monotonic() - session.started_s)
    if spent > session.settings.budget_s:
        session.skipped += 1
        return
    session.world.doing("overlap of an all-reduce with matrix products")
    for part, sample in overlap.measure(session.world, session.settings).items():
        one = Measurement(key=f"overlap/{part}", kind="overlap", facts={"part": part}, sample=sample)
        session.journal.add(one)


# --------------------------------------------------------------------------- the file


def _document(session: Session, own_s: Sequence[float], *, redact: bool, name: str) -> dict[str, Any]:
    world, layout = session.world, session.layout
    found = list(session.journal.measurements.values())
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    source = f"measured on {today} with {world.backend if world.size > 1 else world.device.type}"
    kind = (
        bundled_name(layout.device_name, tuple(bundled("devices"))) if layout.device_name != "cpu" else "cpu"
    )
    sheet = read_document(find("device", kind, "devices")).data if kind else None
    expected = detect(device=kind if kind != "cpu" else None).data["levels"]
    dtype = compute.main_dtype(world.device)
    levels = profile_file.levels(layout, found, default=expected, source=source)
    hosts = [f"host {i}" for i in range(len(layout.hosts))] if redact else list(layout.hosts)
    ranks_hosts = [hosts[rank * len(hosts) // world.size] for rank in range(world.size)]
    warnings = [
        *layout.notes,
        *(below_class.slow_kernels(found, load_device(kind)) if kind and kind != "cpu" else ()),
        *below_class.slow_links(levels, expected),
        *below_class.stragglers(own_s, ranks_hosts),
        *_budget_notes(session),
    ]
    return {
        "name": "cluster" if redact else name,
        "description": f"{world.size} x {layout.device_name}, measured",
        "device": kind or layout.device_name,
        "measured_device": profile_file.device(layout, found, sheet=sheet, dtype=dtype, source=source),
        "levels": levels,
        "profile": {
            "version": 1, "tpplan": __version__, "torch": str(torch.__version__), "date": today,
            "backend": world.backend, "hosts": hosts, "ranks": world.size, "seed": session.settings.seed,
            "quick": session.settings.quick, "measured_s": round(time.monotonic() - session.started_s, 1),
            "overlap": _overlap_record(session), "kernels": profile_file.kernel_records(found),
            "warnings": warnings,
        },
    }  # fmt: skip


def _budget_notes(session: Session) -> Iterator[str]:
    if session.skipped:
        yield f"the time budget ended: {session.skipped} measurements were left out (--budget sets it)"


def _overlap_record(session: Session) -> dict[str, float] | None:
    found = session.journal.measurements
    parts = ("collective", "compute", "both")
    if not all(f"overlap/{part}" in found for part in parts):
        return None
    samples = {part: found[f"overlap/{part}"].sample for part in parts}
    times = {f"{part}_us": float(f"{samples[part].seconds * 1e6:.5g}") for part in parts}
    return {"sigma": float(f"{overlap.sigma(samples):.4g}"), **times}
