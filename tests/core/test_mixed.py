"""Clusters of several kinds of nodes: the search against enumeration, files, and what the plan says."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpplan.planner.cost import BlockCost, Estimate, IntraSolution, Recompute
from tpplan.planner.errors import TopologyError
from tpplan.planner.estimate.step import Setting, once_per_step, send_recv, spans
from tpplan.planner.mesh import Mesh
from tpplan.planner.problem import Pricing
from tpplan.planner.solve.costed import Costed
from tpplan.planner.solve.intervals import Modes, rank_bytes
from tpplan.planner.solve.mixed import Kind, search_mixed
from tpplan.planner.solve.mixed_space import Placed, placed
from tpplan.planner.topology import Level, MixedTopology, Topology
from tpplan.topologies import load
from tpplan.topologies.mixed import load_cluster

from .test_search import PEAK, Transformer, topology

LEAST_SLOWDOWN = 1.3


@dataclass(frozen=True)
class Lab:
    """Two kinds of nodes and a model, small enough to enumerate."""

    model: Transformer
    kinds: tuple[Kind, ...]
    cluster: MixedTopology


def slowed(pricing: Pricing, factors: dict[str, float], kernels: float, link_s: float) -> Pricing:
    """The same cost models on devices where each block class takes its own factor longer."""

    def intra(mesh: Mesh, micro_batch: int) -> tuple[IntraSolution, ...]:
        return tuple(
            replace(s, blocks={name: slow(cost, factors[name]) for name, cost in s.blocks.items()})
            for s in pricing.intra(mesh, micro_batch)
        )

    def kernel_time(work, device) -> Estimate:
        found = pricing.kernel_time(work, device)
        return replace(found, seconds=found.seconds * kernels)

    def collective_time(collective, nbytes, span) -> Estimate:
        found = pricing.collective_time(collective, nbytes, span)
        return replace(found, seconds=found.seconds * link_s)

    return Pricing(intra=intra, kernel_time=kernel_time, collective_time=collective_time)


def slow(cost: BlockCost, factor: float) -> BlockCost:
    return replace(
        cost,
        forward_s=cost.forward_s * factor,
        backward_s=cost.backward_s * factor,
        recompute_s={mode: s * factor for mode, s in cost.recompute_s.items()},
    )


def lab(seed: int) -> Lab:
    draw = random.Random(seed)
    model = Transformer(
        layers=draw.randint(2, 4), hidden=draw.choice([1024, 2048]), ffn=8192, vocab=32000, seq=2048,
        kv=draw.choice([1, 2]), experts=draw.choice([0, 0, 2]),
    )  # fmt: skip
    nodes = (draw.choice([1, 1, 2]), 1)
    memory = (draw.choice([4e9, 8e9, 40e9]), draw.choice([3e9, 6e9, 40e9]))
    parts = tuple(
        replace(topology(n, memory=m, per_node=2), name=f"kind{i}")
        for i, (n, m) in enumerate(zip(nodes, memory, strict=True))
    )
    if draw.random() < 0.5:
        parts = parts[::-1]
    batch, framework = draw.choice([2, 4, 6]), draw.choice(["fake", "tpplan"])
    cluster = MixedTopology(
        name="lab",
        parts=parts,
        link=Level(name="between kinds", size=2, kind="tcp", bytes_per_s=1e9, latency_s=1e-4, efficiency=1),
    )
    factors = [
        {name: draw.uniform(LEAST_SLOWDOWN, 3.0) for name in ("embedding", "layer", "head")} for _ in parts
    ]
    link_s = draw.uniform(2, 10)
    kinds = tuple(
        kind(model, part, cluster, by, batch=batch, framework=framework, link_s=link_s)
        for part, by in zip(parts, factors, strict=True)
    )
    return Lab(model=model, kinds=kinds, cluster=cluster)


def kind(
    model: Transformer,
    part: Topology,
    cluster: MixedTopology,
    factors: dict[str, float],
    *,
    batch: int,
    framework: str,
    link_s: float,
) -> Kind:
    wide = part.with_nodes(-(-cluster.devices // part.devices_per_node))
    wide = replace(wide, device=replace(wide.device, peak_flops={"bf16": PEAK / LEAST_SLOWDOWN}))
    base = model.pricing(wide)
    own = slowed(base, factors, kernels=factors["layer"], link_s=1.0)
    problem = model.problem(wide, batch=batch)

    def again(mesh: Mesh, solution: IntraSolution) -> IntraSolution:
        micro_batch = round(
            solution.blocks["layer"].model_flops / problem.blocks["layer"].forward_flops_per_sample
        )
        return own.intra(mesh, micro_batch)[0]

    return Kind(
        problem=replace(problem, framework=replace(problem.framework, name=framework)),
        devices=part.devices,
        pricing=own,
        joined=slowed(base, factors, kernels=factors["layer"], link_s=link_s),
        again=again,
    )


# --------------------------------------------------------------------------- enumeration


def every_step(small: Lab) -> Iterator[float]:
    """The step of every placed candidate under every cut and every mode of every block."""
    problems = [k.problem for k in small.kinds]
    for place in placed(problems, [k.devices for k in small.kinds], {}):
        if small.kinds[0].pricing.intra(place.candidate.mesh, place.candidate.micro_batch):
            yield from replica_steps(small, place) if place.microbatches else stage_steps(small, place)


def costed(k: Kind, place: Placed, pricing: Pricing) -> Costed:
    candidate, span = place.candidate, spans(k.problem.topology)
    setting = Setting(
        candidate=candidate, topology=k.problem.topology, framework=k.problem.framework,
        optimizer=k.problem.optimizer, pricing=pricing, span=span,
    )  # fmt: skip
    (solution,) = k.pricing.intra(candidate.mesh, candidate.micro_batch)
    return Costed(problem=k.problem, setting=setting, intra=solution)


def stage_steps(small: Lab, place: Placed) -> Iterator[float]:
    made = [costed(k, place, k.pricing) for k in small.kinds]
    m, chain = place.candidate.microbatches, made[0].problem.chain
    overhead = made[0].problem.framework.step_overhead_s
    for cuts in combinations(range(1, len(chain)), len(place.kinds) - 1):
        ends = list(pairwise((0, *cuts, len(chain))))
        if not all("layer" in chain[a:b] for a, b in ends):
            continue
        ranks = [
            fitting(made[place.kinds[rank]], chain[a:b], rank, handed(small, place, rank))
            for rank, (a, b) in enumerate(ends)
        ]
        for picked in product(*ranks):
            busy, once = [seconds for seconds, _ in picked], max(o for _, o in picked)
            yield (m - 1) * max(busy) + sum(busy) + once + overhead


def handed(small: Lab, place: Placed, rank: int) -> float:
    """Seconds of a rank's two hand-overs: at a border the slower of the two sides, over the slower link."""
    around = {place.kinds[r] for r in (rank - 1, rank, rank + 1) if 0 <= r < len(place.kinds)}
    sent = []
    for number in around:
        k = small.kinds[number]
        at = costed(k, place, k.joined if len(around) > 1 else k.pricing)
        largest = at.intra.blocks["layer"].output_bytes
        sent.append(send_recv(at.setting, largest, whole_on_tp=not at.intra.sequence_parallel).exposed_s)
    return 2 * max(sent)


def every_mode(blocks: tuple[str, ...]) -> Iterator[Modes]:
    rest = tuple((name, 1, Recompute.NONE) for name in blocks if name != "layer")
    for picked in combinations_with_replacement(Recompute, blocks.count("layer")):
        yield (*rest, *(("layer", picked.count(mode), mode) for mode in dict.fromkeys(picked)))


def fitting(at: Costed, blocks: tuple[str, ...], rank: int, handover_s: float) -> list[tuple[float, float]]:
    found = []
    for modes in every_mode(blocks):
        if rank_bytes(at.stage_problem, rank, modes) <= at.stage_problem.capacity_bytes:
            forward = sum(n * at.times[name].forward_s for name, n, _ in modes)
            backward = sum(n * at.times[name].backward_s(mode) for name, n, mode in modes)
            counts = {name: blocks.count(name) for name in dict.fromkeys(blocks)}
            once = once_per_step(
                at.parameters(counts), at.setting, blocks=len(blocks), forward_s=forward, backward_s=backward
            )
            found.append((forward + backward + handover_s, once.seconds))
    return found


def replica_steps(small: Lab, place: Placed) -> Iterator[float]:
    made = [costed(k, place, k.joined) for k in small.kinds]
    overhead = made[0].problem.framework.step_overhead_s
    for modes in every_mode(made[0].problem.chain):
        here = [one for at in made if (one := fitting_one(at, modes))]
        if len(here) == len(made):
            busy = [m * seconds for m, (seconds, _) in zip(place.microbatches, here, strict=True)]
            yield max(busy) + max(once for _, once in here) + overhead


def fitting_one(at: Costed, modes: Modes) -> tuple[float, float] | None:
    if rank_bytes(at.stage_problem, 0, modes) > at.stage_problem.capacity_bytes:
        return None
    seconds = sum(n * (at.times[c].forward_s + at.times[c].backward_s(q)) for c, n, q in modes)
    return seconds, at.once_s(modes)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_no_placement_is_faster(seed: int) -> None:
    small = lab(seed)
    best = min(every_step(small), default=math.inf)
    found = search_mixed(small.kinds, small.cluster, {})
    step = found.best.priced.step_time_s if found.best else math.inf
    assert step == pytest.approx(best, rel=1e-5)
    assert found.lower_bound_s <= best * (1 + 1e-9)
    if found.best:
        for stage in found.best.priced.stages:
            assert stage.device_memory_bytes and stage.peak_memory_bytes <= stage.device_memory_bytes


# --------------------------------------------------------------------------- files and plans


MIXED = """\
name: lab
kinds:
  - topology: dgx-h100
    nodes: 1
  - topology: dgx-a100-80
    nodes: 2
link: {kind: infiniband, gb_per_s: 25, latency_us: 5, efficiency: 0.85}
"""


@pytest.fixture
def lab_file(tmp_path: Path) -> Path:
    path = tmp_path / "lab.yaml"
    path.write_text(MIXED)
    return path


def test_a_file_names_its_kinds_and_their_link(lab_file: Path) -> None:
    cluster = load_cluster(str(lab_file))
    assert isinstance(cluster, MixedTopology)
    assert [(part.name, part.nodes) for part in cluster.parts] == [("dgx-h100", 1), ("dgx-a100-80", 2)]
    assert (cluster.devices, cluster.link.bytes_per_s) == (24, 25e9)
    assert isinstance(load_cluster("dgx-h100:2"), Topology)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MIXED.replace("dgx-a100-80", "dgx-a100-81"), "kinds[1].topology: no topology named"),
        (MIXED.replace("nodes: 2", "nodes: 0"), "kinds[1].nodes"),
        ("name: lab\nkinds: []\nlink: {}\n", "kinds"),
    ],
)
def test_mistakes_name_their_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=re.escape(said)):
        load_cluster(str(path))


def test_numbers_of_nodes_are_the_files(lab_file: Path) -> None:
    with pytest.raises(TopologyError, match="how many nodes of each kind"):
        load_cluster(f"{lab_file}:4")
    with pytest.raises(TopologyError, match="several kinds"):
        load(str(lab_file))
