"""Plans in the words of other frameworks: `export(plan, "megatron")`, one target a file.

A new target is a module here with a function under `@exporter(name, summary)`, and its name below.
"""

from . import (
    accelerate,
    deepspeed,
    hf,
    kubernetes,
    megatron,
    nanotron,
    sglang,
    slurm,
    torchrun,
    torchtitan,
    vllm,
)
from .registry import Exported, Target, export, exporter, targets
