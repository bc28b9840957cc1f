"""A priced candidate as a plan, with its reasons and runners-up; or why nothing serves."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

from ..cost import Origin
from ..estimate.compute import peak_flops
from ..facts import (
    cluster_info,
    forward_flops_per_sample,
    layout_facts,
    model_info,
    model_warnings,
    size_reasons,
)
from ..plan import (
    Alternative,
    Infeasible,
    MemoryPart,
    Plan,
    Prediction,
    SearchSummary,
    Serving,
    Stage,
    TimePart,
)
from ..problem import SCHEDULE_NONE
from ..profile import Job
from ..solve.intra_op import Splits
from .replica import Holding, Span, communications
from .search import LATENCY, Served, ServeProblem

GIB = 2.0**30
MS = 1e3
ERROR_BAND = (0.88, 1.06)
"""Measured over predicted time between tokens: 77 % of 26 vLLM runs on H100 lie within (docs/serving.md)."""
SOLVER = "every replica size priced"


def serving_plan(
    problem: ServeProblem, ranked: list[Served], job: Job, *, source: str, tried: int, top: int
) -> Plan:
    """The plan of the best candidate."""
    best, graph = ranked[0], problem.graph
    splits = best.solution.splits
    assert isinstance(splits, Splits)
    return Plan(
        tpplan_version=metadata.version("tpplan"),
        model=model_info(graph, job, source),
        cluster=cluster_info(problem.topology),
        job=replace(job, global_batch=best.in_flight),
        mesh=best.mesh,
        zero_stage=0,
        micro_batch=-(-best.sequences // best.mesh.pp),
        num_microbatches=best.mesh.pp,
        schedule=SCHEDULE_NONE,
        virtual_stages=1,
        sequence_parallel=False,
        recompute="none",
        stages=tuple(_stages(problem, best)),
        **layout_facts(best.graph, splits),
        communications=communications(best.graph, best.solution, _slowest(best), passes=float(best.mesh.pp)),
        predicted=_prediction(problem, best),
        search=SearchSummary(
            meshes_considered=tried,
            meshes_pruned=0,
            pruned_by=(),
            lower_bound_s=best.token_time_s,
            gap=0.0,
            solver=SOLVER,
            complete=True,
        ),
        reasons=(*size_reasons(graph, problem.topology, splits), *_reasons(problem, ranked)),
        alternatives=tuple(_alternative(problem, other, best) for other in ranked[1 : top + 1]),
        warnings=(*model_warnings(graph, problem.topology, best.mesh.tp), *_warnings(problem, best)),
        assumptions=(f"engine {problem.engine.name}: {problem.engine.source}",),
        serving=_serving(problem, best),
    )


def nothing_serves(problem: ServeProblem, lacking: list[Served]) -> Infeasible:
    """The answer when no replica size holds one sequence."""
    device = problem.topology.device
    if not lacking:
        return Infeasible(
            reason=f"no replica size divides {problem.topology.devices} devices and the model's sizes "
            f"(tp in {problem.tp_sizes}, ep in {problem.ep_sizes})",
            short_by_bytes=0.0,
            nearest_fix="drop a --set, or another number of nodes",
        )
    closest = lacking[0]
    fullest = min(closest.holdings, key=lambda h: h.cache_budget_bytes)
    needed = fullest.cache_bytes_per_token * problem.sequence_len
    short = needed - fullest.cache_budget_bytes
    return Infeasible(
        reason=(
            f"no replica fits: the closest ({closest.mesh}) holds {fullest.weights_bytes / GIB:.1f} GiB of "
            f"weights on {device.name} with {device.memory_bytes / GIB:.1f} GiB, and one sequence of "
            f"{problem.sequence_len:,} tokens needs {needed / GIB:.2f} GiB of cache"
        ),
        short_by_bytes=short,
        nearest_fix="more devices for one replica, 8-bit weights (--dtype fp8), or shorter sequences",
        closest=closest.mesh.sizes,
    )


def _slowest(served: Served) -> Span:
    return served.cuts[max(range(len(served.cuts)), key=served.stage_s.__getitem__)]


def _stages(problem: ServeProblem, served: Served):
    graph, layer = problem.graph, 0
    for index, (cut, seconds, held) in enumerate(
        zip(served.cuts, served.stage_s, served.holdings, strict=True)
    ):
        runs: list[tuple[str, int, str]] = []
        for name in graph.chain[cut.first : cut.stop]:
            if runs and runs[-1][0] == name:
                runs[-1] = (name, runs[-1][1] + 1, "none")
            else:
                runs.append((name, 1, "none"))
        layers = sum(n for name, n, _ in runs if graph.blocks[name].repeated)
        memory = _memory(problem, served, held)
        yield Stage(
            index=index,
            blocks=tuple(runs),
            first_layer=layer,
            layers=layers,
            forward_s=seconds,
            backward_s=0.0,
            in_flight=1,
            memory=memory,
            peak_memory_bytes=sum(part.bytes for part in memory),
        )
        layer += layers


def _memory(problem: ServeProblem, served: Served, held: Holding) -> tuple[MemoryPart, ...]:
    cache = held.cache_bytes_per_token * problem.sequence_len * served.sequences / served.mesh.ep
    return (
        MemoryPart(kind="parameters", bytes=held.weights_bytes),
        MemoryPart(kind="cache", bytes=cache),
        MemoryPart(kind="working", bytes=held.working_bytes),
        MemoryPart(kind="context", bytes=held.context_bytes),
    )


def _prediction(problem: ServeProblem, served: Served) -> Prediction:
    stages = [_memory(problem, served, held) for held in served.holdings]
    fullest = max(stages, key=lambda parts: sum(part.bytes for part in parts))
    seconds, device = served.token_time_s, problem.topology.device
    rate = served.tokens_per_s / problem.topology.devices
    flops = forward_flops_per_sample(problem.graph) / problem.graph.seq_len
    decode, others = served.decode, seconds - served.decode_s
    origin = Origin.MODELLED
    peak, _ = peak_flops("bf16" if problem.dtype == "fp8" else problem.dtype, device)
    return Prediction(
        step_time_s=seconds,
        step_time_interval_s=(seconds * ERROR_BAND[0], seconds * ERROR_BAND[1]),
        tokens_per_s_per_device=rate,
        model_flops_utilization=flops * rate / peak,
        peak_memory_bytes=sum(part.bytes for part in fullest),
        memory_by_kind_bytes={part.kind: part.bytes for part in fullest},
        device_memory_bytes=device.memory_bytes,
        exposed_communication_s=decode.communication_s * served.mesh.pp,
        bubble_fraction=0.0,
        waterfall=(
            TimePart(
                label="weights, cache and arithmetic",
                seconds=decode.compute_s * served.mesh.pp,
                origin=origin,
            ),
            TimePart(label="collectives", seconds=decode.communication_s * served.mesh.pp, origin=origin),
            TimePart(label="prompts of other sequences", seconds=others, origin=origin),
        ),
        origin=origin,
    )


def _serving(problem: ServeProblem, served: Served) -> Serving:
    return Serving(
        engine=problem.engine.name,
        prompt_len=problem.prompt_len,
        output_len=problem.output_len,
        replicas=served.replicas,
        concurrency=served.in_flight,
        max_concurrency=served.capacity * served.replicas,
        token_time_s=served.token_time_s,
        decode_s=served.decode_s,
        prefill_s=served.prefill_s,
        tokens_per_s=served.tokens_per_s,
        cache_bytes_per_token=max(h.cache_bytes_per_token for h in served.holdings),
        cache_budget_bytes=min(h.cache_budget_bytes for h in served.holdings),
    )


def _reasons(problem: ServeProblem, ranked: list[Served]):
    best = ranked[0]
    held = min(best.holdings, key=lambda h: h.cache_budget_bytes)
    yield (
        f"weights take {held.weights_bytes / GIB:.1f} GiB of a device, which leaves "
        f"{held.cache_budget_bytes / GIB:.1f} GiB for keys and values: {best.capacity:,} sequences of "
        f"{problem.sequence_len:,} tokens a replica"
        + (f", as many as {problem.engine.name} runs at once" if _is_full(problem, best) else "")
    )
    for other in _neighbours(ranked):
        yield f"{_size_text(other)} {_loses_by(problem, other, best)}"


def _is_full(problem: ServeProblem, served: Served) -> bool:
    return served.capacity == problem.engine.max_sequences * served.mesh.ep


def _neighbours(ranked: list[Served]) -> list[Served]:
    """The best candidate with fewer devices a replica, and the best with more."""
    size = ranked[0].replicas
    fewer = [s for s in ranked[1:] if s.replicas > size]
    more = [s for s in ranked[1:] if s.replicas < size]
    return fewer[:1] + more[:1]


def _size_text(served: Served) -> str:
    mesh = served.mesh
    axes = " x ".join(f"{a}{mesh.size(a)}" for a in ("pp", "ep", "tp") if mesh.size(a) > 1) or "one device"
    copies = "replica" if served.replicas == 1 else "replicas"
    return f"{served.replicas} {copies} on {axes} each"


def _loses_by(problem: ServeProblem, other: Served, best: Served) -> str:
    if problem.objective == LATENCY:
        return (
            f"would take {other.token_time_s * MS:.1f} ms between tokens instead of "
            f"{best.token_time_s * MS:.1f}: {_cause(other, best)}"
        )
    lost = 1 - other.tokens_per_s / best.tokens_per_s
    return f"would make {lost:.0%} fewer tokens a second: {_cause(other, best)}"


def _cause(other: Served, best: Served) -> str:
    """Which part of the time between tokens, or which lack of room, costs the other the most."""
    if other.in_flight < best.in_flight:
        return f"room for {other.in_flight:,} sequences instead of {best.in_flight:,}"
    parts = {
        "reading weights and cache": (other.decode.compute_s, best.decode.compute_s),
        "collectives": (other.decode.communication_s, best.decode.communication_s),
        "prompts": (other.token_time_s - other.decode_s, best.token_time_s - best.decode_s),
    }
    name, (theirs, ours) = max(parts.items(), key=lambda item: item[1][0] - item[1][1])
    return f"{name} take {theirs * MS:.1f} ms instead of {ours * MS:.1f}"


def _alternative(problem: ServeProblem, other: Served, best: Served) -> Alternative:
    held = max(other.holdings, key=lambda h: h.weights_bytes)
    return Alternative(
        mesh=other.mesh,
        zero_stage=0,
        micro_batch=-(-other.sequences // other.mesh.pp),
        num_microbatches=other.mesh.pp,
        recompute="none",
        step_time_s=other.token_time_s,
        peak_memory_bytes=sum(part.bytes for part in _memory(problem, other, held)),
        reason=_loses_by(problem, other, best),
        tokens_per_s=other.tokens_per_s,
    )


def _warnings(problem: ServeProblem, best: Served):
    if problem.concurrency is not None and best.in_flight < problem.concurrency:
        yield (
            f"{problem.concurrency:,} sequences were asked for and {best.in_flight:,} of "
            f"{problem.sequence_len:,} tokens fit at once: the others wait"
        )
