"""Published runs: from a YAML file to `Row`s in which nothing is missing.

In: a list of documents, one a run: `id`, `tier`, `kind`, `source`, `model`, `hardware`, `parallel`,
`measured`, and `derived` (arithmetic from `measured`). Out: `Row`s with the model's dims, the plan,
the hardware and what was measured; whatever a source does not state is filled in by a rule of this
file and said in `assumed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .row_models import Dims

GIB = 2.0**30
VOCAB_MULTIPLE = 1024
"""Megatron pads the vocabulary to a multiple of 128 times tp; this is that of tp = 8."""
A100_PEAK_FLOPS = 312e12
"""What published model FLOPs utilisations of A100 runs are relative to (NVIDIA A100 data sheet)."""

HEAD_DIM = {
    "gpt_oss_moe": 64,
    "qwen3": 128,
    "qwen3_moe": 128,
    "deepseek_v3_mla_moe": 128,
    "deepseek_mla_moe": 128,
}
"""Width of a head where it is not hidden / heads (the models' published configurations)."""
DEEPSEEK_V3 = {"qk_rope_head_dim": 64, "shared_expert_ffn": 2048}
"""Of the published configuration, where a row leaves them out."""
TIED = ("gpt", "mpt")
"""Architectures whose head shares the embedding."""
GUESSED_MICRO_BATCHES = (2, 1)
GUESSED_VIRTUAL_STAGES = (4, 3, 2)
"""Tried where none is stated; the first legal one is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """What a run did, in this project's words: dp does not contain ep."""

    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    zero: int
    global_batch: int
    micro_batch: int
    recompute: str
    schedule: str
    virtual_stages: int
    sequence_parallel: bool
    precision: str
    """`bf16`, `fp16` or `fp8`."""

    @property
    def microbatches(self) -> int:
        """Microbatches of one step."""
        return self.global_batch // (self.dp * self.ep * self.micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run."""

    id: str
    tier: str
    kind: str
    source: str
    """The first word of the id: rows of one source share it."""
    dims: Dims
    plan: RowPlan
    hardware: dict[str, Any]
    options: dict[str, Any]
    """Facts of the run that only a framework's profile reads (`compile`, `async_tp`, `mp_mode`, ...)."""
    measured_s: float | None
    measured_tokens_per_s_per_gpu: float | None
    measured_memory_bytes: float | None
    measured_reserved_bytes: float | None
    assumed: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """Devices of the run."""
        return int(self.hardware["gpus"])

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.plan.global_batch * self.dims.seq_len


def load_documents(path: Path) -> list[dict[str, Any]]:
    """The rows of a file as they stand there."""
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def source_of(document: dict[str, Any]) -> str:
    """The source's short name."""
    return str(document["id"]).split("_")[0]


def read_row(document: dict[str, Any]) -> Row:
    """One row. Raises `ValueError` or `KeyError` when it cannot be made whole."""
    assumed: list[str] = []
    dims = read_dims(document["model"], assumed)
    plan = _plan(document, dims, assumed)
    measured = document["measured"]
    step_s, tokens_per_s = _times(document, dims, plan, assumed)
    parallel = document["parallel"]
    reserved = measured.get("reserved_memory_gib")
    peak = measured.get("peak_memory_gib")
    return Row(
        id=document["id"],
        tier=document["tier"],
        kind=document["kind"],
        source=source_of(document),
        dims=dims,
        plan=plan,
        hardware=document["hardware"],
        options={k: parallel[k] for k in ("compile", "async_tp", "mp_mode", "overlap") if k in parallel},
        measured_s=step_s,
        measured_tokens_per_s_per_gpu=tokens_per_s,
        measured_memory_bytes=peak * GIB if peak else None,
        measured_reserved_bytes=reserved * GIB if reserved else None,
        assumed=tuple(assumed),
    )


# --------------------------------------------------------------------------- the model


def read_dims(model: dict[str, Any], assumed: list[str]) -> Dims:
    """The dims of a row's model; what had to be assumed is added to `assumed`."""
    arch = model["arch"]
    old = arch in ("gpt", "mpt")
    latent = bool(model.get("kv_lora_rank"))
    model = {**DEEPSEEK_V3, **model} if arch == "deepseek_v3_mla_moe" else model
    if arch == "nemotron4":
        assumed.append("squared ReLU priced as GELU")
    vocab = -(-model["vocab"] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if vocab != model["vocab"]:
        assumed.append(f"vocabulary padded from {model['vocab']} to {vocab}")
    experts = int(model.get("experts") or 0)
    return Dims(
        layers=model["layers"],
        hidden=model["hidden"],
        heads=model["heads"],
        kv_heads=model["kv_heads"],
        head_dim=int(HEAD_DIM.get(arch) or model["hidden"] // model["heads"]),
        ffn=model["ffn"] or model.get("moe_ffn") or 4 * model["hidden"],
        vocab=vocab,
        seq_len=model["seq_len"],
        gated=not old and arch != "nemotron4",
        positions="learned" if arch == "gpt" else "none" if arch == "mpt" else "rotary",
        layer_norm=old or arch == "nemotron4",
        bias=arch == "gpt",
        tied=arch in TIED,
        dropout=0.1 if arch == "gpt" else 0.0,
        experts=experts,
        experts_per_token=int(model.get("top_k") or 0),
        expert_ffn=int(model.get("moe_ffn") or 0) if experts else 0,
        shared_ffn=int(model.get("shared_expert_ffn") or 0),
        dense_layers=int(model.get("dense_layers") or 0),
        query_rank=int(model.get("q_lora_rank") or 0),
        kv_rank=int(model.get("kv_lora_rank") or 0),
        rope_dim=int(model.get("qk_rope_head_dim") or 0) if latent else 0,
    )


# --------------------------------------------------------------------------- the plan


def _plan(document: dict[str, Any], dims: Dims, assumed: list[str]) -> RowPlan:
    given = document["parallel"]
    tp, pp, cp, ep = (int(given.get(axis) or 1) for axis in ("tp", "pp", "cp", "ep"))
    ranks = int(document["hardware"]["gpus"]) // (tp * pp * cp)
    if ranks % ep:
        raise ValueError(f"ep={ep} does not divide the {ranks} data-parallel ranks")
    samples = int(given["global_batch"]) // ranks
    schedule, virtual = _schedule(given, dims, pp, assumed)
    micro_batch = _micro_batch(given, samples, pp, virtual, assumed)
    return RowPlan(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        dp=ranks // ep,
        zero=_or(given["zero"], 0, "ZeRO stage 0", assumed),
        global_batch=int(given["global_batch"]),
        micro_batch=micro_batch,
        recompute=_or(given["recompute"], *_recompute(document, dims), assumed),
        schedule=schedule,
        virtual_stages=virtual,
        sequence_parallel=bool(
            _or(given["sequence_parallel"], tp > 1, "sequence parallelism with tp", assumed)
        ),
        precision="fp8" if given["precision"].startswith("fp8") else given["precision"],
    )


def _or(value: Any, default: Any, words: str, assumed: list[str]) -> Any:
    if value is not None:
        return value
    assumed.append(words)
    return default


def _recompute(document: dict[str, Any], dims: Dims) -> tuple[str, str]:
    """What a source does that does not say: FSDP of a dense model recomputes, recipes do not."""
    full = source_of(document) == "automodel" and not dims.experts
    return ("full", "full recomputation") if full else ("none", "no recomputation")


def _schedule(given: dict[str, Any], dims: Dims, pp: int, assumed: list[str]) -> tuple[str, int]:
    """Schedule and virtual stages."""
    if pp == 1:
        return "none", 1
    stated, virtual = given["schedule"], given["virtual_stages"]
    if virtual is None and stated == "1f1b_interleaved":
        each = dims.layers // pp
        virtual = next((v for v in GUESSED_VIRTUAL_STAGES if each % v == 0), 2)
        assumed.append(f"{virtual} virtual stages")
    if stated is None:
        assumed.append("1F1B, interleaved with virtual stages")
    virtual = int(virtual or 1)
    return ("interleaved" if virtual > 1 else "1f1b"), virtual


def _micro_batch(given: dict[str, Any], samples: int, pp: int, virtual: int, assumed: list[str]) -> int:
    if given["micro_batch"] is not None:
        return int(given["micro_batch"])
    if given.get("local_batch"):
        found = max(1, int(given["local_batch"]) // pp)
        words = "local batch cut into pp microbatches"
    elif virtual > 1 or pp == 1:
        fits = (b for b in GUESSED_MICRO_BATCHES if samples % b == 0 and samples // b % pp == 0)
        found, words = next(fits, 1), "2 unless the schedule asks for less"
    else:
        found, words = 2, "a guess"
    assumed.append(f"micro-batch {found} ({words})")
    return found


# --------------------------------------------------------------------------- what was measured


def _times(
    document: dict[str, Any], dims: Dims, plan: RowPlan, assumed: list[str]
) -> tuple[float | None, float | None]:
    """(seconds a step, tokens/s of one device), one from the other where only one is published."""
    measured, derived = document["measured"], document.get("derived") or {}
    step_s = measured.get("step_time_s") or derived.get("step_time_s")
    rate = measured.get("tokens_per_s_per_gpu") or derived.get("tokens_per_s_per_gpu")
    tokens = plan.global_batch * dims.seq_len / int(document["hardware"]["gpus"])
    if not step_s and not rate and measured.get("mfu"):
        flops = _published_flops(dims, plan.global_batch) / int(document["hardware"]["gpus"])
        step_s = flops / (measured["mfu"] * A100_PEAK_FLOPS)
        assumed.append("step time from the published model FLOPs utilisation")
    return step_s or (tokens / rate if rate else None), rate or (tokens / step_s if step_s else None)


def _published_flops(dims: Dims, batch: int) -> float:
    """Model FLOPs of a GPT step as Korthikanti et al. count them (arXiv:2205.05198, appendix A)."""
    h, s = dims.hidden, dims.seq_len
    layers = dims.layers * batch * s * h * h
    return 72 * layers * (1 + s / (6 * h) + dims.vocab / (12 * h * dims.layers))
