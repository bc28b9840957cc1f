"""The exported torchrun script trains: on two ranks, with nothing but its own files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tpplan
from tpplan import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlp.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("auto_parallelize" not in tpplan.__all__, reason="needs tpplan.auto_parallelize"),
]


def test_the_exported_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPPLAN_CACHE_DIR", str(tmp_path / "cache"))
    plan = str(tmp_path / "plan.yaml")
    assert cli.main(["suggest", str(EXAMPLE), "-t", "cpu-gloo", "--global-batch", "32", "-o", plan]) == 0
    assert cli.main(["export", plan, "--to", "torchrun", "-o", str(tmp_path / "run")]) == 0
    run = subprocess.run(
        ["bash", "run.sh"],
        cwd=tmp_path / "run",
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MODEL": str(EXAMPLE), "STEPS": "2", "OMP_NUM_THREADS": "1", "MASTER_PORT": "29571",
        },
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^step \d: loss \d+\.\d+$", run.stdout, re.MULTILINE)) == 2
