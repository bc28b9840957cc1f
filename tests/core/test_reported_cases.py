"""Figures and orderings that users of other tools reported, which the estimators must reproduce."""

from __future__ import annotations

import pytest
from tpplan.planner.cost import BlockCost, ParameterGroup, Recompute
from tpplan.planner.estimate import collectives
from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.estimate.memory import KINDS, Held, block_states, replicas, stage_memory
from tpplan.planner.estimate.step import pipeline_s
from tpplan.planner.layout import Collective
from tpplan.planner.mesh import Mesh
from tpplan.planner.profile import OPTIMIZERS
from tpplan.topologies import load

GIB = 2.0**30


def states(numel: float, *, mesh: Mesh, zero: int, framework: str, sparse: bool = False):
    group = ParameterGroup(numel=numel, element_bytes=2, sparse=sparse, trainable=True, tensors=1)
    cost = BlockCost(name="model", forward_s=0.0, backward_s=0.0, parameters=(group,))
    optimizer = OPTIMIZERS["adamw"]
    return block_states(cost, mesh=mesh, zero=zero, framework=FRAMEWORKS[framework], optimizer=optimizer)


def bubble(*, pp: int, microbatches: int) -> float:
    step = pipeline_s([1.0] * pp, microbatches=microbatches)
    return 1 - microbatches / step


def test_zero_3_states_of_a_seven_billion_model_on_four_devices():
    """DeepSpeed#4527: 29.0 GiB of states and one layer; activations, buffers and context come on top."""
    held = states(6.805e9, mesh=Mesh(dp=4), zero=3, framework="megatron").total
    layer = 131e6 * 4
    assert (held + layer) / GIB == pytest.approx(29.0, abs=0.05)
    assert {"activations", "buffers", "context"} <= set(KINDS)


def test_sharding_over_128_instead_of_8_saves_fourteen_gib():
    """torchtitan, Llama 3.1 8B: 82.4 against 67.0 GiB, of which states 14.0."""
    eight, many = (states(8.03e9, mesh=Mesh(dp=n), zero=3, framework="torch").total for n in (8, 128))
    assert (eight - many) / GIB == pytest.approx(14.0, abs=0.1)


def test_experts_are_replicated_over_dp_alone():
    """Megatron-LM#4050: expert parameters divide by ep, dense ones do not."""
    mesh = Mesh(dp=2, ep=4, tp=2)
    dense, sparse = (
        ParameterGroup(numel=1.0, element_bytes=2, sparse=s, trainable=True, tensors=1) for s in (False, True)
    )
    assert (replicas(dense, mesh), replicas(sparse, mesh)) == (8, 2)


@pytest.mark.parametrize(
    ("pp", "microbatches", "expected"),
    [(16, 96, 0.135), (16, 16, 0.484), (8, 8, 0.467), (8, 16, 0.304), (4, 8, 0.273)],
)
def test_bubbles_of_reported_pipelines(pp, microbatches, expected):
    """vTrain 39.1B at tp=4, dp=8, pp=16, micro-batch 2 and 12; marin#6532 on eight devices."""
    assert bubble(pp=pp, microbatches=microbatches) == pytest.approx(expected, abs=0.0006)


def parameters(layers: int, *, layer: float, head: float) -> float:
    """Parameters of a last stage, as its memory says."""
    held = []
    for numel, count in ((layer, layers), (head, 1)):
        group = ParameterGroup(numel=numel, element_bytes=2, sparse=False, trainable=True, tensors=1)
        cost = BlockCost(
            name="b", forward_s=0.0, backward_s=0.0, parameters=(group,), saved_bytes={Recompute.NONE: 0.0}
        )
        framework, optimizer = FRAMEWORKS["megatron"], OPTIMIZERS["adamw"]
        kept = block_states(cost, mesh=Mesh(pp=4), zero=0, framework=framework, optimizer=optimizer)
        held.append(Held(cost=cost, states=kept, mode=Recompute.NONE, count=count))
    parts = stage_memory(held, in_flight=1, buffer_bytes=0.0, framework=FRAMEWORKS["megatron"])
    return {part.kind: part.bytes for part in parts}["parameters"] / 2


def test_the_heaviest_stage_holds_all_its_layers():
    """Megatron-Bridge#5077: stages of 1, 2, 2, 3 layers; the last holds 9952 parameters, two layers a stage
    would be 6792, 31.8% less (so a layer has 3160 and the head 472)."""
    heaviest, average = (parameters(layers, layer=3160, head=472) for layers in (3, 2))
    assert (heaviest, average) == (9952, 6792)
    assert 1 - average / heaviest == pytest.approx(0.318, abs=0.0005)


def test_the_fullest_stage_sets_the_pace_and_the_size():
    """Megatron-Bridge#5077: layers 1, 2, 2, 3 are as slow and as large as the stage of three."""
    uneven, even = (pipeline_s(layers, microbatches=64) for layers in ([1, 2, 2, 3], [2, 2, 2, 2]))
    assert uneven / even == pytest.approx(3 / 2, rel=0.02)
    sizes = [states(n * 1e9, mesh=Mesh(pp=4), zero=0, framework="megatron").total for n in (1, 2, 2, 3)]
    assert max(sizes) == pytest.approx(1.5 * sum(sizes) / 4)


def test_all_to_all_outside_the_nvlink_domain_loses_far_more_than_all_reduce():
    """GB300: all-to-all falls from 667 to 48 GB/s between 64 and 128 devices, all-reduce from 931 to 738.

    Here one whole domain of 72 against two, so that no group straddles a border unevenly.
    """
    topology = load("gb300-nvl72:2")
    price = collectives.model(topology).time

    def slowdown(collective: Collective) -> float:
        inside, across = (
            price(collective, 2**30, topology.span(size=n, stride=1)).seconds for n in (72, 144)
        )
        return across / inside

    assert slowdown(Collective.ALL_TO_ALL) > 3 * slowdown(Collective.ALL_REDUCE)


def test_experts_belong_inside_the_nvlink_domain():
    """The same machine: exchanging over 72 devices of one domain beats 144 of two, all else alike."""
    topology = load("gb300-nvl72:2")
    price = collectives.model(topology).time
    inside, across = (
        price(Collective.ALL_TO_ALL, 2**30, topology.span(size=n, stride=1)).seconds for n in (72, 144)
    )
    assert across > 3 * inside
