"""From options to what the planner is asked, and its answer."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .exits import INFEASIBLE
from .streams import progress_line, stdout_to_stderr

if TYPE_CHECKING:
    from ..planner.options import Pins
    from ..planner.plan import Infeasible, Plan
    from ..planner.topology import Cluster

COMPARE_LIMIT_S = 10.0
"""Longest search, seconds, for the plan that `estimate` compares yours with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `suggest` or `estimate` was asked, each option checked."""

    model: str
    topology: Cluster
    options: dict[str, Any]
    """Keyword arguments of `planner.suggest.suggest` that the user gave."""
    pins: Pins
    quiet: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan, or why there is none; one of the two is None."""

    plan: Plan | None
    infeasible: Infeasible | None
    wall_s: float
    """How long it took, model loading included, seconds."""


def make_request(
    model: str, spec: str, nodes: int | None, *, pins: Pins, options: dict[str, Any], quiet: bool
) -> Request:
    """Everything that can be checked without the model is checked here, before the model is loaded."""
    from ..planner.options import MODES, check_names, check_pins, check_sizes, common_dtype
    from ..planner.split_pins import parse_split
    from ..planner.topology import Topology

    given = {key: value for key, value in options.items() if value is not None}
    words = ("mode", "objective", "dtype", "optimizer", "framework")
    check_names(**{key: given[key] for key in words if key in given})
    sizes = ("global_batch", "seq_len", "output_len", "top", "time_limit_s")
    check_sizes(**{key: given[key] for key in sizes if key in given})
    for text in given.get("splits", ()):
        parse_split(text)
    topology = load_topology(spec, nodes)
    if isinstance(topology, Topology):
        check_pins(
            pins,
            devices=topology.devices,
            global_batch=given.get("global_batch"),
            cluster=spec if nodes is None else f"{spec} with {nodes} nodes",
        )
    given["dtype"] = common_dtype(given.get("dtype"), topology, mode=given.get("mode", MODES[0]))
    return Request(model=model, topology=topology, options=given, pins=pins, quiet=quiet)


def load_topology(spec: str, nodes: int | None) -> Cluster:
    """The cluster of `--topology` and `--nodes`."""
    from ..planner.options import check_sizes
    from ..topologies.mixed import load_cluster

    check_sizes(nodes=nodes)
    return load_cluster(spec, nodes=nodes)


def parse_sets(texts: list[str] | None) -> Pins:
    """The choices of all `--set` together."""
    from ..planner.options import parse_set

    return parse_set(",".join(texts)) if texts else {}


def solve(request: Request) -> Answer:
    """Ask the planner; what the model file prints goes to stderr."""
    start = time.perf_counter()
    with stdout_to_stderr(), progress_line(request.quiet) as progress:
        from ..planner.plan import Plan
        from ..planner.suggest import suggest as find

        found = find(
            request.model,
            topology=request.topology,
            pins=request.pins or None,
            cache_dir=cache_dir(),
            progress=progress,
            **request.options,
        )
    plan, infeasible = (found, None) if isinstance(found, Plan) else (None, found)
    return Answer(plan=plan, infeasible=infeasible, wall_s=time.perf_counter() - start)


def solve_unpinned(request: Request) -> Plan | None:
    """The best plan when nothing is fixed, as far as a short search finds it."""
    options = request.options | {"time_limit_s": COMPARE_LIMIT_S}
    return solve(replace(request, pins={}, options=options)).plan


def cache_dir() -> Path:
    """Where traced graphs are kept: TPPLAN_CACHE_DIR, or tpplan/ in the user's cache."""
    if directory := os.environ.get("TPPLAN_CACHE_DIR"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpplan"


def leave(answer: Answer) -> None:
    """End with the exit code of an answer: infeasible has its own."""
    if answer.infeasible:
        raise typer.Exit(INFEASIBLE)
