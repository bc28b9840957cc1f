"""A checkpoint saved under one plan is read under another and by one process, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import zoo
from pool import RankPool
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from tpplan.planner.plan import Plan
from tpplan.runtime.api import auto_parallelize
from tpplan.runtime.gather import whole
from tpplan.runtime.parallel import Parallel
from tpplan.runtime.portable import portable_state
from tpplan.runtime.resume import Checkpoints

Ranks = Callable[[int], RankPool]
Values = dict[str, torch.Tensor]
TOLERANCE = 1e-5


def made(name: str, plan: Plan) -> tuple[Parallel, torch.optim.Optimizer]:
    loss = zoo.MODELS[name].loss
    parallel = auto_parallelize(zoo.built(name), zoo.inputs(name), plan=plan, loss_fn=loss)
    return parallel, cases.optimizer_of(parallel.parameters())


def contents(parallel: Parallel, optimizer: torch.optim.Optimizer) -> Values:
    """Whole parameters and moments."""
    found = {name: whole(p.detach()).clone() for name, p in parallel.named_parameters()}
    for name, parameter in parallel.named_parameters():
        state = optimizer.state[parameter]
        found |= {f"{name}.{key}": whole(value).clone() for key, value in state.items() if value.numel() > 1}
    return found


def stepped(parallel: Parallel, optimizer: torch.optim.Optimizer, name: str, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(parallel.train_step(zoo.inputs(name, seed=step)).item())
        parallel.clip_grad_norm_(cases.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(name: str, plan: Plan, folder: str, steps: int) -> tuple[list[float], Values]:
    parallel, optimizer = made(name, plan)
    losses = stepped(parallel, optimizer, name, range(steps))
    write(portable_state(parallel, optimizer), checkpoint_id=folder)
    return losses, contents(parallel, optimizer)


def load(name: str, plan: Plan, folder: str, steps: range) -> tuple[list[float], Values]:
    """Losses of some steps more, and what was read before them."""
    parallel, optimizer = made(name, plan)
    for parameter in parallel.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the state that is loaded into
    optimizer.zero_grad()
    read(portable_state(parallel, optimizer), checkpoint_id=folder)
    found = contents(parallel, optimizer)
    return stepped(parallel, optimizer, name, steps), found


def alone(name: str, steps: int) -> tuple[list[float], torch.nn.Module]:
    """One process that was never interrupted."""
    model = zoo.built(name)
    optimizer = cases.optimizer_of(model.parameters())
    losses = []
    for step in range(steps):
        loss = zoo.loss_of(name, model, zoo.inputs(name, seed=step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cases.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def plans(name: str) -> tuple[Plan, Plan]:
    """Eight ranks in two ways."""
    first = zoo.planned(name, pp=2, dp=2, tp=2, zero=3, schedule="1f1b")
    return first, zoo.planned(name, dp=4, tp=2, zero=1)


def check(name: str, steps: int, more: int, ranks: Ranks, folder: str) -> None:
    """Under 2x2x2, then under 1x4x2, and read by one process."""
    first, second = plans(name)
    saved = ranks(8).run(save, name, first, folder, steps)
    resumed = ranks(8).run(load, name, second, folder, range(steps, steps + more))
    expected, model = alone(name, steps + more)
    everything: Values = {}
    for losses, found in saved:
        assert losses == pytest.approx(expected[:steps], rel=TOLERANCE)
        everything |= found
    for losses, found in resumed:
        assert losses == pytest.approx(expected[steps:], rel=TOLERANCE)
        assert [key for key, value in found.items() if not torch.equal(value, everything[key])] == []
    state: dict[str, Any] = {
        f"model.{key}": torch.zeros_like(value) for key, value in model.named_parameters()
    }
    read(state, checkpoint_id=folder, no_dist=True)
    assert [key for key, value in state.items() if not torch.equal(value, everything[key[6:]])] == []


@pytest.mark.filterwarnings("ignore:.*single process")
def test_another_plan_and_one_process_read_it(ranks: Ranks, tmp_path: Path) -> None:
    """Query, key and value in one projection: a cut in pieces."""
    check("gpt", 2, 1, ranks, str(tmp_path / "checkpoint"))


@pytest.mark.filterwarnings("ignore:.*single process")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-hf", "gpt2-hf"])
def test_fifty_steps_of_hugging_face_models(name: str, ranks: Ranks, tmp_path: Path) -> None:
    check(name, 50, 5, ranks, str(tmp_path / "checkpoint"))


def begin(name: str, plan: Plan, folder: str, steps: int) -> Values:
    parallel, optimizer = made(name, plan)
    stepped(parallel, optimizer, name, range(steps))
    checkpoints = Checkpoints(parallel, optimizer, folder, every=steps)
    checkpoints.after(steps - 1)
    checkpoints.close()
    return contents(parallel, optimizer)


def go_on(name: str, plan: Plan, folder: str) -> tuple[int, Values]:
    parallel, optimizer = made(name, plan)
    checkpoints = Checkpoints(parallel, optimizer, folder, every=1)
    step = checkpoints.resume()
    checkpoints.close()
    return step, contents(parallel, optimizer)


def test_a_run_goes_on_under_another_plan(ranks: Ranks, tmp_path: Path) -> None:
    first, second = plans("gpt")
    everything: Values = {}
    for found in ranks(8).run(begin, "gpt", first, str(tmp_path), 2):
        everything |= found
    for step, found in ranks(8).run(go_on, "gpt", second, str(tmp_path)):
        assert step == 2
        assert [key for key, value in found.items() if not torch.equal(value, everything[key])] == []
