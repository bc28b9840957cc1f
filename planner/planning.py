"""A built graph, a cluster and a job in, a `Plan` (or why there is none) out.

named iteration spaces -> search meshes, asking the intra-op solver
-> a plan with splits in words, predictions, reasons and a certificate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, TypedDict

from .context import check_context, context_sizes
from .cutting import check_stages, uncuttable
from .divisibility import check_tensor_size, framework_splits, head_sizes
from .errors import ModelError
from .estimate import collectives, compute
from .estimate.as_run import as_run
from .estimate.frameworks import FRAMEWORKS, OWN_FRAMEWORK
from .estimate.measured import Calibrated, calibrated
from .facts import cluster_info, layout_facts, model_info, model_warnings, size_reasons
from .graph import DTYPE_BYTES, Block, Graph
from .options import check_pins
from .plan import Infeasible, Plan
from .problem import BlockFacts, Outcome, Pricing, SearchProblem, SearchProgress
from .profile import OPTIMIZERS, Framework, Job
from .routed import check_routing
from .routed import obstacle as routing_obstacle
from .rules.choices import BATCH, SEQUENCE
from .solve.batch_slack import batch_slack, kernel_slack
from .solve.block_cost import sparse_parameters
from .solve.intra_op import IntraOp, Prices, Splits
from .solve.search import search
from .topology import Topology

MAX_TP = 64
"""Largest tensor-parallel size tried; beyond a rack-scale NVLink domain no measured plan splits further."""
GIB = 2.0**30


class Asked(TypedDict, total=False):
    """Keyword arguments of `plan_graph`."""

    pins: Mapping[str, int | str] | None
    source: str
    top: int
    time_limit_s: float | None
    progress: Callable[[str], None] | None


def plan_graph(
    graph: Graph,
    topology: Topology,
    job: Job,
    *,
    pins: Mapping[str, int | str] | None = None,
    source: str = "",
    top: int = 5,
    time_limit_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan | Infeasible:
    """Plan a graph that is already built. Raises `OptionError` for pins that cannot hold."""
    if not has_dim(graph, BATCH):
        raise ModelError(
            "no input of the model has a batch dim: example_inputs(batch, seq) must use batch first"
        )
    made = prepared(graph, topology, job)
    problem = made.problem
    checked = check_pins(
        pins,
        devices=topology.devices,
        global_batch=job.global_batch,
        layers=max(problem.layers, 1),
        cluster=topology.name,
    )
    check_tensor(made.graph, problem, checked)
    check_stages(made.graph, int(checked.get("pp", 1)), job.framework)
    check_context(made.graph, int(checked.get("cp", 1)), job.framework)
    found = search(
        problem,
        made.pricing,
        pins=checked,
        top=top,
        time_limit_s=time_limit_s,
        progress=teller(progress),
    )
    if isinstance(found, Infeasible):
        return found
    plan = plan_of(graph, topology, job, found, source=source)
    return made.with_calibration(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A graph on one cluster with the cost models that hold there."""

    graph: Graph
    """As the framework runs it."""
    topology: Topology
    """Its device at the clocks that it sustains."""
    framework: Framework
    problem: SearchProblem
    intra: IntraOp
    pricing: Pricing
    calibrated: Calibrated
    """The scales behind it, measured here or fitted on published runs."""

    def with_calibration(self, plan: Plan) -> Plan:
        """The plan with the interval and the assumptions of its scales, where there are any."""
        return self.calibrated.annotate(plan)


def prepared(graph: Graph, topology: Topology, job: Job) -> Prepared:
    """Everything that a search on this cluster asks."""
    found = calibrated(topology, FRAMEWORKS[job.framework])
    priced, framework = found.topology, found.framework
    run = as_run(graph, framework, precision=job.dtype, architecture=priced.device.architecture)
    model = collectives.model(priced)
    prices = Prices(kernel_time=compute.kernel_time, collective_time=model.time)
    intra = IntraOp(run, priced, framework, prices)
    return Prepared(
        graph=run,
        topology=priced,
        framework=framework,
        problem=replace(search_problem(run, priced, job), framework=framework),
        intra=intra,
        pricing=Pricing(
            intra=intra,
            floor=intra.floor,
            splits_floor=intra.splits_floor,
            collective_time=model.time,
            kernel_time=compute.kernel_time,
            batch_slack=batch_slack(priced),
            kernel_slack=kernel_slack(priced),
        ),
        calibrated=found,
    )


def check_tensor(graph: Graph, problem: SearchProblem, pins: Mapping[str, int | str]) -> None:
    """Raise `OptionError` for a pinned tp that the model's sizes do not allow."""
    tp = pins.get("tp")
    if isinstance(tp, int) and tp not in problem.tp_sizes:
        check_tensor_size(graph, tp, problem.tp_sizes, problem.job.framework)
        check_routing(graph, tp, problem.tp_sizes, problem.job.framework)


def teller(tell: Callable[[str], None] | None) -> Callable[[SearchProgress], None] | None:
    """The search's news as lines of text."""
    if tell is None:
        return None

    def on_progress(state: SearchProgress) -> None:
        best = "none yet" if state.incumbent_s is None else f"{state.incumbent_s:.3f} s"
        tell(f"searching: {state.considered} candidates, {state.pruned} ruled out, best {best}")

    return on_progress


# --------------------------------------------------------------------------- the problem


def search_problem(graph: Graph, topology: Topology, job: Job) -> SearchProblem:
    """What the outer search needs to know of the model."""
    sparse = sparse_parameters(graph)
    return SearchProblem(
        chain=graph.chain,
        layer_classes=frozenset(name for name, block in graph.blocks.items() if block.repeated),
        blocks={name: _facts(graph, block, sparse) for name, block in graph.blocks.items()},
        topology=topology,
        job=job,
        framework=FRAMEWORKS[job.framework],
        optimizer=OPTIMIZERS[job.optimizer],
        tokens_per_sample=job.seq_len,
        tp_sizes=tensor_sizes(graph, topology.devices, job.framework),
        ep_sizes=expert_sizes(graph, topology.devices),
        pipelines=uncuttable(graph, job.framework) is None,
        cp_sizes=context_sizes(graph, devices=topology.devices, framework=job.framework),
    )


def _facts(graph: Graph, block: Block, sparse: frozenset[str]) -> BlockFacts:
    dense = sum(v.numel for v in block.parameters if v.name not in sparse)
    total = sum(v.numel for v in block.parameters)
    trainable = sum(v.numel for v in block.parameters if v.trainable)
    handed = graph.boundary.get(block.name)
    boundary = 0.0
    if handed is not None:
        op = block.ops[handed[0]]
        write = op.writes[handed[1]]
        count = math.prod(op.size(label) for label in write.labels)
        boundary = count * DTYPE_BYTES[write.dtype] / graph.batch
    widths = {DTYPE_BYTES[v.dtype] for v in block.parameters}
    return BlockFacts(
        name=block.name,
        forward_flops_per_sample=sum(op.forward_flops for op in block.ops) / graph.batch,
        dense_numel=dense,
        sparse_numel=total - dense,
        element_bytes=min(widths, default=2),
        trainable_share=trainable / total if total else 1.0,
        boundary_bytes_per_sample=boundary,
    )


def has_dim(graph: Graph, name: str) -> bool:
    """Whether any op iterates over a dim of that name."""
    return any(dim.name == name for block in graph.blocks.values() for op in block.ops for dim in op.dims)


def tokens_per_sample(graph: Graph) -> int:
    """Length of the sequences that were traced; 1 for models without a sequence."""
    return graph.seq_len if has_dim(graph, SEQUENCE) else 1


def tensor_sizes(graph: Graph, devices: int, framework: str = OWN_FRAMEWORK) -> tuple[int, ...]:
    """Sizes that split every attention by heads and every large matrix by a dim, as the framework can."""
    sizes = [n for n in range(1, min(devices, MAX_TP) + 1) if devices % n == 0]
    wide = _wide_ops(graph)
    fitting = (n for n in sizes if n == 1 or all(_splits(op, n) for op in wide))
    return tuple(
        n
        for n in fitting
        if framework_splits(graph, n, framework) and routing_obstacle(graph, n, framework) is None
    )


def _wide_ops(graph: Graph) -> list:
    return [
        op
        for block in graph.blocks.values()
        if block.repeated or len(graph.blocks) == 1
        for op in block.ops
        if op.family in ("attention", "grouped_gemm")
        or (op.family == "gemm" and any(read.kind == "parameter" for read in op.reads))
    ]


def _splits(op: Any, degree: int) -> bool:
    """Whether one of the op's own dims divides: heads for attention, columns or rows of a product."""
    if op.family == "attention":
        heads = [size for sizes in head_sizes(op) for size in sizes]
        return any(size % degree == 0 for size in heads)
    sides = (*op.gemm.n, *op.gemm.k)
    narrow = all(dim.size < degree for dim in op.dims if dim.label in op.gemm.n)
    return narrow or any(op.size(label) % degree == 0 for label in sides)


def expert_sizes(graph: Graph, devices: int) -> tuple[int, ...]:
    """Expert-parallel sizes: divisors of every expert count, or of the devices for large tables."""
    counts = {
        op.size(op.experts) for block in graph.blocks.values() for op in block.ops if op.experts is not None
    }
    if counts:
        common = math.gcd(*counts)
        return tuple(n for n in range(1, common + 1) if common % n == 0 and devices % n == 0)
    if graph.table_fqns:
        return tuple(n for n in range(1, devices + 1) if devices % n == 0)
    return (1,)


# --------------------------------------------------------------------------- the plan


def plan_of(graph: Graph, topology: Topology, job: Job, found: Outcome, *, source: str) -> Plan:
    """The document of what was found for a graph, as it was traced."""
    best = found.best
    candidate = best.candidate
    if candidate.mesh.devices < topology.devices:
        topology = topology.part(candidate.mesh.devices)
    splits = best.intra.splits
    assert isinstance(splits, Splits)
    return Plan(
        tpplan_version=metadata.version("tpplan"),
        model=model_info(graph, job, source),
        cluster=cluster_info(topology),
        job=job,
        mesh=candidate.mesh,
        zero_stage=candidate.zero_stage,
        shard_group=candidate.shard_group,
        micro_batch=candidate.micro_batch,
        num_microbatches=candidate.microbatches,
        schedule=candidate.schedule,
        virtual_stages=candidate.virtual_stages,
        sequence_parallel=best.intra.sequence_parallel,
        recompute=best.recompute,
        stages=best.stages,
        **layout_facts(graph, splits),
        communications=best.communications,
        predicted=best.prediction,
        search=found.summary,
        reasons=(*size_reasons(graph, topology, splits), *found.reasons),
        alternatives=found.alternatives,
        warnings=(*model_warnings(graph, topology, candidate.mesh.tp), *found.warnings),
    )
