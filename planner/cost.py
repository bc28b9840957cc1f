"""Nouns for costs. Times are seconds, sizes bytes; every estimate knows where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from .layout import Collective


class Origin(StrEnum):
    """How trustworthy a number is. The order is from best to worst."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    MODELLED = "modelled"


ORIGIN_RANK = {Origin.MEASURED: 0, Origin.INTERPOLATED: 1, Origin.MODELLED: 2}


def worst(*origins: Origin) -> Origin:
    """The least trustworthy of several origins (measured if there is none)."""
    return max(origins, key=ORIGIN_RANK.__getitem__, default=Origin.MEASURED)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time with its origin. Adding two keeps the worse origin."""

    seconds: float
    origin: Origin

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.seconds + other.seconds, worst(self.origin, other.origin))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What ONE device does in one kernel (or one short run of kernels).

    `family`: `gemm` and `grouped_gemm` (m, n, k: the sides of each of `batch` products, on average),
    `attention` (flops), or `memory` (bytes alone). `bytes` counts reads and writes of device
    memory. `kernels` is how many launches it takes.
    """

    family: str
    flops: float
    bytes: float
    dtype: str
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    batch: float = 1.0
    kernels: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """One collective of a plan, as it runs on one device."""

    label: str
    """What it is for, in words: `mlp.down -> residual`, `gradients of dense parameters`."""
    collective: Collective
    axis: str
    """The mesh axis it runs over; flattened axes are joined, e.g. `dp+ep`."""
    group_size: int
    bytes: float
    """Whole buffer, as nccl-tests counts it."""
    seconds: float
    """One execution, alone."""
    exposed_s: float
    """One execution: the part that computation does not hide."""
    count: float
    """Executions per step on one device."""
    level: str
    """The outermost level it crosses, e.g. `node`."""
    origin: Origin
    again: float = 0.0
    """How many of `count` are of forwards that backward runs again."""
    by_stage: tuple[tuple[float, float, float], ...] = ()
    """`count`, `again` and `bytes` on a rank of every pipeline stage; empty where all are alike."""


class Recompute(StrEnum):
    """How much of a block's forward is run again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters of one block class that are stored and synchronised alike.

    `numel` is what one device holds after tp (and, for sparse ones, ep) splits, before ZeRO.
    Dense parameters are replicated over dp, cp and ep; sparse ones (experts, tables) over dp
    and cp alone.
    """

    numel: float
    element_bytes: int
    sparse: bool
    trainable: bool
    tensors: int
    """Number of parameter tensors (for per-tensor optimizer overheads)."""
    replicated_over_tp: bool = False
    """Its gradient needs a sum over tp as well (norm weights under sequence parallelism)."""
    tied: bool = False
    """A copy of parameters that an earlier block owns, held because a pipeline separates the two;
    their gradients are summed over both stages once per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Bytes beside what one block keeps for one microbatch; negative where part of it is gone by then."""

    forward: float = 0.0
    """At the fullest moment of forward, beside what it keeps in the end."""
    whole_forward: float = 0.0
    """The same of a forward that keeps nothing."""
    backward: float = 0.0
    """At the fullest moment of backward, gradients of earlier microbatches aside."""
    first_backward: float = 0.0
    """The same while gradients of parameters are made that stay."""
    input_gradients: float = 0.0
    """At the fullest moment of a backward of the input alone, which lets go of nothing."""
    waiting: float = 0.0
    """Gradients that wait between such a backward and the weights' own."""
    weight_gradient: float = 0.0
    """The largest parameter's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What one block of a class costs one device for ONE microbatch, under one intra-op solution.

    Compute and collectives are kept apart; `forward_comm` / `backward_comm` hold executions
    inside the block with `count` = executions per block and microbatch, seconds unhidden.
    """

    name: str
    forward_s: float
    backward_s: float
    forward_comm: tuple[Communication, ...] = ()
    backward_comm: tuple[Communication, ...] = ()
    saved_bytes: dict[Recompute, float] = field(default_factory=dict)
    """Kept from forward until this block's backward."""
    recompute_s: dict[Recompute, float] = field(default_factory=dict)
    """Extra seconds of compute in backward."""
    again: frozenset[int] = frozenset()
    """Which of `forward_comm` run again when the whole block does."""
    recompute_comm_s: dict[Recompute, float] = field(default_factory=dict)
    """Extra seconds of collectives in backward."""
    working_bytes: float = 0.0
    """Largest short-lived memory while the block runs, beyond what is saved."""
    loss_bytes: float = 0.0
    """Live at the loss, before any gradient of a parameter exists: every copy of the logits."""
    logit_bytes: float = 0.0
    """What the model returns to the loss, one copy."""
    output_bytes: float = 0.0
    """Activations this block hands to the next one, on one device."""
    live: Live = Live()
    """What is alive beside that, op by op."""
    parameters: tuple[ParameterGroup, ...] = ()
    model_flops: float = 0.0
    """Forward FLOPs of the whole op set at this microbatch, all devices of the slice together."""
    origin: Origin = Origin.MODELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class IntraSolution:
    """One point of the intra-op frontier for a mesh slice and a microbatch."""

    blocks: dict[str, BlockCost]
    """By block class name."""
    sequence_parallel: bool
    objective_s: float
    bound_s: float
    """Proven lower bound of the objective (equal to it when solved to optimality)."""
    optimal: bool
    splits: object = None
    """The choices behind the costs, for the report; opaque to the search."""

    @property
    def proven_share(self) -> float:
        """What any splits take at least, as a share of what these take."""
        return min(1.0, self.bound_s / self.objective_s) if self.objective_s > 0 else 1.0
