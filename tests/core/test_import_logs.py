"""nccl-tests logs become curves, and curves find their level."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpplan import cli
from tpplan.planner.errors import TopologyError
from tpplan.planner.estimate.collectives import model
from tpplan.planner.layout import Collective
from tpplan.topologies import load_file
from tpplan.topologies.importers.nccl_tests import is_log, read_log

from .test_import_topo import PASTES

SIZES = (1024, 65536, 2**20, 2**26)


def times(ranks: int) -> list[float]:
    """Made-up microseconds: 20 us and 100 GB/s of bus bandwidth."""
    return [20 + 2 * (ranks - 1) / ranks * size / 100e3 for size in SIZES]


def rows(ranks: int, *, factor: float, redop: bool = True, wrong: str = "0") -> str:
    """The table as nccl-tests prints it, out of place and in place."""
    lines = ["#       size         count      type   redop    root     time   algbw   busbw #wrong"]
    for size, us in zip(SIZES, times(ranks), strict=True):
        algbw = size / us / 1e3
        both = f"{us:9.2f} {algbw:8.4f} {algbw * factor:8.4f}      {wrong}"
        middle = "sum      -1" if redop else ""
        lines.append(f"{size:12} {size // 4:12}     float  {middle} {both}  {both}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3", ""])


def all_reduce(ranks: int) -> str:
    return "# all_reduce_perf -b 1K -e 64M -f 64\n" + rows(ranks, factor=2 * (ranks - 1) / ranks)


def all_gather(ranks: int) -> str:
    return "# all_gather_perf\n" + rows(ranks, factor=(ranks - 1) / ranks, redop=False)


@pytest.mark.parametrize("ranks", [2, 4, 7, 8, 16, 64])
def test_the_rank_count_follows_from_the_two_bandwidths(ranks: int):
    (curve,) = read_log(all_reduce(ranks)).curves
    assert (curve.collective, curve.ranks) == ("all-reduce", ranks)
    assert [size for size, _ in curve.points] == list(SIZES)
    expected = [us * 1e-6 for us in times(ranks)]
    assert [seconds for _, seconds in curve.points] == pytest.approx(expected, abs=6e-9)


def test_rank_lines_count_too():
    listing = "".join(f"#  Rank  {i} Group  0 Pid 1 on host device {i} [0x07] H100\n" for i in range(6))
    text = "# sendrecv_perf\n" + listing + rows(6, factor=1.0)
    assert read_log(text).curves[0].ranks == 6


def test_several_programs_in_one_log():
    log = read_log(all_reduce(8) + all_gather(8))
    assert [(curve.collective, curve.ranks) for curve in log.curves] == [("all-reduce", 8), ("all-gather", 8)]


def test_sizes_that_start_over_are_another_run():
    assert [curve.ranks for curve in read_log(all_reduce(8) + rows(16, factor=30 / 16)).curves] == [8, 16]


def test_wrong_results_are_left_out_and_named():
    text = all_reduce(8).split("\n")
    text[2] = text[2].replace("      0", "      7", 1)
    log = read_log("\n".join(text))
    assert len(log.curves[0].points) == len(SIZES) - 1
    assert log.notes == ("line 3: 7 wrong elements, row left out",)


@given(
    prefix=st.sampled_from(["", "> ", "[1,0]<stdout>:", "node0: "]),
    ending=st.sampled_from(["\n", "\r\n", "  \n"]),
    gap=st.sampled_from([" ", "\t", "   "]),
    colour=st.booleans(),
)
def test_a_mangled_log_gives_the_same_curve(prefix: str, ending: str, gap: str, colour: bool):
    lines = all_reduce(8).splitlines()
    mangled = ending.join(prefix + gap.join(line.split()) for line in lines) + ending + "that is slow"
    if colour:
        mangled = mangled.replace("float", "\x1b[31mfloat\x1b[0m")
    assert read_log(mangled).curves == read_log(all_reduce(8)).curves


def test_a_table_by_node_count():
    text = (
        "# 8x A100 per node\n# all_reduce 1 GiB float\n# nodes  time_us  algbw_GBs  busbw_GBs\n"
        "1   8142.6  131.87  230.77\n2  35215     30.49   57.17\n"
    )
    log = read_log(text)
    assert [(curve.ranks, curve.points) for curve in log.curves] == [
        (8, ((2**30, pytest.approx(8142.6e-6)),)),
        (16, ((2**30, pytest.approx(35215e-6)),)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", "no rows of nccl-tests found"),
        ("1024 256 float sum -1 fast 1 2", "log:1: found 'sum -1 fast 1 2', expected time, algbw and busbw"),
        ("1024 256 float sum -1 -3.0 1 2", "log:1: found a time of -3.0 us"),
        ("1024 256 float sum -1 3.0 1 9", "fit no number of ranks"),
        ("# broadcast_perf\n1024 256 float none 0 3.0 1 1 0", "does not say over how many ranks broadcast"),
        ("# nodes time_us algbw busbw\n1 2 3 4", "does not name its message size"),
        ("1 GiB\n# nodes time_us algbw busbw\n", "but no rows"),
    ],
)
def test_a_log_that_cannot_be_read(text: str, message: str):
    with pytest.raises(TopologyError, match=message):
        read_log(text, origin="log")


def test_a_matrix_is_no_log():
    assert not any(map(is_log, PASTES.values()))
    assert is_log(all_reduce(8))


def test_curves_go_to_the_level_of_their_ranks_and_price_it(tmp_path: Path):
    for name, text in {
        "topo.txt": PASTES["two sockets"],
        "four.log": all_reduce(4),
        "eight.log": all_reduce(8),
        "far.log": all_reduce(16),
        "odd.log": all_reduce(7),
    }.items():
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("topo.txt", "four.log", "eight.log", "far.log", "odd.log")]
    target = tmp_path / "box.yaml"
    assert cli.main(["topology", "import", *files, "--nodes", "2", "-o", str(target)]) == 0
    topology = load_file(target)
    assert [[curve.ranks for curve in level.curves] for level in topology.levels] == [[4], [8], [16]]
    for ranks in (4, 8, 16):
        estimate = model(topology).time(Collective.ALL_REDUCE, 2**20, topology.span(size=ranks, stride=1))
        assert estimate.seconds == pytest.approx(times(ranks)[2] * 1e-6, rel=1e-3)
        assert estimate.origin == "measured"


def test_logs_alone_become_a_curve_file(tmp_path: Path, capsys):
    (tmp_path / "a.log").write_text(all_reduce(8))
    target = tmp_path / "curves.yaml"
    assert cli.main(["topology", "import", str(tmp_path / "a.log"), "-o", str(target)]) == 0
    capsys.readouterr()
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        "name: lab\ndevice: l40s\nlevels:\n"
        "  - {name: node, size: 8, kind: pcie, gb_per_s: 30, latency_us: 2, efficiency: 0.5, "
        "curves: curves.yaml}\n"
        "  - {name: cluster, size: 1, kind: tcp, gb_per_s: 1, latency_us: 9, efficiency: 0.5}\n"
    )
    assert load_file(cluster).levels[0].curves[0].points[0] == (1024, pytest.approx(20e-6, rel=1e-2))
