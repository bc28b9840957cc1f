"""The speed benchmark measures a process of its own and prints one JSON document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "benchmarks.speed", *options)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_one_case_as_json():
    result = benchmark("--only", "help", "--json")
    (case,) = json.loads(result.stdout)["cases"]
    assert case["error"] is None and case["warm"] is None
    assert 0 < case["cold"]["wall_s"] < 60
    assert 5e6 < case["cold"]["peak_bytes"] < 1e9, "a Python process, in bytes"
    assert case["case"]["cold_s"] == 0.4


def test_an_unknown_case_is_refused():
    result = benchmark("--only", "gpt9")
    assert result.returncode == 2 and "gpt9" in result.stderr and "llama3-8b" in result.stderr
