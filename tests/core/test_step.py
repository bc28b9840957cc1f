"""Time of a step: what hides, what happens once, what the pipeline adds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tpplan.planner.cost import BlockCost, Communication, Estimate, Origin, ParameterGroup, Recompute, Work
from tpplan.planner.estimate.overlap import exposed_s
from tpplan.planner.estimate.step import (
    GATHER,
    GRADIENT_NORM,
    NORM_SYNC,
    OPTIMIZER,
    PARAMETER_SYNC,
    REDUCE,
    SYNC,
    Setting,
    block_time,
    once_per_step,
    pipeline_s,
    spans,
)
from tpplan.planner.layout import Collective
from tpplan.planner.mesh import Mesh
from tpplan.planner.problem import Candidate, Pricing
from tpplan.planner.profile import OPTIMIZERS, Framework
from tpplan.planner.schedule import actions
from tpplan.planner.simulate import simulate
from tpplan.planner.topology import Device, GroupSpan, Level, Topology

FRAMEWORK = Framework(
    name="fake", description="", gradient_bytes=4, sync_bytes=2, master_bytes=4, dp_overlap=0.5,
    gather_overlap=0.75, tp_overlap=0.25, saves_gathered_input=False, logits_bytes_per_element=0.0,
    allocator_reserve=(1.0, 1.0), context_bytes=0.0, step_overhead_s=0.0, source="",
)  # fmt: skip
LEVELS = tuple(
    Level(name=name, size=size, kind="fake", bytes_per_s=1, latency_s=0, efficiency=1)
    for name, size in (("node", 4), ("cluster", 4))
)
DEVICE = Device(
    name="d", vendor="v", memory_bytes=1, memory_bytes_per_s=1, peak_flops={}, efficiency={},
    kernel_latency_s=0, sources={},
)  # fmt: skip
TOPOLOGY = Topology(name="t", device=DEVICE, levels=LEVELS)
GROUP = ParameterGroup(numel=1000, element_bytes=2, sparse=False, trainable=True, tensors=1)


def a_second_per_byte(collective: Collective, nbytes: float, span: GroupSpan) -> Estimate:
    """Every collective takes as long as its bytes, an all-reduce twice that."""
    return Estimate(nbytes * (2 if collective is Collective.ALL_REDUCE else 1), Origin.MEASURED)


def a_second_per_byte_moved(work: Work, device: Device) -> Estimate:
    """Kernels too."""
    return Estimate(work.bytes, Origin.MODELLED)


def setting(mesh: Mesh, zero: int) -> Setting:
    """A candidate on a 4 x 4 cluster with made-up prices."""
    pricing = Pricing(
        intra=lambda mesh, micro_batch: (),
        collective_time=a_second_per_byte,
        kernel_time=a_second_per_byte_moved,
    )
    candidate = Candidate(
        mesh=mesh, micro_batch=1, microbatches=1, zero_stage=zero, schedule="none", virtual_stages=1
    )
    return Setting(
        candidate=candidate, topology=TOPOLOGY, framework=FRAMEWORK, optimizer=OPTIMIZERS["adamw"],
        pricing=pricing, span=spans(TOPOLOGY),
    )  # fmt: skip


def test_what_computation_hides() -> None:
    assert exposed_s([(10, 0.5)], compute_s=100) == [5]
    assert exposed_s([(10, 1.0)], compute_s=3) == [7]
    assert exposed_s([(10, 0.0), (10, 0.0)], compute_s=100) == [10, 10]


def test_collectives_share_the_computation_they_hide_behind() -> None:
    assert exposed_s([(10, 1.0), (30, 1.0)], compute_s=20) == [5, 15]
    whole = [compute + sum(exposed_s([(10, 1.0), (30, 0.5)], compute_s=compute)) for compute in range(60)]
    assert whole == sorted(whole), "more computation never shortens the whole"


def test_only_tensor_collectives_hide_inside_a_block() -> None:
    def comm(axis: str) -> Communication:
        return Communication(
            label=axis, collective=Collective.ALL_GATHER, axis=axis, group_size=2, bytes=1, seconds=4.0,
            exposed_s=4.0, count=2, level="node", origin=Origin.MEASURED,
        )  # fmt: skip

    cost = BlockCost(
        name="b", forward_s=100, backward_s=200, forward_comm=(comm("tp"), comm("ep")),
        saved_bytes={Recompute.NONE: 1, Recompute.FULL: 0}, recompute_s={Recompute.FULL: 100},
        recompute_comm_s={Recompute.FULL: 12},
    )  # fmt: skip
    time = block_time(cost, setting(Mesh(dp=16), 0))
    assert time.forward["tp communication"] == 8 * 0.75
    assert time.forward["ep communication"] == 8
    assert time.forward_s == 100 + 6 + 8
    assert time.backward_s(Recompute.FULL) - time.backward_s(Recompute.NONE) == 112
    assert {c.axis: c.exposed_s for c in time.communications} == {"tp": 3, "ep": 4}


def test_zero_3_gathers_twice_and_reduces_for_every_microbatch() -> None:
    cost = BlockCost(
        name="b", forward_s=1e6, backward_s=1e6, parameters=(GROUP,), saved_bytes={Recompute.NONE: 0}
    )
    three = block_time(cost, setting(Mesh(dp=16), 3))
    assert three.forward[GATHER] == three.backward[Recompute.NONE][GATHER] == 2000 * 0.25
    assert three.backward[Recompute.NONE][REDUCE] == 2000 * 0.5
    assert GATHER not in block_time(cost, setting(Mesh(dp=16), 1)).forward


@pytest.mark.parametrize(
    ("zero", "sync", "gather"), [(0, 4000 * 0.5, 0), (1, 2000 * 0.5, 2000 * 0.25), (2, 0, 500), (3, 0, 0)]
)
def test_gradients_and_parameters_once_per_step(zero: int, sync: float, gather: float) -> None:
    once = once_per_step([GROUP], setting(Mesh(dp=16), zero), blocks=100, forward_s=1e6, backward_s=1e6)
    assert once.parts.get(SYNC, 0) == pytest.approx(sync)
    assert once.parts.get(PARAMETER_SYNC, 0) == pytest.approx(gather)


def test_the_optimizer_touches_its_own_shard() -> None:
    whole = once_per_step([GROUP], setting(Mesh(tp=16), 0), blocks=1, forward_s=0, backward_s=0)
    # read the gradient; read and write master copy and two moments; write the parameter
    assert whole.parts[OPTIMIZER] == 1000 * (4 + 2 * 12 + 2)
    shard = once_per_step([GROUP], setting(Mesh(dp=16), 1), blocks=1, forward_s=0, backward_s=0)
    assert shard.parts[OPTIMIZER] == pytest.approx(whole.parts[OPTIMIZER] / 16)
    assert shard.parts[GRADIENT_NORM] == pytest.approx(1000 * 4 / 16 + 2 * 4)


def test_the_last_block_has_nothing_to_hide_its_gradients_behind() -> None:
    once = once_per_step([GROUP], setting(Mesh(dp=16), 0), blocks=1, forward_s=1e9, backward_s=1e9)
    assert once.parts[SYNC] == 4000


def test_gradients_of_what_is_whole_on_every_tensor_rank() -> None:
    group = replace(GROUP, replicated_over_tp=True)
    once = once_per_step([group], setting(Mesh(tp=4, dp=4), 1), blocks=9, forward_s=0, backward_s=0)
    assert once.parts[NORM_SYNC] == 4000


def test_groups_flattened_over_axes() -> None:
    span = spans(TOPOLOGY)
    mesh = Mesh(dp=2, ep=2, tp=2, pp=2)
    assert span(mesh, ("tp",)).members == (2, 1)
    assert span(mesh, ("dp", "cp", "ep")).members == (2, 2)
    assert span(mesh, ("dp",)).members == (1, 2)
    assert span(mesh, ("pp", "tp")).members == (2, 2), "not evenly spaced: 0, 1, 8, 9"
    assert span(mesh, ("cp",)).size == 1


def test_even_stages_take_the_familiar_time() -> None:
    assert pipeline_s([3.0] * 4, microbatches=8) == (8 + 3) * 3
    assert pipeline_s([3.0] * 4, microbatches=8, virtual_stages=2) == 8 * 3 + 3 * 3 / 2
    assert pipeline_s([5.0], microbatches=7) == 35


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_the_closed_form_is_what_simulation_says_and_never_less(seed: int, virtual_stages: int) -> None:
    draw = random.Random(seed)
    pp = draw.randint(2, 6)
    m = pp * draw.randint(1, 8)
    name = "interleaved" if virtual_stages > 1 else "1f1b"
    ranks = [1 + draw.choice([0, 0.2]) * draw.random() for _ in range(pp)]
    stages = [ranks[stage % pp] / virtual_stages for stage in range(pp * virtual_stages)]
    order = actions(name, pp=pp, virtual_stages=virtual_stages, microbatches=m)
    simulated = simulate(order, forward_s=[s / 3 for s in stages], backward_s=[s * 2 / 3 for s in stages])
    closed = pipeline_s(ranks, microbatches=m, virtual_stages=virtual_stages)
    assert simulated.makespan_s * (1 - 1e-12) <= closed <= simulated.makespan_s * 1.12
