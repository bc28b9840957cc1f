"""What this project predicts for a published run whose plan is forced.

In: a `Row`. Out: a `Predicted`: step time, its parts, memory by kind. Nothing is searched: the mesh,
microbatch, ZeRO stage, recompute mode and schedule are the row's; only the splits inside a block are
solved for, as in any plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from tpplan.planner.cost import IntraSolution, Recompute
from tpplan.planner.estimate import collectives, compute
from tpplan.planner.estimate.as_run import as_run
from tpplan.planner.estimate.calibration import calibration, fitted_interval, scale_of, sustained
from tpplan.planner.estimate.step import Setting, spans
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.mesh import Mesh
from tpplan.planner.planning import search_problem
from tpplan.planner.problem import Candidate, Priced, Pricing
from tpplan.planner.profile import Framework, Job
from tpplan.planner.solve.brackets import StagePlan, read_cuts
from tpplan.planner.solve.costed import Costed
from tpplan.planner.solve.intervals import Intervals, StageProblem
from tpplan.planner.solve.intra_op import IntraOp, Prices
from tpplan.planner.solve.price import price
from tpplan.planner.solve.stages import shortest
from tpplan.planner.topology import Topology

from .row_models import Dims
from .row_setting import family_of, framework_of, topology_of
from .rows import Row

BATCH = 2
"""Samples in the trace; costs scale it to the microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a run is predicted to take."""

    step_s: float
    interval_s: tuple[float, float]
    parts_s: dict[str, float]
    """The step by waterfall label."""
    memory_bytes: dict[str, float]
    """The fullest device by kind."""
    framework: str
    device: str


@cache
def graph_of(dims: Dims) -> Graph:
    """The graph of a model with these dims."""
    from tpplan.planner.trace import trace_source

    from .row_models import build_model, example_inputs, loss

    traced = trace_source(
        build_model(dims),
        seq_len=dims.seq_len,
        batch=BATCH,
        example_inputs=lambda batch, _: example_inputs(dims, batch),
        loss=loss,
    )
    return build(traced)


def predict(row: Row, *, scale: float | None = None) -> Predicted:
    """Predict one run on kernels that take `scale` times as long as their curves say (None: as fitted).

    Raises `ValueError` when the row's plan cannot be priced.
    """
    topology, framework = topology_of(row), framework_of(row)
    factor = scale_of(topology.device, framework) if scale is None else scale
    device = sustained(topology.device, framework, scale=factor)
    graph = as_run(graph_of(row.dims), framework, precision=row.plan.precision)
    priced = price_row(row, graph, replace(topology, device=device), framework)
    prediction = priced.prediction
    if scale is None and calibration(topology.device, framework):
        prediction = fitted_interval(prediction)
    return Predicted(
        step_s=prediction.step_time_s,
        interval_s=prediction.step_time_interval_s,
        parts_s={part.label: part.seconds for part in prediction.waterfall},
        memory_bytes=dict(prediction.memory_by_kind_bytes),
        framework=framework.name,
        device=topology.device.name,
    )


def price_row(row: Row, graph: Graph, topology: Topology, framework: Framework) -> Priced:
    """The row's plan, priced. Raises `ValueError` when the model cannot be split so."""
    problem = replace(search_problem(graph, topology, _job(row)), framework=framework)
    model = collectives.model(topology)
    pricing = Pricing(
        intra=IntraOp(
            graph,
            topology,
            framework,
            Prices(kernel_time=compute.kernel_time, collective_time=model.time),
            sequence_parallel=row.plan.sequence_parallel,
        ),
        collective_time=model.time,
        kernel_time=compute.kernel_time,
    )
    candidate = _candidate(row)
    solution = _solution(row, pricing.intra(candidate.mesh, candidate.micro_batch))
    costed = Costed(
        problem=problem,
        setting=Setting(
            candidate=candidate,
            topology=topology,
            framework=framework,
            optimizer=problem.optimizer,
            pricing=pricing,
            span=spans(topology),
        ),
        intra=solution,
        recompute=Recompute(row.plan.recompute),
    )
    return price(costed, _stages(costed.stage_problem), bound=0.0)


def _stages(problem: StageProblem) -> StagePlan:
    """As many layers on every stage, as published runs have; the best stages where they do not divide."""
    layers = [i for i, name in enumerate(problem.chain) if name in problem.layer_classes]
    if len(layers) % problem.stages or layers != list(range(layers[0], layers[-1] + 1)):
        return shortest(problem)
    each = len(layers) // problem.stages
    inner = [layers[0] + rank * each for rank in range(1, problem.stages)]
    return read_cuts(Intervals(problem), (0, *inner, len(problem.chain)))


def _job(row: Row) -> Job:
    return Job(
        mode="train",
        objective="throughput",
        global_batch=row.plan.global_batch,
        seq_len=row.dims.seq_len,
        dtype=row.plan.precision,
        optimizer="adamw",
        framework=family_of(row),
    )


def _candidate(row: Row) -> Candidate:
    plan = row.plan
    return Candidate(
        mesh=Mesh(pp=plan.pp, dp=plan.dp, cp=plan.cp, ep=plan.ep, tp=plan.tp),
        micro_batch=plan.micro_batch,
        microbatches=plan.microbatches,
        zero_stage=plan.zero,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
    )


def _solution(row: Row, frontier: tuple[IntraSolution, ...]) -> IntraSolution:
    """The fastest splits with or without sequence parallelism, as the row says."""
    if not frontier:
        raise ValueError("the model's dims do not divide by the plan")
    wanted = [s for s in frontier if s.sequence_parallel == row.plan.sequence_parallel]
    return (wanted or frontier)[0]


RESERVED = ("tt",)
"""Sources that publish reserved memory: allocated and what the allocator holds beyond it."""


def memory_like(memory: dict[str, float], source: str) -> float:
    """The prediction of what a source measured: allocated or reserved bytes, without the device context."""
    beyond = {"context"} if source in RESERVED else {"context", "reserve"}
    return sum(nbytes for kind, nbytes in memory.items() if kind not in beyond)
