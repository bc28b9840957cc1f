"""The page of peers: recorded answers are complete, and the page says what was measured and what was not."""

from __future__ import annotations

import pytest
import yaml
from tpplan.planner.options import parse_set

from benchmarks.peers import PAGE, RECORDED, ROOT, Ours, in_words, options, page

PEERS = yaml.safe_load(RECORDED.read_text())
OURS = Ours(step_s=1.0, gap=0.002, plan="dp8 x tp8, ZeRO-1, microbatch 2", cpu_s=5.0, peak_gb=0.4)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer["name"])
def test_a_recorded_answer_is_complete(peer: dict) -> None:
    assert (ROOT / "examples" / peer["model"]).exists()
    assert peer["conditions"] and peer["version"] and peer["source"].startswith("https://")
    assert peer["plan"] or peer["plan_note"], "a plan, or why there is none to compare"
    sets = ",".join(f"{key}={value}" for key, value in (peer["plan"] or peer["pins"]).items())
    assert parse_set(sets) == (peer["plan"] or peer["pins"])


def test_the_page_tells_who_is_faster() -> None:
    text = page([(PEERS[0], OURS, None), (PEERS[1], OURS, 1.25)])
    assert f"{PEERS[0]['cpu_s'] / 5.0:.3g} times as many CPU seconds" in text
    assert "ours takes 20.0% less time a step" in text
    assert "not recorded" in text and str(ROOT) not in text


def test_the_page_in_the_documentation_names_every_peer() -> None:
    text = PAGE.read_text()
    for peer in PEERS:
        assert f"## {peer['name']}" in text and peer["version"] in text


def test_a_plan_in_words() -> None:
    mesh = {"pp": 8, "dp": 2, "cp": 1, "ep": 1, "tp": 4}
    plan = {"mesh": mesh, "schedule": "interleaved", "virtual_stages": 6, "zero_stage": 1, "micro_batch": 1}
    assert in_words({"plan": plan}) == "pp8 x dp2 x tp4, interleaved with 6, ZeRO-1, microbatch 1"
    assert options(PEERS[1], {"tp": 4})[-2:] == ["--set", "tp=4"]
