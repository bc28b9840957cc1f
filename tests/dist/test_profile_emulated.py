"""Emulated clusters, profiled for real: bandwidth as shaped, and as many tiers as there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tpplan.planner.topology import Topology
from tpplan.topologies import load_file

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "two_tier.sh"
LIMIT_S = 600
MBIT = 200
ACROSS_MBIT = 60


def profiled(output: Path, *arguments: str) -> Topology:
    """The topology that the script measures; skips with its reason where namespaces are not permitted."""
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["sh", str(SCRIPT), str(MBIT), str(output), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if "two_tier: skipped:" in done.stderr:
        pytest.skip(done.stderr.partition("skipped:")[2].strip())
    assert done.returncode == 0, done.stderr
    return load_file(output)


@pytest.mark.slow
def test_two_nodes_are_measured_as_they_are_shaped(tmp_path: Path):
    node, cluster = profiled(tmp_path / "two.yaml").levels
    assert (node.size, cluster.size) == (2, 2)
    assert cluster.bytes_per_s == pytest.approx(
        MBIT * 1e6 / 8 / 2, rel=0.10
    )  # two devices share a node's link
    assert node.bytes_per_s > 10 * cluster.bytes_per_s


@pytest.mark.slow
def test_racks_show_as_a_tier_of_their_own(tmp_path: Path):
    levels = profiled(tmp_path / "three.yaml", str(ACROSS_MBIT)).levels
    assert [level.size for level in levels] == [2, 2, 2]
    node, rack, cluster = (level.bytes_per_s for level in levels)
    assert node > 10 * rack and rack > 2 * cluster
