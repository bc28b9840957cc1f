"""The profiler's arithmetic, without ranks: patterns, tiers, timing, the journal, the file, warnings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpplan import cli
from tpplan.planner.errors import TopologyError
from tpplan.planner.estimate.compute import kernel_time
from tpplan.profiler import below_class, check, host, journal, profile_file
from tpplan.profiler.discovery import Layout, Ring, tiers
from tpplan.profiler.overlap import sigma
from tpplan.profiler.patterns import pairs, pattern, patterns
from tpplan.profiler.settings import QUICK, Measurement, Sample
from tpplan.profiler.timing import Batch, in_turns, sample, spread
from tpplan.topologies import load_device, load_file
from tpplan.topologies.document import parse
from tpplan.topologies.load import topology_of


def one(key: str, *, kind: str = "kernel", seconds: float = 1e-3, **facts) -> Measurement:
    return Measurement(
        key=key, kind=kind, facts=facts, sample=Sample(seconds=seconds, spread=0.01, batches=5)
    )


# --------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("members", "groups"),
    [
        ((2, 1), {(0, 1), (2, 3), (4, 5), (6, 7)}),  # inside nodes of two
        ((1, 4), {(0, 2, 4, 6), (1, 3, 5, 7)}),  # one of each node
        ((1, 2), {(0, 2), (1, 3), (4, 6), (5, 7)}),  # one of each of two nodes
        ((2, 4), {(0, 1, 2, 3, 4, 5, 6, 7)}),
    ],
)
def test_groups_of_a_pattern(members: tuple[int, ...], groups: set[tuple[int, ...]]):
    assert set(pattern((2, 4), members).groups) == groups


def test_quick_spans_levels_whole_and_full_also_parts_of_them():
    assert [one.members for one in patterns((2, 4), quick=True)] == [(2, 1), (1, 4), (2, 4)]
    assert [one.members for one in patterns((2, 4), quick=False)] == [(2, 1), (1, 2), (1, 4), (2, 2), (2, 4)]
    assert patterns((1, 1), quick=False) == ()


def test_pairs_at_each_level():
    assert [one.members for one in pairs((2, 1, 4))] == [(2, 1, 1), (1, 1, 2)]
    assert pairs((3,))[0].groups == ((0, 1),)  # the odd rank waits


# --------------------------------------------------------------------------- tiers


def speeds(count: int, racks: int, *, inside: float, across: float) -> dict[tuple[int, int], float]:
    """Pairs of `count` nodes in racks of `racks`, each a little different."""
    return {
        (a, b): (inside if a // racks == b // racks else across) * (1 + 0.01 * (a + b))
        for a in range(count)
        for b in range(a + 1, count)
    }


@pytest.mark.parametrize(
    ("found", "sizes"),
    [
        (speeds(4, 2, inside=62.0, across=10.8), (2, 2)),
        (speeds(8, 4, inside=100.0, across=30.0), (4, 2)),
        (speeds(4, 4, inside=100.0, across=1.0), (4,)),
        (speeds(4, 2, inside=100.0, across=80.0), (4,)),  # a fifth less is noise
        ({(0, 1): 90.0, (0, 2): 10.0, (1, 2): 10.0}, (3,)),  # uneven racks
        (
            {(0, 1): 9.0, (0, 2): 90.0, (0, 3): 9.0, (1, 2): 9.0, (1, 3): 90.0, (2, 3): 9.0},
            (4,),
        ),  # interleaved
    ],
)
def test_tiers_are_gaps_in_bandwidth(found: dict[tuple[int, int], float], sizes: tuple[int, ...]):
    assert tiers(found, 1 + max(b for _, b in found)) == sizes


def test_three_tiers_of_nodes():
    found = {
        (a, b): 100.0 if a // 2 == b // 2 else 30.0 if a // 4 == b // 4 else 5.0
        for a in range(8)
        for b in range(a + 1, 8)
    }
    assert tiers(found, 8) == (2, 2, 2)


# --------------------------------------------------------------------------- timing


def test_batches_repeat_until_they_agree():
    steady = sample(lambda count: 0.01 * count, QUICK)
    assert (steady.batches, steady.spread) == (QUICK.batches[0], 0.0)
    assert steady.seconds == pytest.approx(0.01)
    clock = iter(range(1, 1000))
    restless = sample(lambda count: count * (0.001 if next(clock) % 2 else 0.003), QUICK)
    assert restless.batches == QUICK.batches[1] and restless.spread > QUICK.spread


def test_short_executions_are_timed_in_long_batches():
    counts = []

    def run(count: int) -> float:
        counts.append(count)
        return 1e-6 * count

    sample(run, QUICK)
    assert counts[-1] * 1e-6 >= QUICK.batch_s / 2


def test_a_slow_first_execution_does_not_make_batches_short():
    counts: list[int] = []

    def run(count: int) -> float:
        counts.append(count)
        return 1.0 if len(counts) == 1 else 1e-6 * count

    found = sample(run, QUICK)
    assert counts[-1] * 1e-6 >= QUICK.batch_s / 2
    assert found.seconds == pytest.approx(1e-6)


def test_the_hosts_time_is_told_per_operation():
    seconds = {"forward": 1e-3, "step": 3e-3, "split forward": 4e-3, "split step": 9e-3}
    samples = {
        part: Sample(seconds=s * host.OPERATIONS, spread=0.0, batches=9) for part, s in seconds.items()
    }
    assert host.record(samples) == {
        "forward_us": 1000.0, "backward_us": 2000.0, "split_forward_us": 4000.0, "split_backward_us": 5000.0,
    }  # fmt: skip


def test_what_belongs_together_is_taken_in_turns():
    order: list[str] = []

    def run(key: str, seconds: float):
        def execute(count: int) -> float:
            order.append(key)
            return seconds * count

        return execute

    runs = {key: run(key, seconds) for key, seconds in (("a", 0.001), ("b", 0.002))}
    found = in_turns(runs, {key: Batch(2, 0.001) for key in runs}, QUICK)
    assert order == ["a", "b"] * QUICK.batches[0]
    assert {key: one.seconds for key, one in found.items()} == {"a": 0.001, "b": pytest.approx(0.002)}


def test_one_that_takes_long_is_repeated_less():
    clock = iter(range(1, 1000))
    runs = {"short": lambda n: n * (1e-3 if next(clock) % 2 else 3e-3), "long": lambda n: n * 0.4}
    found = in_turns(runs, {"short": Batch(1, 1e-3), "long": Batch(1, 0.4)}, QUICK)
    assert (found["short"].batches, found["long"].batches) == (QUICK.batches[1], 3)


def test_interruptions_only_add():
    times = iter([1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0] * 9)
    settings = replace(QUICK, enough_s=1e9)
    assert in_turns({"": lambda n: next(times)}, {"": Batch(1, 1.0)}, settings)[""].seconds == 1.0


def test_spread_ignores_one_interrupted_batch():
    assert spread([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0


# --------------------------------------------------------------------------- the journal

RUN = {"sizes": [2, 2], "device": "cpu"}


def test_a_journal_is_read_back(tmp_path: Path):
    path = tmp_path / "c.yaml.partial"
    book = journal.Journal(path, RUN, {})
    book.add(one("a", flops=1.0))
    book.add(one("b", seconds=2.0))
    found, problem = journal.read(path, RUN)
    assert found == book.measurements and problem is None
    book.remove()
    assert not path.exists() and journal.read(path, RUN) == ({}, None)


@given(cut=st.integers(min_value=0))
def test_a_journal_cut_anywhere_keeps_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int):
    path = tmp_path_factory.mktemp("cut") / "c.yaml.partial"
    book = journal.Journal(path, RUN, {})
    for key in "abc":
        book.add(one(key))
    whole = path.read_bytes()
    path.write_bytes(whole[: cut % (len(whole) + 1)])
    found, problem = journal.read(path, RUN)
    assert problem is None
    assert list(found) == list("abc")[: len(found)]


def test_another_run_starts_over_and_says_why(tmp_path: Path):
    path = tmp_path / "c.yaml.partial"
    journal.Journal(path, RUN, {}).add(one("a"))
    found, problem = journal.read(path, {**RUN, "sizes": [4, 2]})
    assert found == {} and problem and "(sizes differ)" in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\nworld\n", ":1: damaged"),
        ('{"version": 9, "run": {}}\n', ":1: not a journal of version 1"),
        (json.dumps({"version": 1, "run": RUN}) + "\n\x00\x01\n{}\n", ":2: damaged"),
        (json.dumps({"version": 1, "run": RUN}) + '\n{"key": 1}\n', ":2: damaged"),
        (json.dumps({"version": 1, "run": RUN}) + "\n[1]\n", ":2: damaged"),
    ],
)
def test_a_corrupted_journal_is_a_clear_error(tmp_path: Path, text: str, message: str):
    path = tmp_path / "c.yaml.partial"
    path.write_text(text)
    with pytest.raises(TopologyError, match=message):
        journal.read(path, RUN)


# --------------------------------------------------------------------------- the file


def gemm(side: int, seconds: float) -> Measurement:
    return one(
        f"gemm {side}", seconds=seconds, name="gemm", family="gemm", dtype="fp32", flops=2.0 * side**3,
        bytes=12.0 * side**2, shape={"m": side, "n": side, "k": side},
    )  # fmt: skip


def test_larger_kernels_are_never_faster():
    points = [(1.0, 0.5), (2.0, 1.0), (4.0, 3.0), (8.0, 0.2)]
    held = profile_file.monotone(points)
    times = [size / fraction for size, fraction in held]
    assert times == sorted(times) and held[1] == [2.0, 1.0] and held[2] == [4.0, 2.0]


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12))
def test_times_are_made_to_rise_by_pooling_neighbours(times: list[float]):
    held = profile_file.rising(times)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(held))
    assert math.prod(b / a for a, b in zip(times, held, strict=True)) == pytest.approx(1.0)
    if times == sorted(times):
        assert held == pytest.approx(times)


def test_curves_are_monotone_and_say_how_groups_lie():
    found = [
        one(f"{members} {size}", kind="collective", seconds=seconds, collective="all-gather",
            members=list(members), bytes=size)
        for members in ((1, 2), (2, 2))
        for size, seconds in ((1024, 2e-4), (65536, 1e-4), (2**20, 1e-3))
    ]  # fmt: skip
    base = {"gb_per_s": 1.0, "latency_us": 1.0, "efficiency": 0.5}
    layout = Layout(
        rings=(Ring(name="node", size=2, kind="tcp"), Ring(name="cluster", size=2, kind="tcp")),
        device_name="cpu", memory_bytes=1, free_bytes=1, hosts=("a", "b"), notes=(),
    )  # fmt: skip
    node, cluster = profile_file.levels(layout, found, default=[base], source="here")
    assert "measured" not in node and node["sources"]["gb_per_s"].startswith("not measured")
    apart, full = cluster["measured"]
    assert apart["inside"] == [1] and "inside" not in full
    assert apart["bytes_us"] == [[1024, 141.42], [65536, 141.42], [2**20, 1000.0]]


def test_matrix_products_of_other_dtypes_have_curves_of_their_own():
    found = [gemm(64, 1e-4), gemm(128, 4e-4)]
    bf16 = [replace(one, facts={**one.facts, "dtype": "bf16"}) for one in (gemm(64, 4e-4), gemm(128, 5e-4))]
    layout = Layout(
        rings=(Ring(name="cluster", size=1, kind="tcp"),), device_name="cpu", memory_bytes=2**30,
        free_bytes=1, hosts=("a",), notes=(),
    )  # fmt: skip
    rest = [
        one("gap", seconds=1e-6, name="gap", family="latency", dtype="fp32", flops=1.0, bytes=8.0, shape={}),
        one("add", name="pointwise", family="memory", dtype="fp32", flops=1.0, bytes=1e6, shape={}),
    ]  # fmt: skip
    made = profile_file.device(layout, [*found, *bf16, *rest], sheet=None, dtype="fp32", source="here")
    level = {"name": "cluster", "size": 1, "kind": "tcp", "gb_per_s": 1, "latency_us": 9, "efficiency": 0.5}
    document = {"name": "lab", "device": "cpu", "measured_device": made, "levels": [level]}
    device = topology_of(parse(json.dumps(document), Path("lab"))).device
    for one_of in (*found, *bf16):
        predicted = kernel_time(check.work(one_of.facts), device).seconds
        assert predicted == pytest.approx(one_of.sample.seconds, rel=1e-3)


def test_sigma_is_at_least_one():
    part = Sample(seconds=2.0, spread=0.0, batches=5)
    samples = {"collective": part, "compute": replace(part, seconds=1.5), "both": replace(part, seconds=3.0)}
    assert sigma(samples) == 1.5
    assert sigma({**samples, "both": replace(part, seconds=1.9)}) == 1.0


CLUSTER = """name: lab
device: cpu
levels:
  - name: node
    size: 2
    kind: tcp
    gb_per_s: 1
    latency_us: 9
    efficiency: 0.5
  - name: cluster
    size: 2
    kind: tcp
    gb_per_s: 1
    latency_us: 9
    efficiency: 0.5
    measured:
      - {collective: all-reduce, ranks: 4, bytes_us: [[8, 1]], source: here}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("ranks: 4", "ranks: 5", "ranks: found 5, expected a multiple of the 2 ranks in one unit"),
        ("ranks: 4", "ranks: 4, inside: [1, 1]", "inside: found 2 numbers, expected one for each of the 1"),
        ("all-reduce", "allreduce", "did you mean 'all-reduce'"),
        ("[[8, 1]]", "[[8, -1]]", "must be greater than 0"),
        ("name: lab", "name: lab\nprofile: {version: 2}", "profile.version"),
        ("name: lab", "name: lab\nmeasured_device: {nam: x}", "measured_device.name: missing"),
        ("levels:", "levels", "not YAML"),
    ],
)
def test_a_damaged_profile_is_a_clear_error(tmp_path: Path, capsys, right: str, wrong: str, message: str):
    path = tmp_path / "lab.yaml"
    path.write_text(CLUSTER)
    assert cli.main(["topology", "show", str(path)]) == 0
    path.write_text(CLUSTER.replace(right, wrong, 1))
    assert cli.main(["topology", "show", str(path)]) == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------------- held back


def lab(tmp_path: Path):
    """Two nodes of two, whose all-reduce over all four takes 100 us + 1 us a KiB."""
    points = [[size, 100 + size / 1024] for size in (1024, 4096, 16384, 65536)]
    path = tmp_path / "lab.yaml"
    path.write_text(CLUSTER.replace("[[8, 1]]", json.dumps(points)))
    return load_file(path)


def held(nbytes: int, us: float) -> Measurement:
    return one(f"{nbytes}", kind="collective check", seconds=us * 1e-6, collective="all-reduce",
               members=[2, 2], bytes=nbytes)  # fmt: skip


def test_held_back_sizes_tell_how_well_curves_predict(tmp_path: Path):
    found = [held(8192, 108.0), held(32768, 200.0)]
    errors = check.errors(found, lab(tmp_path))
    assert errors["collectives"] == {
        "8192": pytest.approx((104 * 116) ** 0.5 / 108 - 1),  # between 4 and 16 KiB, in log-log
        "32768": pytest.approx((116 * 164) ** 0.5 / 200 - 1),
    }
    summary = check.summary(errors)
    assert summary["collectives"]["sizes"] == 2 and "kernels" not in summary
    assert summary["collectives"]["median_error"] == pytest.approx(0.164, abs=1e-3)


def test_a_held_back_size_that_was_missed_joins_its_curve(tmp_path: Path):
    found = [held(8192, 108.0), held(32768, 200.0), one("kernel")]
    assert [m.key for m in check.joined(found, check.errors(found, lab(tmp_path)))] == ["32768"]


def test_kernels_are_predicted_as_the_planner_does(tmp_path: Path):
    gemm_96 = replace(gemm(96, 1.0), kind="kernel check")
    topology = lab(tmp_path)
    (error,) = check.errors([gemm_96], topology)["kernels"].values()
    predicted = kernel_time(check.work(gemm_96.facts), topology.device).seconds
    assert error == pytest.approx(predicted / 1.0 - 1.0)


# --------------------------------------------------------------------------- below class


def h100_gemm(tflops: float) -> Measurement:
    flops = 2.0 * 8192**3
    return one(
        "gemm", seconds=flops / (tflops * 1e12), name="gemm", family="gemm", dtype="bf16", flops=flops,
        bytes=6.0 * 8192**2, shape={"m": 8192, "n": 8192, "k": 8192},
    )  # fmt: skip


def test_a_slow_device_is_compared_with_its_kind():
    h100 = load_device("h100-sxm5-80gb")
    assert list(below_class.slow_kernels([h100_gemm(700.0)], h100)) == []
    (warning,) = below_class.slow_kernels([h100_gemm(200.0)], h100)
    assert "h100-sxm5-80gb" in warning and "power or clock limits" in warning


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("nvlink", "goes over PCIe"), ("pcie", "no peer-to-peer"), ("infiniband", "one NIC of 4")],
)
def test_a_slow_link_names_its_likely_cause(kind: str, cause: str):
    usual = {"name": "node", "kind": kind, "gb_per_s": 100.0, "efficiency": 0.8}
    slow = {**usual, "gb_per_s": 25.0, "measured": []}
    (warning,) = below_class.slow_links([slow], [usual])
    assert cause in warning
    assert list(below_class.slow_links([{**usual, "measured": []}], [usual])) == []


def test_a_straggler_is_named_with_its_host():
    (warning,) = below_class.stragglers([1.0, 1.0, 1.4, 1.0], ["a", "a", "b", "b"])
    assert warning.startswith("rank 2 (b) takes 1.40 times")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget 0: must be greater than 0"),
        (["--budget", "soon"], "--budget soon: expected a number"),
        (["-o", "nowhere/c.yaml"], "there is no directory nowhere"),
    ],
)
def test_bad_options(capsys, arguments: list[str], message: str):
    assert cli.main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err
