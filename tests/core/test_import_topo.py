"""`nvidia-smi topo -m` pastes: golden graphs, mangled variants, levels, mistakes, whole files."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpplan import cli
from tpplan.planner.errors import OptionError, TopologyError
from tpplan.topologies import load_device, load_file
from tpplan.topologies.importers.draft import choose_device, draft, to_yaml
from tpplan.topologies.importers.hierarchy import Nest, nest
from tpplan.topologies.importers.read import import_topo
from tpplan.topologies.importers.smi import link_of, read_topo

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""
CUBE = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1,
    (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
"""NVLinks of a DGX-1 V100 by pair."""


def paste(names: list[str], links: dict[tuple[str, str], str], *, default: str, affinity: bool = True) -> str:
    """A matrix as the tool prints it, tabs and all."""
    tail = "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID" if affinity else ""
    lines = ["\t" + "\t".join(names) + tail]
    for a in names:
        cells = [" X " if a == b else links.get((a, b), links.get((b, a), default)) for b in names]
        ends = "\t0-23,48-71\t0\tN/A" if affinity and a.startswith("GPU") else ""
        lines.append(f"{a}\t" + "\t".join(cells) + ends)
    return "\n".join(lines) + "\n" + LEGEND


def gpus(count: int) -> list[str]:
    return [f"GPU{i}" for i in range(count)]


def pairs(*members: tuple[int, int], link: str) -> dict[tuple[str, str], str]:
    return {(f"GPU{a}", f"GPU{b}"): link for a, b in members}


def within(groups: list[range], link: str) -> dict[tuple[str, str], str]:
    return {(f"GPU{a}", f"GPU{b}"): link for group in groups for a, b in combinations(group, 2)}


def switched_with_nics() -> str:
    """Eight devices behind a switch, two NICs for each two of them, a storage NIC, columns out of order."""
    nics = [f"mlx5_{i}" for i in (10, 2, 0, 1, 3, 4, 5, 6, 7)]
    links = within([range(8)], "NV12")
    for i in range(8):
        for nic in (i // 2 * 2, i // 2 * 2 + 1):
            links[f"GPU{i}", f"mlx5_{nic}"] = "PXB"
    return paste([*gpus(8), *nics], links, default="SYS")


PASTES = {
    "pairs": paste(gpus(4), pairs((0, 1), (2, 3), link="NV12"), default="SYS"),
    "crossed pairs": paste(gpus(4), pairs((0, 2), (1, 3), link="NV4"), default="NODE", affinity=False),
    "two sockets": paste(gpus(8), within([range(4), range(4, 8)], "NODE"), default="SYS"),
    "all sys": paste(gpus(8), {}, default="SYS"),
    "one apart": paste(
        gpus(5), {**within([range(1, 5)], "NODE"), **pairs((1, 2), (3, 4), link="PHB")}, default="SYS"
    ),
    "switch": paste(gpus(8), {}, default="NV18"),
    "switch, nics": switched_with_nics(),
    "cube mesh": paste(
        gpus(8), {(f"GPU{a}", f"GPU{b}"): f"NV{n}" for (a, b), n in CUBE.items()}, default="SYS"
    ),
    "four, full mesh": paste(gpus(4), {}, default="NV4"),
    "pcie switches": paste(gpus(8), within([range(0, 4), range(4, 8)], "PIX"), default="SYS"),
    "one device": paste(gpus(1), {}, default="SYS"),
}


def edges(graph: nx.Graph) -> list[tuple[str, str, str]]:
    return sorted((*sorted((a, b)), link) for a, b, link in graph.edges(data="link"))


@pytest.mark.parametrize("text", PASTES.values(), ids=PASTES)
def test_every_cell_becomes_a_link(text: str):
    graph = read_topo(text)
    rows = [line.split("\t") for line in text.splitlines() if "\t" in line]
    names = [name for name in rows[0] if name[:3] in ("GPU", "mlx") and "NUMA" not in name]
    assert list(graph.nodes) == names
    for row in rows[1:]:
        for name, cell in zip(names, row[1:], strict=False):
            if name != row[0]:
                assert link_of(graph, row[0], name) == cell


# --------------------------------------------------------------------------- mangled

MANGLES = {
    "tabs to blanks": lambda text: text.replace("\t", " "),
    "tabs to wide blanks": lambda text: text.expandtabs(8),
    "tabs lost": lambda text: text.replace("\t", ""),
    "all blanks lost": lambda text: text.replace("\t", "").replace(" X ", "X"),
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "underlined header": lambda text: "\x1b[4m" + text.replace("\n", "\x1b[0m\n", 1),
    "escape lost": lambda text: "[4m" + text.replace("\n", "[0m\n", 1),
    "caret escapes": lambda text: "^[[4m" + text.replace("\n", "^[[0m\n", 1),
    "coloured cells": lambda text: text.replace("SYS", "\x1b[31mSYS\x1b[0m").replace("NV", "\x1b[32mNV"),
    "code inside a cell": lambda text: text.replace("NV1", "N\x1b[1mV1").replace("SYS", "SY\x1b[0mS"),
    "quoted": lambda text: "".join(f"> {line}" for line in text.splitlines(keepends=True)),
    "markdown table": lambda text: "\n".join(
        "| " + line.replace("\t", " | ") + " |" for line in text.split("\n")
    ),
    "fenced": lambda text: f"```\n{text}```\n",
    "byte order mark": lambda text: "\ufeff" + text,
    "no-break blanks": lambda text: text.replace("\t", "\u00a0"),
    "lower case": lambda text: text.replace("SYS", "sys").replace("NODE", "node"),
    "prose around": lambda text: f"GPU0 GPU1 are slow, see:\n{text}\nGPU0 SYS is the one\nGPU1 X marks it\n",
    "prompt before": lambda text: f"$ nvidia-smi topo -m\n{text}",
    "rows reversed": lambda text: "\n".join([text.split("\n")[0], *reversed(text.split("\n")[1:])]),
    "no legend": lambda text: text.replace(LEGEND, ""),
    "twice": lambda text: text + text,
    "old name of SYS": lambda text: text.replace("SYS", "SOC"),
    "upper half only": lambda text: _upper_half(text),
}


def _upper_half(text: str) -> str:
    """All rows but the last: symmetry says the rest."""
    rows = [line for line in text.split("\n") if "\t" in line]
    return "\n".join(rows[:-1]) if len(rows) > 2 else text


@pytest.mark.parametrize("mangle", MANGLES.values(), ids=MANGLES)
@pytest.mark.parametrize("text", PASTES.values(), ids=PASTES)
def test_a_mangled_paste_gives_the_same_links(text: str, mangle):
    assert edges(read_topo(mangle(text))) == edges(read_topo(text))


CODES = st.sampled_from(["\x1b[0m", "\x1b[1;31m", "\x1b[K", "\x1b[4m", "\u200b"])
PROSE = st.lists(
    st.sampled_from(
        ["", "GPU0 is slow", "I have 4 GPUs", "NV12 = fast", "SYS?", "GPU1 GPU2", "---", "Legend: X"]
    ),
    max_size=3,
)


@given(
    name=st.sampled_from(sorted(PASTES)),
    gap=st.sampled_from(["\t", " ", "  ", "\t\t", ""]),
    ending=st.sampled_from(["\n", "\r\n", "  \n"]),
    codes=st.lists(st.tuples(st.integers(0, 10_000), CODES), max_size=8),
    before=PROSE,
    after=PROSE,
)
def test_any_mix_of_mangling_gives_the_same_links(name, gap, ending, codes, before, after):
    text = PASTES[name]
    mangled = text.replace("\t", gap).replace("\n", ending)
    for place, code in codes:
        place %= len(mangled)
        mangled = mangled[:place] + code + mangled[place:]
    mangled = "\n".join([*before, mangled, *after])
    assert edges(read_topo(mangled)) == edges(read_topo(text))


def test_a_wrapped_terminal_gives_the_same_links():
    text = PASTES["switch, nics"].expandtabs(8)
    wrapped = "\n".join(
        line[i : i + 80] for line in text.split("\n") for i in range(0, max(len(line), 1), 80)
    )
    assert edges(read_topo(wrapped)) == edges(read_topo(text))


def test_a_lost_header_is_made_up_from_the_rows():
    text = PASTES["pairs"]
    assert edges(read_topo(text.partition("\n")[2])) == edges(read_topo(text))


def test_names_behind_numbers_and_models_are_kept():
    text = paste(["GPU0", "NIC0"], {("GPU0", "NIC0"): "PIX"}, default="SYS")
    listing = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\nNIC Legend:\n  NIC0: mlx5_bond_0\n"
    graph = read_topo(text + listing)
    assert graph.nodes["NIC0"]["alias"] == "mlx5_bond_0"
    assert graph.nodes["GPU0"]["model"] == "NVIDIA A100-SXM4-80GB"


# --------------------------------------------------------------------------- levels

LEVELS = {
    "pairs": [(2, "NV"), (2, "SYS")],
    "crossed pairs": [(2, "NV"), (2, "NODE")],
    "two sockets": [(4, "NODE"), (2, "SYS")],
    "all sys": [(8, "SYS")],
    "one apart": [(2, "PHB"), (2, "NODE")],
    "switch": [(8, "NV")],
    "switch, nics": [(8, "NV")],
    "cube mesh": [(4, "NV"), (2, "NV")],
    "four, full mesh": [(4, "NV")],
    "pcie switches": [(4, "PIX"), (2, "SYS")],
    "one device": [(1, "SYS")],
}


@pytest.mark.parametrize("name", PASTES)
def test_groups_follow_the_links(name: str):
    found = nest(read_topo(PASTES[name]))
    assert [(tier.size, tier.link) for tier in found.tiers] == LEVELS[name]


def of(name: str) -> Nest:
    return nest(read_topo(PASTES[name]))


def test_ranks_are_ordered_so_that_pairs_are_neighbours():
    found = of("crossed pairs")
    assert found.order == ("GPU0", "GPU2", "GPU1", "GPU3")
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in found.notes[0]


def test_a_device_on_its_own_socket_is_left_out_and_named():
    found = of("one apart")
    assert found.left_out == ("GPU0",) and found.order == ("GPU1", "GPU2", "GPU3", "GPU4")
    assert "left out GPU0" in found.notes[0]


def test_half_of_the_devices_are_never_left_out():
    lone = paste(gpus(4), pairs((0, 1), link="NV4"), default="SYS")
    found = nest(read_topo(lone))
    assert len(found.order) == 4 and [tier.link for tier in found.tiers] == ["SYS"]


def test_storage_nics_do_not_count():
    found = of("switch, nics")
    assert found.nics == tuple(f"mlx5_{i}" for i in range(8))
    assert found.nearest_nics["GPU5"] == ("mlx5_4", "mlx5_5")
    assert "mlx5_10" in found.notes[0]


def test_a_distant_nic_counts_if_it_is_the_only_one():
    found = nest(read_topo(paste([*gpus(2), "mlx5_0"], {}, default="SYS")))
    assert found.nics == ("mlx5_0",)


SPEEDS = [
    ("switch", "h100-sxm5-80gb", [450.0]),  # 18 links x 25
    ("four, full mesh", "a100-sxm4-40gb", [300.0]),  # 4 links x 3 peers x 25
    ("pairs", "a100-pcie-80gb", [300.0, 31.2]),  # 12 x 25; 62.4 between sockets for two devices
    ("cube mesh", "v100-sxm2-32gb", [112.5, 37.5]),  # 4.5 and 1.5 links a device x 25
    ("two sockets", "rtx-4090", [31.5, 15.6]),  # a slot; 62.4 for four devices
    ("pcie switches", "l40s", [31.5, 7.875]),  # a slot; one uplink of a slot for four devices
]


@pytest.mark.parametrize(("name", "device", "gb_per_s"), SPEEDS)
def test_bandwidth_is_what_one_device_can_send(name: str, device: str, gb_per_s: list[float]):
    data = draft(of(name), load_device(device), name="x").data
    assert [level["gb_per_s"] for level in data["levels"][:-1]] == gb_per_s


def test_nics_share_the_network_among_devices():
    data = draft(of("switch, nics"), load_device("a100-sxm4-80gb"), name="x", nic_gbit=100).data
    assert data["levels"][-1]["gb_per_s"] == 12.5  # 8 x 100 Gb/s for 8 devices
    assert data["levels"][-1]["sources"]["gb_per_s"].startswith("given")


@pytest.mark.parametrize("name", PASTES)
def test_the_file_loads(name: str, tmp_path: Path):
    found = import_topo(PASTES[name], origin="box.txt", device="a100-sxm4-80gb", nodes=3)
    file = tmp_path / "box.yaml"
    file.write_text(to_yaml(found.data))
    topology = load_file(file)
    assert topology.nodes == 3 and topology.devices_per_node == len(of(name).order)


# --------------------------------------------------------------------------- which device


DEVICES = ("a100-pcie-80gb", "a100-sxm4-40gb", "a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-3090", "rtx-4090",
           "v100-sxm2-32gb")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "device"),
    [
        ("pairs", "A100 80GB", "a100-pcie-80gb"),
        ("switch", "8xA100 80 GB", "a100-sxm4-80gb"),
        ("two sockets", "8x RTX 4090", "rtx-4090"),
        ("two sockets", "dual 4090s or a 4090", "rtx-4090"),
        ("switch", "", "h100-sxm5-80gb"),
        ("switch, nics", "", "a100-sxm4-40gb"),
        ("cube mesh", "", "v100-sxm2-32gb"),
        ("pairs", "", "a100-pcie-80gb"),
        ("all sys", "", "rtx-4090"),
    ],
)
def test_the_device_is_read_or_guessed_and_said(name: str, text: str, device: str):
    found, note = choose_device(None, text, of(name), DEVICES)
    if name == "switch, nics":
        assert found.startswith("a100-sxm4")
    else:
        assert found == device
    assert note and "--device" in note


def test_a_box_with_several_kinds_says_which_one_is_planned_for():
    found, note = choose_device(None, "a 3090 and two 4090", of("pairs"), DEVICES)
    assert note and "mentions it (as rtx-4090: one kind is planned for)" in note and found == "rtx-3090"


def test_an_unknown_device_names_the_nearest():
    with pytest.raises(OptionError, match="did you mean 'rtx-4090'"):
        choose_device("rtx4090", "", of("all sys"), DEVICES)


# --------------------------------------------------------------------------- mistakes

MISTAKES = [
    ("NV12", "NVI2", r"box:2:10: found 'NVI2' for GPU0 to GPU1; did you mean 'NV12'\?"),
    ("SYS", "SY5", r"box:2:15: found 'SY5' for GPU0 to GPU2; did you mean 'SYS'"),
    ("GPU1\tNV12", "GPU1\tSYS", r"box:3:6: GPU1 to GPU0 is 'SYS', but GPU0 to GPU1 is 'NV12' \(line 2"),
    ("GPU0\t X ", "GPU0\tNV1", r"box:2:6: found 'NV1' for GPU0 to GPU0, expected 'X'"),
    ("GPU1\tNV12\t X ", "GPU1\t X \t X ", r"box:3:7: found 'X' for GPU1 to GPU0"),
]


@pytest.mark.parametrize(("right", "wrong", "message"), MISTAKES)
def test_a_wrong_cell_is_placed(right: str, wrong: str, message: str):
    text = PASTES["pairs"]
    assert right in text
    with pytest.raises(TopologyError, match=message):
        read_topo(text.replace(right, wrong, 1), origin="box")


@pytest.mark.parametrize("text", ["", "hello", "GPU0 GPU1 GPU2", "\0\1\2", "X X X", LEGEND])
def test_no_matrix_is_said(text: str):
    with pytest.raises(TopologyError, match="no matrix of `nvidia-smi topo -m`"):
        read_topo(text)


def test_a_cut_paste_is_said():
    lines = PASTES["two sockets"].split("\n")
    with pytest.raises(TopologyError, match="does not say how GPU2 and GPU3 are linked"):
        read_topo("\n".join(lines[:3]))


# --------------------------------------------------------------------------- the command


def test_import_writes_a_file_that_loads(tmp_path: Path, capsys):
    source, target = tmp_path / "topo.txt", tmp_path / "lab.yaml"
    source.write_text(PASTES["one apart"])
    code = cli.main(["topology", "import", str(source), "--device", "l40s", "-o", str(target)])
    captured = capsys.readouterr()
    assert code == 0 and captured.out == ""
    assert "left out GPU0" in captured.err and "--nic-gbit" in captured.err
    topology = load_file(target)
    assert [level.name for level in topology.levels] == ["pair", "node", "cluster"]
    assert "CUDA_VISIBLE_DEVICES=1,2,3,4" in topology.sources["notes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nofile.txt"], "nofile.txt: no such file"),
        (["topo.txt", "--device", "h1000"], "--device h1000: no such device; did you mean"),
        (["topo.txt", "--nic-gbit", "-1"], "--nic-gbit -1: must be greater than 0"),
        (["topo.txt", "topo2.txt"], "give one link matrix"),
        (["topo.txt", "-o", "nowhere/x.yaml"], "there is no directory nowhere"),
    ],
)
def test_bad_input_to_import(tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    for name in ("topo.txt", "topo2.txt"):
        Path(name).write_text(PASTES["pairs"])
    assert cli.main(["topology", "import", *arguments]) == 2
    assert message in capsys.readouterr().err
