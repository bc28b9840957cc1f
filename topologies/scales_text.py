"""The scales of a cluster file, replaced in its text so that everything else stays as it stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from ..planner.topology import MeasuredScale

FIELD = "scales:"


def with_scales(text: str, scales: Iterable[MeasuredScale]) -> str:
    """The file's text with these scales in place of those it has."""
    import yaml

    entries = [asdict(scale) for scale in scales]
    block = yaml.safe_dump({"scales": entries}, sort_keys=False, allow_unicode=True, width=110)
    return _without(text).rstrip("\n") + "\n" + (block if entries else "")


def _without(text: str) -> str:
    """The text less its top-level `scales`: that line and all that is indented or listed under it."""
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if line.startswith(FIELD):
            inside = True
        elif inside and line.strip() and not line.startswith((" ", "-", "#")):
            inside = False
        if not inside:
            kept.append(line)
    return "".join(kept)
