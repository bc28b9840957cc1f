"""A larger microbatch is not slower per sample by more than the curves say."""

from __future__ import annotations

import random

import pytest
from tpplan.planner.cost import Work
from tpplan.planner.estimate import collectives, compute
from tpplan.planner.layout import Collective
from tpplan.planner.solve.batch_slack import batch_slack
from tpplan.planner.topology import Topology
from tpplan.topologies import load

CLUSTERS = ("dgx-a100-80:4", "dgx-h100:4", "8x-l40s-no-p2p", "gb200-nvl72", "4x-a100-pairs")
INSIDE_BLOCKS = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
)


@pytest.fixture(params=CLUSTERS, scope="module")
def cluster(request: pytest.FixtureRequest) -> Topology:
    return load(request.param)


def test_kernels_of_more_rows(cluster: Topology) -> None:
    slack, draw = batch_slack(cluster), random.Random(0)
    for _ in range(300):
        n, k, rows, times = 2 ** draw.randint(5, 14), 2 ** draw.randint(5, 14), draw.randint(1, 4096), 4
        for family in ("gemm", "attention", "memory"):
            small, large = (
                compute.kernel_time(work(family, m, n, k), cluster.device).seconds
                for m in (rows, rows * times)
            )
            assert small >= large / times * (1 - slack) * (1 - 1e-9), (family, rows, n, k)


def work(family: str, m: int, n: int, k: int) -> Work:
    flops = 2.0 * m * n * k if family != "memory" else 0.0
    return Work(
        family=family, flops=flops, bytes=2.0 * (m * k + n * k + m * n), dtype="bfloat16", m=m, n=n, k=k
    )


def test_messages_of_more_bytes(cluster: Topology) -> None:
    slack, model, draw = batch_slack(cluster), collectives.model(cluster), random.Random(0)
    sizes = [size for size in (2, 3, 4, 8, 16) if size <= cluster.devices]
    for _ in range(400):
        span = cluster.span(size=draw.choice(sizes), stride=1)
        nbytes, times = 2.0 ** draw.uniform(8, 32), draw.choice([2, 3, 8, 64])
        for collective in INSIDE_BLOCKS:
            small, large = (model.time(collective, size, span).seconds for size in (nbytes, nbytes * times))
            assert small >= large / times * (1 - slack) * (1 - 1e-9), (collective, nbytes, span)


def test_a_cluster_whose_rates_never_fall_has_none() -> None:
    assert batch_slack(load("hgx-h200")) == 0.0
    assert 0.1 < batch_slack(load("dgx-a100-80")) < 0.2
