"""The local machine to a topology: NVML, `nvidia-smi topo -m` and /sys, as far as they are there.

Out: the same `Imported` as of a paste. What is missing (a tool, a permission) costs detail, never an
error: a note says so. A machine without an accelerator becomes CPU ranks over gloo.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..document import read
from ..find import bundled, find
from .draft import GBIT_PER_GB
from .read import Imported, import_topo

TOOL_TIMEOUT_S = 20.0
"""A driver in trouble lets nvidia-smi hang; judgement."""
SYS = Path("/sys")
IDLE_STATES = ("down", "lowerlayerdown", "notpresent")

Run = Callable[[Sequence[str]], "str | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network port of this machine."""

    name: str
    gbit: float
    kind: str
    """`infiniband`, `roce`, `efa` or `ethernet`."""


def run_tool(command: Sequence[str]) -> str | None:
    """What a command prints, or None if it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def detect(*, run: Run = run_tool, sys: Path = SYS, device: str | None = None, nodes: int = 1) -> Imported:
    """This machine as a node of a topology with `nodes` nodes like it."""
    names, notes = device_names(run)
    ports = tuple(nics(sys))
    if not names:
        return _cpu(ports, nodes, ("no NVIDIA device found: CPU ranks over gloo", *notes))
    chosen = device or bundled_name(names[0], tuple(bundled("devices")))
    if len(set(names)) > 1:
        notes = (*notes, f"mixed devices ({', '.join(sorted(set(names)))}): planned as {names[0]}")
    text = run(["nvidia-smi", "topo", "-m"])
    if text is None:
        notes = (
            *notes,
            "nvidia-smi topo -m gives nothing: PCIe across sockets is assumed",
        )
        text = all_sys(len(names))
    found = _of_matrix(text, names, chosen, ports, nodes)
    return replace(found, notes=(*found.notes, *notes))


def device_names(run: Run) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Product names of the NVIDIA devices here (NVML, else nvidia-smi), and notes on what was missing."""
    names = _from_nvml()
    if names:
        return names, ()
    text = run(["nvidia-smi", "-L"])
    if text is None:
        return (), ()
    found = tuple(re.findall(r"^GPU \d+: (.+?) \(UUID", text, re.MULTILINE))
    return found, ("nvidia-ml-py is not installed: names were read from nvidia-smi",) if found else ()


def _from_nvml() -> tuple[str, ...]:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()
    return tuple(name.decode() if isinstance(name, bytes) else name for name in names)


def bundled_name(product: str, known: Sequence[str]) -> str | None:
    """The bundled device for a product name: `NVIDIA A100-SXM4-80GB` is `a100-sxm4-80gb`.

    The name that shares most words wins, provided that the model (its first word, or `rtx-4090`) is there;
    drivers name the form factor of PCIe and NVL cards alone, so a bare model is an SXM module.
    """
    words = set(re.findall(r"[a-z]+|\d+", product.lower()))

    def parts(device: str) -> list[str]:
        return re.findall(r"[a-z]+|\d+", device)

    def model(device: str) -> set[str]:
        first = re.match(r"rtx-(?:pro-)?\w+|[a-z]+\d+[a-z]*", device)
        return set(parts(first[0] if first else device))

    fitting = [device for device in known if device != "cpu" and model(device) <= words]
    module = "sxm" if not words & {"pcie", "nvl"} else ""
    return max(fitting, key=lambda d: (len(words & set(parts(d))), module in d, -len(parts(d))), default=None)


def all_sys(count: int) -> str:
    """A matrix that knows nothing better than the sockets' link between devices."""
    names = [f"GPU{i}" for i in range(count)]
    rows = [" ".join([name, *("X" if name == other else "SYS" for other in names)]) for name in names]
    return "\n".join([" ".join(names), *rows])


def nics(sys: Path = SYS) -> Iterator[Nic]:
    """Ports that are up: RDMA devices, else Ethernet interfaces with a physical device behind them."""
    rdma = list(_rdma(sys))
    yield from rdma or _ethernet(sys)


def _rdma(sys: Path) -> Iterator[Nic]:
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        rate = re.match(r"([\d.]+) Gb", _content(port / "rate"))
        if rate and "ACTIVE" in _content(port / "state"):
            name = port.parents[1].name
            ethernet = _content(port / "link_layer") == "Ethernet"
            efa = name.startswith(("efa", "rdmap"))
            yield Nic(
                name=name, gbit=float(rate[1]), kind="efa" if efa else "roce" if ethernet else "infiniband"
            )


def _ethernet(sys: Path) -> Iterator[Nic]:
    for interface in sorted(sys.glob("class/net/*")):
        speed = _content(interface / "speed")
        down = _content(interface / "operstate") in IDLE_STATES
        if (interface / "device").exists() and not down and speed.isdigit() and int(speed) > 0:
            yield Nic(name=interface.name, gbit=int(speed) / 1000, kind="ethernet")


def _content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# --------------------------------------------------------------------------- topologies of what was found


def _of_matrix(
    text: str, names: Sequence[str], device: str | None, ports: Sequence[Nic], nodes: int
) -> Imported:
    listed = "\n".join(f"GPU {i}: {name} (UUID: not kept)" for i, name in enumerate(names))
    gbit = max((port.gbit for port in ports), default=None)
    found = import_topo(
        f"{text}\n{listed}\n", origin="this-machine", device=device, nodes=nodes, nic_gbit=gbit
    )
    if not ports:
        return found
    counted = found.nest.nics if found.nest and found.nest.nics else ports
    return _with_network(found, ports[0].kind, sum(port.gbit for port in ports[: len(counted)]))


def _with_network(found: Imported, kind: str, node_gbit: float) -> Imported:
    levels = [dict(level) for level in found.data["levels"]]
    per_node = 1
    for level in levels[:-1]:
        per_node *= level["size"]
    sources = {**levels[-1]["sources"], "gb_per_s": f"/sys: {node_gbit:g} Gb/s for {per_node} devices"}
    speed = round(node_gbit / GBIT_PER_GB / per_node, 6)
    levels[-1].update(kind=kind, gb_per_s=speed, sources=sources)
    return replace(found, data={**found.data, "levels": levels})


def _cpu(ports: Sequence[Nic], nodes: int, notes: tuple[str, ...]) -> Imported:
    """The bundled `cpu-gloo` with this machine's cores and network."""
    data: dict[str, Any] = dict(read(find("topology", "cpu-gloo", "clusters")).data)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    node, cluster = (dict(level) for level in data["levels"])
    node["size"], cluster["size"] = cores, nodes
    data |= {
        "name": "this-machine",
        "description": f"{cores} CPU ranks over gloo, one a core",
        "levels": [node, cluster],
    }
    found = Imported(data=data, graph=None, nest=None, curves=(), notes=notes)
    if not ports:
        return replace(found, notes=(*notes, "no network port with a known speed: 10 Gb/s is assumed"))
    return _with_network(found, ports[0].kind, sum(port.gbit for port in ports))
