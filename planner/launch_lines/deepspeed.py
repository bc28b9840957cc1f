"""DeepSpeed: `deepspeed train.py --deepspeed_config ds.json`, and the JSON it names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .flags import Flags, Reading, number, schedule, size, text_of


def read(flags: Flags) -> Reading:
    """The choices of a DeepSpeed line."""
    path = text_of(flags, "deepspeed-config") or text_of(flags, "deepspeed")
    config = _json(path) if path else {}
    pp = size(flags, "pipeline-model-parallel-size", "pipe-parallel-size")
    tensor = config.get("tensor_parallel") or {}
    zero = (config.get("zero_optimization") or {}).get("stage", _zero_flag(flags))
    pins: dict[str, int | str | None] = {
        "pp": pp,
        "cp": config.get("sequence_parallel_size", 1),
        "ep": size(flags, "ep-size"),
        "tp": tensor.get("autotp_size") or size(flags, "tensor-model-parallel-size"),
        "zero": zero,
        "micro_batch": _given(config, "train_micro_batch_size_per_gpu") or number(flags, "micro-batch-size"),
        **schedule(pp, 1),
    }
    return Reading(
        pins=pins,
        options={
            "global_batch": _given(config, "train_batch_size") or number(flags, "global-batch-size"),
            "seq_len": number(flags, "seq-length", "max-seq-len", "max-seq-length"),
            "dtype": next((name for name in ("bf16", "fp16") if _enabled(config, flags, name)), None),
            "framework": "deepspeed",
        },
        notes=tuple(_deepspeed_notes(config)),
    )


def _zero_flag(flags: Flags) -> int:
    text = text_of(flags, "zero-stage") or "0"
    if text not in ("0", "1", "2", "3"):
        raise OptionError(f"--from-args: --zero-stage {text}: expected 0, 1, 2 or 3")
    return int(text)


def _json(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"--from-args: cannot read the DeepSpeed configuration {path}: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"--from-args: {path}: expected a JSON object, found {type(found).__name__}")
    return found


def _given(config: Mapping[str, Any], key: str) -> int | None:
    """A number of the configuration; `auto` leaves it to the trainer."""
    value = config.get(key)
    return value if isinstance(value, int) else None


def _enabled(config: Mapping[str, Any], flags: Flags, name: str) -> bool:
    return (config.get(name) or {}).get("enabled") is True or name in flags


def _deepspeed_notes(config: Mapping[str, Any]) -> Iterator[str]:
    zero = config.get("zero_optimization") or {}
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device", "none") != "none":
            yield f"{key} to {zero[key]['device']} is not modelled: everything is taken to stay on the device"
    yield "what is recomputed is the training script's to say: it is chosen here"
