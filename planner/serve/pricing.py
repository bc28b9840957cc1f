"""Both passes of one replica under the same splits: weights lie one way, whatever runs.

Splits are chosen for decoding, where a server spends its time; the prompt's pass is priced with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from ..cost import IntraSolution
from ..estimate import compute
from ..estimate.collectives import CollectiveModel
from ..estimate.engines import Engine, as_framework
from ..graph import Graph
from ..mesh import Mesh
from ..solve.intra_op import IntraOp, Prices, Splits, after, traced_sizes
from ..topology import Topology
from .phases import Phase, in_phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """A pass's graph and what it costs."""

    graph: Graph
    solution: IntraSolution


class Pricer:
    """Prices of passes on replicas of one cluster; equal questions are answered from memory."""

    def __init__(
        self, graph: Graph, topology: Topology, engine: Engine, model: CollectiveModel, dtype: str
    ) -> None:
        """Kernels follow one another as the engine launches them."""
        device = replace(topology.device, kernel_latency_s=engine.kernel_latency_s)
        self._graph, self._dtype = graph, dtype
        self._topology, self._framework = replace(topology, device=device), as_framework(engine)
        self._prices = Prices(kernel_time=compute.kernel_time, collective_time=model.time)
        self._chosen, self._same = cache(self._choose), cache(self._reprice)

    def decoding(self, mesh: Mesh, phase: Phase) -> Passing | None:
        """The decode pass under its best splits; None where the model cannot be split so."""
        return self._chosen(mesh.ep, mesh.tp, phase)

    def filling(self, mesh: Mesh, phase: Phase, decoding: Phase) -> Passing:
        """The prompt's pass under the splits of a decode pass."""
        return self._same(mesh.ep, mesh.tp, phase, decoding)

    def _choose(self, ep: int, tp: int, phase: Phase) -> Passing | None:
        graph = in_phase(self._graph, phase, dtype=self._dtype)
        solve = IntraOp(graph, self._topology, self._framework, self._prices)
        found = solve(Mesh(ep=ep, tp=tp), phase.sequences // ep)
        return Passing(graph=graph, solution=found[0]) if found else None

    def _reprice(self, ep: int, tp: int, phase: Phase, decoding: Phase) -> Passing:
        chosen = self._chosen(ep, tp, decoding)
        assert chosen is not None and isinstance(chosen.solution.splits, Splits)
        graph = in_phase(self._graph, phase, dtype=self._dtype)
        solution = replace(chosen.solution, splits=at_extents(chosen.solution.splits, graph, phase.sequences))
        solve = IntraOp(graph, self._topology, self._framework, self._prices)
        return Passing(graph=graph, solution=solve.again(Mesh(ep=ep, tp=tp), solution))


def at_extents(splits: Splits, graph: Graph, sequences: int) -> Splits:
    """The same choices with the extents of another graph at a batch of `sequences`."""
    whole = traced_sizes(graph, batch=sequences)
    before_ep = after(graph, whole, splits.cp) if splits.cp is not None else whole
    before_tp = after(graph, before_ep, splits.ep)
    return replace(
        splits,
        before_cp=whole,
        before_ep=before_ep,
        before_tp=before_tp,
        local=after(graph, before_tp, splits.tp),
    )
