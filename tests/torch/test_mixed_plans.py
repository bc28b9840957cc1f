"""Plans for clusters of several kinds of nodes, from a model file to the document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tpplan.planner.errors import OptionError
from tpplan.planner.plan import Plan
from tpplan.planner.plan_file import load as load_plan
from tpplan.planner.plan_file import save
from tpplan.planner.suggest import suggest
from tpplan.report.json_view import plan_document

EXAMPLES = Path(__file__).parents[2] / "examples"
MIXED = """\
name: lab
kinds:
  - topology: dgx-h100
    nodes: 1
  - topology: dgx-a100-80
    nodes: 2
link: {kind: infiniband, gb_per_s: 25, latency_us: 5, efficiency: 0.85}
"""


@pytest.fixture(scope="module")
def lab_plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("lab")
    (folder / "lab.yaml").write_text(MIXED)
    found = suggest(
        str(EXAMPLES / "gpt2.py"), topology=str(folder / "lab.yaml"), global_batch=96, seq_len=512,
        framework="torch", cache_dir=folder,
    )  # fmt: skip
    assert isinstance(found, Plan)
    return found


def test_the_plan_says_which_stage_lies_where(lab_plan: Plan) -> None:
    assert [part.device for part in lab_plan.cluster.parts] == ["h100-sxm5-80gb", "a100-sxm4-80gb"]
    assert sum(part.used_devices for part in lab_plan.cluster.parts) == lab_plan.mesh.devices
    assert all(stage.device and stage.device_memory_bytes for stage in lab_plan.stages)
    assert {"dgx-h100", "dgx-a100-80"} & set(re.findall(r"dgx-[\w-]+", lab_plan.reasons[0]))
    alone = [a for a in lab_plan.alternatives if "alone" in a.reason]
    assert alone and all(a.step_time_s >= lab_plan.predicted.step_time_s for a in alone)
    assert lab_plan.search.lower_bound_s <= lab_plan.predicted.step_time_s


def test_the_plan_reads_back_and_renders(lab_plan: Plan, tmp_path: Path) -> None:
    save(lab_plan, tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml") == lab_plan
    assert plan_document(lab_plan, wall_s=1.0)["cluster"]["parts"]


def test_sizes_of_parts_are_asked_kind_by_kind(tmp_path: Path) -> None:
    lab_file = tmp_path / "lab.yaml"
    lab_file.write_text(MIXED)
    with pytest.raises(OptionError, match="each kind of nodes"):
        suggest(str(EXAMPLES / "gpt2.py"), topology=str(lab_file), objective="memory", seq_len=512)
