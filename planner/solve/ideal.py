"""What no plan can beat: costs before any intra-op solution exists.

In: a `SearchProblem` and a `Candidate`. Out: the FLOPs' own time (`roofline`), and an idealised
intra-op solution (`idealised`) from what no split can avoid:

    compute      forward + backward FLOPs / (devices x peak x best efficiency of any kernel family)
    parameters   split by tp (and ep) to the last element, sharded as the ZeRO stage allows
    activations  one block input per layer and microbatch in flight, split by tp and cp

Priced like a real solution it also yields the gathers and the gradient sync of these parameters.
"""

from __future__ import annotations

from collections.abc import Callable

from ..cost import BlockCost, IntraSolution, ParameterGroup, Recompute
from ..mesh import Mesh
from ..problem import BlockFacts, Candidate, SearchProblem
from ..topology import Device

COMPUTE_FAMILIES = ("gemm", "grouped_gemm", "attention")
BACKWARD_OVER_FORWARD = 2
"""FLOPs of backward over forward for trained matrix products: one product for each operand."""


def device_seconds(problem: SearchProblem) -> float:
    """Seconds that one device alone would take for a step's FLOPs, at the best rate of any kernel."""
    flops = sum(
        n * facts.forward_flops_per_sample * (1 + BACKWARD_OVER_FORWARD * facts.trainable_share)
        for name, n in problem.counts.items()
        for facts in (problem.blocks[name],)
    )
    return flops * problem.job.global_batch / best_flops_per_s(problem.topology.device, problem.job.dtype)


def roofline(problem: SearchProblem) -> Callable[[Candidate], float]:
    """A function candidate -> step time of the FLOPs alone, bubble included: the cheapest bound."""
    device_s = 1 / best_flops_per_s(problem.topology.device, problem.job.dtype)
    seconds = {
        name: facts.forward_flops_per_sample * device_s * (1 + BACKWARD_OVER_FORWARD * facts.trainable_share)
        for name, facts in problem.blocks.items()
    }
    counts = problem.counts
    total = sum(n * seconds[name] for name, n in counts.items())

    def bound(candidate: Candidate) -> float:
        mesh, share = candidate.mesh, 1 / candidate.fill_ways
        per_sample = candidate.micro_batch / (mesh.tp * mesh.cp)
        crowded = max(-(-n // mesh.pp) * seconds[name] for name, n in counts.items())
        slowest = max(total / mesh.pp, crowded)
        return per_sample * ((candidate.microbatches - share) * slowest + share * total)

    return bound


def best_flops_per_s(device: Device, dtype: str) -> float:
    """What no kernel of the device exceeds: peak times the best efficiency of any compute family."""
    curves = [device.efficiency[family].curve for family in COMPUTE_FAMILIES if family in device.efficiency]
    best = max((fraction for curve in curves for _, fraction in curve), default=1.0)
    return peak_flops_per_s(device, dtype) * best


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """Dense peak at the job's dtype; the device's best when its data sheet does not name that dtype."""
    return device.peak_flops.get(dtype, max(device.peak_flops.values()))


def idealised(problem: SearchProblem, candidate: Candidate) -> IntraSolution:
    """Costs that no intra-op solution can undercut (see the module docstring)."""
    mesh, b = candidate.mesh, candidate.micro_batch
    flops_per_s = best_flops_per_s(problem.topology.device, problem.job.dtype)
    blocks = {}
    for name, facts in problem.blocks.items():
        forward_s = facts.forward_flops_per_sample * b / (mesh.tp * mesh.cp * flops_per_s)
        layer = name in problem.layer_classes
        boundary = facts.boundary_bytes_per_sample * b / (mesh.tp * mesh.cp)
        blocks[name] = BlockCost(
            name=name,
            forward_s=forward_s,
            backward_s=BACKWARD_OVER_FORWARD * facts.trainable_share * forward_s,
            saved_bytes={Recompute.NONE: boundary if layer else 0.0},
            output_bytes=boundary,
            parameters=_ideal_parameters(facts, mesh),
        )
    return IntraSolution(blocks=blocks, sequence_parallel=True, objective_s=0.0, bound_s=0.0, optimal=False)


def _ideal_parameters(facts: BlockFacts, mesh: Mesh) -> tuple[ParameterGroup, ...]:
    groups = []
    for sparse, numel in (
        (False, facts.dense_numel / mesh.tp),
        (True, facts.sparse_numel / mesh.tp / mesh.ep),
    ):
        for trainable, share in ((True, facts.trainable_share), (False, 1 - facts.trainable_share)):
            if numel * share > 0:
                groups.append(
                    ParameterGroup(
                        numel=numel * share,
                        element_bytes=facts.element_bytes,
                        sparse=sparse,
                        trainable=trainable,
                        tensors=1,
                    )
                )
    return tuple(groups)
