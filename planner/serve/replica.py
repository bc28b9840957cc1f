"""One replica of the model on tp x pp x ep devices: how fast it decodes and how many sequences it holds.

In: the decode and prefill solutions of `solve.intra_op`. Out: a `Replica`. With n sequences in flight of
which each makes `output_len` tokens, n prompts are read for every `output_len` passes:

    time between tokens = decode pass + prompt pass x n / output_len
    decode pass         = stages x (slowest stage on n / stages sequences + hand-over)
    stage               = max(arithmetic, host) + collectives

Sequences held = what is left of the device after weights, activations and libraries, over the keys and
values of one whole sequence, at most what the engine runs at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import add

from ..cost import BlockCost, Communication, IntraSolution, Origin, worst
from ..estimate.engines import Engine
from ..graph import Graph
from ..layout import Collective
from ..mesh import Mesh
from ..problem import CollectiveTime
from ..topology import Topology
from .phases import cache_bytes

STREAMS = 3
"""Tensors as wide as the residual stream that live while a layer's largest op runs: the stream, its
normalised copy, what is added to it. With them Llama-3.1-8B takes 111 KB a token; vLLM logged 110
(vllm-project/vllm issue 10517)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Blocks of one pipeline stage: a slice of the chain."""

    first: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run through the model."""

    compute_s: float
    """Arithmetic of the slowest stage, or the host that launches it where that takes longer."""
    communication_s: float
    """Collectives of the slowest stage, hand-over included."""
    origin: Origin

    @property
    def stage_s(self) -> float:
        """The slowest stage."""
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Memory of the fullest device."""

    weights_bytes: float
    working_bytes: float
    context_bytes: float
    cache_bytes_per_token: float
    cache_budget_bytes: float
    """What is left for keys and values; negative when weights alone do not fit."""

    def sequences(self, tokens: int) -> int:
        """How many sequences of so many tokens the cache holds."""
        if self.cache_bytes_per_token <= 0.0:
            return 0
        return max(0, math.floor(self.cache_budget_bytes / (self.cache_bytes_per_token * tokens)))


def spans(times_s: list[float], stages: int) -> tuple[Span, ...]:
    """The cut of a chain into `stages` runs whose slowest is fastest, the earliest such cut."""
    total = [0.0]
    for seconds in times_s:
        total.append(total[-1] + seconds)
    blocks = len(times_s)
    best = [[math.inf] * (blocks + 1) for _ in range(stages + 1)]
    cut = [[0] * (blocks + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for stop in range(stage, blocks - (stages - stage) + 1):
            for first in range(stage - 1, stop):
                slowest = max(best[stage - 1][first], total[stop] - total[first])
                if slowest < best[stage][stop]:
                    best[stage][stop], cut[stage][stop] = slowest, first
    result, stop = [], blocks
    for stage in range(stages, 0, -1):
        result.append(Span(first=cut[stage][stop], stop=stop))
        stop = cut[stage][stop]
    return tuple(reversed(result))


def block_seconds(cost: BlockCost) -> float:
    """One forward pass of a block, collectives included."""
    return cost.forward_s + sum(c.seconds * c.count for c in cost.forward_comm)


def run_pass(
    graph: Graph, solution: IntraSolution, cuts: tuple[Span, ...], handover_s: float, engine: Engine
) -> tuple[Pass, tuple[float, ...]]:
    """The slowest stage of a pass, and the seconds of every stage."""
    costs = [solution.blocks[name] for name in graph.chain]
    hosts = [engine.layer_host_s * graph.blocks[name].repeated for name in graph.chain]
    compute = [max(sum(c.forward_s for c in costs[a:b]), sum(hosts[a:b])) for a, b in _edges(cuts)]
    waiting = [sum(block_seconds(c) - c.forward_s for c in costs[a:b]) for a, b in _edges(cuts)]
    seconds = tuple(map(add, compute, waiting))
    slowest = max(range(len(cuts)), key=seconds.__getitem__)
    found = Pass(
        compute_s=compute[slowest],
        communication_s=waiting[slowest] + handover_s,
        origin=worst(*(cost.origin for cost in costs)),
    )
    return found, seconds


def _edges(cuts: tuple[Span, ...]) -> list[tuple[int, int]]:
    return [(cut.first, cut.stop) for cut in cuts]


def handover_s(
    graph: Graph, solution: IntraSolution, mesh: Mesh, topology: Topology, price: CollectiveTime
) -> float:
    """Seconds of handing one pass's activations to the next stage; 0 without a pipeline."""
    if mesh.pp == 1:
        return 0.0
    nbytes = max(
        (solution.blocks[name].output_bytes for name in graph.chain if graph.blocks[name].repeated),
        default=0.0,
    )
    span = topology.span(size=mesh.pp, stride=mesh.stride("pp"))
    return price(Collective.SEND_RECV, nbytes, span).seconds


def cache_per_block(graph: Graph, solution: IntraSolution) -> dict[str, float]:
    """Bytes of keys and values per token, on one device, by block class."""
    splits = solution.splits
    return {
        name: sum(cache_bytes(op, splits.local[name, i]) for i, op in enumerate(block.ops))  # type: ignore[attr-defined]
        for name, block in graph.blocks.items()
    }


def holdings(
    graph: Graph,
    solution: IntraSolution,
    cuts: tuple[Span, ...],
    *,
    engine: Engine,
    memory_bytes: float,
    tokens: int,
) -> tuple[Holding, ...]:
    """Memory of one device of every stage, from a pass of `tokens` tokens.

    What runs is as large as the engine's largest pass, and that grows with its tokens.
    """
    per_token = cache_per_block(graph, solution)
    result = []
    for cut in cuts:
        names = graph.chain[cut.first : cut.stop]
        weights = sum(
            group.numel * group.element_bytes for name in names for group in solution.blocks[name].parameters
        )
        working = max(_running_bytes(solution.blocks[name]) for name in names)
        working *= engine.chunk_tokens / tokens
        budget = engine.memory_share * memory_bytes - weights - working - engine.context_bytes
        result.append(
            Holding(
                weights_bytes=weights,
                working_bytes=working,
                context_bytes=engine.context_bytes,
                cache_bytes_per_token=sum(per_token[name] for name in names),
                cache_budget_bytes=budget,
            )
        )
    return tuple(result)


def _running_bytes(cost: BlockCost) -> float:
    """Activations while a block runs: its largest op's, and the streams around it."""
    return cost.working_bytes + STREAMS * cost.output_bytes


def communications(
    graph: Graph, solution: IntraSolution, cut: Span, *, passes: float
) -> tuple[Communication, ...]:
    """Collectives of one stage, `passes` times each, equal ones joined."""
    joined: dict[tuple[str, str, Collective], Communication] = {}
    for name in graph.chain[cut.first : cut.stop]:
        for c in solution.blocks[name].forward_comm:
            key = (c.label, c.axis, c.collective)
            before = joined[key].count if key in joined else 0.0
            joined[key] = replace(c, count=before + c.count * passes)
    return tuple(joined.values())
