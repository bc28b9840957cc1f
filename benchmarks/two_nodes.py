"""An emulated cluster of two nodes on one Linux machine, to run programs on.

In: the speed of each node's link. Out: a context in which `torchrun` runs a module on both nodes, two
gloo ranks each: network namespaces joined by a bridge, each node's link shaped by `tc tbf`. Needs root
and iproute2. What it made is taken away again at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

PER_NODE = 2
ADDRESS = "10.219.7"
BURST, LATENCY = "64kb", "200ms"
"""Of the token bucket: small beside any message that matters; how long packets may queue."""
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class TwoNodes:
    """The two nodes, while they are there."""

    name: str

    def torchrun(self, module: str, arguments: Sequence[str]) -> None:
        """Run a module on all ranks; raises `CalledProcessError` when one of the nodes fails."""
        port = str(20000 + os.getpid() % 20000)
        nodes = [
            subprocess.Popen(
                [*self._inside(node), *self._launcher(node, port), "-m", module, *arguments],
                env={**os.environ, "GLOO_SOCKET_IFNAME": f"{self.name}-e{node}", "OMP_NUM_THREADS": "1"},
            )
            for node in range(2)
        ]
        try:
            codes = [process.wait(TIMEOUT_S) for process in nodes]
        finally:
            for process in nodes:
                process.kill()
        if any(codes):
            raise subprocess.CalledProcessError(max(codes), module)

    def _inside(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", f"{self.name}-{node}"]

    @staticmethod
    def _launcher(node: int, port: str) -> list[str]:
        ranks = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(PER_NODE)]
        where = ["--master-addr", f"{ADDRESS}.1", "--master-port", port]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, *where]


def missing() -> str:
    """Why nodes cannot be emulated here; empty when they can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "needs root on Linux, for network namespaces"
    absent = [name for name in ("ip", "tc") if not shutil.which(name)]
    return f"needs iproute2 ({' and '.join(absent)})" if absent else ""


@contextmanager
def two_nodes(mbit: float) -> Iterator[TwoNodes]:
    """Two nodes whose links carry so many Mb/s each way. Raises `CalledProcessError` if not permitted."""
    name = f"tpl{os.getpid()}"
    try:
        _ip("link", "add", name, "type", "bridge")
        _ip("link", "set", name, "up")
        for node in range(2):
            _add(name, node, mbit)
        yield TwoNodes(name)
    finally:
        for node in range(2):
            subprocess.run(["ip", "netns", "del", f"{name}-{node}"], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", name], stderr=subprocess.DEVNULL, check=False)


def _add(name: str, node: int, mbit: float) -> None:
    inside, outside, space = f"{name}-e{node}", f"{name}-v{node}", f"{name}-{node}"
    _ip("netns", "add", space)
    _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
    _ip("link", "set", inside, "netns", space)
    _ip("link", "set", outside, "master", name, "up")
    _ip("-n", space, "addr", "add", f"{ADDRESS}.{node + 1}/24", "dev", inside)
    _ip("-n", space, "link", "set", inside, "up")
    _ip("-n", space, "link", "set", "lo", "up")
    shaped = ["tbf", "rate", f"{mbit:g}mbit", "burst", BURST, "latency", LATENCY]
    _run("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", inside, "root", *shaped)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
