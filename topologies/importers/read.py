"""Files that people have, whatever they are, to one topology (or curve) file.

In: paths of pastes and logs, a device name or none. Out: an `Imported`: the file's data, the link graph
and nest behind it, and notes. One link matrix at most; logs go onto its levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...planner.errors import OptionError, TopologyError
from ...planner.topology import CollectiveCurve
from ..find import bundled
from ..load import load_device
from .attach import attach, curve_file
from .draft import choose_device, draft
from .hierarchy import Nest, nest
from .nccl_tests import is_log, read_log
from .smi import read_topo

if TYPE_CHECKING:
    import networkx as nx

STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of the files."""

    data: dict[str, Any]
    """A topology, or a curve file if there was no link matrix."""
    graph: nx.Graph | None
    nest: Nest | None
    curves: tuple[CollectiveCurve, ...]
    notes: tuple[str, ...]


def import_files(
    paths: Sequence[Path], *, device: str | None = None, nodes: int = 1, nic_gbit: float | None = None
) -> Imported:
    """Read pastes and logs. Raises `TopologyError` (file, line, column) and `OptionError`."""
    texts = {str(path): _text(path) for path in paths}
    matrices = {name: text for name, text in texts.items() if not is_log(text)}
    if len(matrices) > 1:
        raise OptionError(f"{' and '.join(matrices)}: give one link matrix, the rest nccl-tests logs")
    logs = [read_log(text, origin=name) for name, text in texts.items() if name not in matrices]
    curves = tuple(curve for log in logs for curve in log.curves)
    log_notes = tuple(note for log in logs for note in log.notes)
    for name, text in matrices.items():
        found = import_topo(text, origin=name, device=device, nodes=nodes, nic_gbit=nic_gbit)
        data, notes = attach(found.data, curves)
        notes = (*found.notes, *log_notes, *notes)
        return Imported(data=data, graph=found.graph, nest=found.nest, curves=curves, notes=notes)
    data = curve_file(curves, name=paths[0].stem, device=device or "unknown")
    return Imported(data=data, graph=None, nest=None, curves=curves, notes=log_notes)


def import_topo(
    text: str, *, origin: str, device: str | None = None, nodes: int = 1, nic_gbit: float | None = None
) -> Imported:
    """One link matrix to a topology. Raises as `import_files`."""
    graph = read_topo(text, origin=origin)
    nesting = nest(graph)
    name, note = choose_device(device, text, nesting, tuple(bundled("devices")))
    drafted = draft(
        nesting, load_device(name), name=Path(origin).stem or "imported", nodes=nodes, nic_gbit=nic_gbit
    )
    notes = (*drafted.notes, *([note] if note else []))
    return Imported(data=drafted.data, graph=graph, nest=nesting, curves=(), notes=notes)


def document(found: Imported) -> dict[str, Any]:
    """The links, groups and NICs for `--json`."""
    links = [] if found.graph is None else found.graph.edges(data="link")
    nesting = found.nest
    return {
        "topology" if nesting else "curves": found.data,
        "links": [{"between": [a, b], "link": link} for a, b, link in sorted(links)],
        "order": list(nesting.order) if nesting else [],
        "nics": list(nesting.nics) if nesting else [],
        "nearest_nics": {gpu: list(nics) for gpu, nics in nesting.nearest_nics.items()} if nesting else {},
        "left_out": list(nesting.left_out) if nesting else [],
        "notes": list(found.notes),
    }


def _text(path: Path) -> str:
    import sys

    if str(path) == STDIN:
        return sys.stdin.read()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TopologyError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error
    if b"\0" in raw and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return raw.decode("utf-16", errors="replace")
    if b"\0" in raw:
        raise TopologyError(f"{path}: not a text file")
    return raw.decode("utf-8", errors="replace")
