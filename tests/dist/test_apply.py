"""Plans on real gloo ranks: what they compute is what one process computes, what runs is what was planned."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from pool import RankPool
from torch.distributed.tensor import DTensor
from tpplan import UserError, save_plan
from tpplan.planner.plan import Plan
from tpplan.runtime.api import auto_parallelize
from tpplan.runtime.executed import record
from tpplan.runtime.fidelity import compare
from tpplan.runtime.gather import whole

TOLERANCE = 1e-5
"""Relative, fp32."""
Ranks = Callable[[int], RankPool]


@functools.cache
def plan_of(case: str) -> Plan:
    """The plans of this file by name."""
    llama2, gpt2 = cases.planned("llama", tp=2), cases.planned("gpt", tp=2)
    llama1, gpt1 = cases.planned("llama"), cases.planned("gpt")
    mixtral2 = cases.planned("mixtral", ep=2, tp=1, bytes_per_s=1e12)
    step, cut = cases.stepped, cases.staged
    made = {
        "mlp tp2": lambda: cases.planned("mlp", tp=2),
        "llama tp2": lambda: llama2,
        "gpt tp2": lambda: gpt2,
        "llama tp4": lambda: cases.planned("llama", tp=4),
        "gpt tp4": lambda: cases.planned("gpt", tp=4),
        "llama dp2 zero0": lambda: step(llama1, dp=2, zero=0, microbatches=2),
        "llama dp2 zero1": lambda: step(llama1, dp=2, zero=1, microbatches=2),
        "llama dp2 zero2": lambda: step(llama1, dp=2, zero=2, microbatches=2),
        "gpt dp2 zero3": lambda: step(gpt1, dp=2, zero=3, microbatches=2),
        "llama dp4 zero3": lambda: step(llama1, dp=4, zero=3),
        "gpt dp2 tp2 zero0": lambda: step(gpt2, dp=2, zero=0),
        "gpt dp2 tp2 zero1": lambda: step(gpt2, dp=2, zero=1, microbatches=2),
        "llama dp2 tp2 zero3": lambda: step(llama2, dp=2, zero=3, microbatches=2),
        "llama dp4 tp2 zero2": lambda: step(llama2, dp=4, zero=2),
        "llama recompute full": lambda: cases.recomputed(step(llama2, dp=2, zero=3), "full"),
        "gpt recompute selective": lambda: cases.recomputed(gpt2, "selective"),
        "llama pp2 gpipe": lambda: cut(step(llama1, microbatches=4), "gpipe", (2, 2)),
        "llama pp4 1f1b": lambda: cut(step(llama1, microbatches=4), "1f1b", (1, 1, 1, 1)),
        "gpt pp2 1f1b uneven": lambda: cut(step(gpt1, microbatches=4), "1f1b", (3, 1)),
        "gpt pp2 interleaved": lambda: cut(step(gpt1, microbatches=4), "interleaved", (1, 1, 1, 1), 2),
        "llama pp2 zb-h1": lambda: cut(step(llama1, microbatches=4), "zb-h1", (2, 2)),
        "gpt pp2 zbv": lambda: cut(step(gpt1, microbatches=4), "zbv", (1, 1, 1, 1), 2),
        "llama pp2 tp2 zbv": lambda: cut(step(llama2, microbatches=4), "zbv", (1, 1, 1, 1), 2),
        "gpt pp2 dualpipev": lambda: cut(step(gpt1, microbatches=4), "dualpipev", (1, 1, 1, 1), 2),
        "llama dp4 zero3 hsdp": lambda: replace(step(llama1, dp=4, zero=3, microbatches=2), shard_group=2),
        "gpt dp4 tp2 zero2 hsdp": lambda: replace(step(gpt2, dp=4, zero=2, microbatches=2), shard_group=2),
        "gpt pp2 dp2 tp2": lambda: cut(step(gpt2, dp=2, zero=1, microbatches=2), "1f1b", (2, 2)),
        "llama pp2 dp2 tp2": lambda: cut(step(llama2, dp=2, zero=3, microbatches=2), "1f1b", (3, 1)),
        "mixtral ep2": lambda: step(mixtral2),
        "mixtral ep4": lambda: step(cases.planned("mixtral", ep=4, tp=1, bytes_per_s=1e12), zero=1),
        "mixtral dp2 ep2 zero0": lambda: step(mixtral2, dp=2, microbatches=2),
        "mixtral dp2 ep2 zero3": lambda: step(mixtral2, dp=2, zero=3),
        "mixtral pp2 ep2": lambda: cut(step(mixtral2, microbatches=2), "1f1b", (3, 1)),
        "recommender ep2": lambda: step(cases.planned("recommender", ep=2, tp=1, bytes_per_s=1e12)),
        "recommender dp2 ep4": lambda: step(
            cases.planned("recommender", ep=4, tp=1, bytes_per_s=1e12), dp=2, zero=1
        ),
    }
    return made[case]()


CASES = (
    "llama recompute full", "gpt recompute selective", "gpt pp2 1f1b uneven", "gpt pp2 dp2 tp2",
    "llama pp2 dp2 tp2", "mixtral dp2 ep2 zero3", "mixtral pp2 ep2", "recommender dp2 ep4",
)  # fmt: skip
"""What the combinations of `test_combinations` lack: uneven stages, and more at a time."""
MORE = (
    "mlp tp2", "llama tp2", "gpt tp2", "llama tp4", "gpt tp4", "llama dp2 zero0", "llama dp2 zero1",
    "llama dp2 zero2", "gpt dp2 zero3", "llama dp4 zero3", "gpt dp2 tp2 zero0", "gpt dp2 tp2 zero1",
    "llama dp2 tp2 zero3", "llama dp4 tp2 zero2", "llama pp2 gpipe", "llama pp4 1f1b", "gpt pp2 interleaved",
    "llama pp2 zb-h1", "gpt pp2 zbv", "llama pp2 tp2 zbv", "gpt pp2 dualpipev", "llama dp4 zero3 hsdp",
    "gpt dp4 tp2 zero2 hsdp", "mixtral ep2", "mixtral ep4", "mixtral dp2 ep2 zero0", "recommender ep2",
)  # fmt: skip


def train(name: str, plan: Plan) -> tuple[list[float], dict[str, Any], dict[str, Any], list[bool]]:
    """On one rank: losses, first gradients, last parameters, which parameters are DTensors."""
    parallel = auto_parallelize(cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name])
    optimizer = cases.optimizer_of(parallel.parameters())
    losses, first = [], {}
    for step in range(cases.STEPS):
        losses.append(parallel.train_step(cases.inputs(name, seed=step)).item())
        if not step:
            first = {n: whole(p.grad).clone() for n, p in parallel.named_parameters() if p.grad is not None}
        parallel.clip_grad_norm_(cases.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    last = {n: whole(p.detach()) for n, p in parallel.named_parameters()}
    return losses, first, last, [isinstance(p, DTensor) for p in parallel.parameters()]


@functools.cache
def trained(name: str) -> Any:
    return cases.trained(name)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, tensor in found.items():
        if name in expected:
            error = (tensor - expected[name]).norm() / (expected[name].norm() + 1e-12)
            assert error < TOLERANCE, f"{what} of {name}: relative error {error:.1e}"


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)])
def test_three_steps_equal_one_process(case: str, ranks: Ranks) -> None:
    name = case.split()[0]
    plan = plan_of(case)
    results = ranks(plan.mesh.devices).run(train, name, plan)
    losses, gradients, parameters = trained(name)
    for found, first, last, _ in results:
        assert found == pytest.approx(losses, rel=TOLERANCE)
        assert_equal(first, gradients, "gradient")
        assert_equal(last, parameters, "last value")
    seen = set().union(*(first for _, first, _, _ in results))
    assert set(gradients) <= seen


def executed(name: str, plan: Plan) -> list[Any]:
    """The collectives of a second step on one rank."""
    parallel = auto_parallelize(cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name])
    parallel.train_step(cases.inputs(name))
    for parameter in parallel.parameters():
        parameter.grad = None
    with record() as found:
        parallel.train_step(cases.inputs(name))
        parallel.clip_grad_norm_(1.0)
    return found


FAITHFUL = {
    "mlp tp2": {"tp": 2},
    "llama tp2": {"tp": 2},
    "llama dp2 tp2": {"tp": 2, "dp": 2, "zero": 1},
    "llama dp2 zero3": {"tp": 1, "dp": 2, "zero": 3, "micro_batch": 1},
    "gpt dp4 zero2": {"tp": 1, "dp": 4, "zero": 2},
    "mixtral ep2": {"tp": 1, "ep": 2, "zero": 0, "bytes_per_s": 1e12},
    "mixtral dp2 ep2": {"tp": 1, "ep": 2, "dp": 2, "zero": 0, "bytes_per_s": 1e12},
}


@pytest.mark.parametrize("case", FAITHFUL)
def test_what_runs_is_what_was_planned(case: str, ranks: Ranks) -> None:
    name = case.split()[0]
    plan = cases.planned(name, **FAITHFUL[case])
    rows = compare(plan, ranks(plan.mesh.devices).run(executed, name, plan))
    if name == "mixtral":  # planned in it, run in fp32
        rows = tuple(replace(row, agrees=row.as_often) for row in rows)
    assert rows and [row for row in rows if not row.agrees] == []


# --------------------------------------------------------------------------- weights, loops, mistakes


def first_weights(name: str, plan: Plan, *, on_meta: bool) -> dict[str, torch.Tensor]:
    """Whole parameters as `auto_parallelize` leaves them."""
    torch.manual_seed(torch.distributed.get_rank())  # ranks that disagree, as careless scripts make them
    with torch.device("meta" if on_meta else "cpu"):
        model = cases.BUILD[name]()
    parallel = auto_parallelize(model, cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name])
    return {n: whole(p.detach()) for n, p in parallel.named_parameters()}


@pytest.mark.parametrize("on_meta", [False, True])
def test_weights_are_equal_on_every_rank_whatever_the_mesh(on_meta: bool, ranks: Ranks) -> None:
    every: dict[str, list[torch.Tensor]] = {}
    for case in ("gpt tp2", "gpt pp2 zbv", "gpt dp2 zero3"):
        plan = plan_of(case)
        results = ranks(plan.mesh.devices).run(functools.partial(first_weights, on_meta=on_meta), "gpt", plan)
        for found in results:
            for name, tensor in found.items():
                every.setdefault(name, []).append(tensor)
    for name, tensors in every.items():
        same = [torch.equal(tensor, tensors[0]) for tensor in tensors]
        assert all(same) and tensors[0].isfinite().all(), name


def from_state(name: str, plan: Plan, state: dict[str, torch.Tensor]) -> bool:
    """A model on meta that takes whole weights."""
    with torch.device("meta"):
        model = cases.BUILD[name]()
    parallel = auto_parallelize(
        model, cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name], state_dict=state
    )
    return all(torch.equal(whole(p.detach()), state[n]) for n, p in parallel.named_parameters())


def test_weights_come_from_a_state_dict(ranks: Ranks) -> None:
    state = cases.built("mixtral").state_dict()
    assert ranks(4).run(from_state, "mixtral", plan_of("mixtral pp2 ep2"), state) == [True] * 4


def mixed(name: str, plan: Plan) -> tuple[float, set[torch.dtype]]:
    """Loss of a step in bf16, and the dtypes of parameters and gradients."""
    parallel = auto_parallelize(cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name])
    loss = parallel.train_step(cases.inputs(name)).item()
    kept = {p.dtype for p in parallel.parameters()} | {
        p.grad.dtype for p in parallel.parameters() if p.grad is not None
    }
    return loss, kept


@pytest.mark.parametrize("case", ["llama tp2", "gpt dp2 zero3", "llama pp2 dp2 tp2", "mixtral ep2"])
def test_bf16_computes_and_fp32_is_kept(case: str, ranks: Ranks) -> None:
    name, plan = case.split()[0], plan_of(case)
    plan = replace(plan, job=replace(plan.job, dtype="bf16"))
    for loss, kept in ranks(plan.mesh.devices).run(mixed, name, plan):
        assert loss == pytest.approx(trained(name)[0][0], rel=2e-2) and loss != trained(name)[0][0]
        assert kept == {torch.float32}


def own_loop(name: str, plan: Plan) -> tuple[float, torch.Size]:
    """An ordinary loop around the module: forward, a loss of plain tensors, backward, a step."""
    parallel = auto_parallelize(cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name])
    batch = cases.inputs(name)
    outputs = parallel.module(*batch)
    loss = cases.LOSS[name](outputs, batch)
    loss.backward()
    parallel.finish_gradients()
    return parallel.clip_grad_norm_(1.0).item(), outputs.shape


def test_the_module_works_in_any_loop(ranks: Ranks) -> None:
    _, gradients, _ = trained("llama")
    expected = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    for norm, shape in ranks(2).run(own_loop, "llama", plan_of("llama tp2")):
        assert norm == pytest.approx(expected, rel=TOLERANCE)
        assert shape == (cases.BATCH, cases.SEQ, 128)


def saved_and_loaded(name: str, plan: Plan, folder: str) -> bool:
    """A checkpoint of a trained model, read into an untrained one."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    trained_one, fresh = (
        auto_parallelize(cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name])
        for _ in range(2)
    )
    trained_one.train_step(cases.inputs(name))
    torch.optim.SGD(trained_one.parameters(), lr=1.0).step()
    save(trained_one.state_dict(), checkpoint_id=folder)
    state = fresh.state_dict()
    load(state, checkpoint_id=folder)
    fresh.load_state_dict(state)
    ours, theirs = dict(trained_one.named_parameters()), dict(fresh.named_parameters())
    return all(torch.equal(whole(ours[n].detach()), whole(theirs[n].detach())) for n in ours)


def test_state_dicts_go_through_distributed_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    plan = plan_of("llama pp2 dp2 tp2")
    results = ranks(8).run(saved_and_loaded, "llama", plan, str(tmp_path / "checkpoint"))
    assert results == [True] * 8


def refused(name: str, plan: Plan, batch: Any = None) -> str:
    """What is said of a plan that cannot be run."""
    try:
        parallel = auto_parallelize(
            cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name]
        )
        parallel.train_step(batch)
    except UserError as error:
        return str(error)
    return ""


def test_what_cannot_be_executed_is_named(ranks: Ranks) -> None:
    plan = plan_of("llama tp2")
    two, mixtral = ranks(2), plan_of("mixtral ep2")
    cp = replace(mixtral, mesh=replace(mixtral.mesh, ep=1, cp=2), routing_modules=())
    both = replace(mixtral, mesh=replace(mixtral.mesh, tp=2, ep=2))
    head = replace(plan, stages=(replace(plan.stages[0], blocks=(("head", 1, "full"),)),))
    said = {
        "no module that routes": two.run(refused, "mixtral", cp),
        "experts are split by expert": two.run(refused, "mixtral", both),
        "for 4 ranks": two.run(refused, "llama", replace(plan, mesh=replace(plan.mesh, dp=2))),
        "recomputes 'head'": two.run(refused, "llama", head),
        "another model": two.run(refused, "gpt", plan),
        "8 samples": two.run(refused, "llama", plan, cases.inputs("llama", 6)),
    }
    for expected, answers in said.items():
        assert all(expected in answer for answer in answers), (expected, answers)


def test_verify_prints_equality_and_collectives(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2]
    (tmp_path / "llama.py").write_text((folder / "examples" / "llama.py").read_text())
    (tmp_path / "small.py").write_text(SMALL)
    save_plan(plan_of("llama tp2"), tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "tpplan", "verify", "small.py", "plan.yaml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "2 ranks against one process" in result.stdout and "\nequal: loss" in result.stdout
    assert "order of collectives: the same on all ranks" in result.stdout
    assert "layers.*.mlp.down -> layers.*" in result.stdout and "differs" not in result.stdout


SMALL = """
import torch
from llama import Config, Llama, loss

def build_model():
    return Llama(Config(layers=4, hidden=32, heads=8, kv_heads=4, ffn=64, vocab=128))

def example_inputs(batch, seq):
    return (torch.randint(0, 128, (batch, seq)),)
"""
