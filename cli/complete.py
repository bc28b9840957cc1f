"""What the shell offers when a value is completed: names of clusters, targets, choices.

In: what has been typed of a value. Out: the names that begin with it. Called on every press of the tab
key, so nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


def topologies(typed: str) -> list[str]:
    """Bundled clusters, and files of the folder."""
    bundled = (path.stem for path in (Path(__file__).parents[1] / "topologies" / "clusters").glob("*.yaml"))
    return _beginning(typed, [*bundled, *(str(path) for path in Path().glob("*.yaml"))])


def targets(typed: str) -> list[str]:
    """Frameworks that a plan can be exported to."""
    from ..report.exporters import targets as known

    return _beginning(typed, (target.name for target in known()))


def names(option: str) -> Callable[[str], list[str]]:
    """Completes an option that takes one of a few words: `mode`, `objective`, `framework`, ..."""

    def complete(typed: str) -> list[str]:
        from ..planner import options

        known = {
            "mode": options.MODES,
            "objective": options.OBJECTIVES,
            "framework": (*options.FRAMEWORKS, *options.ENGINES),
            "dtype": options.SERVE_DTYPES,
            "optimizer": options.OPTIMIZERS,
        }
        return _beginning(typed, known[option])

    return complete


def sets(typed: str) -> list[str]:
    """The next key of `--set pp=2,tp=`, after what is there."""
    from ..planner.options import PIN_KEYS

    done, comma, last = typed.rpartition(",")
    used = {part.partition("=")[0] for part in done.split(",")}
    return [f"{done}{comma}{key}=" for key in _beginning(last, PIN_KEYS) if key not in used]


def _beginning(typed: str, known: Iterable[str]) -> list[str]:
    return sorted(name for name in known if name.startswith(typed))
