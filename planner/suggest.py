"""The main job: a model and a topology in, a `Plan` (or why there is none) out.

trace or load the graph -> named iteration spaces -> search meshes, asking the intra-op solver
-> a plan with splits in words, predictions, reasons and a certificate
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..topologies.mixed import load_cluster
from .coverage import check_covered
from .errors import OptionError
from .fold import build
from .graph import Graph
from .graph_cache import TraceOptions, load_or_trace
from .mixed import plan_cluster
from .objective import plan_for
from .options import check_names, check_sizes, common_dtype, job_from_options
from .pareto import pareto as pareto_front
from .plan import Infeasible, Plan
from .planning import tokens_per_sample
from .sensitivity import sensitivity
from .serve import plan_serving
from .split_pins import parse_split, pin_splits
from .topology import Cluster, Topology

if TYPE_CHECKING:
    from torch import nn


TRACED_AS = {"fp8": "bf16"}
"""Activations of a model whose weights are 8 bit."""


def suggest(
    model: str | nn.Module,
    example_inputs: Any = None,
    topology: str | Cluster = "dgx-h100",
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    output_len: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    framework: str | None = None,
    mode: str = "train",
    objective: str = "throughput",
    splits: Iterable[str] = (),
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
    pareto: bool = False,
) -> Plan | Infeasible:
    """Plan how to split `model` over `topology`.

    Args:
        model: `model.py[:factory]`, a Hugging Face `config.json` or folder, a `.pt2` file, or an
            `nn.Module` (then `example_inputs` is needed; its weights are neither read nor moved).
        example_inputs: for a module: a tuple of arguments, a dict of keyword arguments, or a function
            of (batch, seq) that returns one.
        topology: a bundled name (`dgx-h100:8` for eight nodes), a YAML file, or a `Topology`.
        global_batch: samples per optimizer step; default about 4M tokens. When serving: sequences in
            flight over the cluster; default as many as fit, or one for the objective latency.
        seq_len: tokens per sample given to `example_inputs`; default what the model says: the default of
            its `seq` parameter, or a configuration's longest sequence, up to 8,192.
        output_len: when serving, tokens that a sequence makes after its prompt of `seq_len`; default 256.
        dtype: `bf16`, `fp16` or `fp32`; default the first that the device computes in.
        splits: splits to keep: `lm_head=Shard(vocab)@tp`, `layers.*.mlp=Replicate@tp` (see `split_pins`).
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
        pareto: plan again for less memory and fewer devices, and tell in `Plan.pareto` which plans none beats
            in time, memory, devices and cost at once (a dozen more searches).

    Raises:
        UserError: something given is wrong; the message says what and what would be right.
    """
    check_names(mode=mode, objective=objective, dtype=dtype, optimizer=optimizer, framework=framework)
    check_sizes(
        global_batch=global_batch,
        seq_len=seq_len,
        output_len=output_len,
        nodes=nodes,
        top=top,
        time_limit_s=time_limit_s,
    )
    cluster = load_cluster(topology, nodes=nodes) if isinstance(topology, str) else _resized(topology, nodes)
    chosen = common_dtype(dtype, cluster, mode=mode)
    serving = mode == "serve"
    tell = progress or (lambda _: None)
    tell("tracing the model")
    graph = load_graph(
        model,
        seq_len=seq_len,
        dtype=TRACED_AS.get(chosen, chosen),
        mode=mode,
        example_inputs=example_inputs,
        loss=loss,
        cache=cache,
        cache_dir=cache_dir,
    )
    if strict:
        check_covered(graph)
    graph = pin_splits(graph, map(parse_split, splits))
    source = model if isinstance(model, str) else type(model).__name__
    job = job_from_options(
        mode=mode,
        objective=objective,
        global_batch=global_batch,
        seq_len=seq_len if serving else tokens_per_sample(graph),
        output_len=output_len,
        dtype=chosen,
        optimizer=optimizer,
        framework=framework,
        devices=cluster.devices,
    )

    def plan_on(on: Cluster) -> Plan | Infeasible:
        if serving and isinstance(on, Topology):
            return plan_serving(
                graph, on, job, concurrency=global_batch, pins=pins, source=source, top=top, progress=tell
            )
        return plan_cluster(
            graph, on, job, pins=pins, source=source, top=top, time_limit_s=time_limit_s, progress=tell
        )

    if not isinstance(cluster, Topology):
        again = "sensitivity" if sensitive else "pareto" if pareto else None
        _check_mixed(objective, mode=mode, again=again)
        return plan_on(cluster)
    if serving and pareto:
        raise OptionError("pareto: only plans for training are compared; when serving, ask for more of `top`")
    found = plan_for(objective, cluster, plan_on)
    if isinstance(found, Infeasible):
        return found
    if sensitive:
        found = replace(found, changes=sensitivity(found, cluster, plan_on))
    return replace(found, pareto=pareto_front(found, cluster, plan_on)) if pareto else found


def _resized(topology: Cluster, nodes: int | None) -> Cluster:
    if nodes is None:
        return topology
    if isinstance(topology, Topology):
        return topology.with_nodes(nodes)
    raise OptionError(f"nodes={nodes}: {topology.name} says how many nodes of each kind there are")


def _check_mixed(objective: str, *, mode: str, again: str | None) -> None:
    """What is asked by planning on parts of a cluster needs one kind of nodes."""
    if mode != "train":
        raise OptionError(f"mode {mode!r}: plan each kind of nodes by itself")
    if objective in ("memory", "cost"):
        raise OptionError(f"objective {objective!r}: plan each kind of nodes by itself; here: throughput")
    if again:
        raise OptionError(f"{again}: plan each kind of nodes by itself")


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
