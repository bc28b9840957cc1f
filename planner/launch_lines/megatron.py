"""Megatron-LM: `pretrain_gpt.py --tensor-model-parallel-size 8 ...`."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import OptionError
from .flags import Flags, Reading, number, schedule, size, text_of

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}


def read(flags: Flags) -> Reading:
    """The choices of a Megatron-LM line."""
    pp = size(flags, "pipeline-model-parallel-size")
    virtual = _megatron_virtual(flags, pp)
    pins = {
        "pp": pp,
        "cp": size(flags, "context-parallel-size"),
        "ep": size(flags, "expert-model-parallel-size"),
        "tp": size(flags, "tensor-model-parallel-size"),
        "zero": _megatron_zero(flags),
        "micro_batch": number(flags, "micro-batch-size"),
        "recompute": _megatron_recompute(flags),
        **schedule(pp, virtual),
    }
    return Reading(
        pins=pins,
        options={
            "global_batch": number(flags, "global-batch-size"),
            "seq_len": number(flags, "seq-length"),
            "dtype": next((name for name in ("bf16", "fp16") if name in flags), "fp32"),
            "optimizer": _optimizer(text_of(flags, "optimizer") or "adam"),
            "framework": "megatron",
        },
        notes=tuple(_megatron_notes(flags)),
    )


def _megatron_zero(flags: Flags) -> int:
    if "use-torch-fsdp2" in flags:
        return 3
    if "use-megatron-fsdp" in flags:
        strategy = text_of(flags, "data-parallel-sharding-strategy") or "optim_grads_params"
        stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        if strategy not in stages:
            raise OptionError(
                f"--from-args: --data-parallel-sharding-strategy {strategy}: expected {', '.join(stages)}"
            )
        return stages[strategy]
    return int("use-distributed-optimizer" in flags)


def _megatron_virtual(flags: Flags, pp: int) -> int:
    """Virtual stages per rank, by any of Megatron's three ways to say it."""
    if stages := number(flags, "num-virtual-stages-per-pipeline-rank"):
        return stages
    if layout := text_of(flags, "pipeline-model-parallel-layout"):
        cells = layout_cells(layout)
        if cells % pp:
            raise OptionError(
                f"--from-args: the layout {layout!r} has {cells} stages, which pp={pp} does not divide"
            )
        return cells // pp
    if each := number(flags, "num-layers-per-virtual-pipeline-stage"):
        layers = number(flags, "num-layers", "decoder-num-layers")
        if layers is None or layers % (pp * each):
            raise OptionError(
                f"--from-args: --num-layers {layers} does not divide by pp={pp} x "
                f"--num-layers-per-virtual-pipeline-stage {each}"
            )
        return layers // (pp * each)
    return 1


def layout_cells(layout: str) -> int:
    """How many stages a Megatron layout string describes: `Et*3|(tt|)*4L` has 6."""
    cells, rest = 1, layout
    while "(" in rest:
        before, _, after = rest.partition("(")
        inside, _, after = after.partition(")")
        digits = after[1:] if after.startswith("*") else ""
        number = digits[: len(digits) - len(digits.lstrip("0123456789"))]
        cells += before.count("|") + inside.count("|") * int(number or 1)
        rest = after[1 + len(number) :] if number else after
    return cells + rest.count("|")


def _megatron_recompute(flags: Flags) -> str:
    if "recompute-activations" in flags:
        return "selective"
    return text_of(flags, "recompute-granularity") or "none"


def _megatron_notes(flags: Flags) -> Iterator[str]:
    if size(flags, "tensor-model-parallel-size") > 1 and "sequence-parallel" not in flags:
        yield "the line has no --sequence-parallel; whether the sequence is split over tp is chosen here"
    if "recompute-num-layers" in flags and text_of(flags, "recompute-method") == "block":
        yield "recomputation of some layers (--recompute-method block) is checked as recomputation of all"
    if "pipeline-model-parallel-layout" in flags or any("pipeline-num-layers" in flag for flag in flags):
        yield "which layers each stage holds is chosen here, not taken from the line"
    if "use-tp-pp-dp-mapping" in flags:
        yield "--use-tp-pp-dp-mapping is not taken: ranks are laid out as chosen here"
    if size(flags, "expert-tensor-parallel-size") not in (1, size(flags, "tensor-model-parallel-size")):
        yield "--expert-tensor-parallel-size is not taken: experts are split over tp or not, as chosen here"


def _optimizer(name: str) -> str | None:
    if name not in OPTIMIZERS:
        raise OptionError(f"--from-args: --optimizer {name}: expected one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
