"""The runtime against a parallelisation written by hand, in one run, step by step in turn.

    python -m benchmarks.runtime_speed [--ranks 4 8] [--pairs 20] [--json]

In: a small Llama and a plan for it. Out: per plan the median time of a step (forward, backward, AdamW)
under `auto_parallelize` and under what a user of torch would write for the same plan: `parallelize_module`
with sequence parallelism and a split vocabulary, `fully_shard` for each layer, `PipelineStage` with
`Schedule1F1B`. Both models stand on the same gloo ranks, with equal weights, and take their steps in
turn (ours first, then theirs first, and so on), so that a busy machine slows both. The ratio is the
median over pairs; beside it stands the ratio of the processors' time of all ranks, which other programs
disturb less. Losses of both are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tpplan import auto_parallelize, load_topology, suggest
from tpplan.planner.plan import Plan
from tpplan.runtime.forked import on_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import llama

CONFIG = llama.Config(layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=1024)
SEQ, BATCH = 128, 16
MESHES: dict[int, tuple[dict[str, int], ...]] = {
    4: (
        {"dp": 4, "tp": 1, "pp": 1, "zero": 3},
        {"dp": 1, "tp": 4, "pp": 1},
        {"dp": 2, "tp": 2, "pp": 1, "zero": 3},
        {"dp": 1, "tp": 2, "pp": 2},
    ),
    8: ({"dp": 4, "tp": 2, "pp": 1, "zero": 3}, {"dp": 2, "tp": 2, "pp": 2, "zero": 1}),
}
LIMIT = 1.05
WARMUP = 2
MICROBATCHES = 4
"""In a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One plan, run both ways."""

    mesh: str
    ranks: int
    ours_s: float
    theirs_s: float
    ratio: float
    """Median over the pairs of steps."""
    processor_ratio: float
    """The same of the processors' time of all ranks."""
    loss_difference: float
    """Relative, after the same number of steps."""
    plan_s: float
    """What planning takes, once a run."""
    apply_s: float
    """What putting the model onto the mesh takes, agreement of the ranks included."""


# --------------------------------------------------------------------------- by hand


class Parts(llama.Llama):
    """The layers from `first` to `last`, with the embedding or the head where they belong."""

    def cut(self, first: int, last: int) -> Parts:
        """Drop what another stage holds."""
        if first:
            self.embedding = None
        if last < len(self.layers):
            self.norm = self.head = None
        self.layers = self.layers[first:last]
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens or the activation of the stage before -> logits or an activation."""
        c = self.config
        x = tokens if self.embedding is None else self.embedding(tokens)
        cos, sin = llama.rotary(x.new_empty(1, SEQ, 1), c.hidden // c.heads, c.rope_theta)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


LAYER = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


def split_by_hand(model: Parts, tp: DeviceMesh) -> None:
    """Megatron's split with sequence parallelism and the vocabulary over tp."""
    ends = {}
    if model.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if model.head is not None:
        ends["norm"] = SequenceParallel()
        ends["head"] = ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        )
    parallelize_module(model, tp, ends)
    for layer in model.layers:
        parallelize_module(layer, tp, LAYER)


class ByHand:
    """The same plan as its user would have written it."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        mesh, self.plan = plan.mesh, plan
        self.mesh = init_device_mesh("cpu", (mesh.pp, mesh.dp, mesh.tp), mesh_dim_names=("pp", "dp", "tp"))
        self.stage = self.mesh["pp"].get_local_rank()
        bounds = [sum(plan.layers_per_stage[:i]) for i in range(mesh.pp + 1)]
        self.model = Parts(CONFIG).cut(bounds[self.stage], bounds[self.stage + 1])
        if mesh.tp > 1:
            split_by_hand(self.model, self.mesh["tp"])
        if mesh.dp > 1:
            for module in (*self.model.layers, self.model):
                fully_shard(module, mesh=self.mesh["dp"], reshard_after_forward=plan.zero_stage == 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = self._pipeline() if mesh.pp > 1 else None

    def _pipeline(self) -> Schedule1F1B:
        pp, tp = self.plan.mesh.pp, self.plan.mesh.tp
        hidden = torch.empty(self.plan.micro_batch, SEQ // tp, CONFIG.hidden, device="meta")
        scalar = torch.empty((), device="meta")
        last = self.stage == pp - 1
        tokens = torch.empty(self.plan.micro_batch, SEQ, device="meta", dtype=torch.long)
        stage = PipelineStage(
            self.model,
            self.stage,
            pp,
            torch.device("cpu"),
            input_args=(hidden.requires_grad_() if self.stage else tokens,),
            output_args=(scalar if last else hidden.clone().requires_grad_(),),
            group=self.mesh.get_group("pp"),
        )
        return Schedule1F1B(stage, self.plan.num_microbatches, loss_fn=self._loss)

    def _loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return llama.loss(logits, (tokens,))

    def step(self, tokens: Tensor) -> float:
        """Forward, backward, update; the mean loss over data ranks."""
        mine = tokens.chunk(self.plan.mesh.dp)[self.mesh["dp"].get_local_rank()]
        with loss_parallel() if self.plan.mesh.tp > 1 else torch.enable_grad():
            value = self._whole(mine) if self.schedule is None else self._staged(mine)
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = value / (self.plan.mesh.dp * self.plan.mesh.tp)
        dist.all_reduce(total)
        return total.item()

    def _whole(self, tokens: Tensor) -> Tensor:
        value = self._loss(self.model(tokens), tokens)
        value.backward()
        return _plain(value.detach())

    def _staged(self, tokens: Tensor) -> Tensor:
        assert self.schedule is not None
        losses: list[Tensor] = []
        first, last = self.stage == 0, self.stage == self.plan.mesh.pp - 1
        self.schedule.step(
            *((tokens,) if first else ()), **({"target": tokens, "losses": losses} if last else {})
        )
        return _plain(torch.stack(losses).mean().detach()) if last else torch.zeros(())


def _plain(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # pyright: ignore[reportAttributeAccessIssue]


# --------------------------------------------------------------------------- planned


class Planned:
    """The plan under `auto_parallelize`."""

    def __init__(self, plan: Plan) -> None:
        torch.manual_seed(0)
        self.parallel = auto_parallelize(llama.Llama(CONFIG), inputs(0), plan=plan, loss_fn=llama.loss)
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-3)

    def step(self, tokens: Tensor) -> float:
        """Forward, backward, update; the mean loss."""
        value = self.parallel.train_step((tokens,))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.item()


def inputs(seed: int) -> tuple[Tensor]:
    """One global batch."""
    return (torch.randint(0, CONFIG.vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed)),)


def plan_for(pins: dict[str, int]) -> Plan:
    """The planner's own plan of a mesh, in fp32."""
    ranks = pins["dp"] * pins["tp"] * pins["pp"]
    pinned: dict[str, int | str] = {"recompute": "none", **pins}
    if pins["pp"] > 1:
        pinned |= {"schedule": "1f1b", "micro_batch": BATCH // (pins["dp"] * MICROBATCHES)}
    else:
        pinned["micro_batch"] = BATCH // pins["dp"]
    found = suggest(
        llama.Llama(CONFIG), lambda batch, seq: (torch.randint(0, CONFIG.vocab, (batch, seq)),),
        load_topology("cpu-gloo", nodes=ranks // 2), global_batch=BATCH, seq_len=SEQ, dtype="fp32",
        loss=llama.loss, pins=pinned,
    )  # fmt: skip
    if not isinstance(found, Plan):
        raise SystemExit(f"{pins}: {found.reason}")
    return replace(found, job=replace(found.job, dtype="fp32"))


# --------------------------------------------------------------------------- one run


def measure(task: tuple[Plan, int, float]) -> Pair:
    """Both in turn on this process group."""
    plan, pairs, plan_s = task
    start = time.perf_counter()
    ours = Planned(plan)
    apply_s = time.perf_counter() - start
    theirs = ByHand(plan)
    difference = 0.0
    for seed in range(WARMUP):
        first, second = ours.step(*inputs(seed)), theirs.step(*inputs(seed))
        difference = abs(first - second) / abs(second)
    times: list[tuple[Spent, Spent]] = []
    for i in range(pairs):
        batch = inputs(WARMUP + i)[0]
        both = [partial(ours.step, batch), partial(theirs.step, batch)]
        taken = [_spent(step) for step in (reversed(both) if i % 2 else both)]
        times.append((taken[i % 2], taken[1 - i % 2]))
    return Pair(
        mesh=str(plan.mesh),
        ranks=plan.mesh.devices,
        ours_s=median(a.wall_s for a, _ in times),
        theirs_s=median(b.wall_s for _, b in times),
        ratio=median(a.wall_s / b.wall_s for a, b in times),
        processor_ratio=median(a.processor_s / b.processor_s for a, b in times),
        loss_difference=difference,
        plan_s=plan_s,
        apply_s=apply_s,
    )


@dataclass(frozen=True, slots=True)
class Spent:
    """One step on all ranks."""

    wall_s: float
    """Of the slowest rank."""
    processor_s: float
    """Of all ranks together."""


def _spent(step: Callable[[], float]) -> Spent:
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    step()
    found = torch.tensor([time.perf_counter() - start, time.process_time() - used], dtype=torch.float64)
    every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(every, found)
    return Spent(max(x[0].item() for x in every), sum(x[1].item() for x in every))


def run(ranks: Sequence[int], pairs: int) -> list[Pair]:
    """Every mesh of these numbers of ranks."""
    found = []
    for size in ranks:
        for pins in MESHES[size]:
            start = time.perf_counter()
            plan = plan_for(pins)
            task = (plan, pairs, time.perf_counter() - start)
            found.append(on_ranks(measure, task, size=size)[0])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 when any plan's ratio is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=sorted(MESHES), choices=sorted(MESHES))
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    pairs = run(arguments.ranks, arguments.pairs)
    if arguments.json:
        print(json.dumps({"pairs": [asdict(pair) for pair in pairs]}, indent=2))
    else:
        titles = ("ours", "by hand", "ratio", "cpu", "loss", "plan", "apply")
        print(f"{'mesh':<18}" + "".join(f"{title:>11}" for title in titles))
        for pair in pairs:
            times = f"{pair.ours_s * 1e3:8.1f} ms{pair.theirs_s * 1e3:8.1f} ms"
            ratios = f"{pair.ratio:11.3f}{pair.processor_ratio:11.3f}{pair.loss_difference:11.1e}"
            print(f"{pair.mesh:<18}{times}{ratios}{pair.plan_s:9.2f} s{pair.apply_s:9.2f} s")
    return int(any(pair.ratio > LIMIT for pair in pairs))


if __name__ == "__main__":
    raise SystemExit(main())
