"""What one device holds, by kind, and whether that fits.

In: block costs under one intra-op solution, the mesh, the ZeRO stage, the framework and the
optimizer. Out: bytes per block class that stay for the whole step (`block_states`), and the
memory of a stage by kind (`stage_memory`).

    parameters   element_bytes per element; under ZeRO-3 divided by the replicas; where a step computes with
                 copies, those too, and what is stored is divided from ZeRO-1 on
    gradients    framework.gradient_bytes;  from ZeRO-2 on divided by the replicas
    optimizer    master copy (16-bit parameters only) + moments; from ZeRO-1 on divided
    activations  saved bytes x microbatches in flight
    working      the largest short-lived memory of any block, what recomputation brings back included
    buffers      blocks gathered or reduced whole, beyond the shard: the one that runs and, under
                 ZeRO-3, the one being fetched; what stages receive into
    reserve      what the allocator holds beyond what is allocated; context: libraries, communicators

Replicas are dp x cp x ep ranks for dense parameters and dp x cp for sparse ones (Rajbhandari et
al. 2020, arXiv:1910.02054, for the three stages).

Each kind is counted at its own fullest moment, save where the framework's tensors are followed through a
step (`follows_tensors`): there it is one moment, the fullest of all, and the sum is what is allocated then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..cost import BlockCost, ParameterGroup, Recompute
from ..mesh import Mesh
from ..plan import MemoryPart
from ..profile import Framework, Optimizer
from ..topology import Device
from .moments import Fullest

HALF_BYTES = 2
"""Parameters of at most this many bytes get a master copy."""
KINDS = ("parameters", "gradients", "optimizer", "activations", "working", "buffers", "reserve", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStates:
    """Bytes of one block on one device that do not depend on microbatches."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    """The block's parameters whole, when ZeRO-3 gathers them, less the shard already counted."""
    reduced: float
    """The block's gradients whole, when they are stored as shards."""

    @property
    def total(self) -> float:
        """Bytes that stay for the whole step."""
        return self.parameters + self.gradients + self.optimizer


def replicas(group: ParameterGroup, mesh: Mesh) -> int:
    """Ranks that hold the same elements of `group` before ZeRO."""
    return mesh.dp * mesh.cp * (1 if group.sparse else mesh.ep)


def keeps_gathered(zero: int, mesh: Mesh, framework: Framework) -> bool:
    """Whether ZeRO-3 holds parameters and gradients whole through the step (see the framework's field)."""
    return zero == 3 and mesh.pp > 1 and framework.keeps_gathered_in_pipeline


def copies(group: ParameterGroup, mesh: Mesh, zero: int, framework: Framework) -> bool:
    """Whether a step computes with copies of parameters that ZeRO-3 would gather (see the framework's field).

    They are made where there are replicas, and where a dtype is computed in that is not the stored one;
    sparse parameters are left as they are unless they are sharded.
    """
    if not framework.computes_with_copies or zero >= 3:
        return False
    shared = replicas(group, mesh) > 1
    return shared and zero > 0 if group.sparse else shared or group.element_bytes <= HALF_BYTES


def traffic_stage(zero: int, mesh: Mesh, framework: Framework) -> int:
    """The ZeRO stage whose traffic the step has."""
    return 1 if keeps_gathered(zero, mesh, framework) else zero


def master_bytes(group: ParameterGroup, framework: Framework, optimizer: Optimizer) -> float:
    """Bytes per element of the fp32 copy the optimizer updates; 0 where there is none."""
    needed = optimizer.name != "none" and group.element_bytes <= HALF_BYTES
    return framework.master_bytes if needed else 0


def block_states(
    cost: BlockCost,
    *,
    mesh: Mesh,
    zero: int,
    framework: Framework,
    optimizer: Optimizer,
    shard_group: int | None = None,
    root: bool = False,
    turns: int = 1,
) -> BlockStates:
    """Parameters, gradients and optimizer state of one block on one device under ZeRO stage `zero`.

    `shard_group`: how many replicas share one copy (HSDP); None: all. `root`: the block is no repeated
    layer. `turns`: a rank's virtual stages that finish all their backwards one after the other.
    """
    parameters = gradients = states = gathered = reduced = 0.0
    kept = keeps_gathered(zero, mesh, framework)
    whole_step = kept or (root and framework.keeps_root_gathered)
    for group in cost.parameters:
        ways = shard_group or replicas(group, mesh)
        whole = group.numel * group.element_bytes
        copied = copies(group, mesh, zero, framework)
        parameters += whole / (ways if zero >= 3 or (zero and copied) else 1) + (whole if copied else 0.0)
        beside = 0 if framework.computes_with_copies else 1 / ways  # a copy, or the shard completed
        unsharded = whole * (1 - beside) if zero >= 3 and ways > 1 else 0.0
        gathered += 0.0 if whole_step else unsharded
        parameters += whole if kept else unsharded if whole_step else 0.0
        if not group.trainable:
            continue
        whole = group.numel * framework.gradient_bytes
        gradients += whole / (ways if zero >= 2 and not kept else turns if kept else 1)
        gradients += whole / ways if kept and framework.reduces_in_own_pool else 0.0
        reduced += whole * (1 - 1 / ways) if zero >= 2 and not kept else 0.0
        per_element = master_bytes(group, framework, optimizer) + optimizer.state_bytes
        states += group.numel * per_element / (ways if zero >= 1 else 1)
    return BlockStates(
        parameters=parameters, gradients=gradients, optimizer=states, gathered=gathered, reduced=reduced
    )


def staging_bytes(costs: Iterable[BlockCost], *, mesh: Mesh, framework: Framework) -> float:
    """Parameters of `costs`, gathered together into another pool before they are copied out."""
    if not framework.gathers_in_own_pool:
        return 0.0
    groups = [group for cost in costs for group in cost.parameters]
    return sum(g.numel * g.element_bytes for g in groups if replicas(g, mesh) > 1)


def working_bytes(cost: BlockCost, mode: Recompute) -> float:
    """Short-lived memory of one block: its own, and what recomputation brings back at once."""
    restored = cost.saved_bytes.get(Recompute.NONE, 0.0) - cost.saved_bytes.get(mode, 0.0)
    return cost.working_bytes + max(restored, 0.0)


def transient_bytes(cost: BlockCost, states: BlockStates, mode: Recompute) -> float:
    """All that exists only while the block runs: whole parameters, and the fuller of two moments.

    At the loss there are logits but no gradients yet; later there is working memory, and gradients are whole.
    """
    return states.gathered + max(working_bytes(cost, mode) + states.reduced, cost.loss_bytes)


def usable_bytes(device: Device, framework: Framework) -> float:
    """How much may be allocated so that the upper band of what is reserved still fits."""
    return (device.memory_bytes - framework.context_bytes) / framework.allocator_reserve[1]


def dummy_bytes(cost: BlockCost, framework: Framework) -> float:
    """Dummy weight gradients of a block, kept for every distinct shape once (see the framework's field)."""
    return framework.weight_gradient_bytes * sum(g.numel for g in cost.parameters if not g.sparse)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A run of blocks of one class on a stage, recomputed alike."""

    cost: BlockCost
    states: BlockStates
    mode: Recompute
    count: int
    outputs_bytes: float = 0.0
    """What one such block returns to the user, kept for all microbatches."""


def stage_memory(
    held: Sequence[Held], *, in_flight: float, buffer_bytes: float, framework: Framework
) -> tuple[MemoryPart, ...]:
    """Memory of the fullest moment on a device of this stage, upper band, by kind.

    `buffer_bytes`: what every rank holds beside its blocks, such as the next one, gathered while this one
    runs.
    """
    peak = max(held, key=lambda run: transient_bytes(run.cost, run.states, run.mode))
    usual = max(held, key=lambda run: run.count)
    working = working_bytes(peak.cost, peak.mode)
    at_loss = peak.cost.loss_bytes > working + peak.states.reduced
    allocated = {
        "parameters": sum(run.count * run.states.parameters for run in held),
        "gradients": sum(run.count * run.states.gradients for run in held),
        "optimizer": sum(run.count * run.states.optimizer for run in held),
        "activations": in_flight * sum(run.count * run.cost.saved_bytes[run.mode] for run in held),
        "working": peak.cost.loss_bytes if at_loss else working,
        "buffers": peak.states.gathered
        + (0.0 if at_loss else peak.states.reduced)
        + buffer_bytes
        + sum(run.count * run.outputs_bytes for run in held)
        + dummy_bytes(usual.cost, framework),
    }
    reserve = sum(allocated.values()) * (framework.allocator_reserve[1] - 1)
    sizes = allocated | {"reserve": reserve, "context": framework.context_bytes}
    return tuple(MemoryPart(kind=kind, bytes=sizes[kind]) for kind in KINDS)


def followed_memory(
    held: Sequence[Held], moment: Fullest, *, pooled_bytes: float, framework: Framework
) -> tuple[MemoryPart, ...]:
    """The same where every tensor is followed (`moments.py`): what stays for the whole step, and `moment`.

    `pooled_bytes`: what the allocator keeps in pools of other streams, where nothing else can use it.
    """
    allocated = {
        "parameters": sum(run.count * run.states.parameters for run in held),
        "gradients": moment.gradients,
        "optimizer": sum(run.count * run.states.optimizer for run in held),
        "activations": moment.activations,
        "working": moment.working,
        "buffers": moment.buffers,
    }
    total = sum(allocated.values())
    reserve = (total + pooled_bytes) * framework.allocator_reserve[1] - total
    sizes = allocated | {"reserve": reserve, "context": framework.context_bytes}
    return tuple(MemoryPart(kind=kind, bytes=sizes[kind]) for kind in KINDS)


def peak_bytes(parts: Iterable[MemoryPart]) -> float:
    """Sum over kinds."""
    return sum(part.bytes for part in parts)
