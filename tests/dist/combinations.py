"""Which combinations of model, mesh, ZeRO stage, schedule and recomputation are run.

Out: `EVERY`, all that a plan may ask for on at most eight ranks; `QUICK`, the first of a covering array
of strength two: grown greedily, cheapest first, until every pair of two choices that occurs together at
all would occur; and the first of another, of models with experts or split tables beside cp or tp.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import zoo
from tpplan.planner.schedule import SPLIT_BACKWARD, illegality

RANKS = 8
QUICK_COUNT, BESIDE_COUNT = 60, 3
SHARED_HEADS = ("deepseek-hf", "multi-query")
"""Models whose heads share a key: with so few samples on a rank that attention is split by heads."""
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2, "dualpipev": 2}
"""Virtual stages of each."""
MODES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One plan to be made and run."""

    model: str
    pp: int
    dp: int
    cp: int
    ep: int
    tp: int
    zero: int
    group: int | None
    schedule: str
    micro_batch: int
    recompute: str

    @property
    def ranks(self) -> int:
        """Devices it needs."""
        return self.pp * self.dp * self.cp * self.ep * self.tp

    @property
    def pins(self) -> dict[str, int | str]:
        """As choices for the planner."""
        pins: dict[str, int | str] = {
            "pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "tp": self.tp, "zero": self.zero,
            "micro_batch": self.micro_batch, "recompute": self.recompute,
        }  # fmt: skip
        if self.group is not None:
            pins["shard_group"] = self.group
        if self.pp > 1:
            pins |= {"schedule": self.schedule, "virtual_stages": SCHEDULES[self.schedule]}
        return pins

    def __str__(self) -> str:
        axes = (f"{axis}{getattr(self, axis)}" for axis in ("pp", "dp", "cp", "ep", "tp"))
        sizes = "".join(f" {axis}" for axis in axes if not axis.endswith("1"))
        group = f" in groups of {self.group}" if self.group else ""
        schedule = f" {self.schedule}" if self.pp > 1 else ""
        recompute = "" if self.recompute == "none" else f" {self.recompute} recompute"
        return f"{self.model}{sizes} zero{self.zero}{group}{schedule} micro{self.micro_batch}{recompute}"


def _combinations() -> Iterator[Combination]:
    for name, model in zoo.MODELS.items():
        pps = [n for n in (1, 2, 4) if n <= model.layers]
        sizes = itertools.product(pps, (1, 2, 4), model.cp, model.ep, model.tp)
        for pp, dp, cp, ep, tp in sizes:
            if 1 < pp * dp * cp * ep * tp <= RANKS:
                yield from _on(name, model.layers, pp, dp, cp, ep, tp)


def _on(name: str, layers: int, pp: int, dp: int, cp: int, ep: int, tp: int) -> Iterator[Combination]:
    """All on one mesh; the recompute mode turns from one to the next."""
    samples = zoo.BATCH // (dp * ep)
    turn = itertools.cycle(MODES if pp == 1 or layers > 1 else MODES[:1])
    for (zero, group), (schedule, micro_batch) in itertools.product(
        _sharded(pp, dp, cp, ep), _scheduled(layers, pp, samples)
    ):
        mode = next(turn)
        if mode == "selective" and schedule in SPLIT_BACKWARD:
            mode = "none"
        yield Combination(
            model=name, pp=pp, dp=dp, cp=cp, ep=ep, tp=tp, zero=zero, group=group, schedule=schedule,
            micro_batch=micro_batch, recompute=mode,
        )  # fmt: skip


def _sharded(pp: int, dp: int, cp: int, ep: int) -> list[tuple[int, int | None]]:
    """ZeRO stages, and groups of two under HSDP. In a pipeline ZeRO-2 is ZeRO-1."""
    if dp * cp * ep == 1:
        return [(0, None)]
    stages = (0, 1, 2, 3) if pp == 1 else (0, 1, 3)
    grouped = stages[1:] if dp == 4 and cp * ep == 1 else ()
    return [*((zero, None) for zero in stages), *((zero, 2) for zero in grouped)]


def _scheduled(layers: int, pp: int, samples: int) -> list[tuple[str, int]]:
    """Schedules with the largest microbatch that fills them; two microbatches without a pipeline."""
    if pp == 1:
        return [("none", max(1, samples // 2))]
    found = []
    for schedule, virtual in SCHEDULES.items():
        for microbatches in (2, 4, 8):
            legal = not illegality(schedule, pp=pp, virtual_stages=virtual, microbatches=microbatches)
            if legal and microbatches >= pp and samples % microbatches == 0 and pp * virtual <= layers:
                found.append((schedule, samples // microbatches))
                break
    return found


def _features(c: Combination) -> tuple[str, ...]:
    zero = "hsdp" if c.group else f"zero{c.zero}"
    axes = (f"{axis}{getattr(c, axis)}" for axis in ("pp", "dp", "cp", "ep", "tp"))
    return (c.model, *axes, zero, c.schedule, c.recompute)


def covering(every: tuple[Combination, ...], most: int) -> tuple[Combination, ...]:
    """Greedy: the one that adds most new pairs per rank, until every pair occurs or there are `most`."""
    number: dict[tuple[str, str], int] = {}
    pairs = [
        sum(1 << number.setdefault(p, len(number)) for p in itertools.combinations(_features(c), 2))
        for c in every
    ]
    ranks = [c.ranks for c in every]
    missing, chosen = (1 << len(number)) - 1, []
    while missing and len(chosen) < most:
        best = max(range(len(every)), key=lambda i: (pairs[i] & missing).bit_count() / ranks[i])
        chosen.append(every[best])
        missing &= ~pairs[best]
    return tuple(chosen)


def _is_beside(c: Combination) -> bool:
    """Whether experts or tables run beside split sequences or split weights."""
    return zoo.MODELS[c.model].ep != (1,) and max(c.cp, c.tp) > 1


BY_HEADS = Combination(
    model="multi-query", pp=1, dp=4, cp=1, ep=1, tp=2, zero=1, group=None, schedule="none", micro_batch=1,
    recompute="none",
)  # fmt: skip
"""With one sample a microbatch."""
LATENT = replace(BY_HEADS, model="deepseek-hf")
EVERY = tuple(_combinations())
_OTHERS = tuple(c for c in EVERY if c.model not in SHARED_HEADS)
QUICK = (
    *covering(tuple(c for c in _OTHERS if not _is_beside(c)), QUICK_COUNT),
    *covering(tuple(c for c in _OTHERS if _is_beside(c) and c.ep > 1), BESIDE_COUNT),
    BY_HEADS,
    replace(LATENT, zero=3),
    replace(LATENT, dp=2, ep=2, recompute="full"),
    replace(LATENT, pp=2, dp=2, schedule="1f1b"),
)
"""For every run of the suite."""
