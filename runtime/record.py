"""A measured step as a record in a file of runs, which `tpplan calibrate` reads.

In: what was measured, of which model and plan. Out: one more entry under `runs` in a YAML file:

    runs:
      - model: small.py:gpt      # as it was given
        plan: plan.yaml          # relative to this file
        step_s: 0.123
        memory_bytes: 123456     # what tensors occupied on the fullest rank
        device: cpu
        ranks: 4
        date: '2026-11-30'
"""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from ..planner.errors import OptionError, TopologyError
from ..topologies.write import write_text
from .bench import Measured


def add_run(path: Path, measured: Measured, *, model: str, plan: Path, today: date) -> None:
    """Append to the file, which is made if need be. Raises `OptionError` when it holds something else."""
    runs = _runs(path)
    runs.append(
        {
            "model": model,
            "plan": os.path.relpath(plan, path.parent),
            "step_s": measured.step_s,
            "memory_bytes": measured.memory_bytes,
            "device": measured.device,
            "ranks": measured.ranks,
            "date": today.isoformat(),
        }
    )
    try:
        write_text(path, yaml.safe_dump({"runs": runs}, sort_keys=False))
    except TopologyError as error:
        raise OptionError(f"--runs {error}") from None


def _runs(path: Path) -> list[Any]:
    if not path.exists():
        return []
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise OptionError(f"--runs {path}: is no file of runs, and is left as it is")
    return found["runs"]
