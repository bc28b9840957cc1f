"""SLURM: an sbatch script that runs the torchrun script on every node of the plan."""

from __future__ import annotations

from ...planner.plan import Plan
from .facts import headline, nodes_and_devices
from .registry import Exported, exporter
from .torchrun import launch_script, train_script

NAME = "slurm"
USE = "sbatch --export=ALL,MODEL=model.py job.sbatch"
CPUS_PER_DEVICE = 8
"""CPU cores asked for each process: a few loader workers; a convention."""


@exporter(NAME, "an sbatch script around the torchrun script")
def export(plan: Plan) -> Exported:
    """`job.sbatch`, with `run.sh` and `train.py` that it starts."""
    return Exported(
        files={"job.sbatch": batch(plan, USE), "run.sh": launch_script(plan), "train.py": train_script(plan)},
    )


def batch(plan: Plan, use: str) -> str:
    """An sbatch script that runs `run.sh` on every node; `use` says in a comment how to submit it."""
    nodes, per_node = nodes_and_devices(plan)
    return f"""#!/usr/bin/env bash
#SBATCH --job-name=tpplan
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --cpus-per-task={per_node * CPUS_PER_DEVICE}
#SBATCH --exclusive
# {headline(plan)}
# {use}
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-29500}}"
export NNODES="$SLURM_JOB_NUM_NODES" NPROC_PER_NODE={per_node}
srun --kill-on-bad-exit=1 bash run.sh
"""
