"""Real profiles over forked gloo ranks: complete, resumed, and with a rank that dies, hangs or errs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tpplan.planner.estimate.collectives import model
from tpplan.planner.layout import Collective
from tpplan.profiler import collective, journal, run, watch
from tpplan.profiler.settings import KIB, MIB, QUICK
from tpplan.topologies import load_file

TINY = replace(QUICK, growth=64, largest_bytes=MIB, batch_s=0.001, batches=(3, 4), timeout_s=20.0)
LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def rank_main(rank: int, size: int, nodes: int, port: int, sabotage: Any, pipe: Any, job: dict) -> None:
    per_node = size // nodes
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node), "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    if sabotage:
        watch.DEAD_S, watch.STUCK_S = (
            3.0,
            2.0,
        )  # only where a rank shall be missed: a busy machine starves threads
        run.compute.kernels = lambda *args, **options: ()  # the failure comes later
        sabotage(rank)
    said: list[str] = []
    try:
        wrote = run.profile(**job, say=said.append)
        pipe.send(("wrote" if wrote else "done", said))
    except BaseException as error:
        pipe.send((f"{type(error).__name__}: {error}", said))
    os._exit(0)


def profile(
    output: Path,
    *,
    size: int,
    nodes: int,
    sabotage: Callable[[int], None] | None = None,
    lost: int | None = None,
    **options: Any,
) -> list[tuple[str, list[str]]]:
    """What each rank ended with, and what it said; nothing from a `lost` rank."""
    context = multiprocessing.get_context("fork")
    port, job = free_port(), {"output": output, "settings": TINY, **options}
    ends = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=rank_main, args=(rank, size, nodes, port, sabotage, pipe, job), daemon=True)
        for rank, (_, pipe) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    try:
        return [
            ("", []) if rank == lost else _answer(ours, process, deadline)
            for rank, ((ours, _), process) in enumerate(zip(ends, processes, strict=True))
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Any, process: Any, deadline: float) -> tuple[str, list[str]]:
    while time.monotonic() < deadline:
        if pipe.poll(0.05):
            return pipe.recv()
        if not process.is_alive() and not pipe.poll(0.1):
            return "", []
    return "did not end", []


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of two nodes of two ranks."""
    output = tmp_path_factory.mktemp("profile") / "four.yaml"
    answers = profile(output, size=4, nodes=2)
    assert [end for end, _ in answers] == ["wrote", "done", "done", "done"], answers
    return output


def test_the_file_is_a_topology_of_measured_numbers(four: Path):
    topology = load_file(four)
    assert [(level.name, level.size, level.kind) for level in topology.levels] == [
        ("node", 2, "tcp"),
        ("cluster", 2, "tcp"),
    ]
    assert all(level.source.startswith("bandwidth: measured on") for level in topology.levels)
    assert topology.device.efficiency["gemm"].origin == "measured"
    assert topology.device.efficiency["memory"].source.startswith("measured on")
    assert not journal.partial(four).exists()


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("which", list(collective.GROUPED))
def test_every_group_is_priced_by_its_own_measurement(four: Path, which: Collective, size: int, stride: int):
    topology = load_file(four)
    at = {nbytes: model(topology).time(which, nbytes, topology.span(size=size, stride=stride))
          for nbytes in (KIB, 10 * KIB)}  # fmt: skip
    assert at[KIB].origin == "measured" and at[10 * KIB].origin == "interpolated"
    assert 0.0 < at[KIB].seconds <= at[10 * KIB].seconds * (1 + 1e-9)


def test_the_file_says_how_it_was_made(four: Path):
    record = yaml.safe_load(four.read_text())["profile"]
    assert (record["ranks"], record["backend"], record["version"]) == (4, "gloo", 1)
    assert {kernel["name"] for kernel in record["kernels"]} >= {
        "gemm", "attention", "attention backward", "grouped gemm", "rms norm", "pointwise", "embedding",
        "cross-entropy", "adamw step", "launch gap",
    }  # fmt: skip
    assert record["overlap"]["sigma"] >= 1.0
    host = load_file(four).host
    assert host is not None
    assert 0.0 < host.forward_s < host.split_forward_s and host.backward_s < host.split_backward_s
    assert record["check"]["collectives"]["sizes"] == 17  # one between two sizes of each curve
    assert record["check"]["kernels"]["sizes"] > 10


def test_two_ranks_of_one_node_redacted(tmp_path: Path):
    output = tmp_path / "two.yaml"
    answers = profile(output, size=2, nodes=1, redact=True)
    assert [end for end, _ in answers] == ["wrote", "done"], answers
    assert socket.gethostname() not in output.read_text().split("\n")
    assert yaml.safe_load(output.read_text())["profile"]["hosts"] == ["host 0"]
    assert load_file(output).devices == 2


SMALL = f"""
import sys
import torch
sys.path.insert(0, {str(Path(__file__).parents[2] / "examples")!r})
from gpt import GPT, Config

def build_model():
    return GPT(Config(layers=3, hidden=64, heads=4, vocab=256, positions=64, dropout=0.0))

def example_inputs(batch, seq=64):
    return (torch.randint(0, 256, (batch, seq)),)
"""


def test_a_block_of_the_users_own_model_gives_a_scale(tmp_path: Path):
    (tmp_path / "small.py").write_text(SMALL)
    output = tmp_path / "one.yaml"
    answers = profile(output, size=1, nodes=1, model=str(tmp_path / "small.py"), seq_len=32)
    assert [end for end, _ in answers] == ["wrote"], answers
    assert any("block/small.py/" in line for line in answers[0][1])
    scales = load_file(output).scales
    assert [(scale.name, scale.framework) for scale in scales] == [
        ("kernels", "tpplan"),
        ("kernels", "torch"),
    ]
    assert all("one block of small.py, forward and backward, measured on" in scale.source for scale in scales)
    assert all(0.1 < scale.value < 100.0 for scale in scales)


def test_a_model_without_layers_has_no_block(tmp_path: Path):
    (tmp_path / "flat.py").write_text(
        "import torch\n"
        "build_model = lambda: torch.nn.Linear(4, 4)\n"
        "example_inputs = lambda batch, seq: (torch.zeros(batch, 4),)\n"
    )
    (answer,) = profile(tmp_path / "one.yaml", size=1, nodes=1, model=str(tmp_path / "flat.py"))
    assert "ModelError: flat.py has no list of alike layers" in answer[0]


# --------------------------------------------------------------------------- failures


def at_gather(rank: int, do: Callable[[], None], *, after: int = 3) -> Callable[[int], None]:
    """Sabotage of one rank at its all-gather number `after`."""

    def sabotage(me: int) -> None:
        if me != rank:
            return
        real, calls = collective.ALL_GATHER, []

        def gather(whole: Any, part: Any, group: Any) -> Any:
            calls.append(1)
            done = real(whole, part, group=group)
            if len(calls) == after:
                do()
            if do is corrupt:
                whole[-1] += 1
            return done

        collective.ALL_GATHER = gather

    return sabotage


def corrupt() -> None:
    """Marks a sabotage that changes results instead of doing something once."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    time.sleep(LIMIT_S)


def fail() -> None:
    raise ValueError("no such luck")


def test_a_killed_rank_is_named_and_the_rerun_completes(tmp_path: Path):
    output = tmp_path / "c.yaml"
    answers = profile(output, size=4, nodes=2, sabotage=at_gather(2, die), lost=2)
    host = socket.gethostname()
    for rank in (0, 1, 3):
        assert f"ProfileError: rank 2 ({host}) died or froze" in answers[rank][0], answers
        assert "was at: all-gather" in answers[rank][0]
        assert f"kept in {output}.partial" in answers[rank][0]
    assert not output.exists() and journal.partial(output).exists()
    again = profile(output, size=4, nodes=2)
    assert [end for end, _ in again] == ["wrote", "done", "done", "done"], again
    assert any("measurements are kept" in line for line in again[0][1])
    assert not any("send/recv" in line for line in again[0][1])  # not measured again
    assert load_file(output).devices == 4


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (freeze, "rank 1 ({host}) died or froze; rank 0 ({host}) was at: all-gather/2x1/"),
        (fail, "rank 1 ({host}) failed: ValueError: no such luck; rank 0 ({host}) was at: all-gather/2x1/"),
        (
            hang,
            "no answer from rank 1 ({host}), which is still at: all-gather/2x1/1024 bytes; rank 0 ({host})",
        ),
    ],
)
def test_a_rank_that_stops_is_named(tmp_path: Path, capfd, do: Callable[[], None], message: str):
    settings = replace(TINY, timeout_s=4.0)
    answers = profile(
        tmp_path / "c.yaml", size=2, nodes=1, sabotage=at_gather(1, do), lost=1, settings=settings
    )
    said = answers[0][0] + capfd.readouterr().err
    assert message.format(host=socket.gethostname()) in said
    assert "is kept in" in said


def test_a_wrong_result_is_named(tmp_path: Path):
    answers = profile(tmp_path / "c.yaml", size=2, nodes=1, sabotage=at_gather(1, corrupt))
    for end, _ in answers:
        assert f"ProfileError: rank 1 ({socket.gethostname()}) got a wrong result from all-gather of" in end
