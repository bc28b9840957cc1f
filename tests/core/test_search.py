"""The mesh search on an analytic transformer: against exhaustive pricing, and what it must answer."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise

import pytest
from tpplan.planner.cost import (
    BlockCost,
    Communication,
    Estimate,
    IntraSolution,
    Origin,
    ParameterGroup,
    Recompute,
    Work,
)
from tpplan.planner.estimate.step import Setting, spans
from tpplan.planner.layout import Collective
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import Infeasible
from tpplan.planner.problem import (
    BlockFacts,
    Candidate,
    Floor,
    Outcome,
    Priced,
    Pricing,
    SearchProblem,
    SearchProgress,
)
from tpplan.planner.profile import OPTIMIZERS, Framework, Job
from tpplan.planner.solve.costed import Costed
from tpplan.planner.solve.exploration import Exploration
from tpplan.planner.solve.ideal import Roofline, Unsplit, idealised
from tpplan.planner.solve.price import price
from tpplan.planner.solve.quick import quick_bound
from tpplan.planner.solve.search import search
from tpplan.planner.solve.solver import Status
from tpplan.planner.solve.space import EXPERTS, candidates
from tpplan.planner.solve.stages import shortest
from tpplan.planner.topology import Device, Efficiency, GroupSpan, Level, Topology

PEAK, BEST, MEMORY_BYTES_PER_S = 1e15, 0.7, 3e12
NODE_BYTES_PER_S, NET_BYTES_PER_S = 240e9, 32e9
FRAMEWORK = Framework(
    name="fake", description="", gradient_bytes=4, sync_bytes=4, master_bytes=4, dp_overlap=0.9,
    gather_overlap=0.8, tp_overlap=0.3, saves_gathered_input=False, logits_bytes_per_element=0.0,
    allocator_reserve=(1.03, 1.08), context_bytes=1e9, step_overhead_s=0.01, source="",
)  # fmt: skip


def topology(nodes: int, *, memory: float, per_node: int = 8) -> Topology:
    """Nodes of fast links joined by a slower network."""
    best = Efficiency(curve=((1e9, 0.1), (1e12, BEST)), origin="fake", source="fake")
    device = Device(
        name="fake-80", vendor="v", memory_bytes=int(memory), memory_bytes_per_s=MEMORY_BYTES_PER_S,
        peak_flops={"bf16": PEAK}, efficiency={"gemm": best}, kernel_latency_s=5e-6, sources={},
    )  # fmt: skip
    link = {"latency_s": 1e-5, "efficiency": 1.0}
    node = Level(name="node", size=per_node, kind="nvlink", bytes_per_s=NODE_BYTES_PER_S, **link)
    net = Level(name="cluster", size=nodes, kind="infiniband", bytes_per_s=NET_BYTES_PER_S, **link)
    return Topology(name="fake", device=device, levels=(node, net))


def collective_time(collective: Collective, nbytes: float, span: GroupSpan) -> Estimate:
    """Latency and bytes over the outermost link, shared rails added up."""
    outside = span.outermost > 0
    rate = NET_BYTES_PER_S * span.members[0] if outside else NODE_BYTES_PER_S
    n = span.size
    factor = {Collective.ALL_REDUCE: 2 * (n - 1) / n, Collective.SEND_RECV: 1.0}.get(collective, (n - 1) / n)
    return Estimate(2e-5 + factor * nbytes / rate, Origin.MODELLED)


def kernel_time(work: Work, device: Device) -> Estimate:
    """Memory traffic alone."""
    return Estimate(work.bytes / MEMORY_BYTES_PER_S + 5e-6 * work.kernels, Origin.MODELLED)


@dataclass(kw_only=True)
class Transformer:
    """An analytic decoder: sizes in, problem and costs out."""

    layers: int
    hidden: int
    ffn: int
    vocab: int
    seq: int
    kv: int = 8
    experts: int = 0
    calls: list[tuple[int, int, int]] = field(default_factory=list, init=False)

    def facts(self) -> dict[str, BlockFacts]:
        """Split-independent truth of the three block classes."""
        h, seq = self.hidden, self.seq
        attention, mlp = 3 * h * h, 3 * h * self.ffn
        active = attention + mlp * (2 if self.experts else 1)
        dense, sparse = (attention, mlp * self.experts) if self.experts else (attention + mlp, 0)
        flops = 2 * seq * active + 2 * seq * seq * h
        boundary = 2.0 * seq * h

        def block(name: str, flops: float, dense: float, sparse: float = 0.0) -> BlockFacts:
            return BlockFacts(
                name=name, forward_flops_per_sample=flops, dense_numel=dense, sparse_numel=sparse,
                element_bytes=2, boundary_bytes_per_sample=boundary,
            )  # fmt: skip

        return {
            "embedding": block("embedding", 0, self.vocab * h),
            "layer": block("layer", flops, dense, sparse),
            "head": block("head", 2 * seq * h * self.vocab, self.vocab * h),
        }

    def problem(self, cluster: Topology, *, batch: int, optimizer: str = "adamw") -> SearchProblem:
        """The job on a cluster."""
        job = Job(
            mode="train", objective="throughput", global_batch=batch, seq_len=self.seq, dtype="bf16",
            optimizer=optimizer, framework="fake",
        )  # fmt: skip
        return SearchProblem(
            chain=("embedding", *("layer",) * self.layers, "head"),
            layer_classes=frozenset({"layer"}),
            blocks=self.facts(),
            topology=cluster,
            job=job,
            framework=FRAMEWORK,
            optimizer=OPTIMIZERS[optimizer],
            tokens_per_sample=self.seq,
            tp_sizes=tuple(n for n in (1, 2, 4, 8, 16) if n <= cluster.devices),
            ep_sizes=tuple(n for n in (1, 2, 4, 8) if n <= self.experts) or (1,),
        )

    def pricing(self, cluster: Topology) -> Pricing:
        """Costs that grow as the sizes say; tp beyond the KV heads is impossible."""

        def intra(mesh: Mesh, micro_batch: int) -> tuple[IntraSolution, ...]:
            self.calls.append((mesh.tp, mesh.ep, micro_batch))
            if mesh.tp > self.kv:
                return ()
            span = cluster.span(size=mesh.tp, stride=mesh.stride("tp"))
            blocks = {
                name: self._cost(name, facts, mesh, micro_batch, span) for name, facts in self.facts().items()
            }
            seconds = sum(cost.forward_s + cost.backward_s for cost in blocks.values())
            return (
                IntraSolution(
                    blocks=blocks,
                    sequence_parallel=mesh.tp > 1,
                    objective_s=seconds,
                    bound_s=seconds,
                    optimal=True,
                ),
            )

        def floor(mesh: Mesh, micro_batch: int) -> Floor:
            known = (
                Floor(
                    total_s=found.objective_s,
                    blocks_s={name: cost.forward_s + cost.backward_s for name, cost in found.blocks.items()},
                )
                for found in intra(mesh, micro_batch)
            )
            return reduce(Floor.raised, known, Floor())

        return Pricing(
            intra=intra,
            collective_time=collective_time,
            kernel_time=kernel_time,
            floor=floor,
            batch_slack=0.0,
            kernel_slack=0.0,
        )

    def _cost(self, name: str, facts: BlockFacts, mesh: Mesh, b: int, span: GroupSpan) -> BlockCost:
        tp, act = mesh.tp, 2.0 * self.seq * b * self.hidden
        logits = 2.0 * self.seq * b * self.vocab / tp
        flops = facts.forward_flops_per_sample * b / tp
        efficiency = BEST * min(1.0, 0.3 + 0.7 * math.log10(max(flops, 1e9) / 1e9) / 4)
        moved = {"embedding": 4 * act / tp, "layer": 14 * act / tp, "head": 3 * logits}[name]
        forward = flops / (PEAK * efficiency) + moved / MEMORY_BYTES_PER_S + 2e-5
        comm = ()
        if tp > 1:
            kinds = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
            comm = tuple(
                Communication(
                    label=f"{name} {kind}", collective=kind, axis="tp", group_size=tp, bytes=act,
                    seconds=(seconds := collective_time(kind, act, span).seconds), exposed_s=seconds,
                    count=2 if name == "layer" else 1, level="node", origin=Origin.MODELLED,
                )
                for kind in kinds
            )  # fmt: skip
        wide = self.ffn / self.hidden
        saved = {
            "embedding": {Recompute.NONE: 0.0},
            "layer": {
                Recompute.NONE: act / tp * (8 + 3 * wide),
                Recompute.SELECTIVE: act / tp * (7 + 2 * wide),
                Recompute.FULL: act / tp,
            },
            "head": {Recompute.NONE: logits + act / tp},
        }[name]
        group = {"element_bytes": 2, "trainable": True}
        parameters = [ParameterGroup(numel=facts.dense_numel / tp, sparse=False, tensors=6, **group)]
        if facts.sparse_numel:
            numel = facts.sparse_numel / tp / mesh.ep
            parameters.append(ParameterGroup(numel=numel, sparse=True, tensors=3, **group))
        again = {Recompute.NONE: 0.0, Recompute.SELECTIVE: 0.05 * forward, Recompute.FULL: forward}
        return BlockCost(
            name=name, forward_s=forward, backward_s=2 * forward, forward_comm=comm, backward_comm=comm,
            saved_bytes=saved, recompute_s={mode: again[mode] for mode in saved},
            recompute_comm_s={Recompute.FULL: sum(c.seconds * c.count for c in comm)},
            working_bytes={"embedding": act / tp, "layer": 4 * act / tp, "head": 2 * logits}[name],
            output_bytes=act / tp, parameters=tuple(parameters),
            model_flops=facts.forward_flops_per_sample * b,
        )  # fmt: skip


def solved(model: Transformer, cluster: Topology, *, batch: int, **options: object) -> Outcome:
    """The outcome of a search that must find a plan."""
    found = search(model.problem(cluster, batch=batch), model.pricing(cluster), **options)
    assert isinstance(found, Outcome), found
    return found


LLAMA_8B = {"layers": 32, "hidden": 4096, "ffn": 14336, "vocab": 128256, "seq": 8192}
LLAMA_70B = {"layers": 80, "hidden": 8192, "ffn": 28672, "vocab": 128256, "seq": 4096}
LLAMA_405B = {"layers": 126, "hidden": 16384, "ffn": 53248, "vocab": 128256, "seq": 8192}
MIXTRAL = {"layers": 32, "hidden": 4096, "ffn": 14336, "vocab": 32000, "seq": 4096, "experts": 8}


@pytest.fixture(scope="module")
def small() -> Outcome:
    """Llama 8B on two nodes."""
    return solved(Transformer(**LLAMA_8B), topology(2, memory=80e9), batch=64)


# --------------------------------------------------------------------------- exactness


def every_price(problem: SearchProblem, pricing: Pricing) -> list[float]:
    """The price of every candidate under every intra-op solution; asserts that all bounds hold."""
    unsplit = Unsplit(pricing)
    span, flops, prices = spans(problem.topology), Roofline(problem, unsplit).candidate_s, []
    for candidate in candidates(problem, {}):
        setting = Setting(
            candidate=candidate, topology=problem.topology, framework=problem.framework,
            optimizer=problem.optimizer, pricing=pricing, span=span,
        )  # fmt: skip
        ideal = Costed(
            problem=problem,
            setting=setting,
            intra=idealised(problem, candidate.mesh, candidate.micro_batch, unsplit),
        )
        floored = quick_bound(ideal).bound_s(
            candidate, pricing.floor(candidate.mesh, candidate.micro_batch).times(1 - 1e-12)
        )
        for solution in pricing.intra(candidate.mesh, candidate.micro_batch):
            costed = Costed(problem=problem, setting=setting, intra=solution)
            plan = shortest(costed.stage_problem)
            if plan.status is Status.INFEASIBLE:
                continue
            found = price(costed, plan, bound=costed.step_bound_s(plan))
            step = found.step_time_s * (1 + 1e-12)
            assert flops(candidate) <= ideal.bound_s * (1 + 1e-12) <= step * (1 + 1e-12), candidate
            assert ideal.bound_s <= floored * (1 + 1e-12) <= step * (1 + 1e-12), candidate
            assert costed.bound_s <= step and costed.step_bound_s(plan) <= step, candidate
            assert found.prediction.peak_memory_bytes <= problem.topology.device.memory_bytes
            prices.append(found.step_time_s)
    return prices


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_better_than_the_answer(seed: int) -> None:
    draw = random.Random(seed)
    model = Transformer(
        layers=draw.randint(2, 5), hidden=draw.choice([2048, 4096]), ffn=8192, vocab=32000, seq=2048,
        kv=draw.choice([2, 4]), experts=draw.choice([0, 0, 4]),
    )  # fmt: skip
    cluster = topology(draw.choice([1, 2, 3]), memory=draw.choice([6e9, 12e9, 40e9]), per_node=2)
    problem = model.problem(cluster, batch=draw.choice([6, 8, 12]))
    prices = every_price(problem, model.pricing(cluster))
    found = search(problem, model.pricing(cluster))
    if not prices:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Outcome)
    assert found.best.step_time_s == pytest.approx(min(prices), rel=2e-4), "the stage ILP's gap is 1e-4"
    assert found.summary.lower_bound_s <= min(prices) * (1 + 1e-12)
    assert found.summary.complete


@pytest.mark.parametrize("experts", [0, 4])
def test_the_closed_form_of_ideal_costs_is_their_bound(experts: int) -> None:
    model = Transformer(layers=7, hidden=2048, ffn=8192, vocab=32000, seq=2048, kv=4, experts=experts)
    problem = model.problem(topology(2, memory=5e9, per_node=4), batch=24)
    pricing, span, finite = model.pricing(problem.topology), spans(problem.topology), 0
    unsplit = Unsplit(pricing)
    for candidate in candidates(problem, {}):
        setting = Setting(
            candidate=candidate, topology=problem.topology, framework=problem.framework,
            optimizer=problem.optimizer, pricing=pricing, span=span,
        )  # fmt: skip
        costed = Costed(
            problem=problem,
            setting=setting,
            intra=idealised(problem, candidate.mesh, candidate.micro_batch, unsplit),
        )
        quick = quick_bound(costed).bound_s(candidate)
        assert quick == pytest.approx(costed.bound_s, rel=1e-12), candidate
        finite += math.isfinite(quick)
    assert finite > 0


def test_waterfall_adds_up_and_memory_fits(small: Outcome) -> None:
    best = small.best
    assert sum(part.seconds for part in best.prediction.waterfall) == pytest.approx(best.step_time_s)
    assert sum(best.prediction.memory_by_kind_bytes.values()) == pytest.approx(
        best.prediction.peak_memory_bytes
    )
    assert best.prediction.peak_memory_bytes <= best.prediction.device_memory_bytes
    low, high = best.prediction.step_time_interval_s
    assert low < best.step_time_s < high
    assert 0.2 < best.prediction.model_flops_utilization < BEST
    assert sum(stage.layers for stage in best.stages) == 32


def test_the_certificate(small: Outcome) -> None:
    summary = small.summary
    assert summary.lower_bound_s <= small.best.step_time_s
    assert summary.gap == pytest.approx(1 - summary.lower_bound_s / small.best.step_time_s, abs=1e-12)
    assert summary.gap < 0.02
    assert summary.solver in ("highs", "cbc")
    assert summary.meshes_pruned == sum(count for _, count in summary.pruned_by)


def test_same_inputs_same_answer(small: Outcome) -> None:
    again = solved(Transformer(**LLAMA_8B), topology(2, memory=80e9), batch=64)
    assert again == small


def test_cbc_gives_the_same_plan(small: Outcome) -> None:
    cbc = solved(Transformer(**LLAMA_8B), topology(2, memory=80e9), batch=64, solver="cbc")
    assert cbc.best.candidate == small.best.candidate
    assert cbc.best.step_time_s == pytest.approx(small.best.step_time_s, rel=2e-4)


# --------------------------------------------------------------------------- experts and alternatives


def test_expert_plans_are_named_and_never_faster(small: Outcome) -> None:
    named = {name for a in small.alternatives if a.seeded_as for name in a.seeded_as.split(", ")}
    best = {e.name for e in EXPERTS if e.holds(small.best.candidate, small_problem())}
    assert {"FSDP", "DDP", "FSDP+TP", "Megatron 3D"} <= named | best
    for alternative in small.alternatives:
        if "more than the device has" in alternative.reason:
            assert alternative.peak_memory_bytes > small.best.prediction.device_memory_bytes
        else:
            assert alternative.step_time_s >= small.best.step_time_s
            assert alternative.reason.startswith(("slower by", "as fast"))


SEEDED = {
    "llama 8B, 2 nodes": (LLAMA_8B, 2, 64),
    "llama 8B, 4 nodes, little memory": (LLAMA_8B, 4, 64),
    "mixtral, 4 nodes": (MIXTRAL, 4, 128),
}


@pytest.mark.parametrize("name", SEEDED)
def test_the_answer_is_never_worse_than_the_best_of_any_expert_family(name: str) -> None:
    """Every member of every family is priced here by itself: Megatron 3D, FSDP, HSDP, FSDP+TP, DP+EP, ..."""
    sizes, nodes, batch = SEEDED[name]
    model, cluster = Transformer(**sizes), topology(nodes, memory=40e9 if "little" in name else 80e9)
    asked = model.problem(cluster, batch=batch)
    problem = replace(asked, framework=replace(asked.framework, name="torch"))
    found = search(problem, model.pricing(cluster))
    assert isinstance(found, Outcome)
    pricing, fitted = model.pricing(cluster), {}
    for expert in EXPERTS:
        members = [c for c in candidates(problem, {}) if expert.holds(c, problem) and c.micro_batch <= 2]
        fitted[expert.name] = [p.step_time_s for c in members if (p := priced_alone(problem, pricing, c))]
        assert all(step >= found.best.step_time_s * (1 - 1e-6) for step in fitted[expert.name]), expert.name
    assert sum(map(bool, fitted.values())) >= 3, "several families fit and have been compared"
    seeded = {family for a in found.alternatives if a.seeded_as for family in a.seeded_as.split(", ")}
    best = {e.name for e in EXPERTS if e.holds(found.best.candidate, problem)}
    assert {family for family, steps in fitted.items() if steps} <= seeded | best


def priced_alone(problem: SearchProblem, pricing: Pricing, candidate: Candidate) -> Priced | None:
    """A candidate with its exact stages under its only intra-op solution, by closed form."""
    setting = Setting(
        candidate=candidate, topology=problem.topology, framework=problem.framework,
        optimizer=problem.optimizer, pricing=pricing, span=spans(problem.topology),
    )  # fmt: skip
    for solution in pricing.intra(candidate.mesh, candidate.micro_batch):
        costed = Costed(problem=problem, setting=setting, intra=solution)
        plan = shortest(costed.stage_problem)
        if plan.status is not Status.INFEASIBLE:
            return price(costed, plan, bound=0.0)
    return None


def small_problem() -> SearchProblem:
    """The problem of the `small` fixture."""
    return Transformer(**LLAMA_8B).problem(topology(2, memory=80e9), batch=64)


def test_runners_up_are_distinct_meshes(small: Outcome) -> None:
    unnamed = [a.mesh for a in small.alternatives if a.seeded_as is None]
    assert len(set(unnamed)) == len(unnamed)
    assert small.best.candidate.mesh not in unnamed


# --------------------------------------------------------------------------- pins


@pytest.mark.parametrize(
    "pins",
    [
        {"tp": 8},
        {"pp": 4, "schedule": "1f1b", "zero": 1},
        {"tp": 2, "pp": 2, "dp": 4, "micro_batch": 1},
        {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
    ],
)
def test_pins_are_kept(pins: dict) -> None:
    found = solved(Transformer(**LLAMA_8B), topology(2, memory=80e9), batch=64, pins=pins)
    c = found.best.candidate
    kept = c.mesh.sizes | {
        "zero": c.zero_stage, "micro_batch": c.micro_batch, "schedule": c.schedule,
        "virtual_stages": c.virtual_stages,
    }  # fmt: skip
    assert {name: kept[name] for name in pins} == pins


def test_pinned_recompute_is_used_where_a_block_has_it() -> None:
    found = solved(
        Transformer(**LLAMA_8B), topology(2, memory=80e9), batch=64, pins={"recompute": "full", "pp": 1}
    )
    modes = {name: mode for stage in found.best.stages for name, _, mode in stage.blocks}
    assert modes["layer"] == "full"


# --------------------------------------------------------------------------- answers that must hold


def test_tensor_groups_stay_inside_a_node() -> None:
    found = solved(Transformer(**LLAMA_70B, kv=16), topology(8, memory=80e9), batch=256)
    assert found.best.candidate.mesh.tp <= 8


def test_experts_that_exceed_a_device_are_split() -> None:
    found = solved(Transformer(**MIXTRAL), topology(2, memory=80e9), batch=128)
    mesh = found.best.candidate.mesh
    assert mesh.ep * mesh.tp * mesh.pp > 1 or found.best.candidate.zero_stage == 3
    assert found.reasons


def test_sizes_need_not_be_powers_of_two() -> None:
    found = solved(Transformer(**LLAMA_8B), topology(3, memory=80e9), batch=96)
    assert found.best.candidate.mesh.devices == 24


def test_nothing_fits_says_what_would() -> None:
    model, cluster = Transformer(**LLAMA_70B), topology(1, memory=24e9)
    found = search(model.problem(cluster, batch=64), model.pricing(cluster))
    assert isinstance(found, Infeasible)
    assert found.short_by_bytes > 50e9
    assert "nodes" in found.nearest_fix and "GiB" in found.reason
    nodes = int(found.nearest_fix.split("(")[1].split()[0])
    larger = topology(nodes, memory=24e9)
    assert isinstance(search(model.problem(larger, batch=64), model.pricing(larger)), Outcome)


def test_a_pin_that_does_not_fit_is_named() -> None:
    model, cluster = Transformer(**LLAMA_70B), topology(8, memory=80e9)
    pins = {"tp": 1, "pp": 1, "zero": 0}
    found = search(model.problem(cluster, batch=64), model.pricing(cluster), pins=pins)
    assert isinstance(found, Infeasible)
    assert "tp=1, pp=1, zero=0" in found.nearest_fix


def test_a_pin_along_which_nothing_splits_is_named() -> None:
    """Eight key heads do not go to sixteen ranks; batch and devices would divide."""
    model, cluster = Transformer(**LLAMA_8B), topology(4, memory=80e9)
    found = search(model.problem(cluster, batch=64), model.pricing(cluster), pins={"tp": 16})
    assert isinstance(found, Infeasible)
    assert "cannot be split with tp=16" in found.reason
    assert found.fixes == ("drop tp=16",)


def test_where_nothing_splits_no_part_of_the_cluster_is_tried() -> None:
    model, cluster = Transformer(**LLAMA_8B), topology(64, memory=80e9)
    run = Exploration(model.problem(cluster, batch=4096), model.pricing(cluster), {"tp": 16})
    run.explore()
    tried = len(run.entries)
    run.explore_parts()
    assert tried
    assert len(run.entries) == tried


def test_a_batch_that_no_mesh_divides() -> None:
    model, cluster = Transformer(**(LLAMA_8B | {"layers": 3})), topology(7, memory=80e9, per_node=1)
    found = search(model.problem(cluster, batch=10), model.pricing(cluster))
    assert isinstance(found, Outcome)
    assert found.best.candidate.mesh.sizes == {"pp": 1, "dp": 5, "cp": 1, "ep": 1, "tp": 1}
    assert found.reasons[0].startswith("5 of 7 devices are used: no plan on all of them divides")
    found = search(model.problem(cluster, batch=10), model.pricing(cluster), pins={"dp": 7})
    assert isinstance(found, Infeasible)
    assert "70" in found.nearest_fix


# --------------------------------------------------------------------------- limits and speed


def test_a_time_limit_returns_the_incumbent_with_an_honest_gap() -> None:
    found = solved(Transformer(**LLAMA_70B), topology(16, memory=80e9), batch=512, time_limit_s=0.0)
    assert not found.summary.complete
    full = solved(Transformer(**LLAMA_70B), topology(16, memory=80e9), batch=512)
    assert found.summary.lower_bound_s <= full.best.step_time_s <= found.best.step_time_s
    assert found.summary.gap > 0


def test_progress_is_told() -> None:
    told: list[SearchProgress] = []
    solved(Transformer(**LLAMA_8B), topology(2, memory=80e9), batch=64, progress=told.append)
    assert told[-1].incumbent_s is not None
    assert all(a.priced <= b.priced for a, b in pairwise(told))


def test_sixteen_thousand_devices_need_few_intra_op_calls(on_this_machine: Callable[[float], float]) -> None:
    model, cluster = Transformer(**LLAMA_405B), topology(2048, memory=80e9)
    problem, pricing = model.problem(cluster, batch=2048), model.pricing(cluster)
    start = time.process_time()
    found = search(problem, pricing)
    seconds = time.process_time() - start
    assert isinstance(found, Outcome)
    assert found.summary.gap < 0.01
    assert len(set(model.calls)) <= 25
    assert seconds < on_this_machine(3.0)


def test_a_smaller_optimizer_needs_no_more_memory() -> None:
    model, cluster = Transformer(**LLAMA_8B), topology(1, memory=80e9)
    problem = replace(model.problem(cluster, batch=16), tp_sizes=(8,))
    peaks = []
    for name in ("sgd", "adamw"):
        pins = {"tp": 8, "pp": 1, "micro_batch": 1, "recompute": "none"}
        found = search(replace(problem, optimizer=OPTIMIZERS[name]), model.pricing(cluster), pins=pins)
        assert isinstance(found, Outcome)
        peaks.append(found.best.prediction.memory_by_kind_bytes["optimizer"])
    assert peaks[0] == pytest.approx(peaks[1] / 3), "4 bytes of master copy against 12"


def test_of_equal_plans_the_simpler_wins() -> None:
    """Costs that no choice changes: one axis beats two."""
    model, cluster = Transformer(**LLAMA_8B), topology(1, memory=1e15, per_node=4)
    problem = model.problem(cluster, batch=8)
    still = {name: replace(facts, forward_flops_per_sample=0.0) for name, facts in problem.blocks.items()}
    cost = BlockCost(
        name="", forward_s=1e-3, backward_s=1e-3, saved_bytes={Recompute.NONE: 0.0}, output_bytes=0.0
    )  # fmt: skip

    def intra(mesh: Mesh, micro_batch: int) -> tuple[IntraSolution, ...]:
        seconds = micro_batch * 4 / (mesh.tp * mesh.cp) * 1e-4  # with all 4 devices: equal for every mesh
        blocks = {name: replace(cost, name=name, forward_s=seconds, backward_s=seconds) for name in still}
        return (
            IntraSolution(blocks=blocks, sequence_parallel=False, objective_s=1, bound_s=1, optimal=True),
        )

    pricing = replace(model.pricing(cluster), intra=intra)
    found = search(replace(problem, blocks=still), pricing, pins={"pp": 1})
    assert isinstance(found, Outcome)
    axes = [axis for axis, size in found.best.candidate.mesh.sizes.items() if size > 1]
    assert len(axes) == 1 and found.best.candidate.zero_stage == 0


def test_fixes_are_ranked_and_each_says_what_then_fits() -> None:
    model, cluster = Transformer(**LLAMA_70B), topology(1, memory=24e9)
    found = search(model.problem(cluster, batch=64), model.pricing(cluster))
    assert isinstance(found, Infeasible)
    assert len(found.fixes) >= 2
    assert found.nearest_fix.startswith(found.fixes[0])
    assert any("of memory or more" in fix for fix in found.fixes)


# --------------------------------------------------------------------------- stopped searches


def interrupting(after: int) -> Callable[[SearchProgress], None]:
    """Sends SIGINT to this process, as Ctrl-C does, after so many steps."""
    seen: list[SearchProgress] = []

    def on_progress(state: SearchProgress) -> None:
        seen.append(state)
        if len(seen) == after:
            assert state.incumbent_s is not None, "experts are priced before the first step"
            signal.raise_signal(signal.SIGINT)

    return on_progress


@pytest.mark.parametrize("after", [1, 5, 20])
def test_an_interruption_returns_the_best_so_far_with_its_honest_gap(small: Outcome, after: int) -> None:
    model, cluster = Transformer(**LLAMA_8B), topology(2, memory=80e9)
    found = solved(model, cluster, batch=64, progress=interrupting(after))
    assert not found.summary.complete
    assert found.best.step_time_s >= small.best.step_time_s * (1 - 1e-9)
    assert found.summary.lower_bound_s <= small.best.step_time_s, "what was not looked at may be that good"
    assert found.summary.gap == pytest.approx(1 - found.summary.lower_bound_s / found.best.step_time_s)


def test_an_interruption_before_there_is_a_plan_ends_the_search() -> None:
    model, cluster = Transformer(**LLAMA_8B), topology(2, memory=80e9)

    def intra(mesh: Mesh, micro_batch: int) -> tuple[IntraSolution, ...]:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal comes first")

    with pytest.raises(KeyboardInterrupt):
        search(model.problem(cluster, batch=64), replace(model.pricing(cluster), intra=intra))


@pytest.mark.parametrize("seed", range(6))
def test_floors_of_larger_microbatches_rule_out_nothing_better(seed: int) -> None:
    """With nothing known of larger microbatches the search asks more, and answers the same."""
    draw = random.Random(seed)
    model = Transformer(
        layers=draw.randint(2, 6), hidden=2048, ffn=8192, vocab=32000, seq=2048, kv=draw.choice([2, 4]),
        experts=draw.choice([0, 4]),
    )  # fmt: skip
    cluster = topology(2, memory=draw.choice([6e9, 12e9, 40e9]), per_node=4)
    problem, pricing = model.problem(cluster, batch=draw.choice([16, 24])), model.pricing(cluster)
    known = search(problem, pricing)
    unknown = search(problem, replace(pricing, batch_slack=1.0))
    assert isinstance(known, Outcome) == isinstance(unknown, Outcome)
    if isinstance(known, Outcome) and isinstance(unknown, Outcome):
        assert known.best.step_time_s == pytest.approx(unknown.best.step_time_s, rel=1e-9)
