"""The fullest moment of a pipeline rank of a candidate whose stages are chosen.

In: a `Costed` candidate, the blocks of one of its ranks. Out: `Fullest`, bytes beside what stays for the
whole step, and how blocks are dealt to the rank's pieces (`dealt`).
"""

from __future__ import annotations

from itertools import accumulate, groupby

from ..cost import Recompute
from ..estimate.memory import copies, keeps_gathered, replicas
from ..estimate.moments import Fullest, Piece, Run, fullest, moments
from ..schedule import stages_of
from .costed import Costed
from .intervals import Modes
from .pieces import piece_layers

Blocks = list[tuple[str, Recompute]]
"""(class, mode) of blocks in the order of forward."""


def dealt(costed: Costed, modes: Modes, *, last_rank: bool) -> list[Blocks]:
    """The blocks of each piece of a rank; what is no layer goes with the layers next to it."""
    v, kinds = costed.candidate.virtual_stages, costed.problem.layer_classes
    blocks = [(name, mode) for name, n, mode in modes for _ in range(n)]
    layers = sum(name in kinds for name, _ in blocks)
    ends = list(accumulate(piece_layers(layers, v, last_rank=last_rank)))
    pieces: list[Blocks] = [[] for _ in range(v)]
    piece = seen = 0
    for name, mode in blocks:
        if name in kinds:
            while seen >= ends[piece]:
                piece += 1
            seen += 1
        pieces[piece].append((name, mode))
    return pieces


def fullest_moment(costed: Costed, modes: Modes, rank: int) -> Fullest:
    """What the rank's fullest moment takes. `modes`: its blocks, in the order of forward."""
    candidate = costed.candidate
    pp, v = candidate.mesh.pp, candidate.virtual_stages
    held = stages_of(candidate.schedule, pp=pp, virtual_stages=v, rank=rank) if pp > 1 else (0,)
    blocks = dealt(costed, modes, last_rank=rank == pp - 1)
    pieces = [
        _piece(costed, own, is_last=stage == pp * v - 1) for stage, own in zip(held, blocks, strict=True)
    ]
    whole = frozenset(
        stage for stage, own in zip(held, blocks, strict=True) if stage and recomputes(costed, own)
    )
    return fullest(pieces, moments(candidate.schedule, pp, v, candidate.microbatches, rank, whole))


def recomputes(costed: Costed, blocks: Blocks) -> bool:
    """Whether a piece runs its backward in one part because some of its blocks are run again for it."""
    framework = costed.problem.framework
    return framework.recomputes_in_one_part and any(mode is not Recompute.NONE for _, mode in blocks)


def pooled_bytes(costed: Costed, modes: Modes) -> float:
    """What lies in pools of other streams, in which parameters are gathered, and once a step reduced."""
    candidate, framework = costed.candidate, costed.problem.framework
    if not keeps_gathered(candidate.zero_stage, candidate.mesh, framework):
        return costed.staging_bytes
    runs = [_run(costed, name, mode, n) for name, n, mode in modes]
    shards = sum(run.count * run.reduced for run in runs) if framework.reduces_in_own_pool else 0.0
    return costed.staging_bytes + costed.prefetch_bytes + shards


def _piece(costed: Costed, blocks: Blocks, *, is_last: bool) -> Piece:
    runs = [_run(costed, name, mode, len(list(same))) for (name, mode), same in groupby(blocks)]
    return Piece(runs=tuple(runs), handed=0.0 if is_last else costed.boundary_bytes, reduces=costed.reduces)


def _run(costed: Costed, name: str, mode: Recompute, count: int) -> Run:
    cost, framework = costed.intra.blocks[name], costed.problem.framework
    candidate = costed.candidate
    mesh, zero = candidate.mesh, candidate.zero_stage
    whole = reduced = reducing = copy = 0.0
    for group in cost.parameters:
        if group.trainable:
            size, ways = group.numel * framework.gradient_bytes, replicas(group, mesh)
            whole += size
            reduced += size / ((candidate.shard_group or ways) if zero else 1)
            reducing += size if ways > 1 else 0.0
        if zero and copies(group, mesh, zero, framework):
            copy += group.numel * group.element_bytes
    gathers = zero >= 3 and not keeps_gathered(zero, mesh, framework)
    return Run(
        cost=cost,
        mode=mode,
        count=count,
        gradients=whole,
        reduced=reduced,
        reducing=reducing,
        copy=copy,
        root=name not in costed.problem.layer_classes,
        gathered=costed.states[name].gathered + costed.prefetch_bytes if gathers else 0.0,
    )
