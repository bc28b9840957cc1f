"""Every way of serving a model on a cluster, priced, and the best for the objective.

In: a `ServeProblem` and the cost models. Out: `Served` candidates, best first. A candidate is the size of
one replica (tp x pp x ep); the cluster holds as many replicas as fit. All are priced: nothing is pruned, so
the best of them is the best there is in this space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..cost import IntraSolution
from ..estimate.engines import Engine
from ..graph import Graph
from ..mesh import Mesh
from ..problem import CollectiveTime, Pins
from ..topology import Topology
from .phases import decoding, filling
from .pricing import Pricer
from .replica import Holding, Pass, Span, block_seconds, handover_s, holdings, run_pass, spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeProblem:
    """What is to be served, on what."""

    graph: Graph
    topology: Topology
    engine: Engine
    prompt_len: int
    output_len: int
    concurrency: int | None
    """Sequences in flight over the whole cluster; None: as many as fit."""
    dtype: str
    objective: str
    tp_sizes: tuple[int, ...]
    ep_sizes: tuple[int, ...]

    @property
    def sequence_len(self) -> int:
        """Tokens of a whole sequence."""
        return self.prompt_len + self.output_len

    @property
    def layers(self) -> int:
        """Repeated layers."""
        return sum(self.graph.blocks[name].repeated for name in self.graph.chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A candidate with its price."""

    mesh: Mesh
    sequences: int
    """In flight on one replica; 0 when not one fits."""
    capacity: int
    """Most that one replica holds."""
    wanted: int
    """What it was asked to hold."""
    asked: int | None
    """Sequences that the whole cluster was asked to serve at once; None: as many as fit."""
    decode: Pass
    prefill: Pass
    prefill_s: float
    """One prompt alone, all stages after another."""
    decode_s: float
    """One pass for all sequences of the replica."""
    token_time_s: float
    """Between two tokens of one sequence, prompts of the others included."""
    cuts: tuple[Span, ...]
    stage_s: tuple[float, ...]
    holdings: tuple[Holding, ...]
    graph: Graph
    """The decode pass."""
    solution: IntraSolution

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.mesh.dp

    @property
    def in_flight(self) -> int:
        """Sequences in flight over the cluster."""
        room = self.sequences * self.replicas
        return room if self.asked is None else min(room, self.asked)

    @property
    def tokens_per_s(self) -> float:
        """Tokens the cluster makes."""
        return self.in_flight / self.token_time_s

    @property
    def short_by_bytes(self) -> float:
        """What lacks for one sequence on the fullest device; negative when it fits."""
        return max(-holding.cache_budget_bytes for holding in self.holdings)


def candidates(problem: ServeProblem, pins: Pins) -> Iterator[Mesh]:
    """Replica sizes whose number divides the cluster."""
    devices = problem.topology.devices
    for tp in problem.tp_sizes:
        for ep in problem.ep_sizes:
            for pp in range(1, max(problem.layers, 1) + 1):
                if devices % (tp * ep * pp):
                    continue
                mesh = Mesh(pp=pp, dp=devices // (tp * ep * pp), ep=ep, tp=tp, order=ORDER)
                if all(mesh.size(axis) == pins[axis] for axis in mesh.sizes if axis in pins):
                    yield mesh


LATENCY = "latency"
"""The objective for which the time between tokens is what counts."""
ORDER = ("dp", "pp", "cp", "ep", "tp")
"""Replicas outermost: no replica talks to another."""


def search(
    problem: ServeProblem, pricer: Pricer, collective_time: CollectiveTime, pins: Pins
) -> tuple[list[Served], list[Served]]:
    """Candidates that serve what was asked, best first, and those that hold too little, closest first."""
    found = [
        served
        for mesh in candidates(problem, pins)
        if (served := serve_on(problem, mesh, pricer, collective_time)) is not None
    ]
    fitting = [served for served in found if served.sequences]
    lacking = [served for served in found if not served.sequences]
    return sorted(fitting, key=rank(problem)), sorted(lacking, key=lambda s: (s.short_by_bytes, _size(s)))


def rank(problem: ServeProblem) -> Callable[[Served], tuple]:
    """The order of the objective; ties go to the smaller replica."""
    if problem.objective == LATENCY:
        return lambda s: (s.wanted > s.sequences, s.token_time_s, _size(s))
    return lambda s: (-s.tokens_per_s, _size(s))


def _size(served: Served) -> tuple[int, ...]:
    mesh = served.mesh
    return (mesh.pp * mesh.ep * mesh.tp, mesh.pp, mesh.ep, mesh.tp)


def serve_on(
    problem: ServeProblem, mesh: Mesh, pricer: Pricer, collective_time: CollectiveTime
) -> Served | None:
    """Price one mesh; None where the model cannot be split so."""
    wanted = _wanted(problem, mesh)
    served = price_mesh(problem, mesh, wanted, pricer, collective_time)
    if served is None or served.capacity >= wanted or not served.capacity:
        return served
    fewer = price_mesh(problem, mesh, served.capacity, pricer, collective_time)
    return None if fewer is None else replace(fewer, wanted=wanted)


def _wanted(problem: ServeProblem, mesh: Mesh) -> int:
    if problem.concurrency is None:
        return problem.engine.max_sequences
    return math.ceil(problem.concurrency / mesh.dp)


def price_mesh(
    problem: ServeProblem, mesh: Mesh, sequences: int, pricer: Pricer, collective_time: CollectiveTime
) -> Served | None:
    """Price one mesh with `sequences` in flight on each replica; None where the model cannot be split so."""
    engine = problem.engine
    per_pass = math.ceil(sequences / mesh.pp)
    per_rank = math.ceil(per_pass / mesh.ep)
    cached = problem.prompt_len + problem.output_len // 2
    phase = decoding(cached=cached, sequences=per_rank * mesh.ep)
    found = pricer.decoding(mesh, phase)
    if found is None:
        return None
    filled = pricer.filling(mesh, filling(prompt=problem.prompt_len, sequences=mesh.ep), phase)
    token, solution = found.graph, found.solution
    prompt, prompt_solution = filled.graph, filled.solution
    cuts = spans([block_seconds(solution.blocks[name]) for name in token.chain], mesh.pp)
    held = holdings(
        prompt,
        prompt_solution,
        cuts,
        engine=engine,
        memory_bytes=problem.topology.device.memory_bytes,
        tokens=problem.prompt_len,
    )
    room = min(h.sequences(problem.sequence_len) for h in held)
    capacity = min(engine.max_sequences, room) * mesh.ep
    hop_s = handover_s(token, solution, mesh, problem.topology, collective_time)
    prompt_hop_s = handover_s(prompt, prompt_solution, mesh, problem.topology, collective_time)
    one, stage_s = run_pass(token, solution, cuts, hop_s, engine)
    whole, prompt_s = run_pass(prompt, prompt_solution, cuts, prompt_hop_s, engine)
    decode_s = mesh.pp * one.stage_s
    prefill_s = sum(prompt_s) + prompt_hop_s * (mesh.pp - 1)
    prompts = sequences / mesh.ep / problem.output_len * whole.stage_s
    return Served(
        mesh=mesh,
        sequences=min(sequences, capacity),
        capacity=capacity,
        wanted=sequences,
        asked=problem.concurrency,
        decode=one,
        prefill=whole,
        prefill_s=prefill_s,
        decode_s=decode_s,
        token_time_s=decode_s + prompts,
        cuts=cuts,
        stage_s=stage_s,
        holdings=held,
        graph=token,
        solution=solution,
    )
