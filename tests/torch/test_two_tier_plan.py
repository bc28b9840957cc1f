"""Plans follow measured tiers: tensor groups stay inside a node, and leave it when the tiers are gone."""

from __future__ import annotations

from pathlib import Path

import tpplan
import yaml
from tpplan.planner.estimate.collectives import model
from tpplan.planner.layout import Collective
from tpplan.planner.mesh import Mesh
from tpplan.topologies import load_file

GPT2 = Path(__file__).parents[2] / "examples" / "gpt2.py"
SIZES = [2**e for e in range(10, 27, 2)]


def measured(mb_per_s: float, *, ranks: int, inside: list[int] | None) -> list[dict]:
    """Every collective at 0.5 ms and so many MB/s of whole buffer."""
    return [
        {
            "collective": name, "ranks": ranks, "source": "made up",
            "bytes_us": [[size, 500.0 + size / mb_per_s] for size in SIZES],
            **({"inside": inside} if inside else {}),
        }
        for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")
    ]  # fmt: skip


def cluster(path: Path, *, across_mb_per_s: float) -> Path:
    """Two nodes of two ranks, as a profile would write them."""
    link = {"kind": "tcp", "latency_us": 500.0, "efficiency": 1.0, "size": 2}
    levels = [
        {"name": "node", "gb_per_s": 0.8, "measured": measured(800, ranks=2, inside=None), **link},
        {
            "name": "cluster", "gb_per_s": across_mb_per_s / 1e3, **link,
            "measured": measured(across_mb_per_s, ranks=2, inside=[1])
            + measured(across_mb_per_s, ranks=4, inside=None),
        },
    ]  # fmt: skip
    path.write_text(yaml.safe_dump({"name": "lab", "device": "cpu", "levels": levels}, sort_keys=False))
    return path


def test_strided_and_whole_groups_have_their_own_curves(tmp_path: Path):
    topology = load_file(cluster(tmp_path / "a.yaml", across_mb_per_s=12.5))
    prices = model(topology)
    seconds = {
        (size, stride): prices.time(Collective.ALL_REDUCE, 2**20, topology.span(size=size, stride=stride))
        for size, stride in ((2, 1), (2, 2), (4, 1))
    }
    assert {estimate.origin for estimate in seconds.values()} == {"measured"}
    assert seconds[2, 1].seconds < seconds[2, 2].seconds / 10
    assert seconds[2, 2].seconds == seconds[4, 1].seconds


def mesh_on(path: Path) -> Mesh:
    plan = tpplan.suggest(str(GPT2), topology=load_file(path), global_batch=8, seq_len=256)
    assert isinstance(plan, tpplan.Plan)
    return plan.mesh


def test_tensor_groups_stay_in_a_node_and_the_plan_flips_without_the_tiers(tmp_path: Path):
    lone = mesh_on(cluster(tmp_path / "lone.yaml", across_mb_per_s=12.5))
    assert lone.devices == 2  # nothing hides on CPUs: so slow a link is not worth the second node
    tiers = mesh_on(cluster(tmp_path / "tiers.yaml", across_mb_per_s=25.0))
    assert tiers.tp * tiers.stride("tp") <= 2  # ranks 0,1 and 2,3 are nodes
    assert tiers.pp == 2  # the least traffic crosses
    flat = mesh_on(cluster(tmp_path / "flat.yaml", across_mb_per_s=800.0))
    assert flat.pp == 1  # gradients or activations may cross now
