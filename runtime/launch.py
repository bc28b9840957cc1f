"""Whether this machine has the devices that a plan's ranks need.

In: a plan, the number of ranks to be started here. Out: nothing, or a `PlanError` that says what is
missing and what would help.
"""

from __future__ import annotations

import torch

from ..planner.errors import PlanError
from ..planner.plan import Plan

CPU = "cpu"
"""The device of clusters whose ranks are CPU processes."""


def check_devices(plan: Plan, ranks: int) -> None:
    """Raise `PlanError` unless `ranks` ranks of the plan can be started on this machine."""
    if plan.cluster.device == CPU:
        return
    found = torch.accelerator.device_count()
    if found < ranks:
        raise PlanError(
            f"the plan needs {ranks} x {plan.cluster.device} on each node; this machine has "
            f"{found or 'no'} device{'' if found == 1 else 's'}: run it on the cluster, write its launch "
            "files with --to slurm or --to kubernetes, or rehearse on CPU ranks with --on-cpu"
        )
