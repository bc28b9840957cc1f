"""The user's own training script under torchrun: the command line, and the files of batch systems.

In: a plan, the script with its arguments, where the plan file is. Out: torchrun's arguments for one
node, or launch files for SLURM and Kubernetes. Restarts are torchrun's own: whenever a process ends,
all are started again, at most `max_restarts` times, and the script goes on from its last checkpoint.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ...planner.errors import OptionError, did_you_mean
from ...planner.plan import Plan
from . import kubernetes, slurm
from .facts import nodes_and_devices
from .registry import Exported
from .shell import head, torchrun, world_check

PORT = 29500
"""Where nodes meet when none is given: torchrun's own default."""
RUN_ID = "tpplan"
"""What the nodes of one run call it when they meet."""
PLAN_VARIABLE = "PLAN"
"""Environment variable in which the script finds the plan file, as in exported scripts."""
BATCH_SYSTEMS = (slurm.NAME, kubernetes.NAME)
ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(?::(?P<port>\d{1,5}))?")
LARGEST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How processes are started on one node."""

    nodes: int
    per_node: int
    address: str | None
    """`host:port` of the first node; None for one node, which needs none."""
    max_restarts: int


def launch_of(plan: Plan, *, address: str | None, max_restarts: int, one_node: bool) -> Launch:
    """The plan's nodes, or all its ranks on `one_node`.

    Raises OptionError when a plan of several nodes has no address to meet at, or the address is none.
    """
    nodes, per_node = (1, plan.mesh.devices) if one_node else nodes_and_devices(plan)
    if nodes > 1 and address is None:
        raise OptionError(
            f"the plan is for {nodes} nodes: give --address FIRST_NODE[:{PORT}], the same on every node"
        )
    return Launch(
        nodes=nodes,
        per_node=per_node,
        address=_with_port(address) if address is not None and nodes > 1 else None,
        max_restarts=max_restarts,
    )


def _with_port(address: str) -> str:
    found = ADDRESS.fullmatch(address)
    if not found or not 0 < int(found["port"] or PORT) <= LARGEST_PORT:
        raise OptionError(f"--address {address}: expected a host, or host:port")
    return f"{found['host']}:{found['port'] or PORT}"


def arguments(launch: Launch, command: Sequence[str]) -> list[str]:
    """What torchrun is given on each node; `command` is a script with its arguments, or `-m` and a module."""
    meeting = ["--standalone"]
    if launch.address:
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={launch.address}", f"--rdzv-id={RUN_ID}"]
    return [
        f"--nnodes={launch.nodes}",
        f"--nproc-per-node={launch.per_node}",
        f"--max-restarts={launch.max_restarts}",
        *meeting,
        *command,
    ]


def launch_files(plan: Plan, command: Sequence[str], *, to: str, max_restarts: int) -> Exported:
    """A job for `to` (one of BATCH_SYSTEMS) that runs `command` under the plan.

    Raises OptionError for an unknown batch system.
    """
    if to not in BATCH_SYSTEMS:
        raise OptionError(
            f"--to {to}: unknown batch system{did_you_mean(to, BATCH_SYSTEMS)} "
            f"(known: {', '.join(BATCH_SYSTEMS)})"
        )
    files = {"run.sh": _script(plan, command, max_restarts)}
    if to == slurm.NAME:
        return Exported(files={"job.sbatch": slurm.batch(plan, "sbatch job.sbatch"), **files})
    return Exported(
        files={"pytorchjob.yaml": kubernetes.job_text(plan, model=None), **files},
        deviations=(
            f"the image ({kubernetes.IMAGE}), which has to hold {PurePath(command[0]).name}, plan.yaml and "
            "run.sh in /workspace, and the shared memory volume are the cluster's to give",
        ),
    )


def _script(plan: Plan, command: Sequence[str], max_restarts: int) -> str:
    return (
        head(plan, "run on every node: MASTER_ADDR=first-node bash run.sh")
        + world_check(plan)
        + f'export {PLAN_VARIABLE}="${{{PLAN_VARIABLE}:-plan.yaml}}"\n'
        + torchrun([f"--max-restarts={max_restarts}", shlex.join(command)])
    )
