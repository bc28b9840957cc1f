"""From what a user typed to a file: bundled names, paths, and `name:NODES`.

In: `dgx-h100:128` or `my-cluster.yaml`. Out: the file and the number of nodes asked for.
"""

from __future__ import annotations

import re
from os.path import isfile
from pathlib import Path

from ..planner.errors import TopologyError, did_you_mean

HERE = Path(__file__).parent
SUFFIXES = (".yaml", ".yml")
MAX_NODES = 1_000_000
"""More nodes than any cluster has: a slip of the keyboard."""


def split(spec: str) -> tuple[str, int | None]:
    """`name:128` -> (`name`, 128). A path that exists as it stands is never split."""
    name, colon, count = spec.rpartition(":")
    if not colon or isfile(spec):
        return spec, None
    return name, node_count(spec, count)


def node_count(spec: str, count: str | int) -> int:
    """A number of nodes between 1 and MAX_NODES, or a `TopologyError`."""
    text = str(count).strip()
    if isinstance(count, bool) or not re.fullmatch(r"[+-]?[0-9]+", text):
        raise TopologyError(
            f"topology {spec!r}: nodes: found {text!r}, expected a whole number, as in 'dgx-h100:16'"
        )
    if text.startswith("-") or not text.strip("+0"):
        near = text.lstrip("-0") or "1"
        raise TopologyError(
            f"topology {spec!r}: nodes: found {text}, must be at least 1; did you mean {near}?"
        )
    if len(text.lstrip("+0")) > len(str(MAX_NODES)) or int(text) > MAX_NODES:
        raise TopologyError(f"topology {spec!r}: nodes: found {text[:20]}, must be at most {MAX_NODES}")
    return int(text)


def bundled(folder: str) -> dict[str, Path]:
    """The bundled files of `devices`, `clusters` or `curves` by name, sorted."""
    found = {path.stem: path for path in (HERE / folder).glob("*.yaml")}
    return dict(sorted(found.items()))


def find(kind: str, name: str, folder: str, *, beside: Path | None = None) -> Path:
    """The file of a bundled name, or the path itself (relative to `beside`) if it names a file."""
    known = bundled(folder)
    if name in known:
        return known[name]
    path = (beside or Path()) / name
    if isfile(path):
        return path
    if path.suffix in SUFFIXES:
        raise TopologyError(f"{kind} file {str(path)!r} does not exist{did_you_mean(path.stem, known)}")
    raise TopologyError(f"no {kind} named {name!r}{_nearest(name, known)}")


def _nearest(name: str, known: dict[str, Path]) -> str:
    """What was probably meant: names that go on as `name` begins, else a near miss, else the list."""
    longer = [repr(other) for other in known if name and other.startswith(name)]
    if longer:
        return f"; did you mean {' or '.join(longer)}?"
    return did_you_mean(name, known) or f"; there are: {', '.join(known)}"
