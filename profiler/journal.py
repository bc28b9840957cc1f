"""What was measured so far, in a file that survives being killed.

One JSON document a line, appended and flushed: the first names the run (what must be equal to continue),
every other is a `Measurement`. A last line that was cut off is dropped. The journal of `cluster.yaml` is
`cluster.yaml.partial`; it is removed when the profile is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..planner.errors import TopologyError
from .settings import Measurement, Sample

VERSION = 1


class Journal:
    """The measurements of one run by key; rank 0 alone has a file behind it."""

    def __init__(self, path: Path | None, run: Mapping[str, Any], done: Mapping[str, Measurement]) -> None:
        self._path = path
        self.measurements: dict[str, Measurement] = dict(done)
        if path is not None:
            lines = [json.dumps({"version": VERSION, "run": dict(run)}), *map(_line, done.values())]
            _attempt(path, lambda: path.write_text("".join(line + "\n" for line in lines)))

    def add(self, *measurements: Measurement) -> None:
        """Keep more measurements."""
        self.measurements |= {one.key: one for one in measurements}
        if self._path is not None:
            with self._path.open("a") as file:
                file.write("".join(_line(one) + "\n" for one in measurements))

    def remove(self) -> None:
        """The profile is complete: its file holds everything."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def partial(output: Path) -> Path:
    """The journal's path for a profile file."""
    return output.with_name(output.name + ".partial")


def read(path: Path, run: Mapping[str, Any]) -> tuple[dict[str, Measurement], str | None]:
    """The measurements to continue from, and why there are none of an existing file.

    Raises `TopologyError` for a file that is no journal.
    """
    if not path.exists():
        return {}, None
    lines = path.read_text(errors="replace").splitlines()
    if not lines:
        return {}, None
    head = _parse(path, 1, lines[0], last=len(lines) == 1)
    if head is None:
        return {}, None
    if head.get("version") != VERSION or "run" not in head:
        raise TopologyError(f"{path}:1: not a journal of version {VERSION}; remove it or give --no-resume")
    if differing := [key for key in run if head["run"].get(key) != run[key]]:
        return {}, f"{path} is of another run ({', '.join(differing)} differ): starting over"
    found = {}
    for number, line in enumerate(lines[1:], start=2):
        data = _parse(path, number, line, last=number == len(lines))
        if data is not None:
            measurement = _measurement(path, number, data)
            found[measurement.key] = measurement
    return found, None


def _parse(path: Path, number: int, line: str, *, last: bool) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        if last:
            return None  # killed while writing it
        raise TopologyError(
            f"{path}:{number}: damaged ({error.msg}); remove it or give --no-resume"
        ) from error
    if not isinstance(data, dict):
        raise TopologyError(f"{path}:{number}: damaged (no object); remove it or give --no-resume")
    return data


def _measurement(path: Path, number: int, data: Mapping[str, Any]) -> Measurement:
    try:
        return Measurement(
            key=data["key"], kind=data["kind"], facts=data["facts"], sample=Sample(**data["sample"])
        )
    except (KeyError, TypeError) as error:
        raise TopologyError(f"{path}:{number}: damaged ({error}); remove it or give --no-resume") from error


def _line(measurement: Measurement) -> str:
    return json.dumps(asdict(measurement), separators=(",", ":"))


def _attempt(path: Path, write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise TopologyError(f"{path}: cannot be written: {error.strerror}") from error
