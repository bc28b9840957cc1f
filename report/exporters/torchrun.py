"""A plain torchrun script that applies the plan with `tpplan.auto_parallelize`."""

from __future__ import annotations

from ...planner.plan import Plan
from . import facts
from .registry import Exported, cannot, exporter
from .shell import head, torchrun, world_check

NAME = "torchrun"
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "adafactor": "Adafactor"}
TRAIN = '''\
"""%(headline)s.

The model file is a user's: `build_model()`, `example_inputs(batch, seq)`, optionally `loss(outputs, inputs)`.
The batches made here are examples: put your own in their place. Started again, it goes on from the last
checkpoint in the folder CHECKPOINTS, which all nodes must see.
"""

import os
import runpy

import torch
import tpplan

GLOBAL_BATCH, SEQ_LEN = %(batch)d, %(seq)d
STEPS = int(os.environ.get("STEPS", "10"))
CHECKPOINTS = os.environ.get("CHECKPOINTS", "checkpoints")
CHECKPOINT_EVERY = int(os.environ.get("CHECKPOINT_EVERY", "100"))


def main():
    model_file = runpy.run_path(os.environ["MODEL"])
    plan = tpplan.load_plan(os.environ.get("PLAN", "plan.yaml"))
    example = model_file["example_inputs"]
    with torch.device("meta"):
        model = model_file["build_model"]()
    parallel = tpplan.auto_parallelize(
        model,
        example(%(micro)d, SEQ_LEN),
        plan=plan,
        global_batch=GLOBAL_BATCH,
        loss_fn=model_file.get("loss"),
    )
    optimizer = %(optimizer)s
    checkpoints = tpplan.Checkpoints(parallel, optimizer, CHECKPOINTS, every=CHECKPOINT_EVERY)
    for step in range(checkpoints.resume(), STEPS):
        torch.manual_seed(step)  # every rank makes the same global batch
        loss = parallel.train_step(example(GLOBAL_BATCH, SEQ_LEN))
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.after(step)
        if int(os.environ["RANK"]) == 0:
            print(f"step {step}: loss {float(loss):.4f}", flush=True)
    checkpoints.close()


if __name__ == "__main__":
    main()
'''


@exporter(NAME, "a torchrun script that applies the plan file")
def export(plan: Plan) -> Exported:
    """`train.py` and `run.sh`; both read `plan.yaml` beside them unless PLAN names another file."""
    return Exported(files={"train.py": train_script(plan), "run.sh": launch_script(plan)})


def train_script(plan: Plan) -> str:
    """The Python program that every process runs."""
    if plan.job.optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise cannot(NAME, f"the optimizer {plan.job.optimizer!r} takes no step", f"plan with one of {known}")
    name = OPTIMIZERS[plan.job.optimizer]
    headline = facts.headline(plan).replace("\\", "/").replace('"', "'")
    return TRAIN % {
        "headline": headline,
        "batch": plan.job.global_batch,
        "seq": plan.job.seq_len,
        "micro": plan.micro_batch,
        "optimizer": f"torch.optim.{name}(parallel.parameters(), lr=3e-4)",
    }


def launch_script(plan: Plan) -> str:
    """torchrun on each node, for the plan's number of processes."""
    return (
        head(plan, "run on every node: MODEL=model.py MASTER_ADDR=first-node bash run.sh")
        + world_check(plan)
        + ': "${MODEL:?the model file, e.g. MODEL=model.py}"\nexport MODEL\n'
        + torchrun(["train.py"])
    )
