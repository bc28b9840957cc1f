"""How a chain is dealt to ranks that hold several pieces of it (virtual stages).

In: a `SearchProblem`, pipeline ranks, a schedule with v pieces per rank. Out: the chain in the order
that ranks hold it, how many layers each rank lacks of v equal pieces, and the layers of each piece.

Pieces are equal. Ranks that run unequal ones wait for each other in every round, which the closed form
of the pipeline's time does not see: 12 layers a rank in 8 pieces cost 3% of a GPT-3 step, 126 layers over
16 ranks in 7 pieces each cost 9% (event simulator). The first and the last piece of the chain may lack a
layer: they hold the embedding and the head, and layers two short of a multiple are common for that
reason (Llama 3, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from ..problem import SearchProblem
from ..schedule import V_SHAPED, Schedule


def lacking(layers: int, pp: int, v: int, schedule: str) -> tuple[int, ...] | None:
    """Per rank, the layers it lacks of v equal pieces; None when the layers cannot be dealt so.

    With one layer missing the first piece lacks it, with two the first and the last.
    """
    if v == 1:
        return (0,) * pp
    missing = -layers % v
    if missing == 0:
        return (0,) * pp
    if missing == 1:
        return (1, *(0,) * (pp - 1))
    if missing == 2 and schedule == Schedule.INTERLEAVED:
        return (1, *(0,) * (pp - 2), 1)
    return None


def can_deal(problem: SearchProblem, pp: int, v: int, schedule: str) -> bool:
    """Whether the layers go evenly into v pieces on each rank.

    Layers of several kinds only in pieces of equal length; other blocks stand at the two ends.
    """
    layers = [name in problem.layer_classes for name in problem.chain]
    first, last = layers.index(True), len(layers) - layers[::-1].index(True)
    if not all(layers[first:last]):
        return False
    if len(problem.layer_classes) > 1:
        return problem.layers % (pp * v) == 0
    lacks = lacking(problem.layers, pp, v, schedule)
    if lacks is None:
        return False
    fewest = sum(v if not lack else 2 * v - lack for lack in lacks)
    return problem.layers >= fewest


def dealt_chain(
    problem: SearchProblem, pp: int, v: int, schedule: str
) -> tuple[tuple[str, ...], frozenset[int] | None]:
    """The chain in the order that ranks hold it, and where it may be cut (None: anywhere).

    With one kind of layer only the counts matter. Layers of several kinds come in equal pieces: rank r
    holds pieces r, r + pp, ..., or in a V pieces r and 2 pp - 1 - r; the two ends are then one rank's.
    """
    layers = [name for name in problem.chain if name in problem.layer_classes]
    if v == 1 or not layers:
        return problem.chain, None
    first = next(i for i, name in enumerate(problem.chain) if name in problem.layer_classes)
    prefix, suffix = problem.chain[:first], problem.chain[first + len(layers) :]
    in_v = schedule in V_SHAPED
    ends = (*prefix, *suffix) if in_v else prefix
    rest = () if in_v else suffix
    if len(problem.layer_classes) == 1 or len(layers) % (pp * v):
        return (*ends, *layers, *rest), None
    each = len(layers) // (pp * v)
    pieces = [layers[k * each : (k + 1) * each] for k in range(pp * v)]
    held = [(rank, 2 * pp - 1 - rank) if in_v else range(rank, pp * v, pp) for rank in range(pp)]
    dealt = [name for ks in held for k in ks for name in pieces[k]]
    cuts = {len(ends) + rank * v * each for rank in range(1, pp)}
    chain = (*ends, *dealt, *rest)
    return chain, frozenset({*cuts, len(chain)})


def piece_layers(layers: int, v: int, *, last_rank: bool) -> tuple[int, ...]:
    """Layers of each piece of a rank: a piece that lacks one is the last rank's last, else the first."""
    each, extra = divmod(layers, v)
    short = (each,) * (v - extra)
    full = (each + 1,) * extra
    return (*full, *short) if last_rank else (*short, *full)
