"""How groups of ranks spread over levels, against a recomputation that lists every rank."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.mesh import AXES, Mesh
from tpplan.planner.topology import Device, GroupSpan, Level, Topology

DEVICE = Device(
    name="toy",
    vendor="generic",
    memory_bytes=1,
    memory_bytes_per_s=1.0,
    peak_flops={"fp32": 1.0},
    efficiency={},
    kernel_latency_s=0.0,
    sources={},
)


def topology(*sizes: int) -> Topology:
    levels = tuple(
        Level(name=f"level {i}", size=size, kind="tcp", bytes_per_s=1.0, latency_s=0.0, efficiency=1.0)
        for i, size in enumerate(sizes)
    )
    return Topology(name="toy", device=DEVICE, levels=levels)


def touched(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> list[int]:
    """How many units of every level hold `ranks`, outward: by listing, and dividing step by step."""
    units, counts = set(ranks), [len(ranks)]
    for size in sizes:
        units = {unit // size for unit in units}
        counts.append(len(units))
    return counts


def listed(sizes: tuple[int, ...], groups: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Members per level of the widest of `groups`."""
    counts = [max(column) for column in zip(*(touched(sizes, group) for group in groups), strict=True)]
    return tuple(math.ceil(inner / outer) for inner, outer in pairwise(counts))


@st.composite
def meshes_on_clusters(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh]:
    """A cluster and a mesh over all of its devices: their prime factors, dealt out differently."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=6).filter(lambda p: math.prod(p) <= 360))
    levels = [1] * draw(st.integers(1, 4))
    for prime in primes:
        levels[draw(st.integers(0, len(levels) - 1))] *= prime
    shares = dict.fromkeys(AXES, 1)
    for prime in primes:
        shares[draw(st.sampled_from(AXES))] *= prime
    return tuple(levels), Mesh(**shares, order=tuple(draw(st.permutations(AXES))))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(case=meshes_on_clusters())
def test_span_equals_listing_every_group_of_a_mesh(case: tuple[tuple[int, ...], Mesh]) -> None:
    sizes, mesh = case
    cluster = topology(*sizes)
    assert mesh.devices == cluster.devices
    for axis in AXES:
        span = cluster.span(size=mesh.size(axis), stride=mesh.stride(axis))
        assert span.members == listed(sizes, list(mesh.groups(axis)))


@settings(deadline=None, max_examples=100, derandomize=True)
@given(exponents=st.lists(st.integers(0, 3), min_size=1, max_size=3), data=st.data())
def test_where_sizes_divide_all_groups_spread_alike(exponents: list[int], data: st.DataObject) -> None:
    levels = tuple(2**exponent for exponent in exponents)
    total = sum(exponents)
    stride = data.draw(st.integers(0, total))
    size = data.draw(st.integers(0, total - stride))
    span = topology(*levels).span(size=2**size, stride=2**stride)
    assert span.size == 2**size
    mesh = Mesh(
        dp=2 ** (total - size - stride), tp=2**size, ep=2**stride, order=("pp", "dp", "cp", "tp", "ep")
    )
    assert {listed(levels, [group]) for group in mesh.groups("tp")} == {span.members}


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    size=st.integers(1, 80),
    stride=st.integers(1, 40),
)
def test_span_holds_its_group_or_refuses(sizes: tuple[int, ...], size: int, stride: int) -> None:
    cluster = topology(*sizes)
    if (size - 1) * stride >= cluster.devices:
        with pytest.raises(ValueError, match="do not fit"):
            cluster.span(size=size, stride=stride)
        return
    span = cluster.span(size=size, stride=stride)
    assert span.size >= size
    assert len(span.members) == len(sizes)
    first = touched(sizes, tuple(i * stride for i in range(size)))
    assert span.members[-1] >= first[-2], "it reaches at least as many nodes as the group from rank 0"


@pytest.mark.parametrize(
    ("sizes", "size", "stride", "members"),
    [
        ((8, 16), 8, 1, (8, 1)),  # tensor group inside a node
        ((8, 16), 16, 8, (1, 16)),  # one rank a node
        ((8, 16), 16, 1, (8, 2)),  # two whole nodes
        ((8, 16), 4, 4, (2, 2)),  # two ranks in each of two nodes
        ((8, 16), 1, 1, (1, 1)),  # a group of one
        ((2, 2, 4), 4, 1, (2, 2, 1)),  # both pairs of a node
        ((2, 2, 4), 4, 2, (1, 2, 2)),  # one rank a pair, two nodes
        ((2, 2, 4), 4, 4, (1, 1, 4)),
        ((8, 3), 6, 1, (3, 2)),  # 0-5 stay inside, but 6, 7 | 8-11 do not
        ((72, 2), 16, 1, (8, 2)),  # so does 64-71 | 72-79
        ((72, 2), 8, 1, (8, 1)),
        ((72, 2), 16, 9, (8, 2)),
        ((8, 1), 8, 1, (8, 1)),
    ],
)
def test_spans_a_reader_can_count(
    sizes: tuple[int, ...], size: int, stride: int, members: tuple[int, ...]
) -> None:
    assert topology(*sizes).span(size=size, stride=stride).members == members


@pytest.mark.parametrize(("members", "size", "outermost"), [((8, 1), 8, 0), ((1, 4), 4, 1), ((1, 1), 1, -1)])
def test_group_span_properties(members: tuple[int, ...], size: int, outermost: int) -> None:
    span = GroupSpan(members=members)
    assert (span.size, span.outermost) == (size, outermost)


def test_a_group_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="17 ranks spaced by 1 do not fit in 16 devices"):
        topology(8, 2).span(size=17, stride=1)


def test_span_needs_no_list_of_ranks() -> None:
    """A closed form: the answer for a hundred million ranks comes at once."""
    assert topology(8, 12_500_000).span(size=100_000_000, stride=1).members == (8, 12_500_000)
