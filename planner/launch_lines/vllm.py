"""vLLM: `vllm serve MODEL --tensor-parallel-size 8 ...`."""

from __future__ import annotations

from .flags import DTYPES, Flags, Reading, number, size, text_of


def read(flags: Flags) -> Reading:
    """The choices of a vLLM line; a server has no microbatches, optimizer or recomputation."""
    tp = size(flags, "tensor-parallel-size", "tp")
    dp = size(flags, "data-parallel-size", "dp")
    notes = ["this is a serving line: its sizes are checked for training, which needs far more memory"]
    if "enable-expert-parallel" in flags or "ep" in flags:
        notes.append(f"vLLM spreads experts over tp x dp = {tp * dp} ranks; how they lie is chosen here")
    dtype = text_of(flags, "dtype") or "auto"
    pins: dict[str, int | str | None] = {
        "pp": size(flags, "pipeline-parallel-size", "pp"),
        "dp": dp,
        "tp": tp,
    }
    return Reading(
        pins=pins,
        options={"seq_len": number(flags, "max-model-len"), "dtype": DTYPES.get(dtype)},
        notes=tuple(notes),
    )
