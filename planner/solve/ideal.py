"""What no plan can beat: costs before any intra-op solution exists.

In: a `SearchProblem` and a `Candidate`. Out: the time of computation alone (`Roofline`), whether what every
step keeps fits (`states_fit`), and an idealised intra-op solution (`idealised`) from what no split can avoid:

    compute      forward + backward FLOPs / (devices x peak x best efficiency of any kernel family)
    parameters   split by tp (and ep) to the last element, sharded as the ZeRO stage allows
    activations  one block input per layer and microbatch in flight, split by tp and cp

Priced like a real solution it also yields the gathers and the gradient sync of these parameters.

Where it is known that a kernel on a part of the work takes no less than its share of the whole one's time
(`Pricing.kernel_slack`), the model as it runs on one device (`Unsplit`) says more: every split leaves a
device its share of each op's kernels, of each tensor kept and of all that recomputation runs again. Devices
of ep compute on their samples together, so their kernels are compared with those of a batch of all of them;
and a larger batch than that is a bound as well, which is why few of them are worked out.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cost import BlockCost, IntraSolution, ParameterGroup, Recompute
from ..estimate.memory import block_states, usable_bytes
from ..mesh import Mesh
from ..problem import BlockFacts, Candidate, Pricing, SearchProblem
from ..topology import Device

COMPUTE_FAMILIES = ("gemm", "grouped_gemm", "attention")
BACKWARD_OVER_FORWARD = 2
"""FLOPs of backward over forward for trained matrix products: one product for each operand."""
BATCH_STEP = 4
"""Batches of the unsplit model are its powers: kernels of four times the size are hardly more efficient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one sample's share of a block takes and keeps, over all devices together."""

    forward_s: float
    backward_s: float
    saved_bytes: dict[Recompute, float]
    recompute_s: dict[Recompute, float]


class Unsplit:
    """The model on one device, per sample: what all devices together take at least."""

    def __init__(self, pricing: Pricing) -> None:
        self._pricing = pricing
        self._known: dict[int, dict[str, Sample]] = {}

    def samples(self, batch: int) -> dict[str, Sample]:
        """By block class, when so many samples or fewer are computed together; empty: nothing is known."""
        if self._pricing.kernel_slack >= 1:
            return {}
        together = 1
        while together < batch:
            together *= BATCH_STEP
        if together not in self._known:
            self._known[together] = self._at(together)
        return self._known[together]

    def _at(self, batch: int) -> dict[str, Sample]:
        found = self._pricing.intra(Mesh(), batch)
        share_s = (1 - self._pricing.kernel_slack) / batch
        return {
            name: Sample(
                forward_s=cost.forward_s * share_s,
                backward_s=cost.backward_s * share_s,
                saved_bytes={mode: nbytes / batch for mode, nbytes in cost.saved_bytes.items()},
                recompute_s={mode: seconds * share_s for mode, seconds in cost.recompute_s.items()},
            )
            for name, cost in (found[0].blocks.items() if found else ())
        }


class Roofline:
    """Step times of computation alone, every kernel at its best rate: the cheapest bounds."""

    def __init__(self, problem: SearchProblem, unsplit: Unsplit | None = None) -> None:
        device_s = 1 / best_flops_per_s(problem.topology.device, problem.job.dtype)
        self._samples, self._counts = problem.job.global_batch, problem.counts
        self._seconds = {
            name: facts.forward_flops_per_sample
            * device_s
            * (1 + BACKWARD_OVER_FORWARD * facts.trainable_share)
            for name, facts in problem.blocks.items()
        }
        for name, sample in (unsplit.samples(self._samples) if unsplit else {}).items():
            self._seconds[name] = sample.forward_s + sample.backward_s
        self._total = sum(n * self._seconds[name] for name, n in self._counts.items())

    @property
    def device_s(self) -> float:
        """What one device alone would take."""
        return self._samples * self._total

    def mesh_s(self, mesh: Mesh) -> float:
        """No microbatch and no schedule makes the step faster."""
        return self._samples / mesh.batch_ways * self._slowest_s(mesh.pp) / (mesh.tp * mesh.cp)

    def candidate_s(self, candidate: Candidate) -> float:
        """The same with the pipeline's bubble."""
        mesh, share = candidate.mesh, 1 / candidate.fill_ways
        per_sample = candidate.micro_batch / (mesh.tp * mesh.cp)
        steady = (candidate.microbatches - share) * self._slowest_s(mesh.pp)
        return per_sample * (steady + share * self._total)

    def _slowest_s(self, pp: int) -> float:
        """A sample on the slowest stage: an even share, or the most repeated class's, rounded up."""
        crowded = max(-(-n // pp) * self._seconds[name] for name, n in self._counts.items())
        return max(self._total / pp, crowded)


def best_flops_per_s(device: Device, dtype: str) -> float:
    """What no kernel of the device exceeds: peak times the best efficiency of any compute family."""
    curves = [device.efficiency[family].curve for family in COMPUTE_FAMILIES if family in device.efficiency]
    best = max((fraction for curve in curves for _, fraction in curve), default=1.0)
    return peak_flops_per_s(device, dtype) * best


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """Dense peak at the job's dtype; the device's best when its data sheet does not name that dtype."""
    return device.peak_flops.get(dtype, max(device.peak_flops.values()))


def idealised(
    problem: SearchProblem, mesh: Mesh, micro_batch: int, unsplit: Unsplit | None = None
) -> IntraSolution:
    """Costs that no intra-op solution can undercut (see the module docstring)."""
    b = micro_batch
    flops_per_s = best_flops_per_s(problem.topology.device, problem.job.dtype)
    samples = unsplit.samples(b * mesh.ep) if unsplit else {}
    share = b / (mesh.tp * mesh.cp)
    blocks = {}
    for name, facts in problem.blocks.items():
        forward_s = facts.forward_flops_per_sample / flops_per_s * share
        backward_s = BACKWARD_OVER_FORWARD * facts.trainable_share * forward_s
        boundary = facts.boundary_bytes_per_sample * share
        saved = {Recompute.NONE: boundary if name in problem.layer_classes else 0.0}
        again: dict[Recompute, float] = {}
        if name in samples:
            sample = samples[name]
            forward_s, backward_s = sample.forward_s * share, sample.backward_s * share
            saved = {mode: nbytes * share for mode, nbytes in sample.saved_bytes.items()}
            again = {mode: seconds * share for mode, seconds in sample.recompute_s.items()}
        blocks[name] = BlockCost(
            name=name,
            forward_s=forward_s,
            backward_s=backward_s,
            saved_bytes=saved,
            recompute_s=again,
            output_bytes=boundary,
            parameters=_ideal_parameters(facts, mesh),
        )
    return IntraSolution(blocks=blocks, sequence_parallel=True, objective_s=0.0, bound_s=0.0, optimal=False)


def states_fit(problem: SearchProblem, candidate: Candidate) -> bool:
    """Whether parameters, gradients and optimizer states fit in its stages, were nothing else there."""
    mesh, framework, layers = candidate.mesh, problem.framework, problem.layer_classes or problem.blocks
    total = 0.0
    for name, facts in problem.blocks.items():
        states = block_states(
            BlockCost(name=name, forward_s=0.0, backward_s=0.0, parameters=_ideal_parameters(facts, mesh)),
            mesh=mesh,
            zero=candidate.zero_stage,
            shard_group=candidate.shard_group,
            framework=framework,
            optimizer=problem.optimizer,
            root=name not in layers,
            turns=candidate.virtual_stages,
        )
        total += problem.counts[name] * states.total
    return total <= mesh.pp * usable_bytes(problem.topology.device, framework)


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
