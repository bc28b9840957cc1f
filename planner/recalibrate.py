"""Measured runs against a cluster's predictions: `tpplan calibrate` for programs.

In: a topology and measured runs. Out: one `Fitted` per framework. Each run's plan is priced as it is (its
choices are pinned), first without any scale of this cluster and then as the fit asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from .errors import OptionError
from .estimate.frameworks import OWN_FRAMEWORK
from .fit_scales import Case, Fitted, Scales, fit_scales
from .options import Pins, check_names, choose_dtype, job_from_options, parse_set, pins_of
from .plan import Infeasible, Plan
from .plan_file import load as load_plan
from .planning import plan_graph, tokens_per_sample
from .profile import Job
from .run_file import MeasuredRun
from .suggest import load_graph
from .topology import MeasuredScale, Topology

NOT_ALLOCATED = ("reserve", "context")


def recalibrate(
    topology: Topology,
    runs: Sequence[MeasuredRun],
    *,
    source: str,
    cache_dir: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Fitted]:
    """What the runs tell, by framework. Raises `UserError`s naming the run."""
    bare = replace(topology, scales=())
    cases: dict[str, list[Case]] = {}
    for run in runs:
        tell(f"pricing {run.name}")
        framework, case = _case(bare, run, cache_dir)
        cases.setdefault(framework, []).append(case)
    return {
        framework: fit_scales(found, framework=framework, source=f"{_count(len(found))} {source}")
        for framework, found in cases.items()
    }


def _count(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def updated(topology: Topology, fitted: dict[str, Fitted]) -> tuple[MeasuredScale, ...]:
    """The topology's scales with those of the fitted frameworks in place of their old ones."""
    kept = [scale for scale in topology.scales if scale.framework not in fitted]
    return (*kept, *(scale for found in fitted.values() for scale in found.scales))


def _case(topology: Topology, run: MeasuredRun, cache_dir: Path | None) -> tuple[str, Case]:
    cluster = topology if run.nodes is None else topology.with_nodes(run.nodes)
    cluster, options, pins = _options(cluster, run)
    dtype = choose_dtype(options["dtype"], cluster.device)
    graph = load_graph(run.model, seq_len=options["seq_len"], dtype=dtype, cache_dir=cache_dir)
    job = job_from_options(
        global_batch=options["global_batch"],
        seq_len=tokens_per_sample(graph),
        dtype=dtype,
        optimizer=options["optimizer"],
        framework=options["framework"],
        devices=cluster.devices,
    )

    @cache
    def priced(kernels: float, collectives: float) -> Plan:
        scales = tuple(_scales(job, kernels=kernels, collectives=collectives))
        found = plan_graph(graph, replace(cluster, scales=scales), job, pins=pins, top=1)
        if isinstance(found, Infeasible):
            raise OptionError(f"run {run.name!r}: no such plan on {cluster.name}: {found.reason}")
        return found

    def predict(scales: Scales) -> float:
        return priced(scales.get("kernels", 1.0), scales.get("collectives", 1.0)).predicted.step_time_s

    kinds = priced(1.0, 1.0).predicted.memory_by_kind_bytes
    return job.framework, Case(
        name=run.name,
        step_s=run.step_s,
        memory_bytes=run.memory_bytes,
        predict=predict,
        allocated_bytes=sum(size for kind, size in kinds.items() if kind not in NOT_ALLOCATED),
    )


def _scales(job: Job, **values: float) -> Iterator[MeasuredScale]:
    for name, value in values.items():
        yield MeasuredScale(
            name=name, framework=job.framework, value=value, uncertainty=0.0, runs=1, source="a trial"
        )


def _options(topology: Topology, run: MeasuredRun) -> tuple[Topology, dict, Pins]:
    """The cluster's part that the run used, the job and the choices: the plan file's, or as stated."""
    stated = {
        key: getattr(run, key) for key in ("global_batch", "seq_len", "dtype", "optimizer", "framework")
    }
    if run.plan is None:
        pins = parse_set(",".join(f"{key}={value}" for key, value in (run.set or {}).items()))
        framework = stated["framework"] or OWN_FRAMEWORK
        named = {"optimizer": stated["optimizer"] or "adamw", "framework": framework}
        check_names(dtype=stated["dtype"], **named)
        return topology, {**stated, **named}, pins
    plan = load_plan(run.plan)
    given = {key: value for key, value in stated.items() if value is not None}
    job = {key: getattr(plan.job, key) for key in stated} | given
    if plan.cluster.devices != topology.devices:
        if plan.cluster.devices % topology.devices_per_node:
            raise OptionError(
                f"run {run.name!r} used {plan.cluster.devices} devices, {topology.name} has nodes of "
                f"{topology.devices_per_node}"
            )
        topology = topology.with_nodes(plan.cluster.devices // topology.devices_per_node)
    return topology, job, pins_of(plan)
