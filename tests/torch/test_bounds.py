"""What is known of splits before they are costed is never more than what they cost, on graphs of real models.

Bounds from the model as it runs on one device (`ideal.Unsplit`), floors of a microbatch and of larger ones
(`Pricing.floor`), and floors of the frontier's own splits (`Pricing.splits_floor`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tpplan.planner.cost import BlockCost
from tpplan.planner.fold import build
from tpplan.planner.mesh import Mesh
from tpplan.planner.planning import Prepared, prepared
from tpplan.planner.problem import Floor
from tpplan.planner.profile import Job, hidden_share
from tpplan.planner.solve.ideal import Unsplit, idealised
from tpplan.planner.trace import trace_source
from tpplan.topologies import load

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = ("gpt2.py", "llama3_8b.py", "mixtral_8x7b.py", "recommender.py", "deepseek_v3/config.json")
LITTLE = 1 + 1e-9
"""Rounding."""


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest) -> Prepared:
    """A model on two nodes."""
    seq = 1 if request.param == "recommender.py" else 1024
    graph = build(trace_source(str(EXAMPLES / request.param), seq_len=seq))
    job = Job(
        mode="train", objective="throughput", global_batch=512, seq_len=seq, dtype="bf16",
        optimizer="adamw", framework="tpplan",
    )  # fmt: skip
    return prepared(graph, load("dgx-a100-80:2"), job)


def meshes(made: Prepared) -> Iterator[Mesh]:
    """Every way to split the model over up to 16 devices."""
    problem = made.problem
    for tp in problem.tp_sizes:
        for ep in problem.ep_sizes:
            for cp in problem.cp_sizes[:2]:
                if 16 % (tp * ep * cp) == 0:
                    yield Mesh(dp=16 // (tp * ep * cp), cp=cp, ep=ep, tp=tp)


def exposed_s(made: Prepared, cost: BlockCost) -> float:
    """Seconds of a block when computation hides all that it may."""
    comm = sum(
        c.seconds * c.count * (1 - hidden_share(made.framework, c.axis))
        for c in (*cost.forward_comm, *cost.backward_comm)
    )
    return cost.forward_s + cost.backward_s + comm


def test_the_unsplit_model_bounds_every_split(made: Prepared) -> None:
    unsplit = Unsplit(made.pricing)
    seen = 0
    for mesh in meshes(made):
        for micro_batch in (1, 3, 8):
            ideal = idealised(made.problem, mesh, micro_batch, unsplit)
            for solution in made.pricing.intra(mesh, micro_batch):
                seen += 1
                for name, cost in solution.blocks.items():
                    least = ideal.blocks[name]
                    assert least.forward_s <= cost.forward_s * LITTLE, (mesh, micro_batch, name)
                    assert least.backward_s <= cost.backward_s * LITTLE, (mesh, micro_batch, name)
                    for mode, nbytes in least.saved_bytes.items():
                        assert nbytes <= cost.saved_bytes[mode] * LITTLE, (mesh, micro_batch, name, mode)
                        again = cost.recompute_s[mode] + cost.recompute_comm_s[mode]
                        assert least.recompute_s[mode] <= again * LITTLE, (mesh, micro_batch, name, mode)
    assert seen > 10


def test_floors_are_below_what_splits_cost(made: Prepared) -> None:
    seen = 0
    for mesh in meshes(made):
        for micro_batch in (1, 3, 8):
            floors = [
                made.pricing.splits_floor(mesh, micro_batch),
                made.pricing.floor(mesh, micro_batch),
                made.pricing.floor(mesh, 24).times(micro_batch / 24 * (1 - made.pricing.batch_slack)),
            ]
            for solution in made.pricing.intra(mesh, micro_batch):
                taken = {name: exposed_s(made, cost) for name, cost in solution.blocks.items()}
                total = sum(n * taken[name] for name, n in made.problem.counts.items())
                for floor in floors:
                    seen += len(floor.blocks_s)
                    check(floor, total, taken)
    assert seen > 10


def check(floor: Floor, total: float, taken: dict[str, float]) -> None:
    """Of all blocks, and of one of each class that something is known of."""
    assert floor.total_s <= total * LITTLE
    for name, seconds in floor.blocks_s.items():
        assert seconds <= taken[name] * LITTLE, name
