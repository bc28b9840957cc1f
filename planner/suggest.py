"""The main job: a model and a topology in, a `Plan` (or why there is none) out.

trace or load the graph -> named iteration spaces -> search meshes, asking the intra-op solver
-> a plan with splits in words, predictions, reasons and a certificate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..topologies import load
from .context import check_context, context_sizes
from .coverage import check_covered, in_words, uncovered
from .describe import (
    layer_lists,
    module_layouts,
    parameter_placements,
    planned_reshards,
    splits_in_words,
)
from .divisibility import check_tensor_size, vocabulary_warnings
from .errors import ModelError
from .estimate import collectives, compute
from .estimate.as_run import as_run
from .estimate.calibration import calibration, fitted_interval, sustained
from .estimate.frameworks import FRAMEWORKS
from .facts import cluster_info, model_info, size_reasons
from .fold import build
from .graph import DTYPE_BYTES, Block, Graph
from .graph_cache import TraceOptions, load_or_trace
from .objective import plan_for
from .options import check_names, check_pins, check_sizes, choose_dtype, job_from_options
from .plan import Infeasible, Plan
from .problem import BlockFacts, Outcome, Pricing, SearchProblem, SearchProgress
from .profile import OPTIMIZERS, Framework, Job
from .rules.choices import BATCH, SEQUENCE
from .sensitivity import sensitivity
from .solve.block_cost import sparse_parameters
from .solve.intra_op import Prices, Splits, intra_op
from .solve.search import search
from .topology import Topology

if TYPE_CHECKING:
    from torch import nn

MAX_TP = 64
"""Largest tensor-parallel size tried; beyond a rack-scale NVLink domain no measured plan splits further."""


def suggest(
    model: str | nn.Module,
    example_inputs: Any = None,
    topology: str | Topology = "dgx-h100",
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    framework: str = "tpplan",
    mode: str = "train",
    objective: str = "throughput",
    pins: Mapping[str, int | str] | None = None,
    nodes: int | None = None,
    top: int = 5,
    time_limit_s: float | None = None,
    cache: bool = True,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
    loss: Callable[..., Any] | None = None,
    strict: bool = False,
    sensitive: bool = False,
) -> Plan | Infeasible:
    """Plan how to split `model` over `topology`.

    Args:
        model: `model.py[:factory]`, a Hugging Face `config.json` or folder, a `.pt2` file, or an
            `nn.Module` (then `example_inputs` is needed; its weights are neither read nor moved).
        example_inputs: for a module: a tuple of arguments, a dict of keyword arguments, or a function
            of (batch, seq) that returns one.
        topology: a bundled name (`dgx-h100:8` for eight nodes), a YAML file, or a `Topology`.
        global_batch: samples per optimizer step; default about 4M tokens.
        seq_len: tokens per sample given to `example_inputs`; default what the model says: the default of
            its `seq` parameter, or a configuration's longest sequence, up to 8,192.
        dtype: `bf16`, `fp16` or `fp32`; default the first that the device computes in.
        pins: choices to keep: mesh axes (`tp`, ...), `zero`, `micro_batch`, `recompute`, `schedule`.
        nodes: overrides the topology's number of nodes.
        top: how many runners-up to list.
        time_limit_s: stop searching after so many seconds, with the gap reached.
        cache: whether traced graphs are kept on disk (in `cache_dir`).
        progress: called with a line of text whenever there is news.
        loss: for a module: a function of (outputs, inputs); default its own loss.
        strict: whether an op without a sharding rule is an error.
        sensitive: plan again with slower links, more memory and fewer devices, and tell in
            `Plan.changes` what would change the answer (a few more searches).

    Raises:
        UserError: something given is wrong; the message says what and what would be right.
    """
    check_names(mode=mode, objective=objective, dtype=dtype, optimizer=optimizer, framework=framework)
    check_sizes(global_batch=global_batch, seq_len=seq_len, nodes=nodes, top=top, time_limit_s=time_limit_s)
    cluster = load(topology, nodes=nodes) if isinstance(topology, str) else _resized(topology, nodes)
    chosen = choose_dtype(dtype, cluster.device)
    tell = progress or (lambda _: None)
    tell("tracing the model")
    graph = load_graph(
        model,
        seq_len=seq_len,
        dtype=chosen,
        mode=mode,
        example_inputs=example_inputs,
        loss=loss,
        cache=cache,
        cache_dir=cache_dir,
    )
    if strict:
        check_covered(graph)
    source = model if isinstance(model, str) else type(model).__name__
    job = job_from_options(
        mode=mode,
        objective=objective,
        global_batch=global_batch,
        seq_len=graph.seq_len if has_dim(graph, SEQUENCE) else 1,
        dtype=chosen,
        optimizer=optimizer,
        framework=framework,
        devices=cluster.devices,
        device=cluster.device,
    )

    def plan_on(on: Topology) -> Plan | Infeasible:
        return plan_graph(
            graph, on, job, pins=pins, source=source, top=top, time_limit_s=time_limit_s, progress=tell
        )

    found = plan_for(objective, cluster, plan_on)
    if not sensitive or isinstance(found, Infeasible):
        return found
    return replace(found, changes=sensitivity(found, cluster, plan_on))


def _resized(topology: Topology, nodes: int | None) -> Topology:
    return topology if nodes is None else topology.with_nodes(nodes)


def load_graph(
    model: str | nn.Module,
    *,
    seq_len: int | None,
    dtype: str,
    mode: str = "train",
    example_inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    cache: bool = True,
    cache_dir: Path | None = None,
) -> Graph:
    """The graph of a model, from the cache or traced; arguments as for `suggest`."""
    options = TraceOptions(seq_len=seq_len, dtype=dtype, mode=mode)
    if isinstance(model, str):
        return build(load_or_trace(model, options, cache_dir=cache_dir, use_cache=cache))
    from .trace import trace_source  # a module is at hand, so torch is loaded already

    traced = trace_source(
        model,
        seq_len=options.seq_len,
        example_inputs=example_inputs,
        loss=loss,
        batch=options.batch,
        dtype=options.dtype,
        mode=options.mode,
    )
    return build(traced)


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
    framework = FRAMEWORKS[job.framework]
    fitted = calibration(topology.device, framework)
    device = sustained(topology.device, framework, scale=fitted.scale if fitted else 1.0)
    priced = replace(topology, device=device)
    as_traced, graph = graph, as_run(graph, framework, precision=job.dtype)
    problem = search_problem(graph, priced, job)
    checked = check_pins(
        pins,
        devices=topology.devices,
        global_batch=job.global_batch,
        layers=max(problem.layers, 1),
        cluster=topology.name,
    )
    check_context(graph, int(checked.get("cp", 1)), job.framework)
    tp = checked.get("tp")
    if isinstance(tp, int) and tp not in problem.tp_sizes:
        check_tensor_size(graph, tp, problem.tp_sizes)
    model = collectives.model(priced)
    prices = Prices(kernel_time=compute.kernel_time, collective_time=model.time)
    pricing = Pricing(
        intra=intra_op(graph, priced, framework, prices),
        collective_time=model.time,
        kernel_time=compute.kernel_time,
    )
    found = search(
        problem, pricing, pins=checked, top=top, time_limit_s=time_limit_s, progress=_teller(progress)
    )
    if isinstance(found, Infeasible):
        return found
    plan = _plan(as_traced, topology, job, found, source=source, framework=framework)
    if fitted is None:
        return plan
    return replace(plan, predicted=fitted_interval(plan.predicted), assumptions=(str(fitted),))


def _teller(tell: Callable[[str], None] | None) -> Callable[[SearchProgress], None] | None:
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
        tp_sizes=tensor_sizes(graph, topology.devices),
        ep_sizes=expert_sizes(graph, topology.devices),
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
        count = math.prod(op.size(label) for axis in write.axes for label in axis)
        boundary = count * DTYPE_BYTES[write.dtype] / graph.batch
    flops = sum(
        factor * math.prod(op.size(label) for label in labels)
        for op in block.ops
        for factor, labels in op.flops
    )
    widths = {DTYPE_BYTES[v.dtype] for v in block.parameters}
    return BlockFacts(
        name=block.name,
        forward_flops_per_sample=flops / graph.batch,
        dense_numel=dense,
        sparse_numel=total - dense,
        element_bytes=min(widths, default=2),
        trainable_share=trainable / total if total else 1.0,
        boundary_bytes_per_sample=boundary,
    )


def has_dim(graph: Graph, name: str) -> bool:
    """Whether any op iterates over a dim of that name."""
    return any(dim.name == name for block in graph.blocks.values() for op in block.ops for dim in op.dims)


def tensor_sizes(graph: Graph, devices: int) -> tuple[int, ...]:
    """Tensor-parallel sizes that split every attention by heads and every large matrix by a dim."""
    sizes = [n for n in range(1, min(devices, MAX_TP) + 1) if devices % n == 0]
    return tuple(n for n in sizes if n == 1 or all(_splits(op, n) for op in _wide_ops(graph)))


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
        heads = [dim for dim in op.dims if dim.label in ("kv", "g")]
        return not heads or any(dim.size % degree == 0 for dim in heads)
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


def _plan(
    graph: Graph, topology: Topology, job: Job, found: Outcome, *, source: str, framework: Framework
) -> Plan:
    best = found.best
    candidate = best.candidate
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
        splits=splits_in_words(graph, splits),
        parameters=parameter_placements(graph, splits),
        modules=module_layouts(graph, splits),
        reshards=planned_reshards(graph, splits),
        layer_lists=layer_lists(graph),
        communications=best.communications,
        predicted=best.prediction,
        search=found.summary,
        reasons=(*size_reasons(graph, topology, splits), *found.reasons),
        alternatives=found.alternatives,
        pareto=found.pareto,
        warnings=(
            *graph.warnings,
            *map(in_words, uncovered(graph, topology.device)),
            *vocabulary_warnings(graph, candidate.mesh.tp),
            *found.warnings,
        ),
    )
