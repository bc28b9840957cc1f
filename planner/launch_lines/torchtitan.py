"""torchtitan: `-m torchtitan.train --parallelism.tensor_parallel_degree 8 ...`."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import OptionError
from ..schedule import Schedule
from .flags import Flags, Reading, number, size, text_of

TITAN_SCHEDULES = {
    "GPipe": Schedule.GPIPE,
    "1F1B": Schedule.ONE_F_ONE_B,
    "Interleaved1F1B": Schedule.INTERLEAVED,
    "ZBVZeroBubble": Schedule.ZBV,
    "DualPipeV": Schedule.DUALPIPEV,
}


def read(flags: Flags) -> Reading:
    """The choices of a torchtitan line."""
    here = {flag.partition(".")[2]: values for flag, values in flags.items() if "." in flag}
    pp = size(here, "pipeline-parallel-degree")
    seq_len = number(here, "max-context-length", "seq-len")
    ep = size(here, "expert-parallel-degree")
    pins: dict[str, int | str | None] = {
        "pp": pp,
        "cp": size(here, "context-parallel-degree"),
        "ep": ep,
        "tp": size(here, "tensor-parallel-degree"),
        "zero": _titan_zero(here, pp),
        "micro_batch": _titan_micro_batch(here, pp, seq_len),
        "recompute": _recompute(flags),
        "dp": _titan_dp(here, ep),
    }
    if pp > 1:
        pins["schedule"] = _titan_schedule(text_of(here, "pipeline-parallel-schedule") or "1F1B")
    tokens = number(here, "num-tokens-per-train-step")
    batch = tokens // seq_len if tokens and seq_len else number(here, "global-batch-size")
    options = {"global_batch": batch, "seq_len": seq_len, "framework": "torch"}
    return Reading(pins=pins, options=options, notes=tuple(_titan_notes(here, flags)))


def _titan_dp(here: Flags, ep: int) -> int | None:
    """dp of the plan: torchtitan's replicas and shards together, experts taken out; None: the rest."""
    shards = here.get("data-parallel-shard-degree", ("-1",))
    if shards[:1] == ("-1",):
        return None
    ways = size(here, "data-parallel-shard-degree") * size(here, "data-parallel-replicate-degree")
    if ways % ep:
        raise OptionError(f"--from-args: {ways} data-parallel ranks do not divide by expert parallelism {ep}")
    return ways // ep


def _titan_zero(here: Flags, pp: int) -> int:
    """FSDP is ZeRO-3, or 2 where parameters stay gathered (the default with a pipeline)."""
    if here.get("data-parallel-shard-degree", ("-1",))[:1] == ("1",):
        return 0
    policy = text_of(here, "fsdp-reshard-after-forward") or "default"
    return 2 if policy == "never" or (policy == "default" and pp > 1) else 3


def _titan_micro_batch(here: Flags, pp: int, seq_len: int | None) -> int | None:
    tokens = number(here, "num-tokens-per-microbatch-per-dp-rank")
    if tokens and seq_len:
        if tokens % seq_len:
            raise OptionError(
                f"--from-args: microbatches of {tokens} tokens do not divide by sequences of {seq_len}"
            )
        return tokens // seq_len
    if pp > 1:
        return number(here, "pipeline-parallel-microbatch-size", default=1)
    return number(here, "local-batch-size", "batch-size")


def _recompute(flags: Flags) -> str | None:
    """The policy, said as a subcommand (`activation-checkpoint:full`) or, earlier, by a flag."""
    words = [word.replace("_", "-") for values in flags.values() for word in values]
    said = [word.partition(":")[2] for word in words if word.startswith("activation-checkpoint:")]
    mode = said[-1] if said else text_of(flags, "activation-checkpoint.mode")
    return mode if mode in ("none", "selective", "full") else None


def _titan_schedule(name: str) -> str:
    if name not in TITAN_SCHEDULES:
        raise OptionError(
            f"--from-args: the schedule {name} cannot be checked; known: {', '.join(TITAN_SCHEDULES)}"
        )
    return str(TITAN_SCHEDULES[name])


def _titan_notes(here: Flags, flags: Flags) -> Iterator[str]:
    replicas = size(here, "data-parallel-replicate-degree")
    if replicas > 1 and here.get("data-parallel-shard-degree", ("-1",))[:1] != ("1",):
        yield f"hybrid sharding over {replicas} replicas is checked as sharding over all data-parallel ranks"
    if "module-fqns-per-model-part" in here:
        yield "which layers each stage holds is chosen here, not taken from the line"
    if _recompute(flags) is None:
        yield "what is recomputed is chosen here: the line does not name none, selective or full"
