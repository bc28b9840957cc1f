"""Checkpoints while training goes on, and going on from the last one after whatever happened.

    checkpoints = Checkpoints(parallel, optimizer, "checkpoints", every=100)
    for step in range(checkpoints.resume(), steps):
        parallel.train_step(batch_of(step))
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.after(step)
    checkpoints.close()

In: a `Parallel`, its optimizer, a folder that all ranks see. Out: `step-N` folders in it, written by
torch.distributed.checkpoint in a thread, from a copy, over a process group of their own. A checkpoint
is complete or absent: it is written under another name and renamed when every rank has written and
synced its part. Each one holds parameters, buffers, the optimizer's state and options, the random
numbers of every rank, and the state of whatever else is given (data loaders, learning rate schedules).

A rank that dies loses at most `every` steps, and those that ran while a checkpoint was being written: never
more than twice `every`, because the next checkpoint does not begin before the last one is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..planner.errors import OptionError, PlanError
from .parallel import Parallel
from .portable import portable_copy, portable_state

FACTS = "run.json"
"""File of what is no tensor: the next step, the optimizer's options, other state."""
COMPLETE = re.compile(r"step-(\d+)")
PARTIAL = ".partial"


class Stateful(Protocol):
    """Anything whose state is saved too, in values that JSON knows."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state that `state_dict` gave."""
        ...


class Checkpoints:
    """The checkpoints of one run. To be made on every rank."""

    def __init__(
        self,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        folder: str | os.PathLike[str],
        *,
        every: int,
        keep: int = 2,
        also: Mapping[str, Stateful] | None = None,
    ) -> None:
        """`every`: steps between checkpoints. `keep`: how many complete ones stay. `also`: other state.

        Collective. Raises `OptionError` for numbers below 1.
        """
        if every < 1 or keep < 1:
            raise OptionError(f"every={every}, keep={keep}: both must be at least 1")
        self._parallel, self._optimizer, self._also = parallel, optimizer, dict(also or {})
        self._folder, self._every, self._keep = Path(folder), every, keep
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self._group = group
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tpplan-checkpoint")
        self._pending: Future[None] | None = None

    def resume(self) -> int:
        """Load the last complete checkpoint, if there is one; the step to go on with. Collective.

        Raises `PlanError` when it is another model's; another plan's is read like one's own.
        """
        found: list[int] = [0]
        if dist.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(left)
            found = [max(self.complete(), default=0)]
        dist.broadcast_object_list(found, src=0, group=self._group)
        if found[0]:
            self._load(self._folder / f"step-{found[0]}")
        return found[0]

    def after(self, step: int) -> None:
        """Step number `step` is done: begin a checkpoint if it is time. Collective.

        Waits for the one before. Raises what went wrong with that one.
        """
        if (step + 1) % self._every == 0:
            self.save(step + 1)

    def save(self, step: int) -> None:
        """Begin a checkpoint from which step number `step` is the next. Collective."""
        self.wait()
        state = portable_copy(self._parallel, self._optimizer)
        state |= _random_numbers(self._parallel.device)
        facts = {
            "step": step,
            "ranks": dist.get_world_size(),
            "groups": _options(self._optimizer),
            "also": {name: thing.state_dict() for name, thing in self._also.items()},
        }
        self._pending = self._writer.submit(self._write, step, state, facts)

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is complete."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Wait for the last checkpoint and end the thread."""
        self.wait()
        self._writer.shutdown()

    def complete(self) -> list[int]:
        """Steps of the complete checkpoints, in no order."""
        names = (COMPLETE.fullmatch(path.name) for path in self._folder.iterdir())
        return [int(name[1]) for name in names if name]

    # ------------------------------------------------------------------ writing

    def _write(self, step: int, state: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """In the thread: all ranks write their parts, then rank 0 gives the folder its name."""
        partial = self._folder / f"step-{step}{PARTIAL}"
        dcp.save(state, storage_writer=FileSystemWriter(partial), process_group=self._group)
        if dist.get_rank() == 0:
            _write_synced(partial / FACTS, json.dumps(facts))
            os.rename(partial, self._folder / f"step-{step}")
            _sync(self._folder)
            for old in sorted(self.complete())[: -self._keep]:
                shutil.rmtree(self._folder / f"step-{old}")
        dist.barrier(group=self._group)

    # ------------------------------------------------------------------ reading

    def _load(self, path: Path) -> None:
        reader = FileSystemReader(path)
        saved = reader.read_metadata().state_dict_metadata
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
        _make_state(self._parallel, self._optimizer, saved)
        state = portable_state(self._parallel, self._optimizer)
        if missing := sorted(set(state) - set(saved)):
            raise PlanError(f"{path} has no {missing[0]}: it is of another model")
        random = _random_numbers(self._parallel.device) if facts["ranks"] == dist.get_world_size() else {}
        dcp.load(state | random, storage_reader=reader, process_group=self._group)
        _set_random_numbers(random, self._parallel.device)
        for group, options in zip(self._optimizer.param_groups, facts["groups"], strict=True):
            group.update(options)
        for name, thing in self._also.items():
            thing.load_state_dict(facts["also"][name])


# --------------------------------------------------------------------------- what else is saved


def _random_numbers(device: torch.device) -> dict[str, Tensor]:
    """The states of this rank's generators."""
    found = {f"random.cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type != "cpu":
        found[f"random.{device.type}.{dist.get_rank()}"] = torch.get_device_module(device).get_rng_state()
    return found


def _set_random_numbers(states: Mapping[str, Tensor], device: torch.device) -> None:
    for name, state in states.items():
        kind = name.split(".")[1]
        torch.set_rng_state(state) if kind == "cpu" else torch.get_device_module(device).set_rng_state(state)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What JSON knows of each group's options: learning rates and the like."""
    kept = int | float | bool | str | None | list | tuple
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, kept)}
        for group in optimizer.param_groups
    ]


def _make_state(parallel: Parallel, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the optimizer tensors of the saved kinds, which loading then fills."""
    keys: dict[str, dict[str, TensorStorageMetadata]] = {}
    for entry, facts in saved.items():
        if entry.startswith("optimizer.") and isinstance(facts, TensorStorageMetadata):
            name, _, key = entry.removeprefix("optimizer.").rpartition(".")
            keys.setdefault(name, {})[key] = facts
    for name, parameter in parallel.named_parameters():
        for key, facts in keys.get(name, {}).items():
            like = torch.zeros(facts.size) if facts.size.numel() == 1 else parameter
            optimizer.state[parameter][key] = torch.zeros_like(like, dtype=facts.properties.dtype)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Make names in a folder outlast a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
