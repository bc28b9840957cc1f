"""The ranks of this run and how they talk.

In: the environment that torchrun (or any launcher) sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
GROUP_RANK, MASTER_ADDR, MASTER_PORT. Out: a `World`: the measuring process group on the device's own
backend, a gloo group for agreeing on numbers, a store for small facts, and a `Watch` over all ranks.
Without RANK there is one process and nothing to talk to.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..planner.errors import OptionError, ProfileError
from .watch import Watch

STORE_TIMEOUT_S = 120.0
"""For ranks to arrive; starting Python and torch on many hosts takes that long."""


class World:
    """This rank's place among the ranks, and what it needs to measure with them."""

    def __init__(self, *, timeout_s: float, environment: Mapping[str, str] = os.environ) -> None:
        self.rank = _number(environment, "RANK", 0)
        self.size = _number(environment, "WORLD_SIZE", 1)
        self.local_rank = _number(environment, "LOCAL_RANK", 0)
        self.host = socket.gethostname()
        self.node = environment.get("GROUP_RANK")
        self.device = _device(self.local_rank)
        self.backend = dist.get_default_backend_for_device(self.device) if self.size > 1 else "none"
        self.watch: Watch | None = None
        self.hosts = [self.host]
        self._timeout = timedelta(seconds=timeout_s)
        self._control: dist.ProcessGroup | None = None
        self._store: dist.Store | None = None
        if self.size > 1:
            self._connect(environment)

    def _connect(self, environment: Mapping[str, str]) -> None:
        owner = self.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        place = (environment.get("MASTER_ADDR", "127.0.0.1"), _number(environment, "MASTER_PORT", 29500))
        run = environment.get("TORCHELASTIC_RESTART_COUNT", "0")

        def client(*, is_master: bool) -> dist.Store:
            store = dist.TCPStore(
                *place, self.size, is_master=is_master, timeout=timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False,
            )  # fmt: skip
            return dist.PrefixStore(f"tpplan/{run}", store)

        try:
            self._store = client(is_master=owner)
            dist.init_process_group(
                self.backend, store=self._store, rank=self.rank, world_size=self.size, timeout=self._timeout
            )
        except (RuntimeError, ValueError) as error:
            raise ProfileError(
                f"rank {self.rank} cannot join the others at {place[0]}:{place[1]}: {error}"
            ) from error
        self._control = _default_group() if self.backend == "gloo" else self._group(range(self.size), "gloo")
        self._store.set_timeout(self._timeout)
        self.hosts = [facts["host"] for facts in self.gather("host", {"host": self.host})]
        self.watch = Watch(client(is_master=False), rank=self.rank, hosts=self.hosts)
        self.watch.start()

    # ------------------------------------------------------------------ agreeing

    def slowest(self, seconds: float) -> float:
        """The largest value of all ranks."""
        if self._control is None:
            return seconds
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._control)
        return float(value)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.slowest(0.0)

    def gather(self, name: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says under `name`, in rank order. A name is used once."""
        if self._store is None:
            return [dict(facts)]
        self._store.set(f"{name}/{self.rank}", json.dumps(dict(facts)))
        return [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self.size)]

    def from_first(self, name: str, facts: Any) -> Any:
        """What rank 0 says under `name`. A name is used once."""
        if self._store is None:
            return facts
        if self.rank == 0:
            self._store.set(f"first/{name}", json.dumps(facts))
        return json.loads(self._store.get(f"first/{name}"))

    # ------------------------------------------------------------------ working

    def doing(self, what: str) -> None:
        """Publish what this rank is about to do, for messages about failures."""
        if self.watch is not None:
            self.watch.doing(what)

    @property
    def ranks_per_core(self) -> float:
        """How many ranks share a core of this host, at least 1; accelerators are not shared."""
        if self.device.type != "cpu":
            return 1.0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1.0, self.hosts.count(self.host) / cores)

    def settle(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def groups(self, members: Sequence[Sequence[int]]) -> tuple[dist.ProcessGroup | None, Sequence[int]]:
        """Make a process group of each set of ranks (all ranks must ask alike); this rank's own."""
        mine: tuple[dist.ProcessGroup | None, Sequence[int]] = (None, ())
        for ranks in members:
            group = self._group(ranks)
            if self.rank in ranks:
                mine = (group, ranks)
        return mine

    def _group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        """A process group of `ranks`; None on a rank that is not in it."""
        group = dist.new_group(list(ranks), backend=backend, timeout=self._timeout)
        return group if isinstance(group, dist.ProcessGroup) else None

    def close(self) -> None:
        """Part from the others in peace."""
        if self._control is not None:
            self.barrier()
            if self.watch is not None:
                self.watch.stop()
            dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise OptionError(
            f"local rank {local_rank} has no device: this host has {count}; use --nproc-per-node {count}"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit():
        raise OptionError(f"{name}={text}: expected a whole number, as torchrun sets it")
    return int(text)
