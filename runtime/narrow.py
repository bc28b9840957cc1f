"""A large model made narrow enough to run here, and the same plan for it.

In: a model on meta whose `config` its class takes (Hugging Face's and the examples' do), a plan. Out: a
`Narrow`. Every width is divided by one number, so that any two that were equal stay equal; what is
counted (layers, heads, key and value heads, experts) stays as it is, so that each split of the plan
divides as before. Sequences get short, and a step has only the microbatches that its schedule needs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..planner.cost import Communication
from ..planner.plan import ParameterPlacement, Plan
from ..planner.schedule import illegality
from .expected_data import is_data, syncs
from .gradients import NORM_LABEL, REPLICATED_LABEL
from .names import matches
from .ties import LABEL as TIED_LABEL

WIDTHS = (
    "hidden", "hidden_size", "n_embd", "d_model", "dim", "ffn", "intermediate_size", "ffn_dim", "d_ff",
    "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size", "head_dim", "d_kv",
)  # fmt: skip
"""What configurations call their widths."""
HEADS = ("heads", "num_attention_heads", "n_head", "num_heads")
VOCABULARIES = ("vocab", "vocab_size")
"""Divided too where they divide: odd ones, which no plan splits, stay."""
WANTED_PARAMETERS = 10_000_000
"""Of a narrow model: the smallest divisor that gives no more is taken."""
LEAST_HEAD_DIM = 2
"""Rotary embeddings turn pairs."""
TOKENS_PER_RANK = 8
"""Length of a sequence on each rank that has a part of it."""
ONCE_A_STEP = {NORM_LABEL, REPLICATED_LABEL, TIED_LABEL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow:
    """A model and its plan at smaller sizes."""

    kind: type[nn.Module]
    config: Any
    plan: Plan
    """With the narrow model's shapes, fewer microbatches and short sequences."""
    divisor: int
    """What widths were divided by."""
    parameters: int
    """How many it has."""
    vocab: int | None
    """Ids of the batch must be less."""

    def build(self) -> nn.Module:
        """The model with weights."""
        return self.kind(self.config)

    def batch(self, inputs: Any) -> Any:
        """The same inputs with ids that the narrow model knows; negative ones mark what to ignore."""
        return inputs if self.vocab is None else tree_map(self._known, inputs)

    def _known(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.long or self.vocab is None:
            return value
        return torch.where(value >= self.vocab, value % self.vocab, value)


def narrowed(model: nn.Module, plan: Plan) -> Narrow | str:
    """The largest narrow model of at most `WANTED_PARAMETERS`, or in words why there is none."""
    config = getattr(model, "config", None)
    if config is None:
        return f"{type(model).__name__} has no config to build it narrower from"
    best: Narrow | str = (
        f"no common divisor of the widths of {type(model).__name__}'s config leaves all splits"
    )
    for divisor in _divisors(config, plan):
        smaller = _divided(config, divisor, plan.mesh.tp)
        try:
            with torch.device("meta"):
                made = type(model)(smaller)
        except Exception as error:  # the user's class: whatever it raises, it cannot be built so
            return f"{type(model).__name__} cannot be built at 1/{divisor} of its config's widths: {error}"
        placements = _placements(plan, made)
        if isinstance(placements, str):
            return placements
        best = Narrow(
            kind=type(model),
            config=smaller,
            plan=_short(replace(plan, parameters=placements)),
            divisor=divisor,
            parameters=sum(p.numel() for p in made.parameters()),
            vocab=next((value for _, value in _fields(smaller, VOCABULARIES)), None),
        )
        if best.parameters <= WANTED_PARAMETERS:
            return best
    return best


# --------------------------------------------------------------------------- the config


def _fields(config: Any, names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            yield name, value


def _divisors(config: Any, plan: Plan) -> list[int]:
    """Numbers that divide every width so that tensor parallelism divides what is left, ascending."""
    widths = dict(_fields(config, WIDTHS))
    heads = max((value for _, value in _fields(config, HEADS)), default=1)
    if not widths:
        return []
    common = math.gcd(*widths.values())
    ways = math.lcm(2, plan.mesh.tp)

    def legal(divisor: int) -> bool:
        left = {name: value // divisor for name, value in widths.items()}
        per_head = [left.pop(name) for name in ("head_dim", "d_kv") if name in left]
        hidden = next(iter(left.values()), 0)
        per_head = per_head or [hidden // heads if hidden % heads == 0 else 0]
        whole = all(value % ways == 0 for value in left.values())
        return whole and all(n >= LEAST_HEAD_DIM and n % 2 == 0 for n in per_head)

    return [n for n in range(2, common + 1) if common % n == 0 and legal(n)]


def _divided(config: Any, divisor: int, tp: int) -> Any:
    smaller = copy.deepcopy(config)
    for name, value in _fields(config, WIDTHS):
        setattr(smaller, name, value // divisor)
    for name, value in _fields(config, VOCABULARIES):
        if value % (divisor * tp) == 0:
            setattr(smaller, name, value // divisor)
            _clamp_ids(smaller, value // divisor)
    return smaller


def _clamp_ids(config: Any, vocab: int) -> None:
    """Ids of special tokens must lie in the vocabulary."""
    for name in [name for name in vars(config) if name.endswith("_token_id")]:
        value = getattr(config, name)
        if isinstance(value, int) and value >= vocab:
            setattr(config, name, vocab - 1)


# --------------------------------------------------------------------------- the plan


def _placements(plan: Plan, model: nn.Module) -> tuple[ParameterPlacement, ...] | str:
    """The plan's placements with the narrow model's shapes; in words, where a fused dim does not divide."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    found = []
    for parameter in plan.parameters:
        own = _shape(parameter, shapes)
        if own is None:
            return f"the plan's {parameter.fqn} is no parameter of {type(model).__name__}"
        sizes = [
            _factors(old, size, new)
            for old, size, new in zip(parameter.dim_sizes, parameter.shape, own, strict=False)
        ]
        if None in sizes:
            return f"{parameter.fqn}: the factors of {parameter.dims} cannot be made smaller"
        found.append(replace(parameter, shape=own, dim_sizes=tuple(s for s in sizes if s is not None)))
    return tuple(found)


def _shape(parameter: ParameterPlacement, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    exact = shapes.get(parameter.fqn)
    return exact or next((shape for name, shape in shapes.items() if matches(parameter.fqn, name)), None)


def _factors(factors: tuple[int, ...], size: int, new: int) -> tuple[int, ...] | None:
    """Factors of a tensor dim whose innermost, a width, got smaller."""
    if not factors or size == new:
        return factors
    last, rest = divmod(factors[-1] * new, size)
    return None if rest or not last else (*factors[:-1], last)


def _short(plan: Plan) -> Plan:
    """The plan with the fewest microbatches (at least two) that its schedule allows, and short sequences."""
    before, mesh = plan.num_microbatches, plan.mesh
    fewer = [n for n in range(min(2, before), before) if before % n == 0 and _allows(plan, n)]
    count = fewer[0] if fewer else before
    communications = tuple(
        c if _is_once(plan, c.label) else _less_often(c, count / before) for c in plan.communications
    )
    length = min(plan.job.seq_len, 2 * TOKENS_PER_RANK * mesh.cp * mesh.tp)
    return replace(
        plan, num_microbatches=count, communications=communications, job=replace(plan.job, seq_len=length)
    )


def _is_once(plan: Plan, label: str) -> bool:
    """Whether it happens once a step, however many microbatches there are."""
    return label in ONCE_A_STEP or (is_data(label) and syncs(plan) == 1)


def _less_often(c: Communication, share: float) -> Communication:
    """What every microbatch does, for fewer of them."""
    by_stage = tuple((count * share, again * share, nbytes) for count, again, nbytes in c.by_stage)
    return replace(c, count=c.count * share, again=c.again * share, by_stage=by_stage)


def _allows(plan: Plan, microbatches: int) -> bool:
    mesh = plan.mesh
    return mesh.pp == 1 or (
        microbatches >= mesh.pp
        and not illegality(
            plan.schedule, pp=mesh.pp, virtual_stages=plan.virtual_stages, microbatches=microbatches
        )
    )
