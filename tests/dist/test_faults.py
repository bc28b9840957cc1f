"""Ranks are killed at random moments: every restart goes on, nothing before the last checkpoint is lost.

Final parameters have to be those of a run that nobody disturbed, bit by bit.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import cases
import fault_script
import pytest
import torch
import torch.distributed as dist
import tpplan
from pool import RankPool
from tpplan.planner.errors import OptionError
from tpplan.planner.plan import Plan
from tpplan.planner.plan_file import save
from tpplan.runtime.resume import Checkpoints

PATIENCE_S = 600.0
LATEST_S = 0.05
"""A kill follows a step by up to so many seconds: several steps of these models."""


def lives(folder: Path) -> list[tuple[int, int]]:
    """(first, last) step of every life, from the log of rank 0."""
    rows = [tuple(map(int, line.split()[:2])) for line in (folder / "steps").read_text().splitlines()]
    ends: dict[int, tuple[int, int]] = {}
    life = 0
    for before, (first, step) in zip([(0, -1), *rows], rows, strict=False):
        life += step != before[1] + 1 or first != before[0]
        ends[life] = (first, step)
    return list(ends.values())


def check_lives(folder: Path, steps: int, every: int) -> None:
    """Each life begins at a checkpoint: the last one, or that before if it was still being written."""
    found = lives(folder)
    for (_, last), (first, _) in itertools.pairwise(found):
        assert first % every == 0
        assert last + 1 - first < 2 * every, found
    assert found[-1][1] == steps - 1


def losses(folder: Path) -> dict[int, set[str]]:
    """All values that each step's loss had in any life."""
    found: dict[int, set[str]] = {}
    for line in (folder / "steps").read_text().splitlines():
        _, step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def final(folder: Path, ranks: int) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"final.{rank}") for rank in range(ranks)]


def check_equal(found: Path, expected: Path, ranks: int) -> None:
    """Losses and parameters, bit by bit."""
    assert losses(found) == losses(expected)
    for ours, theirs in zip(final(found, ranks), final(expected, ranks), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def wait_for_progress(folder: Path, steps: int, since: int) -> None:
    """Until rank 0 has logged `steps` more lines than `since`."""
    log, end = folder / "steps", time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if log.exists() and len(log.read_text().splitlines()) >= since + steps:
            return
        time.sleep(0.002)
    raise AssertionError("the run does not go on")


def kill_one(folder: Path, ranks: int, dice: random.Random, *, most_steps: int) -> None:
    """A random rank, up to so many steps into its life, at a random moment of a step."""
    log = folder / "steps"
    since = len(log.read_text().splitlines()) if log.exists() else 0
    wait_for_progress(folder, dice.randint(1, most_steps), since)
    time.sleep(dice.uniform(0, LATEST_S))
    os.kill(int((folder / "pids" / str(dice.randrange(ranks))).read_text()), signal.SIGKILL)


# --------------------------------------------------------------------------- quick: forked ranks


def _rank(rank: int, size: int, store: str, args: tuple) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    fault_script.train(*args)
    os._exit(0)


def start(size: int, store: Path, *args: object) -> list:
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, size, str(store), args), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return ranks


def end(ranks: Sequence) -> None:
    for process in ranks:
        process.kill()
        process.join()


def killed_and_not(name: str, plan: Plan, folder: Path, *, steps: int, every: int, kills: int) -> None:
    """The same run, left alone and killed so often; both must end alike."""
    size, dice = plan.mesh.devices, random.Random(kills)
    for run, times in ((folder / "quiet", 0), (folder / "killed", kills)):
        run.mkdir()
        for life in range(times + 1):
            ranks = start(size, run / f"store{life}", name, plan, run, steps, every)
            if life < times:
                kill_one(run, size, dice, most_steps=2 * every)
            else:
                for process in ranks:
                    process.join(PATIENCE_S)
                assert [process.exitcode for process in ranks] == [0] * size
            end(ranks)
    assert len(lives(folder / "killed")) == kills + 1
    check_lives(folder / "killed", steps, every)
    check_equal(folder / "killed", folder / "quiet", size)


PLANS = {
    "zero1": ("llama", lambda: cases.stepped(cases.planned("llama", dp=1, tp=1), dp=2, zero=1)),
    "fused-tp": ("gpt", lambda: cases.planned("gpt", dp=1, tp=2)),
}


@pytest.mark.parametrize("which", PLANS)
def test_two_kills(which: str, tmp_path: Path):
    name, plan = PLANS[which]
    killed_and_not(name, plan(), tmp_path, steps=40, every=5, kills=2)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path):
    name, plan = PLANS["zero1"]
    killed_and_not(name, plan(), tmp_path, steps=200, every=10, kills=20)


# --------------------------------------------------------------------------- all of it: torchrun


def run_under_torchrun(plan: Path, folder: Path, steps: int, every: int) -> subprocess.Popen:
    script = Path(fault_script.__file__)
    command = [
        sys.executable,
        "-m",
        "tpplan",
        "run",
        "--on-cpu",
        "--max-restarts",
        "40",
        str(plan),
        str(script),
    ]
    examples = script.parents[2] / "examples"
    python_path = os.pathsep.join([str(script.parent), str(examples), os.environ.get("PYTHONPATH", "")])
    folder.mkdir()
    return subprocess.Popen(
        [*command, str(folder), str(steps), str(every)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def of_one_node(plan: Plan) -> Plan:
    """The same, on so many devices as it has ranks."""
    ranks = plan.mesh.devices
    return replace(plan, cluster=replace(plan.cluster, devices=ranks, devices_per_node=ranks))


def pipeline() -> Plan:
    whole = cases.planned("llama", dp=1, tp=2)
    return cases.stepped(cases.staged(whole, "1f1b", [2, 2]), microbatches=2)


@pytest.mark.parametrize(
    ("made", "steps", "every", "kills"),
    [
        pytest.param(PLANS["zero1"][1], 12, 3, 2, id="two"),
        pytest.param(PLANS["zero1"][1], 200, 10, 20, id="twenty", marks=pytest.mark.slow),
        pytest.param(pipeline, 100, 10, 5, id="pipeline", marks=pytest.mark.slow),
    ],
)
def test_kills_under_torchrun(
    made: Callable[[], Plan], steps: int, every: int, kills: int, tmp_path: Path
) -> None:
    plan, dice = of_one_node(made()), random.Random(kills)
    ranks = plan.mesh.devices
    save(plan, tmp_path / "plan.yaml")
    for folder, times in ((tmp_path / "quiet", 0), (tmp_path / "killed", kills)):
        run = run_under_torchrun(tmp_path / "plan.yaml", folder, steps, every)
        try:
            for _ in range(times):
                kill_one(folder, ranks, dice, most_steps=2 * every)
            assert run.wait(PATIENCE_S) == 0
        finally:
            run.terminate()  # torchrun ends its ranks
            run.wait()
    assert len(lives(tmp_path / "killed")) == kills + 1
    check_lives(tmp_path / "killed", steps, every)
    check_equal(tmp_path / "killed", tmp_path / "quiet", ranks)


# --------------------------------------------------------------------------- what is on the disk


def written(folder: Path) -> tuple[list[int], int, list[str]]:
    """Complete checkpoints after seven steps, where a new run goes on, what is left of a torn one."""
    name, plan = "llama", cases.stepped(cases.planned("llama", dp=1, tp=1), dp=2, zero=1)
    torch.manual_seed(0)
    parallel = tpplan.auto_parallelize(
        cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name]
    )
    optimizer = cases.optimizer_of(parallel.parameters())
    checkpoints = Checkpoints(parallel, optimizer, folder, every=1, keep=2)
    for step in range(7):
        parallel.train_step(cases.inputs(name, seed=step))
        optimizer.step()
        checkpoints.after(step)
    checkpoints.close()
    complete = sorted(checkpoints.complete())
    (folder / "step-99.partial").mkdir(exist_ok=True)
    dist.barrier()
    again = Checkpoints(parallel, optimizer, folder, every=1)
    first = again.resume()
    again.close()
    return complete, first, sorted(path.name for path in folder.iterdir())


def test_the_last_ones_are_kept_and_torn_ones_are_not(tmp_path: Path, ranks: Callable[[int], RankPool]):
    for complete, first, names in ranks(2).run(written, tmp_path):
        assert complete == [6, 7]
        assert first == 7
        assert names == ["step-6", "step-7"]


def test_impossible_intervals_are_refused():
    with pytest.raises(OptionError, match="must be at least 1"):
        Checkpoints(None, None, "x", every=0)  # pyright: ignore[reportArgumentType]
