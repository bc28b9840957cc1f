"""A file of measured runs: what real steps took.

In: a YAML file such as `tpplan bench --runs` writes, or one by hand. Out: `MeasuredRun`s.

    runs:
      - model: small.py              # beside this file, or as seen from where the command runs
        plan: plan.yaml              # a plan file; or `set`, with what the job was:
        step_s: 0.123                # one optimizer step
        memory_bytes: 1234567        # optional: most bytes allocated on the fullest device
      - model: llama/config.json
        set: {tp: 8, pp: 2, dp: 4, micro_batch: 1}
        global_batch: 256
        seq_len: 8192
        dtype: bf16                  # optional, as are optimizer, framework and nodes
        step_s: 4.1

Every fault is a `TopologyError` naming file, line, field and nearest value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..topologies.document import Document, read
from ..topologies.schema import Model, Text, check

Count = Annotated[int, Field(gt=0)]


class MeasuredRun(Model):
    """One run: a model, its plan, and what was measured."""

    model: Text
    plan: Text | None = None
    set: dict[Text, int | str] | None = None
    """Choices as `--set` takes them, where there is no plan file."""
    name: str = ""
    """What to call it in reports."""
    global_batch: Count | None = None
    seq_len: Count | None = None
    nodes: Count | None = None
    dtype: Text | None = None
    optimizer: Text | None = None
    framework: Text | None = None
    step_s: Annotated[float, Field(gt=0)]
    memory_bytes: Annotated[float, Field(gt=0)] | None = None
    device: str = ""
    ranks: Count | None = None
    date: str = ""


class RunFile(Model):
    """All runs of a file."""

    version: Annotated[int, Field(ge=1, le=1)] = 1
    runs: Annotated[list[MeasuredRun], Field(min_length=1)]


def load_runs(path: Path) -> list[MeasuredRun]:
    """The runs of `path`, their files found. Raises `TopologyError`."""
    document = read(path)
    runs = check(document, RunFile).runs
    return [_found(document, i, run) for i, run in enumerate(runs)]


def _found(document: Document, index: int, run: MeasuredRun) -> MeasuredRun:
    """The run with paths as they are from here."""
    if (run.plan is None) == (run.set is None):
        problem = "give `plan` (a plan file) or `set` (its choices), one of them"
        raise document.error(("runs", index), problem)
    changes: dict[str, Any] = {"model": _beside(document.path, run.model)}
    if run.plan is not None:
        changes["plan"] = _beside(document.path, run.plan)
        if not Path(changes["plan"]).is_file():
            raise document.error(("runs", index, "plan"), f"there is no file {run.plan}")
    return run.model_copy(update={**changes, "name": run.name or _title(run)})


def _title(run: MeasuredRun) -> str:
    choices = run.plan or ",".join(f"{key}={value}" for key, value in (run.set or {}).items())
    return f"{run.model} {choices}"


def _beside(file: Path, name: str) -> str:
    """A path relative to the file of runs if it exists there, else as it stands."""
    path, colon, factory = name.partition(":")
    beside = file.parent / path
    return f"{beside}{colon}{factory}" if beside.exists() else name
