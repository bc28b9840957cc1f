"""Profile a cluster, plan for it, run the plan and all its rivals there: was the choice right?

    python -m benchmarks.closed_loop [--mbit 400] [--model gpt moe] [--rounds 5] [--profile FILE] [--json]

On two emulated nodes of two CPU ranks (`two_nodes`; needs root) it

1. profiles the cluster (`tpplan profile --quick`), unless FILE is there already;
2. asks for a plan, and for the best plan of every mesh and ZeRO stage that is legal;
3. takes steps of all of them in turn, `--rounds` times over, in one process group, so that a machine
   that is busy for a while slows all alike, and keeps each plan's fastest: what other programs add to
   a step is never negative;
4. prints predicted and measured step, the error, how much slower the chosen plan is than the best
   measured one (regret), and the rank correlation of prediction and measurement (Kendall's tau).

Ends with 1 when the regret of a model is above 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tpplan import Plan, load_plan, load_topology, save_plan, suggest
from tpplan.planner.errors import UserError
from tpplan.runtime.api import auto_parallelize
from tpplan.runtime.bench import OPTIMIZERS, Step

from .scores import kendall_tau
from .two_nodes import missing, two_nodes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import gpt
import mixtral_8x7b as mixtral

DEVICES, SEQ, BATCH, VOCAB = 4, 64, 16, 512
LIMIT = 0.05
MODULE = "benchmarks.closed_loop"
WARMUP_ROUNDS = 1


def small_gpt() -> nn.Module:
    """3.5 M parameters."""
    return gpt.GPT(gpt.Config(layers=4, hidden=256, heads=8, vocab=VOCAB, positions=SEQ))


def small_moe() -> nn.Module:
    """8 experts in every layer, 2 for each token; 5 M parameters."""
    return mixtral.Mixtral(
        mixtral.Config(layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=VOCAB, experts=8)
    )


BUILD = {"gpt": small_gpt, "moe": small_moe}
LOSS = {"gpt": gpt.loss, "moe": mixtral.loss}
DTYPE = {"gpt": "fp32", "moe": "bf16"}
"""Grouped products of experts can be traced without data in bf16 only."""


def inputs(batch: int, seq: int) -> tuple[Tensor]:
    """Random token ids, the same on every rank."""
    return (torch.randint(0, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(0)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan of one model."""

    model: str
    plan: str
    chosen: bool
    predicted_s: float
    measured_s: float
    rounds_s: tuple[float, ...]


# --------------------------------------------------------------------------- plans


def asked(model: str, profile: Path, pins: dict[str, int] | None) -> Plan | None:
    """The planner's answer; None where a pinned choice is not legal or does not fit."""
    try:
        found = suggest(
            BUILD[model](), inputs, load_topology(str(profile)), global_batch=BATCH, seq_len=SEQ,
            dtype=DTYPE[model], loss=LOSS[model], pins=pins,
        )  # fmt: skip
    except UserError:
        if pins is None:
            raise
        return None
    return found if isinstance(found, Plan) else None


def meshes(*, experts: bool) -> Iterator[dict[str, int]]:
    """Every way to give the devices to the axes, with every ZeRO stage where there is data parallelism.

    Without experts `ep` is `dp` by another name.
    """
    sizes = [n for n in range(1, DEVICES + 1) if DEVICES % n == 0]
    for pp, dp, ep, tp in product(sizes, sizes, sizes if experts else [1], sizes):
        if pp * dp * ep * tp == DEVICES:
            for zero in range(4) if dp * ep > 1 else (0,):
                yield {"pp": pp, "dp": dp, "cp": 1, "ep": ep, "tp": tp, "zero": zero}


def title(plan: Plan) -> str:
    """In a few words."""
    split = f", ZeRO-{plan.zero_stage}" if plan.mesh.batch_ways > 1 else ""
    schedule = f", {plan.schedule}" if plan.mesh.pp > 1 else ""
    again = f", recompute {plan.recompute}" if plan.recompute != "none" else ""
    return f"{plan.mesh}{split}, {plan.num_microbatches} x {plan.micro_batch}{schedule}{again}"


def plans_of(model: str, profile: Path) -> list[Plan]:
    """The chosen plan first, then every other one."""
    chosen = asked(model, profile, None)
    if chosen is None:
        raise SystemExit(f"{model}: nothing fits {profile}")
    rivals = (asked(model, profile, pins) for pins in meshes(experts=model == "moe"))
    every = {title(plan): plan for plan in (chosen, *rivals) if plan}
    return list(every.values())


# --------------------------------------------------------------------------- measuring, on every rank


def work(folder: Path, rounds: int) -> None:
    """Take steps of every plan in `folder`, in turn; rank 0 writes `measured.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tasks = json.loads((folder / "tasks.json").read_text())
    steps = [_step(task["model"], load_plan(task["file"])) for task in tasks]
    times: list[list[float]] = [[] for _ in tasks]
    for turn in range(WARMUP_ROUNDS + rounds):
        for step, taken in zip(steps, times, strict=True):
            seconds = _seconds(step)
            if turn >= WARMUP_ROUNDS:
                taken.append(seconds)
    if dist.get_rank() == 0:
        (folder / "measured.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _step(model: str, plan: Plan) -> Step:
    torch.manual_seed(0)
    batch = inputs(BATCH, SEQ)
    parallel = auto_parallelize(BUILD[model](), batch, plan=plan, loss_fn=LOSS[model])
    return Step(parallel, OPTIMIZERS["adamw"](parallel.parameters()), batch)


def _seconds(step: Step) -> float:
    """Of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


# --------------------------------------------------------------------------- the loop


def loop(models: Sequence[str], *, mbit: float, rounds: int, profile: Path | None) -> list[Row]:
    """All steps of the module's docstring."""
    with tempfile.TemporaryDirectory() as name, two_nodes(mbit) as nodes:
        folder = Path(name)
        profile = profile or folder / "cluster.yaml"
        if not profile.exists():
            nodes.torchrun("tpplan", ["profile", "--quick", "--no-resume", "--quiet", "-o", str(profile)])
        tasks: list[dict[str, Any]] = []
        plans: list[Plan] = []
        for model in models:
            for number, plan in enumerate(plans_of(model, profile)):
                file = str(folder / f"{len(tasks)}.yaml")
                tasks.append({"model": model, "file": file, "chosen": number == 0})
                plans.append(plan)
                save_plan(plan, Path(tasks[-1]["file"]))
        (folder / "tasks.json").write_text(json.dumps(tasks))
        nodes.torchrun(MODULE, ["--work", str(folder), "--rounds", str(rounds)])
        times = json.loads((folder / "measured.json").read_text())
    return [
        Row(
            model=task["model"],
            plan=title(plan),
            chosen=task["chosen"],
            predicted_s=plan.predicted.step_time_s,
            measured_s=min(taken),
            rounds_s=tuple(taken),
        )
        for task, plan, taken in zip(tasks, plans, times, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one model's rows say."""

    model: str
    plans: int
    regret: float
    """The chosen plan's measured step over the best measured one, less one."""
    chosen_error: float
    """Predicted over measured, less one."""
    mean_error: float
    """Mean absolute, of all plans."""
    kendall_tau: float | None


def verdict(model: str, rows: Sequence[Row]) -> Verdict:
    """Of the rows of that model."""
    own = [row for row in rows if row.model == model]
    chosen = next(row for row in own if row.chosen)
    errors = [abs(row.predicted_s / row.measured_s - 1) for row in own]
    return Verdict(
        model=model,
        plans=len(own),
        regret=chosen.measured_s / min(row.measured_s for row in own) - 1,
        chosen_error=chosen.predicted_s / chosen.measured_s - 1,
        mean_error=sum(errors) / len(errors),
        kendall_tau=kendall_tau([(row.predicted_s, row.measured_s) for row in own]),
    )


def show(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
    """Tables, fastest first."""
    for found in verdicts:
        print(
            f"\n{found.model}: {found.plans} plans\n{'plan':<48}{'predicted':>12}{'measured':>12}{'error':>9}"
        )
        for row in sorted((r for r in rows if r.model == found.model), key=lambda r: r.measured_s):
            times = f"{row.predicted_s * 1e3:9.1f} ms{row.measured_s * 1e3:9.1f} ms"
            error = row.predicted_s / row.measured_s - 1
            print(f"{row.plan:<48}{times}{error:+9.1%}{' <- chosen' if row.chosen else ''}")
        tau = "-" if found.kendall_tau is None else f"{found.kendall_tau:.2f}"
        print(
            f"regret {found.regret:.1%}; prediction of the chosen plan {found.chosen_error:+.1%}, "
            f"mean absolute {found.mean_error:.1%}; Kendall tau {tau}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=400.0, help="what each node's link carries, Mb/s")
    parser.add_argument("--model", nargs="+", choices=sorted(BUILD), default=sorted(BUILD))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="made if it is not there")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.work:
        work(arguments.work, arguments.rounds)
        return 0
    if why := missing():
        print(f"closed_loop: skipped: {why}", file=sys.stderr)
        return 0
    run = partial(loop, mbit=arguments.mbit, rounds=arguments.rounds, profile=arguments.profile)
    rows = run(arguments.model)
    verdicts = [verdict(model, rows) for model in arguments.model]
    if arguments.json:
        print(json.dumps({"rows": [asdict(r) for r in rows], "verdicts": [asdict(v) for v in verdicts]}))
    else:
        show(rows, verdicts)
    return int(any(found.regret > LIMIT for found in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
