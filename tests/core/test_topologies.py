"""Bundled topologies are complete and sourced; a faulty file names file, line, field and way out."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan import topologies
from tpplan.planner.errors import TopologyError
from tpplan.planner.layout import Collective
from tpplan.planner.topology import CollectiveCurve
from tpplan.topologies.find import HERE
from tpplan.topologies.mixed import load_cluster

CLUSTERS = sorted(path.stem for path in (HERE / "clusters").glob("*.yaml"))
DEVICES = sorted(path.stem for path in (HERE / "devices").glob("*.yaml"))
CURVES = sorted(path.stem for path in (HERE / "curves").glob("nccl-*.yaml"))
PROMISED_CLUSTERS = [
    "dgx-a100-40",
    "dgx-a100-80",
    "dgx-h100",
    "hgx-h200",
    "dgx-b200",
    "gb200-nvl72",
    "aws-p4d",
    "aws-p5",
    "8x-l40s",
    "8x-rtx4090",
    "4x-a100-pairs",
    "8x-mi300x",
    "dgx-1-v100",
    "cpu-gloo",
]
FAMILIES = {"gemm", "attention", "attention_backward", "grouped_gemm", "memory"}


def data_of(folder: str, name: str) -> dict:
    return yaml.safe_load((HERE / folder / f"{name}.yaml").read_text())


# --- what is bundled -------------------------------------------------------------------------


def test_everything_promised_is_bundled() -> None:
    assert set(PROMISED_CLUSTERS) <= set(CLUSTERS)
    assert len(DEVICES) >= 25
    assert "cpu" in DEVICES


@pytest.mark.parametrize("name", CLUSTERS)
def test_bundled_cluster_loads(name: str) -> None:
    topology = topologies.load(name)
    assert topology.name == name
    assert topology.description
    assert topology.levels[-1].name == "cluster"
    assert topology.devices == math.prod(level.size for level in topology.levels)
    assert topology.devices == topology.nodes * topology.devices_per_node
    outward = [level.bytes_per_s * level.efficiency for level in topology.levels]
    assert outward == sorted(outward, reverse=True) or name == "8x-l40s-no-p2p", "inner links are the faster"


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_number_of_a_cluster_has_a_source(name: str) -> None:
    data = data_of("clusters", name)
    for level in data["levels"]:
        numbers = {key for key, value in level.items() if isinstance(value, float | int)} - {"size"}
        assert numbers == set(level["sources"])
    assert ("usd_per_device_hour" in data) == ("price_source" in data)
    assert all(level.source for level in topologies.load(name).levels)


@pytest.mark.parametrize("name", DEVICES)
def test_bundled_device_loads_and_every_number_has_a_source(name: str) -> None:
    data = data_of("devices", name)
    numbers = {key for key, value in data.items() if isinstance(value, float | int | dict)} - {"sources"}
    assert numbers == set(data["sources"])
    device = topologies.load_device(name)
    assert device.name == name
    assert set(device.efficiency) == FAMILIES
    assert set(device.sources) == {"memory_bytes", "memory_bytes_per_s", "peak_flops", "kernel_latency_s"}
    for efficiency in device.efficiency.values():
        assert efficiency.source
        assert list(efficiency.curve) == sorted(efficiency.curve)


def test_units_by_hand() -> None:
    topology = topologies.load("dgx-h100")
    device = topology.device
    assert device.memory_bytes == round(79.1 * 2**30)
    assert device.memory_bytes_per_s == 3.35e12
    assert device.peak_flops["bf16"] == 989e12
    assert device.kernel_latency_s == pytest.approx(3e-6)
    node, cluster = topology.levels
    assert (node.size, node.bytes_per_s, cluster.bytes_per_s) == (8, 450e9, 50e9)
    assert node.latency_s == pytest.approx(0.8e-6)


def test_v100_has_no_bf16() -> None:
    assert set(topologies.load_device("v100-sxm2-32gb").peak_flops) == {"fp16", "fp32"}


def test_pairs_have_three_levels() -> None:
    levels = topologies.load("4x-a100-pairs:3").levels
    assert [(level.name, level.size) for level in levels] == [("pair", 2), ("node", 2), ("cluster", 3)]


# --- measured curves -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CURVES)
def test_curve_file_is_complete_and_used(name: str) -> None:
    data = data_of("curves", name)
    assert data["name"] == name
    assert data["device"] in DEVICES
    assert data["library"].startswith("NCCL")
    keys = [(entry["collective"], entry["ranks"]) for entry in data["curves"]]
    assert len(keys) == len(set(keys))
    users = [level.get("curves") for c in CLUSTERS for level in data_of("clusters", c)["levels"]]
    assert name in users


def all_curves() -> list[CollectiveCurve]:
    return [curve for name in CLUSTERS for level in topologies.load(name).levels for curve in level.curves]


def test_curves_are_monotone_and_in_seconds() -> None:
    curves = all_curves()
    assert len(curves) > 100
    for curve in curves:
        assert curve.collective in set(Collective)
        sizes = [size for size, _ in curve.points]
        seconds = [s for _, s in curve.points]
        assert sizes == sorted(set(sizes))
        assert seconds == sorted(seconds)
        assert 1e-6 < seconds[0] < 1e-3
        assert curve.source


def test_a_dip_of_the_measurement_becomes_its_running_maximum(tmp_path: Path) -> None:
    curves = """{name: c, device: cpu, library: NCCL, link: tcp, source: s,
        curves: [{collective: all-reduce, ranks: 2, bytes_us: [[4, 7.0], [1, 5.0], [2, 9.0], [8, 20.0]]}]}"""
    (tmp_path / "c.yaml").write_text(curves)
    path = write(tmp_path, GOOD.replace("latency_us: 30", "latency_us: 30\n    curves: c.yaml"))
    (curve,) = topologies.load(path).levels[0].curves
    assert [size for size, _ in curve.points] == [1, 2, 4, 8]
    assert [seconds for _, seconds in curve.points] == pytest.approx([5e-6, 9e-6, 9e-6, 20e-6])


def test_curves_for_more_ranks_than_the_level_holds_are_dropped(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("latency_us: 30", "latency_us: 30\n    curves: nccl-h100-sxm5-80gb"))
    assert {curve.ranks for curve in topologies.load(path).levels[0].curves} == {2, 4}


def test_rtx4090_efficiency_is_the_measured_one() -> None:
    """14.45 GB/s of bus bandwidth at 128 MiB: time 16253 us, times 2 (n-1)/n."""
    level = topologies.load("8x-rtx4090").levels[0]
    size, seconds = level.curves[0].points[-1]
    bus = size / seconds * 2 * 7 / 8
    assert bus == pytest.approx(14.45e9, rel=1e-3)
    assert level.efficiency == pytest.approx(bus / level.bytes_per_s, rel=0.01)


def sourced(field: str, start: str) -> list[tuple[str, int]]:
    """(cluster, level index) of every level whose `field` cites `start`."""
    return [
        (name, i)
        for name in CLUSTERS
        for i, level in enumerate(data_of("clusters", name)["levels"])
        if level["sources"][field].startswith(start)
    ]


@pytest.mark.parametrize(("name", "index"), sourced("efficiency", "all-gather over 8 ranks, 512 MiB"))
def test_efficiency_is_what_its_curve_says(name: str, index: int) -> None:
    """Bus bandwidth of the largest all-gather, size / time * (n-1)/n, over the link's."""
    level = topologies.load(name).levels[index]
    (curve,) = (c for c in level.curves if (c.collective, c.ranks) == ("all-gather", 8))
    size, seconds = curve.points[-1]
    assert size / seconds * 7 / 8 / level.bytes_per_s == pytest.approx(level.efficiency, rel=0.02)


@pytest.mark.parametrize(("name", "index"), sourced("latency_us", "all-reduce of 512 B"))
def test_latency_is_what_its_curve_says(name: str, index: int) -> None:
    """A ring all-reduce makes 2 (n-1) hops: the slope of the smallest message between rank counts."""
    level = data_of("clusters", name)["levels"][index]
    cited = re.search(r"between 2 and (\d) ranks \(curves/(.*)\.yaml\)", level["sources"]["latency_us"])
    assert cited
    entries = data_of("curves", cited[2])["curves"]
    times = {c["ranks"]: c["bytes_us"][0][1] for c in entries if c["collective"] == "all-reduce"}
    most = int(cited[1])
    assert (times[most] - times[2]) / (2 * (most - 2)) == pytest.approx(level["latency_us"], rel=0.04)


# --- the number of nodes ---------------------------------------------------------------------


def test_nodes_from_the_spec_or_the_argument() -> None:
    assert topologies.load("dgx-h100:128").devices == 1024
    assert topologies.load("dgx-h100:128") == topologies.load("dgx-h100", nodes=128)
    assert topologies.load("dgx-h100:4", nodes=4).nodes == 4
    assert topologies.load("gb200-nvl72:2").devices == 144
    assert topologies.load("dgx-h100").nodes == 1


@pytest.mark.parametrize(
    ("spec", "nodes", "expected"),
    [
        ("dgx-h100:0", None, "found 0, must be at least 1; did you mean 1?"),
        ("dgx-h100:00", None, "must be at least 1"),
        ("dgx-h100:-3", None, "found -3, must be at least 1; did you mean 3?"),
        ("dgx-h100:x", None, "found 'x', expected a whole number"),
        ("dgx-h100:", None, "found '', expected a whole number"),
        ("dgx-h100:2.5", None, "found '2.5', expected a whole number"),
        ("dgx-h100:1e3", None, "found '1e3', expected a whole number"),
        ("dgx-h100:1_000", None, "expected a whole number"),
        ("dgx-h100:" + "9" * 5000, None, "must be at most 1000000"),
        ("dgx-h100", 0, "found 0, must be at least 1"),
        ("dgx-h100", -1, "found -1, must be at least 1"),
        ("dgx-h100:4", 8, "asks for 4 nodes, but nodes=8"),
        ("dgx-h10", None, "no topology named 'dgx-h10'; did you mean 'dgx-h100'?"),
        ("gdx-a100-80:4", None, "did you mean 'dgx-a100-80'?"),
        ("dgx-a100", None, "did you mean 'dgx-a100-40' or 'dgx-a100-80'?"),
        ("qqqq", None, "no topology named 'qqqq'; there are: 4x-a100-pairs, "),
        ("", None, "no topology named ''"),
        (":4", None, "no topology named ''"),
        ("a\0b", None, "no topology named"),
        ("x" * 5000, None, "no topology named"),
        ("~nobody", None, "no topology named"),
        ("no/such/dgx-h100.yaml", None, "'no/such/dgx-h100.yaml' does not exist; did you mean 'dgx-h100'?"),
    ],
)
def test_bad_spec(spec: str, nodes: int | None, expected: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(expected)):
        topologies.load(spec, nodes=nodes)


def test_bad_device_name() -> None:
    with pytest.raises(TopologyError, match=r"no device named 'h100-sxm5'; did you mean 'h100-sxm5-"):
        topologies.load_device("h100-sxm5")


# --- a user's own file -----------------------------------------------------------------------

GOOD = """\
name: mine
device: cpu
levels:
  - name: node
    size: 4
    kind: tcp
    gb_per_s: 2
    latency_us: 30
    efficiency: 0.7
  - name: cluster
    size: 2
    kind: tcp
    gb_per_s: 1
    latency_us: 60
    efficiency: 0.7
"""


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_users_file_loads_with_and_without_a_node_count(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert topologies.load(path).devices == 8
    assert topologies.load(f"{path}:16").devices == 64
    assert topologies.load(path).levels[0].source == f"given in {path}"


def test_a_users_file_may_bring_its_own_device(tmp_path: Path) -> None:
    device = data_of("devices", "h100-sxm5-80gb") | {"name": "h100-half", "memory_gib": 40}
    (tmp_path / "half.yaml").write_text(yaml.safe_dump(device))
    topology = topologies.load(write(tmp_path, GOOD.replace("device: cpu", "device: half.yaml")))
    assert topology.device.memory_bytes == 40 * 2**30
    assert topologies.load_device(str(tmp_path / "half.yaml")) == topology.device


def test_an_unknown_architecture_is_refused_and_other_takes_the_default_curves(tmp_path: Path) -> None:
    device = data_of("devices", "cpu") | {"architecture": "other"}
    path = tmp_path / "tpu.yaml"
    path.write_text(yaml.safe_dump(device))
    assert set(topologies.load_device(str(path)).efficiency) == FAMILIES


DEEP = "[" * 3000 + "]" * 3000
MALFORMED = {
    "unknown field": (
        ("gb_per_s: 2", "gb_per_sec: 2"),
        7,
        "levels[0].gb_per_sec",
        "did you mean 'gb_per_s'?",
    ),
    "missing field": (
        ("    latency_us: 60\n", ""),
        10,
        "levels[1].latency_us",
        "missing; required by the level",
    ),
    "unknown top field": (("device: cpu", "devise: cpu"), 2, "devise", "did you mean 'device'?"),
    "negative bandwidth": (("gb_per_s: 2", "gb_per_s: -2"), 7, "levels[0].gb_per_s", "did you mean 2?"),
    "zero bandwidth": (("gb_per_s: 1", "gb_per_s: 0"), 13, "levels[1].gb_per_s", "must be greater than 0"),
    "infinite bandwidth": (("gb_per_s: 2", "gb_per_s: .inf"), 7, "levels[0].gb_per_s", "finite number"),
    "nan bandwidth": (("gb_per_s: 2", "gb_per_s: .nan"), 7, "levels[0].gb_per_s", "finite number"),
    "bytes for GB": (("gb_per_s: 2", "gb_per_s: 450000000000"), 7, "levels[0].gb_per_s", "at most 100000"),
    "number as text": (("gb_per_s: 2", "gb_per_s: '2'"), 7, "levels[0].gb_per_s", "did you mean 2.0?"),
    "YAML 1.1 exponent": (("gb_per_s: 2", "gb_per_s: 1e3"), 7, "levels[0].gb_per_s", "did you mean 1000.0?"),
    "unit in the number": (("gb_per_s: 2", "gb_per_s: 2 GB/s"), 7, "levels[0].gb_per_s", "expected a number"),
    "truth for number": (("gb_per_s: 2", "gb_per_s: yes"), 7, "levels[0].gb_per_s", "found True"),
    "nothing for number": (("gb_per_s: 2", "gb_per_s:"), 7, "levels[0].gb_per_s", "found nothing"),
    "efficiency above one": (
        ("efficiency: 0.7", "efficiency: 70"),
        9,
        "levels[0].efficiency",
        "legal value: 1",
    ),
    "fractional size": (("size: 4", "size: 4.0"), 5, "levels[0].size", "a whole number; did you mean 4?"),
    "zero size": (("size: 4", "size: 0"), 5, "levels[0].size", "found 0, must be greater than 0"),
    "misspelt kind": (("kind: tcp", "kind: nvlnk"), 6, "levels[0].kind", "did you mean 'nvlink'?"),
    "misspelt device": (
        ("device: cpu", "device: h100-sxm5-80"),
        2,
        "device",
        "did you mean 'h100-sxm5-80gb'?",
    ),
    "missing device file": (("device: cpu", "device: no.yaml"), 2, "device", "does not exist"),
    "device not text": (("device: cpu", "device: 5"), 2, "device", "found 5"),
    "misspelt curves": (
        ("latency_us: 30", "latency_us: 30\n    curves: nccl-h100"),
        9,
        "levels[0].curves",
        "did you mean 'nccl-h100-sxm5-80gb'?",
    ),
    "last level not cluster": (("name: cluster", "name: rack"), 10, "levels[1].name", "must be 'cluster'"),
    "level named twice": (("name: node", "name: cluster"), 10, "levels[1].name", "a second time"),
    "field given twice": (("device: cpu", "device: cpu\ndevice: cpu"), 3, "device", "first on line 2"),
    "twice on one line": (("device: cpu", "sources: {a: 1, a: 2}"), 2, "a", "given twice"),
    "levels a mapping": (("  - name: node\n", "    name: node\n"), 10, "", "not YAML"),
    "bad tag": (("device: cpu", "device: !!bool maybe"), 1, "", "does not fit its type"),
    "unclosed quote": (("name: mine", "name: 'mine"), 1, "", "not YAML"),
    "tab indent": (("    size: 4", "\tsize: 4"), 5, "", "not YAML"),
    "python object": (("device: cpu", "device: !!python/object:os.x {}"), 2, "", "not YAML"),
    "impossible date": (("name: mine", "name: 2024-99-99"), 1, "", "not YAML"),
    "level not a mapping": (("levels:\n", "levels:\n  - 5\n"), 4, "levels[0]", "found 5"),
    "unknown source": (
        ("efficiency: 0.7", "efficiency: 0.7\n    sources: {bandwidth: x}"),
        10,
        "levels[0].sources.bandwidth",
        "unknown field",
    ),
}
WHOLE_FILES = {
    "empty": ("", 1, "empty"),
    "only a comment": ("# nothing\n", 1, "empty"),
    "a list": ("- a\n- b\n", 1, "found a list"),
    "a text": ("\n\nhello\n", 3, "found a text"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, "not YAML"),
    "not UTF-8": (b"name: a\nx: \xff\xfe\n", 2, "not a text file"),
    "control characters": ("name: \x00\x01", 1, "not YAML"),
    "nested deeply": (f"a: {DEEP}", 1, "nest"),
    "no levels": ("name: a\ndevice: cpu\n", 1, "levels: missing"),
    "empty levels": ("name: a\ndevice: cpu\nlevels: []\n", 3, "levels: found a list of 0"),
    "alias loop": ("name: a\ndevice: cpu\nlevels: &l [*l]\n", 3, "levels[0]: found a list"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_names_file_line_field_and_nearest_value(tmp_path: Path, case: str) -> None:
    (old, new), line, field, hint = MALFORMED[case]
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(TopologyError) as raised:
        topologies.load(path)
    complaints = [text for text in str(raised.value).splitlines() if hint in text]
    assert complaints, str(raised.value)
    assert complaints[0].startswith(f"{path}:{line}: {field}")


@pytest.mark.parametrize("case", WHOLE_FILES)
def test_file_that_is_no_topology(tmp_path: Path, case: str) -> None:
    text, line, hint = WHOLE_FILES[case]
    path = write(tmp_path, text)
    with pytest.raises(TopologyError) as raised:
        topologies.load(path)
    assert str(raised.value).startswith(f"{path}:{line}: ")
    assert hint in str(raised.value)


YAML_PIECES = [
    "&a ",
    "*a",
    "!!float x",
    "? ",
    "- ",
    "{",
    "]",
    ": ",
    "'",
    "\t",
    "\n",
    "~",
    "<<: 5",
    "1e400",
    "---\n",
]


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD)), st.sampled_from(YAML_PIECES)), min_size=1, max_size=3)
)
def test_any_damage_to_a_file_is_our_own_error_or_none(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, str]]
) -> None:
    text = GOOD
    for place, piece in edits:
        text = text[:place] + piece + text[place:]
    path = write(tmp_path_factory.getbasetemp(), text)
    try:
        topologies.load(path)
    except TopologyError as error:
        assert str(error).startswith(f"{path}:")


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "hint"),
    [
        ("bf16: 2250", "bf61: 2250", 11, "peak_tflops.bf61", "did you mean 'bf16'?"),
        ("bf16: 2250", "bf16: -2250", 11, "peak_tflops.bf16", "did you mean 2250?"),
        ("blackwell", "blackwel", 7, "architecture", "did you mean 'blackwell'?"),
        ("memory_gib: 178.35", "memory_gb: 178.35", 8, "memory_gb", "did you mean 'memory_gib'?"),
        (
            "  kernel_latency_us: '",
            "  kernel_latency: '",
            21,
            "sources.kernel_latency",
            "'kernel_latency_us'?",
        ),
    ],
)
def test_malformed_device(tmp_path: Path, old: str, new: str, line: int, field: str, hint: str) -> None:
    text = (HERE / "devices" / "b200-sxm.yaml").read_text()
    assert old in text
    path = tmp_path / "b200.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(TopologyError) as raised:
        topologies.load_device(str(path))
    complaints = [text for text in str(raised.value).splitlines() if hint in text]
    assert complaints, str(raised.value)
    assert complaints[0].startswith(f"{path}:{line}: {field}: ")


def test_a_directory_is_no_topology(tmp_path: Path) -> None:
    folder = tmp_path / "folder.yaml"
    folder.mkdir()
    with pytest.raises(TopologyError, match="does not exist"):
        topologies.load(str(folder))


# --- hashes, listing, speed ------------------------------------------------------------------


def test_hash_depends_on_numbers_and_not_on_prose(tmp_path: Path) -> None:
    base = topologies.topology_hash(topologies.load(write(tmp_path, GOOD)))
    prose = GOOD.replace("name: mine", "name: mine  # a comment\ndescription: words").replace(
        "gb_per_s: 2", "gb_per_s: 2.0"
    )
    assert topologies.topology_hash(topologies.load(write(tmp_path, prose))) == base
    slower = GOOD.replace("gb_per_s: 2", "gb_per_s: 1.9")
    assert topologies.topology_hash(topologies.load(write(tmp_path, slower))) != base
    assert re.fullmatch("[0-9a-f]{64}", base)


def test_hashes_of_bundled_topologies_differ() -> None:
    hashes = {topologies.topology_hash(topologies.load(name)) for name in CLUSTERS}
    assert len(hashes) == len(CLUSTERS)
    assert topologies.topology_hash(topologies.load("dgx-h100:2")) not in hashes


def test_list_topologies() -> None:
    summaries = topologies.list_topologies()
    assert [summary.name for summary in summaries] == CLUSTERS
    for summary in summaries:
        full = topologies.load(summary.name)
        assert (summary.device, summary.description) == (full.device.name, full.description)
        assert (summary.devices, summary.devices_per_node) == (full.devices, full.devices_per_node)
        assert [level.bytes_per_s for level in summary.levels] == [level.bytes_per_s for level in full.levels]
    assert topologies.list_devices() == tuple(DEVICES)


def test_importing_the_loader_is_cheap() -> None:
    code = "import sys, tpplan.topologies; print(sorted({'yaml', 'pydantic', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_is_quick_once_imported(on_this_machine: Callable[[float], float]) -> None:
    taken_s = []
    for nodes in (1, 2, 128):
        start = time.process_time()
        topologies.load(f"dgx-h100:{nodes}")
        taken_s.append(time.process_time() - start)
    assert min(taken_s) < on_this_machine(0.15)


def test_the_documentation_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of docs/topologies.md load, and the mistakes of the first are reported as it says."""
    monkeypatch.chdir(tmp_path)
    page = (HERE.parent / "docs" / "topologies.md").read_text()
    example, complaints, mixed = re.findall(r"```(?:yaml)?\n(.*?)```", page, re.DOTALL)
    lab = Path("lab.yaml")
    lab.write_text(example)
    assert topologies.load("lab.yaml:4").devices == 16
    Path("mixed.yaml").write_text(mixed)
    assert load_cluster("mixed.yaml").name == yaml.safe_load(mixed)["name"]
    mistakes = (("gb_per_s: 300 ", "gb_per_s: -300 "), ("device: a100-pcie-80gb", "device: a100-pcie"))
    for (right, wrong), complaint in zip(mistakes, complaints.splitlines(), strict=True):
        lab.write_text(example.replace(right, wrong, 1))
        with pytest.raises(TopologyError) as raised:
            topologies.load("lab.yaml")
        assert str(raised.value) == complaint
