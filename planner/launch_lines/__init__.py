"""Launch lines of other frameworks, read as choices to check.

In: the command line of a Megatron-LM, torchtitan, DeepSpeed or vLLM run. Out: a `LaunchLine`: pins
as `--set` takes them, the job's options, and notes on what of the line is not carried over. Where
the line names its number of processes (`torchrun --nnodes 8 --nproc-per-node 8`), the data-parallel
size follows and is a pin too; else it follows from the cluster. A line that contradicts itself, or
that no dialect knows, raises `OptionError` with the flag and the value.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError
from . import deepspeed, megatron, torchtitan, vllm
from .flags import Flags, Pins, Reading, flags_of, number, words_of

DIALECTS: dict[str, Callable[[Flags], Reading]] = {
    "megatron": megatron.read,
    "torchtitan": torchtitan.read,
    "deepspeed": deepspeed.read,
    "vllm": vllm.read,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """What a launch line asks for."""

    dialect: str
    """Whose line it is: `megatron`, `torchtitan`, `deepspeed`, `vllm`."""
    pins: Pins
    options: dict[str, Any]
    """`global_batch`, `seq_len`, `dtype`, `optimizer`, `framework`, where the line says."""
    notes: tuple[str, ...]
    """What of the line is not carried over, one sentence each."""


def read(text: str) -> LaunchLine:
    """The choices of a launch line. Raises OptionError."""
    words = words_of(text)
    flags = flags_of(words)
    name = _dialect(words, flags)
    reading = DIALECTS[name](flags)
    pins = {key: value for key, value in reading.pins.items() if value is not None}
    world = _world(flags)
    if world is not None and "dp" not in pins:
        pins["dp"] = _left_for_dp(world, pins)
    options = {key: value for key, value in reading.options.items() if value is not None}
    return LaunchLine(dialect=name, pins=pins, options=options, notes=reading.notes)


def _dialect(words: list[str], flags: Flags) -> str:
    """Whose line it is, by words that only one of them uses."""
    if "vllm" in words or any(word.startswith("vllm.") for word in words):
        return "vllm"
    if any(flag.startswith(("parallelism.", "training.")) for flag in flags) or "torchtitan.train" in words:
        return "torchtitan"
    if words[0].endswith("deepspeed") or {"deepspeed", "deepspeed-config"} & flags.keys():
        return "deepspeed"
    if any(flag.endswith("model-parallel-size") for flag in flags) or "micro-batch-size" in flags:
        return "megatron"
    raise OptionError(
        f"--from-args: {shlex.join(words)[:60]!r} is no launch line of {', '.join(DIALECTS)} that I know"
    )


def _world(flags: Flags) -> int | None:
    """Processes that the launcher starts, where the line says."""
    per_node = number(flags, "nproc-per-node", "num-gpus") if _counts(flags) else None
    if per_node is None:
        return None
    return per_node * (number(flags, "nnodes", "num-nodes", default=1) or 1)


def _counts(flags: Flags) -> bool:
    """Whether the launcher's counts are numbers (not `auto`, `gpu`, `1:4` or a shell variable)."""
    named = ("nproc-per-node", "num-gpus", "nnodes", "num-nodes")
    values = [flags[name][0] for name in named if flags.get(name)]
    return bool(values) and all(value.isdecimal() for value in values)


def _left_for_dp(world: int, pins: Mapping[str, int | str]) -> int:
    sizes = {axis: int(pins[axis]) for axis in ("pp", "cp", "ep", "tp") if axis in pins}
    product = math.prod(sizes.values())
    if world % product:
        told = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        raise OptionError(f"--from-args: {world} processes do not divide by {told} = {product}")
    return world // product
