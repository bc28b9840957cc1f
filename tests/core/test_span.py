"""How groups of ranks spread over levels, against a recomputation that lists every rank."""

from __future__ import annotations

import math

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


def listed(sizes: tuple[int, ...], ranks: list[int]) -> tuple[int, ...]:
    """Members per level by listing: a unit is named by where each rank stands, from the outside in."""
    units: list[tuple[int, ...]] = [(rank,) for rank in ranks]
    members = []
    for size in sizes:
        parents = [(unit[0] // size,) for unit in units]
        members.append(math.ceil(len(set(units)) / len(set(parents))))
        units = parents
    return tuple(members)


def fits(sizes: tuple[int, ...], *, size: int, stride: int) -> bool:
    return (size - 1) * stride < math.prod(sizes)


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(sizes=SIZES, size=st.integers(1, 80), stride=st.integers(1, 40))
def test_span_equals_listing_every_rank(sizes: tuple[int, ...], size: int, stride: int) -> None:
    cluster = topology(*sizes)
    if not fits(sizes, size=size, stride=stride):
        with pytest.raises(ValueError, match="do not fit"):
            cluster.span(size=size, stride=stride)
        return
    span = cluster.span(size=size, stride=stride)
    assert span.members == listed(sizes, [i * stride for i in range(size)])
    assert span.size >= size
    assert len(span.members) == len(sizes)
    assert all(1 <= members <= level for members, level in zip(span.members, sizes, strict=True))


@settings(deadline=None, max_examples=300, derandomize=True)
@given(data=st.data(), sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_where_sizes_divide_every_group_of_a_mesh_spreads_like_the_first(
    data: st.DataObject, sizes: list[int]
) -> None:
    """With powers of two everywhere, `span` is exact for all groups, whatever their first rank."""
    levels = tuple(2**exponent for exponent in sizes)
    shares = data.draw(st.lists(st.sampled_from(AXES), min_size=sum(sizes), max_size=sum(sizes)))
    order = tuple(data.draw(st.permutations(AXES)))
    mesh = Mesh(**{axis: 2 ** shares.count(axis) for axis in AXES}, order=order)
    cluster = topology(*levels)
    assert mesh.devices == cluster.devices
    for axis in AXES:
        span = cluster.span(size=mesh.size(axis), stride=mesh.stride(axis))
        assert span.size == mesh.size(axis)
        assert {listed(levels, list(group)) for group in mesh.groups(axis)} == {span.members}


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
        ((8, 4), 3, 3, (3, 1)),  # 0, 3, 6
        ((8, 4), 5, 3, (3, 2)),  # 0, 3, 6 | 9, 12
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
