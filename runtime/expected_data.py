"""What FSDP has to move on a rank of a stage: parameters gathered, gradients reduced.

In: a plan and a stage. Out: the exact number and bytes of its collectives. FSDP moves every layer by itself
and what is left of each model as one more, experts and tables of other ranks apart. A shard is of the first
dim that divides by the group, or else of dim 0, padded:

    bytes = sum over parameters of local elements, the cut dim rounded up to the group   * bytes of one
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..planner.layout import Collective
from ..planner.plan import ParameterPlacement, Plan
from .amounts import NOTHING, Amount, Expected, Key
from .layouts import is_strided, parameter_placement, shard_dim
from .stages import list_path

DATA = "parameters and gradients"
DATA_AXES, REPLICA_AXES = ("dp", "cp", "ep"), ("dp", "cp")
FULL_BYTES, HALF_BYTES = 4, 2
"""Of an element in fp32, and in 16 bits. Gradients are reduced, and summed once a step, in fp32."""


def is_data(label: str) -> bool:
    """Whether a planned row is of FSDP's own."""
    return label.startswith(
        ("updated ", "gradients of dense", "gradients of sparse", "gradients of sharding")
    ) or (": parameters gathered for " in label)


def wraps(plan: Plan) -> bool:
    """Whether FSDP is there at all."""
    return math.prod(plan.mesh.size(axis) for axis in DATA_AXES) > 1 or plan.job.dtype != "fp32"


def gathers(plan: Plan) -> int:
    """How often a step gathers each parameter."""
    if plan.zero_stage == 0:
        return 0
    return 2 * plan.num_microbatches if plan.zero_stage == 3 and plan.mesh.pp == 1 else 1


def syncs(plan: Plan) -> int:
    """How often it reduces each gradient."""
    return plan.num_microbatches if plan.zero_stage >= 2 and plan.mesh.pp == 1 else 1


def held(plan: Plan, stage: int) -> list[tuple[ParameterPlacement, int]]:
    """Parameters on a rank of a stage, and how many of each: one per block, copies of tied ones too."""
    counts: dict[str, int] = {}
    for name, n, _ in plan.stages[stage].blocks:
        counts[name] = counts.get(name, 0) + n
    readers = [(p, p.blocks if plan.mesh.pp > 1 else p.blocks[:1]) for p in plan.parameters]
    found = [(p, sum(counts.get(name, 0) for name in names)) for p, names in readers]
    return [(p, n) for p, n in found if n]


def local_shape(plan: Plan, parameter: ParameterPlacement) -> tuple[int, ...]:
    """What ep and tp leave of it to a rank."""
    shape = list(parameter.shape)
    for axis in ("ep", "tp"):
        dim = shard_dim(parameter_placement(parameter, axis))
        if dim is not None:
            shape[dim] //= plan.mesh.size(axis)
    return tuple(shape)


def local_numel(plan: Plan, parameter: ParameterPlacement) -> int:
    """Elements of it on a rank before data parallelism."""
    return math.prod(local_shape(plan, parameter))


def padded_numel(plan: Plan, parameter: ParameterPlacement, ranks: int) -> int:
    """The same with the cut dim rounded up to a multiple of `ranks`."""
    shape = local_shape(plan, parameter)
    cut = {shard_dim(p) for axis in ("ep", "tp") if is_strided(p := parameter_placement(parameter, axis))}
    if not shape or any(size % ranks == 0 and dim not in cut for dim, size in enumerate(shape)):
        return math.prod(shape)
    return -(-shape[0] // ranks) * ranks * math.prod(shape[1:])


def is_sparse(parameter: ParameterPlacement) -> bool:
    """Whether it lies on the mesh of experts and tables."""
    cuts = {axis for axis, text in parameter.placements if text != "R"}
    return "ep" in cuts or ("tp" in cuts and parameter.is_expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Parameters that FSDP moves over the same ranks."""

    axis: str
    units: int
    """How many collectives each of its moves takes."""
    numel: int
    padded: int
    managed: bool = True
    """False for experts whose gradients are summed at the step's end instead."""


def _groups(plan: Plan, stage: int) -> Iterator[_Group]:
    for sparse, axes in ((False, DATA_AXES), (True, REPLICA_AXES)):
        ranks = math.prod(plan.mesh.size(axis) for axis in axes)
        mine = [(p, n) for p, n in held(plan, stage) if is_sparse(p) is sparse]
        if ranks > 1 and mine:
            shards = plan.shard_group or ranks
            yield _Group(
                axis="+".join(axis for axis in axes if plan.mesh.size(axis) > 1),
                units=_units(plan, stage, [p for p, _ in mine]),
                numel=sum(n * local_numel(plan, p) for p, n in mine),
                padded=sum(n * padded_numel(plan, p, shards) for p, n in mine),
                managed=not (sparse and plan.zero_stage == 0),
            )


def _units(plan: Plan, stage: int, parameters: list[ParameterPlacement]) -> int:
    """Modules of a rank's models that hold any of `parameters` and are wrapped: layers, and what is left."""
    layers = {entry.block for entry in plan.layer_lists} if list_path(plan) is not None else set()
    with_any = {name for p in parameters for name in (p.blocks if plan.mesh.pp > 1 else p.blocks[:1])}
    blocks = [(name, n) for name, n, _ in plan.stages[stage].blocks]
    places = [i for i, (name, _) in enumerate(blocks) if name in layers]
    roots = {
        i > max(places, default=0) if plan.mesh.pp > 1 else False
        for i, (name, _) in enumerate(blocks)
        if name not in layers and name in with_any
    }
    return len(roots) + sum(n for name, n in blocks if name in layers and name in with_any)


def data(plan: Plan, stage: int, rows: Mapping[Key, Amount]) -> dict[Key, Expected]:
    """Gathers, reductions and sums over copies of a rank."""
    planned: dict[Key, Amount] = {}
    runs: dict[Key, Amount] = {}
    width = FULL_BYTES if plan.job.dtype == "fp32" else HALF_BYTES

    def add(
        kind: Collective, group: _Group, times: int, element_bytes: float, *, padded: bool = True
    ) -> None:
        key = (DATA, kind, group.axis)
        if times:
            units = group.units if group.managed else 1
            nbytes = times * element_bytes
            planned[key] = planned.get(key, NOTHING) + Amount(0, group.numel * nbytes)
            moved = group.padded if padded else group.numel
            runs[key] = runs.get(key, NOTHING) + Amount(times * units, moved * nbytes)

    for group in _groups(plan, stage):
        if plan.zero_stage == 0:
            add(Collective.ALL_REDUCE, group, 1, FULL_BYTES, padded=False)
            continue
        add(Collective.ALL_GATHER, group, gathers(plan), width)
        add(Collective.REDUCE_SCATTER, group, syncs(plan), FULL_BYTES)
        if plan.shard_group:
            add(Collective.ALL_REDUCE, group, 1, FULL_BYTES / plan.shard_group)
    keys = dict.fromkeys((*runs, *(key for key in rows if key[0] == DATA)))
    return {
        key: Expected(
            planned=rows.get(key, NOTHING),
            runs=runs.get(key, NOTHING),
            rule="FSDP moves modules, not blocks, and pads shards",
            sound=math.isclose(rows.get(key, NOTHING).bytes, planned.get(key, NOTHING).bytes, rel_tol=1e-12),
        )
        for key in keys
    }
