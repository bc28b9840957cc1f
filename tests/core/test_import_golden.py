"""Pastes and logs of real machines give the graphs and curves that a reader sees in them, mangled or not."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.topologies import load_file
from tpplan.topologies.importers.draft import to_yaml
from tpplan.topologies.importers.hierarchy import nest
from tpplan.topologies.importers.nccl_tests import read_log
from tpplan.topologies.importers.read import import_files
from tpplan.topologies.importers.smi import nodes_of, read_topo

DATA = Path(__file__).with_name("data")
GOLDEN = yaml.safe_load((DATA / "golden.yaml").read_text())
PASTES: dict[str, dict[str, Any]] = GOLDEN["pastes"]
LOGS: dict[str, dict[str, Any]] = GOLDEN["logs"]
Pair = frozenset[str]


def paste(name: str) -> str:
    return (DATA / "pastes" / f"{name}.txt").read_text()


def log(name: str) -> str:
    return (DATA / "logs" / f"{name}.log").read_text()


def golden_links(name: str, nodes: tuple[str, ...]) -> dict[Pair, str]:
    """The class of every pair, as golden.yaml says."""
    golden = PASTES[name]
    links = {frozenset(pair): golden["others"] for pair in combinations(nodes, 2)}
    for link, groups in golden["links"].items():
        for group in groups:
            links |= {frozenset(pair): link for pair in combinations(group, 2)}
    return links


def links(text: str) -> dict[Pair, str]:
    return {frozenset((a, b)): link for a, b, link in read_topo(text).edges(data="link")}


def test_every_file_has_its_golden_graph():
    assert {path.stem for path in (DATA / "pastes").iterdir()} == set(PASTES)
    assert {path.stem for path in (DATA / "logs").iterdir()} == set(LOGS)


@pytest.mark.parametrize("name", PASTES)
def test_a_paste_gives_its_graph(name: str):
    graph, golden = read_topo(paste(name)), PASTES[name]
    assert len(nodes_of(graph, "gpu")) == golden["devices"]
    assert links(paste(name)) == golden_links(name, tuple(graph.nodes))


@pytest.mark.parametrize("name", PASTES)
def test_a_paste_gives_its_groups_and_nics(name: str):
    found, golden = nest(read_topo(paste(name))), PASTES[name]
    assert [[tier.size, tier.link] for tier in found.tiers] == golden["tiers"]
    assert list(found.order) == golden["order"]
    assert list(found.left_out) == golden.get("left_out", [])
    assert list(found.nics) == golden["nics"]
    nearest = {gpu: list(nics) for gpu, nics in found.nearest_nics.items() if nics}
    assert nearest == golden["nearest_nics"]


@pytest.mark.parametrize("name", PASTES)
def test_a_paste_becomes_a_topology(name: str, tmp_path: Path):
    file = tmp_path / "box.yaml"
    file.write_text(to_yaml(import_files([DATA / "pastes" / f"{name}.txt"], nodes=2).data))
    topology = load_file(file)
    assert [level.size for level in topology.levels] == [size for size, _ in PASTES[name]["tiers"]] + [2]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_gives_its_curves(name: str):
    curves = {curve.ranks: curve for curve in read_log(log(name)).curves}
    assert curves.keys() == LOGS[name]["curves"].keys()
    for ranks, golden in LOGS[name]["curves"].items():
        points = curves[ranks].points
        assert curves[ranks].collective == "all-reduce"
        assert len(points) == golden["points"]
        for (nbytes, seconds), (bytes_there, us) in zip(
            (points[0], points[-1]), (golden["smallest"], golden["largest"]), strict=True
        ):
            assert (nbytes, seconds) == (bytes_there, pytest.approx(us * 1e-6))


# --------------------------------------------------------------------------- mangled

COLOURS = ("\x1b[0m", "\x1b[1;31m", "\x1b[4m", "\x1b[K")
PROSE = (
    "", "it hangs when I use all of them", "nvidia-smi topo -m", "GPU0 is the slow one", "any idea? SYS",
    "Legend:", "  NV#  = Connection traversing a bonded set of # NVLinks", "--- snip ---", "Driver 550.54",
)  # fmt: skip
SPOTS = st.lists(st.tuples(st.integers(0, 100_000), st.sampled_from(COLOURS)), max_size=6)
AROUND = st.lists(st.sampled_from(PROSE), max_size=3)


def coloured(text: str, spots: list[tuple[int, str]]) -> str:
    """Codes between any two characters, never inside each other."""
    places = sorted(((place % len(text), code) for place, code in spots), reverse=True)
    for place, code in places:
        text = text[:place] + code + text[place:]
    return text


@settings(max_examples=30)
@given(
    gap=st.sampled_from(["\t", " ", "   ", ""]),
    ending=st.sampled_from(["\n", "\r\n", " \n"]),
    spots=SPOTS,
    before=AROUND,
    after=AROUND,
)
@pytest.mark.parametrize("name", PASTES)
def test_a_mangled_paste_gives_its_graph(name, gap, ending, spots, before, after):
    text = coloured(paste(name).replace("\t", gap).replace("\n", ending), spots)
    text = "\n".join([*before, text, *after])
    assert links(text) == golden_links(name, tuple(read_topo(paste(name)).nodes))


@settings(max_examples=30)
@given(
    gap=st.sampled_from([" ", "\t", "    "]),
    ending=st.sampled_from(["\n", "\r\n", " \n"]),
    spots=SPOTS,
    before=AROUND,
    after=AROUND,
)
@pytest.mark.parametrize("name", LOGS)
def test_a_mangled_log_gives_its_curves(name, gap, ending, spots, before, after):
    text = ending.join(gap.join(line.split()) for line in log(name).splitlines()) + ending
    text = "\n".join([*before, coloured(text, spots), *after])
    assert read_log(text).curves == read_log(log(name)).curves
