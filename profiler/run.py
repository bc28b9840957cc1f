"""A profile from beginning to end.

In: where to write, `Settings`. Out: a cluster file that `topologies.load` reads, on rank 0. Measurements
go to a journal as they are made; a run that was killed continues from it. A rank that dies, hangs or
gets wrong results ends the run with a `ProfileError` that names it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..planner.errors import ProfileError
from ..topologies.document import parse
from ..topologies.document import read as read_document
from ..topologies.find import bundled, find
from ..topologies.importers.detect import bundled_name, detect
from ..topologies.importers.draft import to_yaml
from ..topologies.load import load_device, topology_of
from ..topologies.write import write_text
from . import below_class, block, check, compute, host, journal, overlap, profile_file, sweep
from .discovery import Layout, discover
from .session import Say, Session
from .settings import Measurement, Sample, Settings
from .world import World


def profile(
    output: Path,
    settings: Settings,
    *,
    resume: bool = True,
    redact: bool = False,
    model: str | None = None,
    seq_len: int | None = None,
    say: Say = lambda text: None,
) -> bool:
    """Measure and write `output`; True on the rank that wrote it.

    `model`: a model of which one block is measured too, at `seq_len` tokens. Raises `ProfileError` and
    `UserError`s.
    """
    torch.manual_seed(settings.seed)
    world = World(timeout_s=settings.timeout_s)
    if world.watch is not None:
        world.watch.hint = f"; what was measured is kept in {journal.partial(output)}"
        world.watch.hear_out(signal.SIGTERM)
    try:
        with torch.no_grad():
            return _profile(
                world, output, settings, resume=resume, redact=redact, model=(model, seq_len), say=say
            )
    except RuntimeError as error:
        if world.watch is None:
            raise
        raise ProfileError(world.watch.verdict(str(error).splitlines()[0])) from error
    except Exception as error:
        if world.watch is not None:
            world.watch.leave(f"{type(error).__name__}: {error}")
        raise


def _profile(
    world: World,
    output: Path,
    settings: Settings,
    *,
    resume: bool,
    redact: bool,
    model: tuple[str | None, int | None],
    say: Say,
) -> bool:
    started_s = time.monotonic()
    layout = discover(world, settings)
    say(f"{world.size} ranks of {layout.device_name}: {' x '.join(map(str, layout.sizes))}, {world.backend}")
    book = _open_journal(world, output, layout, settings, resume=resume, say=say)
    session = Session(world, settings, layout, book, say, started_s)
    sweep.kernels(session, priced=True)
    own_s = sweep.own_speed(world)
    source, seq_len = model
    if source is not None:
        block.measure(session, source, seq_len)
    if world.size > 1:
        host.measure(session)
        sweep.overlaps(session)
        sweep.collectives(session)
    sweep.kernels(session, priced=False)
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


# --------------------------------------------------------------------------- the file


def _document(session: Session, own_s: Sequence[float], *, redact: bool, name: str) -> dict[str, Any]:
    """The file's data, with the held-back sizes that the curves missed."""
    found = list(session.journal.measurements.values())
    of_curves = [one for one in found if one.kind == "collective"]
    first = _cluster(session, of_curves, own_s, redact=redact, name=name)
    topology = topology_of(parse(to_yaml(first), Path(name)))
    missed = check.errors(found, topology)
    whole = _cluster(session, check.joined(found, missed), own_s, redact=redact, name=name)
    record = {**whole["profile"], "check": check.summary(missed)}
    scales = block.scales(found, topology, source=f"measured on {record['date']}")
    return {**whole, "profile": record} | ({"scales": scales} if scales else {})


def _cluster(
    session: Session, collectives: Sequence[Measurement], own_s: Sequence[float], *, redact: bool, name: str
) -> dict[str, Any]:
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
    levels = profile_file.levels(layout, collectives, default=expected, source=source)
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
            "overlap": _overlap_record(session), **_host_record(session),
            "kernels": profile_file.kernel_records(found), "warnings": warnings,
        },
    }  # fmt: skip


def _budget_notes(session: Session) -> Iterator[str]:
    if session.skipped:
        yield f"the time budget ended: {session.skipped} measurements were left out (--budget sets it)"


def _host_record(session: Session) -> dict[str, dict[str, float]]:
    samples = host.samples(session)
    return {"host": host.record(samples)} if samples else {}


def _overlap_record(session: Session) -> dict[str, float] | None:
    found = session.journal.measurements
    if not all(f"overlap/{part}" in found for part in overlap.PARTS):
        return None
    samples = {part: found[f"overlap/{part}"].sample for part in overlap.PARTS}
    times = {f"{part}_us": float(f"{samples[part].seconds * 1e6:.5g}") for part in overlap.PARTS}
    return {"sigma": float(f"{overlap.sigma(samples):.4g}"), **times}
