"""Serving: how many replicas of a model, of which size, for how many sequences at once.

`phases` makes the graphs of the two passes, `engine` says what a server adds, `replica` prices one copy of
the model, `search` tries all sizes, `plan` writes the answer down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from ..cost import IntraSolution
from ..estimate import collectives, compute
from ..estimate.engines import ENGINES, Engine, as_framework
from ..graph import Graph
from ..mesh import Mesh
from ..options import check_serving_pins
from ..plan import Infeasible, Plan
from ..planning import expert_sizes, tensor_sizes
from ..profile import Job
from ..solve.intra_op import Prices
from ..topology import Topology
from .phases import check_decoder
from .plan import nothing_serves, serving_plan
from .pricing import Pricer
from .search import LATENCY, ServeProblem, search


def plan_serving(
    graph: Graph,
    topology: Topology,
    job: Job,
    *,
    concurrency: int | None,
    pins: Mapping[str, int | str] | None = None,
    source: str = "",
    top: int = 5,
    progress: Callable[[str], None] | None = None,
) -> Plan | Infeasible:
    """Plan how to serve a decoder.

    Args:
        concurrency: sequences in flight over the whole cluster; None: as many as fit, or one where latency
            is what counts.
        pins: mesh axes to keep.

    Raises:
        ModelError: the model does not decode token by token.
    """
    check_decoder(graph)
    engine = ENGINES[job.framework]
    problem = ServeProblem(
        graph=graph,
        topology=topology,
        engine=engine,
        prompt_len=job.seq_len,
        output_len=job.output_len,
        concurrency=concurrency or (1 if job.objective == LATENCY else None),
        dtype=job.dtype,
        objective=job.objective,
        tp_sizes=tensor_sizes(graph, topology.devices),
        ep_sizes=expert_sizes(graph, topology.devices),
    )
    if progress:
        progress("pricing every replica size")
    model = collectives.model(topology)
    pricer = Pricer(graph, topology, engine, model, job.dtype)
    ranked, lacking = search(problem, pricer, model.time, check_serving_pins(pins))
    if not ranked:
        return nothing_serves(problem, lacking)
    return serving_plan(problem, ranked, job, source=source, tried=len(ranked) + len(lacking), top=top)
