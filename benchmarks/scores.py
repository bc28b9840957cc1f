"""How good predictions are: error statistics and rank agreement.

In: pairs (predicted, measured), either of which may be missing. Out: `Scores`. Errors are relative to
the measurement: predicted / measured - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from random import Random
from statistics import fmean, median

Pair = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Statistics of a group of rows; None where no row counts."""

    rows: int
    failed: int
    mape: float | None
    """Mean absolute relative error."""
    median: float | None
    p90: float | None
    largest: float | None
    bias: float | None
    """Mean relative error."""
    kendall_tau: float | None


def relative(predicted: float | None, measured: float | None) -> float | None:
    """Relative error, or None when either is missing."""
    return None if predicted is None or not measured else predicted / measured - 1


def scores(pairs: Sequence[Pair]) -> Scores:
    """Statistics of `pairs`."""
    known = [(p, m) for p, m in pairs if p is not None and m]
    errors = [p / m - 1 for p, m in known]
    sizes = sorted(abs(e) for e in errors)
    return Scores(
        rows=len(pairs),
        failed=sum(p is None for p, _ in pairs),
        mape=fmean(sizes) if sizes else None,
        median=median(sizes) if sizes else None,
        p90=quantile(sizes, 0.9) if sizes else None,
        largest=sizes[-1] if sizes else None,
        bias=fmean(errors) if errors else None,
        kendall_tau=kendall_tau(known),
    )


def percent(share: float | None) -> str:
    """A share in percent, or that there is none."""
    return "-" if share is None else f"{100 * share:.1f}"


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Concordant less discordant pairs, over all pairs (tau-a); None for fewer than two."""
    if len(pairs) < 2:
        return None
    signs = [_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum(signs) / len(signs)


def regret(pairs: Sequence[tuple[float, float]], *, menu: int, menus: int, top: int) -> float:
    """Mean cost of choosing by prediction: the best measured of the `top` predicted, over the best, less one.

    Averaged over `menus` menus of `menu` pairs, drawn the same way every time.
    """
    draw = Random(0)
    costs = []
    for _ in range(menus):
        offered = draw.sample(pairs, menu)
        picked = sorted(offered)[:top]
        costs.append(min(m for _, m in picked) / min(m for _, m in offered) - 1)
    return fmean(costs)


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
