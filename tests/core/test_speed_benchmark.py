"""The speed benchmark measures a process of its own and prints one JSON document."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.speed import CASES, GROWTHS, Result, Run, power

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


def test_growth_is_told_as_a_power():
    small, large = (Run(wall_s=s, cpu_s=s, peak_bytes=1) for s in (1.0, 4.0))
    assert power((8, small), (32, large)) == pytest.approx(1.0)
    assert power((8, small), (512, small)) == 0.0
    assert [growth.name for growth in GROWTHS] == ["layers", "nodes", "distinct layers"]
    for growth in GROWTHS:
        if growth.source is not None:
            compile(growth.source.format(size=8, examples="/examples"), growth.name, "exec")


def test_a_loose_gap_or_a_large_process_is_missed():
    fast = Run(wall_s=0.1, cpu_s=0.1, peak_bytes=10**8, gap=0.002)
    case = CASES[1]
    assert not Result(case=case, cold=fast, warm=fast).missed
    assert Result(case=case, cold=replace(fast, gap=0.02), warm=fast).missed
    assert Result(case=case, cold=fast, warm=replace(fast, peak_bytes=9 * 10**8)).missed
    assert Result(case=case, cold=fast, warm=replace(fast, wall_s=1.6)).missed


def test_an_unknown_case_is_refused():
    result = benchmark("--only", "gpt9")
    assert result.returncode == 2 and "gpt9" in result.stderr and "llama3-8b" in result.stderr
