"""What the guard says of runs that go wrong: the rank that is to blame, and where it is."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
import tpplan
from pool import RankPool
from tpplan.planner.errors import OptionError, RunError
from tpplan.runtime.gather import whole
from tpplan.runtime.guard import Guard, check_copies, check_finite


def stepped_once(name: str, plan, spoil_data_rank: int | None = None):
    parallel = tpplan.auto_parallelize(
        cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name]
    )
    batch = cases.inputs(name)
    if spoil_data_rank is not None:
        first = spoil_data_rank * plan.micro_batch * plan.num_microbatches
        batch["x"][first] = float("nan")
    parallel.train_step(batch)
    return parallel


def error_of(check: Callable[..., None], *args: object) -> str:
    try:
        check(*args)
    except RunError as error:
        return str(error)
    return ""


def nan_on(data_rank: int | None, plan) -> str:
    return error_of(check_finite, stepped_once("mlp", plan, data_rank), 3)


def gradient_spoilt_on(spoilt: int, plan) -> str:
    parallel = stepped_once("llama", plan)
    if dist.get_rank() == spoilt:
        parameter = list(parallel.parameters())[2]
        assert parameter.grad is not None
        whole_or_part = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        whole_or_part.view(-1)[0] = float("inf")
    return error_of(check_finite, parallel, 3)


def copies(spoilt: int | None, plan) -> str:
    parallel = stepped_once("llama", plan)
    parameter = dict(parallel.named_parameters())["norm.weight"]
    if dist.get_rank() == spoilt:
        with torch.no_grad():
            parameter.to_local().view(-1)[0].add_(1e-6)
    found = error_of(check_copies, parallel, 7)
    assert whole(parameter.detach()).shape == parameter.shape
    return found


def test_a_loss_that_is_not_finite_names_its_rank(ranks: Callable[[int], RankPool]):
    plan = cases.stepped(cases.planned("mlp", dp=1, tp=1), dp=2, zero=1)
    assert ranks(2).run(nan_on, None, plan) == ["", ""]
    assert ranks(2).run(nan_on, 1, plan) == ["step 3, rank 1: the loss of its samples is nan"] * 2


def test_a_gradient_that_is_not_finite_names_rank_and_parameter(ranks: Callable[[int], RankPool]):
    plan = cases.planned("llama", dp=1, tp=2)
    first, second = ranks(2).run(gradient_spoilt_on, 1, plan)
    assert first == second
    assert first.startswith("step 3, rank 1: the gradient of layers.0.")
    assert first.endswith(" is not finite")


def test_ranks_that_hold_different_copies_are_named(ranks: Callable[[int], RankPool]):
    plan = cases.planned("llama", dp=1, tp=2)
    assert ranks(2).run(copies, None, plan) == ["", ""]
    expected = "step 7: ranks 0 and 1 hold different values of norm.weight"
    assert ranks(2).run(copies, 1, plan) == [expected] * 2


# --------------------------------------------------------------------------- hanging


def _hang(rank: int, folder: Path) -> None:
    error = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(error, 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    plan = cases.stepped(cases.planned("mlp", dp=1, tp=1), dp=2, zero=1)
    parallel = stepped_once("mlp", plan)
    guard = Guard(parallel, timeout_s=1.0)
    guard.after(0)
    if rank == 1:
        time.sleep(60)
    parallel.train_step(cases.inputs("mlp"))


def test_a_collective_that_hangs_ends_with_rank_operation_and_stack(tmp_path: Path):
    cases.planned("mlp", dp=1, tp=1)  # once, for both
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_hang, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [1, 1]
    waiting, sleeping = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert "rank 0 (" in waiting
    assert "has not done step 1 within 1 s; it waits in " in waiting
    assert "train_step" in waiting
    assert "rank 1 (" in sleeping
    assert "it is in no collective" in sleeping
    assert "time.sleep(60)" in sleeping


def test_impossible_limits_are_refused():
    with pytest.raises(OptionError, match="must be positive"):
        Guard(None, timeout_s=0.0)  # pyright: ignore[reportArgumentType]
