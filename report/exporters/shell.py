"""Shell text: a script's head with its world-size check, and a bash array of flags."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from ...planner.plan import Plan
from .facts import headline, nodes_and_devices

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment of torchrun under which processes that start again get a store of their own. In torch 2.13 they
share the agent's with the processes before them, whose addresses gloo then connects to, and hangs."""
Flag = tuple[str, ...]
"""A flag and its values."""


def head(plan: Plan, *notes: str) -> str:
    """Interpreter line, what this is, notes."""
    lines = ["#!/usr/bin/env bash", f"# {headline(plan)}", *(f"# {note}" for note in notes)]
    return "\n".join(lines) + "\nset -euo pipefail\n"


def world_check(plan: Plan) -> str:
    """Nodes and processes by environment variable, refused when they are not the plan's."""
    nodes, per_node = nodes_and_devices(plan)
    return (
        f': "${{NNODES:={nodes}}}" "${{NPROC_PER_NODE:={per_node}}}"\n'
        f"if (( NNODES * NPROC_PER_NODE != {plan.mesh.devices} )); then\n"
        f'  echo "this plan is for {plan.mesh.devices} processes, not $((NNODES * NPROC_PER_NODE))" >&2\n'
        "  exit 2\n"
        "fi\n"
    )


def array(name: str, flags: Iterable[Flag]) -> str:
    """A bash array with one flag a line, quoted."""
    return "\n".join([f"{name}=(", *(f"  {shlex.join(flag)}" for flag in flags), ")"]) + "\n"


def torchrun(arguments: Sequence[str]) -> str:
    """`torchrun` on every node, addresses from the environment."""
    exports = "".join(f"export {name}={value}\n" for name, value in OWN_STORE.items())
    lines = [
        'torchrun --nnodes="$NNODES" --nproc-per-node="$NPROC_PER_NODE"',
        '  --rdzv-backend=c10d --rdzv-endpoint="${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}"',
        *(f"  {argument}" for argument in arguments),
    ]
    return exports + " \\\n".join(lines) + "\n"
