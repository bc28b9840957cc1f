"""A training script whose ranks may be killed: started by `test_faults.py` and by `tpplan run`.

    fault_script.py FOLDER STEPS EVERY

Leaves in FOLDER: checkpoints, `pids/RANK`, `steps` with one line a step (first step of this life, step,
loss), and `final.pt` with the whole parameters.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cases
import torch
import torch.distributed as dist
import tpplan
from tpplan.planner.plan import Plan
from tpplan.runtime.gather import whole
from tpplan.runtime.resume import Checkpoints


def train(name: str, plan: Plan, folder: Path, steps: int, every: int) -> None:
    """`steps` steps of the model of that name, wherever the last life ended."""
    rank = dist.get_rank()
    (folder / "pids").mkdir(exist_ok=True)
    (folder / "pids" / str(rank)).write_text(str(os.getpid()))
    parallel = tpplan.auto_parallelize(
        cases.built(name), cases.inputs(name), plan=plan, loss_fn=cases.LOSS[name]
    )
    optimizer = cases.optimizer_of(parallel.parameters())
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    checkpoints = Checkpoints(parallel, optimizer, folder / "checkpoints", every=every, also={"rates": rates})
    first = checkpoints.resume()
    for step in range(first, steps):
        loss = float(parallel.train_step(cases.inputs(name, seed=step)))
        parallel.clip_grad_norm_(cases.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        checkpoints.after(step)
        if rank == 0:
            with (folder / "steps").open("a") as log:
                log.write(f"{first} {step} {loss!r}\n")
    checkpoints.close()
    keep(parallel, folder)


def keep(parallel: Any, folder: Path) -> None:
    """This rank's parameters, whole, under the first name that appears complete or not at all."""
    values = {name: whole(p.detach()) for name, p in parallel.named_parameters()}
    torch.save(values, folder / f"final.{dist.get_rank()}.partial")
    os.rename(folder / f"final.{dist.get_rank()}.partial", folder / f"final.{dist.get_rank()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(
        "llama", tpplan.load_plan(os.environ["PLAN"]), Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    )
