"""Planned and executed collectives side by side.

In: a plan and what one rank executed in one step (`executed.record`). Out: one row per planned label
and one for everything that no label covers. Conversions of activations must agree in count and bytes;
gradient and parameter traffic, which torch does block by block, in total bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..planner.layout import Collective
from ..planner.plan import Plan
from ..planner.schedule import stages_of
from .attention import LABEL as OPERANDS
from .check import is_routed, reduces_once, runs_layers_again, syncs_every_microbatch, unstated
from .context import AXIS as CONTEXT
from .context import LABEL as KEYS_AND_VALUES
from .exchange import COUNTS_LABEL
from .exchange import ROWS_LABEL as ROUTED
from .executed import Executed, axes_of
from .gradients import NORM_LABEL, REPLICATED_LABEL
from .labels import LOSS_LABEL
from .loss import LABEL as INSIDE_LOSS
from .ties import LABEL as TIED_LABEL

PADDING = 0.02
"""FSDP pads uneven shards: by how much its traffic may exceed the parameters' own bytes."""
GRADIENT = " (gradient)"
"""How labels end in backward, where a gradient may come in the layout that DTensor gave an operation."""
GREETING_BYTES = 4
"""Pipelining's first step begins with a message of one number between neighbours."""
STAGES = "activations between stages"
DATA = "parameters and gradients"
BOOKKEEPING = {LOSS_LABEL, COUNTS_LABEL}
"""Small collectives that no plan prices: averaging the printed loss, counts of rows per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of collective of one step on one rank."""

    label: str
    collective: Collective
    axis: str
    planned_count: float
    executed_count: int
    planned_bytes: float
    """All executions together."""
    executed_bytes: float
    agrees: bool
    as_often: bool
    """Whether it ran as often as planned, whatever its bytes."""
    announced: bool
    """Whether `check.differences` tells of it."""


Key = tuple[str, Collective, str]


def compare(plan: Plan, executed: Sequence[Sequence[Executed]]) -> tuple[Row, ...]:
    """Rows for the busiest of some ranks, as plans count (pipeline stages run different collectives)."""
    planned: dict[Key, tuple[float, float]] = {}
    for c in plan.communications:
        routed = is_routed(plan, c.label)
        key = (ROUTED if routed else _grouped(c.label, c.collective, c.axis), c.collective, c.axis)
        count = _messages(plan) if c.collective is Collective.SEND_RECV else c.count
        _add(planned, key, count, count * c.bytes)
    done: dict[Key, tuple[float, float]] = {}
    for rank in executed:
        for key, found in _sums(plan, rank).items():
            done[key] = max(found, done.get(key, (0, 0.0)), key=lambda amounts: amounts[1])
    return tuple(_rows(plan, planned, done))


def counts_agree(row: Row) -> bool:
    """Agreement where bytes cannot be compared: what runs, and along tp how often.

    A plan for another dtype or for more data ranks has other bytes.
    """
    if row.axis == "tp" and row.planned_count and row.executed_count:
        return row.agrees or row.as_often
    return bool(row.planned_count) == bool(row.executed_count)


def _messages(plan: Plan) -> float:
    """Sends and receives of the busiest rank in a step; a plan prices one border for each of its stages."""
    mesh, v = plan.mesh, plan.virtual_stages
    rank_of = {
        stage: rank
        for rank in range(mesh.pp)
        for stage in stages_of(plan.schedule, pp=mesh.pp, virtual_stages=v, rank=rank)
    }
    borders = [(rank_of[stage], rank_of[stage + 1]) for stage in range(mesh.pp * v - 1)]
    busiest = max(sum((a == rank) != (b == rank) for a, b in borders) for rank in range(mesh.pp))
    return 2 * plan.num_microbatches * busiest


def _sums(plan: Plan, executed: Sequence[Executed]) -> dict[Key, tuple[float, float]]:
    found: dict[Key, tuple[float, float]] = {}
    for e in executed:
        axis = axes_of(e.ranks, plan.mesh)
        greeting = e.collective is Collective.SEND_RECV and e.bytes <= GREETING_BYTES
        if e.label not in BOOKKEEPING and axis and not greeting:
            _add(found, (_grouped(e.label, e.collective, axis), e.collective, axis), 1, e.bytes)
    return found


def _add(table: dict[Key, tuple[float, float]], key: Key, count: float, nbytes: float) -> None:
    before = table.get(key, (0.0, 0.0))
    table[key] = (before[0] + count, before[1] + nbytes)


def _grouped(label: str, collective: Collective, axis: str) -> str:
    """What torch runs block by block has no label of its own and is compared as a whole."""
    if collective is Collective.SEND_RECV:
        return STAGES
    if label in (NORM_LABEL, REPLICATED_LABEL, TIED_LABEL, ROUTED):
        return label
    if axis == CONTEXT and (label.startswith(KEYS_AND_VALUES) or "->" in label):
        return KEYS_AND_VALUES
    if axis == "tp":
        return REPLICATED_LABEL if collective is Collective.ALL_REDUCE and not label else label
    return ROUTED if collective is Collective.ALL_TO_ALL else DATA


def _rows(
    plan: Plan, planned: dict[Key, tuple[float, float]], done: dict[Key, tuple[float, float]]
) -> Iterator[Row]:
    off_border = frozenset(unstated(plan))
    again, once = runs_layers_again(plan), reduces_once(plan)
    instead = ("", INSIDE_LOSS, OPERANDS) if off_border else ()
    after_dtensor = {r.label for r in plan.reshards if off_border and r.side == "input"}
    once_entered = _share(plan)
    for key in dict.fromkeys((*planned, *done)):
        label, collective, axis = key
        (planned_count, planned_bytes), (count, nbytes) = planned.get(key, (0, 0)), done.get(key, (0, 0))
        yield Row(
            label=label or "no label",
            collective=collective,
            axis=axis,
            planned_count=planned_count,
            executed_count=int(count),
            planned_bytes=planned_bytes,
            executed_bytes=nbytes,
            announced=(axis == "tp" and (label in off_border or label in instead))
            or (axis == "tp" and bool(off_border) and label.endswith(GRADIENT) and not planned_count)
            or (axis == "tp" and label in after_dtensor and count < planned_count)
            or (label == REPLICATED_LABEL and bool(off_border) and nbytes > planned_bytes)  # it has no label
            or (once and label == DATA)
            or (again and label not in (DATA, STAGES) and 0 < planned_count < count)
            or (label == REPLICATED_LABEL and syncs_every_microbatch(plan))
            or (label == KEYS_AND_VALUES and planned_count <= count and nbytes <= planned_bytes),
            agrees=_agree(label, (planned_count, planned_bytes), (count, nbytes))
            or (planned_count * once_entered, planned_bytes * once_entered) == (count, nbytes),
            as_often=count in (planned_count, planned_count * once_entered),
        )


def _share(plan: Plan) -> float:
    """How much oftener than priced, a share of every layer, the first stage runs what enters the first."""
    layers = [stage.layers for stage in plan.stages]
    return sum(layers) / max(layers) if plan.mesh.pp > 1 and sum(layers) else 1.0


def _agree(label: str, planned: tuple[float, float], done: tuple[float, float]) -> bool:
    if label == ROUTED:  # how many rows go where is the router's choice
        return planned[0] == done[0]
    if label == DATA:
        return abs(done[1] - planned[1]) <= PADDING * planned[1]
    if label == REPLICATED_LABEL:
        return planned[1] == done[1]
    return planned == done
