"""How well a profile predicts what it did not measure.

In: the topology that the curves make, and the measurements that were held back (sizes between the curves'
own, taken in the same turns). Out: the relative error of each prediction, by kind, and their summary. A
held-back size that its curve misses by more than `MISSED` then joins the curve; the errors stay those of
the curve without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from ..planner.cost import Work
from ..planner.estimate.collectives import model
from ..planner.estimate.compute import kernel_time
from ..planner.layout import Collective
from ..planner.topology import GroupSpan, Topology
from .settings import Measurement

MISSED = 0.10
"""Relative error above which a held-back size is worth a point of its own. Judgement: twice a good spread."""
CHECKS = {"collective check": "collectives", "kernel check": "kernels"}


def errors(found: Iterable[Measurement], topology: Topology) -> dict[str, dict[str, float]]:
    """Relative errors (predicted over measured, less one) by kind and key."""
    prices = model(topology)
    result: dict[str, dict[str, float]] = {name: {} for name in CHECKS.values()}
    for one in found:
        if one.kind == "collective check":
            span = GroupSpan(members=tuple(one.facts["members"]))
            which = Collective(one.facts["collective"])
            predicted = prices.time(which, one.facts["bytes"], span).seconds
        elif one.kind == "kernel check":
            predicted = kernel_time(work(one.facts), topology.device).seconds
        else:
            continue
        result[CHECKS[one.kind]][one.key] = predicted / one.sample.seconds - 1.0
    return result


def summary(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Per kind: how many sizes were held back, and the median and 90% quantile of the error's size."""
    return {name: dict(_summary(list(errors.values()))) for name, errors in found.items() if errors}


def _summary(errors: Sequence[float]) -> Iterator[tuple[str, float]]:
    sizes = [abs(error) for error in errors]
    yield "sizes", len(sizes)
    yield "median_error", round(median(sizes), 4)
    yield (
        "p90_error",
        round(quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0], 4),
    )


def joined(found: Iterable[Measurement], missed: Mapping[str, Mapping[str, float]]) -> list[Measurement]:
    """The collectives of the curves, with the held-back sizes that the curves missed."""
    errors = missed["collectives"]
    return [
        one
        for one in found
        if one.kind == "collective"
        or (one.kind == "collective check" and not math.isclose(errors[one.key], 0.0, abs_tol=MISSED))
    ]


def work(facts: Mapping[str, Any]) -> Work:
    """A measured kernel as the planner prices it."""
    shape = facts["shape"]
    experts = shape.get("experts", 1)
    return Work(
        family=facts["family"],
        flops=facts["flops"],
        bytes=facts["bytes"],
        dtype=facts["dtype"],
        m=shape.get("m", 0) / experts,
        n=shape.get("n", 0),
        k=shape.get("k", 0),
        batch=experts,
    )
