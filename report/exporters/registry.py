"""The table of export targets: one function a framework, from a plan to files and deviations.

In: a `Plan` and a target's name. Out: `Exported`. A target that cannot express something either
raises `OptionError` (the plan would be another one) or states it as a deviation, with its
predicted cost where the plan tells it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...planner.errors import OptionError, did_you_mean
from ...planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What a target needs in order to run a plan."""

    files: dict[str, str]
    """Text by file name."""
    deviations: tuple[str, ...] = ()
    """Where the target will not do exactly as planned, one sentence each."""


Exporter = Callable[[Plan], Exported]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One framework a plan can be exported to."""

    name: str
    summary: str
    """What the files are, in a few words."""
    make: Exporter


SERVE = ("vllm", "sglang")
"""Targets that run plans for serving."""
HAS_GROUPS = ("torchtitan",)
"""Targets that are told a sharding group smaller than the data-parallel ranks."""

_TARGETS: dict[str, Target] = {}


def exporter(name: str, summary: str) -> Callable[[Exporter], Exporter]:
    """Register the function below as target `name`; a second one of that name is a bug."""

    def register(make: Exporter) -> Exporter:
        if name in _TARGETS:
            raise ValueError(f"two exporters are called {name!r}")
        _TARGETS[name] = Target(name=name, summary=summary, make=make)
        return make

    return register


def targets() -> tuple[Target, ...]:
    """Every target, by name."""
    return tuple(_TARGETS[name] for name in sorted(_TARGETS))


def export(plan: Plan, to: str) -> Exported:
    """The plan in the words of target `to`.

    Raises OptionError for an unknown target, and for a plan that the target cannot run at all.
    """
    if to not in _TARGETS:
        raise OptionError(
            f"--to {to}: unknown target{did_you_mean(to, _TARGETS)} (known: {', '.join(sorted(_TARGETS))})"
        )
    if plan.serving and to not in SERVE:
        raise cannot(to, "this plan is for serving", f"export it to {' or '.join(SERVE)}")
    exported = _TARGETS[to].make(plan)
    if plan.shard_group is None or to in HAS_GROUPS:
        return exported
    told = (
        f"the plan shards over groups of {plan.shard_group} of dp={plan.mesh.dp} ranks (HSDP): "
        "here all ranks share one copy, which takes less memory and talks over slower links"
    )
    return replace(exported, deviations=(*exported.deviations, told))


def cannot(target: str, what: str, instead: str) -> OptionError:
    """The error for a plan that `target` cannot run: what is in the way, and what would be possible."""
    return OptionError(f"--to {target}: {what}; {instead}")
