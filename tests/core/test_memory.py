"""Memory of a stage by kind, with numbers a reader can recompute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tpplan.planner.cost import BlockCost, ParameterGroup, Recompute
from tpplan.planner.estimate.memory import (
    Held,
    block_states,
    peak_bytes,
    stage_memory,
    staging_bytes,
    transient_bytes,
    usable_bytes,
)
from tpplan.planner.mesh import Mesh
from tpplan.planner.profile import OPTIMIZERS, Framework
from tpplan.planner.topology import Device

FRAMEWORK = Framework(
    name="fake", description="", gradient_bytes=4, sync_bytes=4, master_bytes=4, dp_overlap=1.0,
    gather_overlap=1.0,
    tp_overlap=0.0, saves_gathered_input=False, logits_bytes_per_element=0.0, allocator_reserve=(1.0, 1.25),
    context_bytes=100.0, step_overhead_s=0.0, source="",
)  # fmt: skip
ADAMW = OPTIMIZERS["adamw"]
DENSE = ParameterGroup(numel=1000, element_bytes=2, sparse=False, trainable=True, tensors=1)
SPARSE = replace(DENSE, sparse=True)
MESH = Mesh(dp=2, ep=5)


def block(*groups: ParameterGroup) -> BlockCost:
    """A block that keeps 500 bytes, or 80 under full recomputation, and needs 70 while it runs."""
    saved = {Recompute.NONE: 500.0, Recompute.FULL: 80.0}
    return BlockCost(
        name="b", forward_s=1, backward_s=2, parameters=groups, saved_bytes=saved, working_bytes=70.0
    )


@pytest.mark.parametrize(
    ("zero", "expected"),
    [(0, (2000, 4000, 12000)), (1, (2000, 4000, 1200)), (2, (2000, 400, 1200)), (3, (200, 400, 1200))],
)
def test_states_of_dense_parameters_are_sharded_as_the_zero_stage_says(zero: int, expected: tuple) -> None:
    states = block_states(block(DENSE), mesh=MESH, zero=zero, framework=FRAMEWORK, optimizer=ADAMW)
    assert (states.parameters, states.gradients, states.optimizer) == pytest.approx(expected)
    assert states.total == pytest.approx(sum(expected))


def test_sparse_parameters_have_replicas_over_dp_alone() -> None:
    states = block_states(block(SPARSE), mesh=MESH, zero=1, framework=FRAMEWORK, optimizer=ADAMW)
    assert states.optimizer == 1000 * 12 / 2


def test_whole_blocks_beside_the_shards() -> None:
    three = block_states(block(DENSE), mesh=MESH, zero=3, framework=FRAMEWORK, optimizer=ADAMW)
    assert three.gathered == pytest.approx(2000 * 0.9)
    assert three.reduced == pytest.approx(4000 * 0.9)
    one = block_states(block(DENSE), mesh=MESH, zero=1, framework=FRAMEWORK, optimizer=ADAMW)
    assert (one.gathered, one.reduced) == (0, 0)


def test_what_needs_no_optimizer_state() -> None:
    def optimizer_bytes(group: ParameterGroup, name: str) -> float:
        states = block_states(
            block(group), mesh=Mesh(), zero=0, framework=FRAMEWORK, optimizer=OPTIMIZERS[name]
        )
        return states.optimizer

    assert optimizer_bytes(DENSE, "sgd") == 4000, "a 16-bit parameter still has its master copy"
    assert optimizer_bytes(replace(DENSE, element_bytes=4), "adamw") == 8000, "fp32 needs no master copy"
    assert optimizer_bytes(replace(DENSE, trainable=False), "adamw") == 0
    assert optimizer_bytes(DENSE, "none") == 0


def test_recomputation_brings_back_what_it_did_not_save() -> None:
    cost = block(DENSE)
    states = block_states(cost, mesh=MESH, zero=0, framework=FRAMEWORK, optimizer=ADAMW)
    assert transient_bytes(cost, states, Recompute.NONE) == 70
    assert transient_bytes(cost, states, Recompute.FULL) == 70 + 500 - 80


def test_a_stage_adds_up_and_respects_what_may_be_allocated() -> None:
    cost = block(DENSE)
    states = block_states(cost, mesh=Mesh(), zero=0, framework=FRAMEWORK, optimizer=ADAMW)
    held = [
        Held(cost=cost, states=states, mode=Recompute.NONE, count=2),
        Held(cost=cost, states=states, mode=Recompute.FULL, count=1),
    ]
    parts = stage_memory(held, in_flight=4, buffer_bytes=0, framework=FRAMEWORK)
    sizes = {part.kind: part.bytes for part in parts}
    assert sizes["parameters"] == 3 * 2000
    assert sizes["activations"] == 4 * (2 * 500 + 80)
    assert sizes["working"] == 70 + 420
    assert sizes["context"] == 100
    allocated = 3 * 18000 + 4 * 1080 + 490
    assert sizes["reserve"] == pytest.approx(0.25 * allocated)
    device = Device(
        name="d", vendor="v", memory_bytes=round(peak_bytes(parts)), memory_bytes_per_s=1, peak_flops={},
        efficiency={}, kernel_latency_s=0, sources={},
    )  # fmt: skip
    assert usable_bytes(device, FRAMEWORK) == pytest.approx(allocated, abs=1)


def test_at_the_loss_there_are_logits_but_no_gradients_yet() -> None:
    three = block_states(block(DENSE), mesh=MESH, zero=3, framework=FRAMEWORK, optimizer=ADAMW)
    later = 70 + three.reduced + three.gathered
    assert transient_bytes(block(DENSE), three, Recompute.NONE) == later
    full = replace(block(DENSE), loss_bytes=1e5)
    assert transient_bytes(full, three, Recompute.NONE) == 1e5 + three.gathered
    held = [Held(cost=full, states=three, mode=Recompute.NONE, count=1)]
    parts = stage_memory(held, in_flight=1, buffer_bytes=30, framework=FRAMEWORK)
    sizes = {part.kind: part.bytes for part in parts}
    assert (sizes["working"], sizes["buffers"]) == (1e5, three.gathered + 30)


def test_the_root_stays_whole_where_the_framework_keeps_it() -> None:
    keeps = replace(FRAMEWORK, keeps_root_gathered=True)

    def states(root: bool):
        return block_states(block(DENSE), mesh=MESH, zero=3, framework=keeps, optimizer=ADAMW, root=root)

    assert (states(True).parameters, states(True).gathered) == (2000, 0)
    assert (states(False).parameters, states(False).gathered) == pytest.approx((200, 1800))


@pytest.mark.parametrize(
    ("group", "mesh", "parameters"),
    [
        (DENSE, MESH, (4000, 2200, 2200, 200)),
        (SPARSE, MESH, (2000, 3000, 3000, 1000)),
        (DENSE, Mesh(), (4000, 4000, 4000, 2000)),  # computed in 16 bits, stored in 32
        (replace(DENSE, element_bytes=4), Mesh(), (4000, 4000, 4000, 4000)),
    ],
)
def test_a_step_computes_with_copies(group: ParameterGroup, mesh: Mesh, parameters: tuple) -> None:
    """Beside what is stored: all of it without ZeRO, a shard from ZeRO-1 on; under ZeRO-3 there is none."""
    copying = replace(FRAMEWORK, computes_with_copies=True)

    def found(zero: int) -> float:
        return block_states(block(group), mesh=mesh, zero=zero, framework=copying, optimizer=ADAMW).parameters

    assert tuple(map(found, range(4))) == parameters


def test_stages_that_finish_in_turn_hold_whole_gradients_one_at_a_time() -> None:
    """Whole parameters and gradients under stages, and the shards that they are reduced into."""
    keeps = replace(FRAMEWORK, keeps_gathered_in_pipeline=True, reduces_in_own_pool=True)

    def gradients(turns: int) -> float:
        states = block_states(
            block(DENSE), mesh=Mesh(pp=2, dp=10), zero=3, framework=keeps, optimizer=ADAMW, turns=turns
        )
        assert states.parameters == 200 + 2000
        return states.gradients

    assert (gradients(1), gradients(2)) == (4000 + 400, 2000 + 400)


def test_gathering_takes_a_buffer_where_it_has_a_pool_of_its_own() -> None:
    pool = replace(FRAMEWORK, gathers_in_own_pool=True)
    assert staging_bytes([block(DENSE), block(SPARSE)], mesh=MESH, framework=pool) == 4000
    assert staging_bytes([block(DENSE)], mesh=Mesh(), framework=pool) == 0
    assert staging_bytes([block(DENSE)], mesh=MESH, framework=FRAMEWORK) == 0


def test_what_a_model_returns_is_kept_beside_the_buffers() -> None:
    states = block_states(block(DENSE), mesh=Mesh(), zero=0, framework=FRAMEWORK, optimizer=ADAMW)
    held = [Held(cost=block(DENSE), states=states, mode=Recompute.NONE, count=1, outputs_bytes=640.0)]
    parts = stage_memory(held, in_flight=1, buffer_bytes=0, framework=FRAMEWORK)
    assert {part.kind: part.bytes for part in parts}["buffers"] == 640
