"""What if some choices of a plan were others: pin them, search again, price both alike.

In: a `Plan` read from a file, pins, and where its model and its cluster are to be found (by default
where the plan says). Out: a `WhatIf`: the plan with its choices priced again, and the best plan under
the pins, or why none fits. Both come from the same cost models, so their difference is that of the
choices alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..topologies import topology_hash
from ..topologies.mixed import load_cluster
from .errors import OptionError, PlanError
from .estimate.frameworks import FRAMEWORKS
from .estimate.memory import keeps_gathered
from .graph import Graph
from .mixed import plan_cluster
from .options import DEFAULT_SEQ_LEN, pins_of
from .plan import Infeasible, Plan
from .serve import plan_serving
from .suggest import TRACED_AS, load_graph
from .topology import Cluster, Topology

CHANGED_SHARE = 0.01
"""A plan priced anew whose step differs by more than this was made by other cost models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A plan, and the best one under some pins."""

    plan: Plan
    """The plan's own choices, priced again."""
    pinned: Plan | Infeasible
    pins: dict[str, int | str]
    notes: tuple[str, ...] = ()
    """What keeps the numbers from being those in the plan's file, or from being what one would expect."""


def why(
    plan: Plan,
    pins: Mapping[str, int | str],
    *,
    model: str | None = None,
    topology: str | None = None,
    cache: bool = True,
    cache_dir: Path | None = None,
) -> WhatIf:
    """The best plan that keeps `pins`, next to `plan`.

    Args:
        model: where the model is now (default: where the plan found it).
        topology: the cluster, as a name or a file (default: the bundled one that the plan names).

    Raises:
        UserError: the model or the cluster is not the plan's, or the pins cannot hold.
    """
    if not pins:
        raise OptionError("nothing to compare with: give choices to change, as in --set tp=4")
    cluster = _cluster(plan, topology)
    graph = load_graph(
        model or plan.model.source,
        seq_len=plan.job.seq_len if plan.job.seq_len > 1 else DEFAULT_SEQ_LEN,
        dtype=TRACED_AS.get(plan.job.dtype, plan.job.dtype),
        mode=plan.job.mode,
        cache=cache,
        cache_dir=cache_dir,
    )
    _check_model(plan, graph)
    ask = _serve if plan.serving else _train
    ours = ask(plan, graph, cluster, pins_of(plan))
    pinned = ask(plan, graph, cluster, pins)
    base = plan if isinstance(ours, Infeasible) else ours
    notes = (*_notes(plan, ours), *_kept_whole(pinned, pins))
    return WhatIf(plan=base, pinned=pinned, pins=dict(pins), notes=notes)


def _train(plan: Plan, graph: Graph, cluster: Cluster, pins: Mapping[str, int | str]) -> Plan | Infeasible:
    return plan_cluster(graph, cluster, plan.job, pins=pins, source=plan.model.source, top=0)


def _serve(plan: Plan, graph: Graph, cluster: Cluster, pins: Mapping[str, int | str]) -> Plan | Infeasible:
    assert isinstance(cluster, Topology)  # plans for serving are made for one kind of nodes
    sequences = plan.job.global_batch
    return plan_serving(
        graph, cluster, plan.job, concurrency=sequences, pins=pins, source=plan.model.source, top=0
    )


def _cluster(plan: Plan, topology: str | None) -> Cluster:
    info = plan.cluster
    nodes = info.nodes if info.nodes > 1 and not info.parts else None
    cluster = load_cluster(topology or info.topology, nodes=nodes)
    if topology_hash(cluster) != info.topology_hash:
        raise OptionError(
            f"the cluster {topology or info.topology} ({cluster.devices} devices) is not the "
            f"one that the plan was made for ({info.devices} x {info.device}): give it with --topology"
        )
    return cluster


def _check_model(plan: Plan, graph: Graph) -> None:
    if graph.parameters != plan.model.parameters:
        raise PlanError(
            f"the plan is for {plan.model.name} with {plan.model.parameters:,} parameters, but "
            f"{plan.model.source} has {graph.parameters:,}: give the right model with --model"
        )


def _notes(plan: Plan, ours: Plan | Infeasible) -> tuple[str, ...]:
    if isinstance(ours, Infeasible):
        return (f"priced again, the plan itself does not fit: {ours.reason}",)
    before, after = plan.predicted.step_time_s, ours.predicted.step_time_s
    if abs(after - before) <= CHANGED_SHARE * before:
        return ()
    return (f"priced again, the plan takes {after:.4g} s a step; its file says {before:.4g} s",)


def _kept_whole(pinned: Plan | Infeasible, pins: Mapping[str, int | str]) -> tuple[str, ...]:
    """Why ZeRO-3 costs no gathers: some frameworks keep parameters gathered under a pipeline."""
    if isinstance(pinned, Infeasible) or "zero" not in pins:
        return ()
    framework = FRAMEWORKS.get(pinned.job.framework)
    if framework is None or not keeps_gathered(pinned.zero_stage, pinned.mesh, framework):
        return ()
    return (
        f"under pipeline stages {framework.name} gathers ZeRO-3's parameters once a step and keeps them, "
        "with their whole gradients: it has the traffic of ZeRO-1 and holds more than that",
    )
