"""Nouns of the outer search: what is asked, what is tried, what is found.

`SearchProblem` is the whole question without any cost model; `Pricing` carries the cost models as
functions; `Candidate` is one point of the space before stages and recompute are chosen; `Outcome`
is the answer, from which a `Plan` is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .cost import Communication, Estimate, IntraSolution, Work
from .layout import Collective
from .mesh import DEFAULT_ORDER, Mesh
from .plan import Alternative, Infeasible, Prediction, SearchSummary, Stage
from .profile import Framework, Job, Optimizer
from .schedule import fill_ways
from .topology import Device, GroupSpan, Topology

Intra = Callable[[Mesh, int], tuple[IntraSolution, ...]]
"""Mesh and microbatch size -> the intra-op frontier, fastest first; empty: these splits cannot be."""
CollectiveTime = Callable[[Collective, float, GroupSpan], Estimate]
"""Collective, whole-buffer bytes, span of the group -> time of one execution."""
KernelTime = Callable[[Work, Device], Estimate]
Pins = dict[str, int | str]
"""Choices the user made: mesh axes by name, `zero`, `shard_group`, `micro_batch`, `recompute`, `schedule`,
`virtual_stages`."""

SCHEDULE_NONE = "none"
"""The schedule of a plan without pipeline stages."""


def pins_in_words(pins: Mapping[str, int | str]) -> str:
    """`tp=4, zero=3`."""
    return ", ".join(f"{name}={value}" for name, value in pins.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """What is true of one block class however it is split."""

    name: str
    forward_flops_per_sample: float
    """All devices together."""
    dense_numel: float
    """Parameters that every data-parallel rank needs."""
    sparse_numel: float
    """Parameters that ep may split (experts, embedding tables)."""
    element_bytes: int
    trainable_share: float = 1.0
    """Trainable share of the parameters."""
    boundary_bytes_per_sample: float = 0.0
    """Activations handed to the next block, unsplit."""

    @property
    def numel(self) -> float:
        """All parameters of the block."""
        return self.dense_numel + self.sparse_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """A model as a chain of blocks, a cluster, a job, and the sizes worth trying."""

    chain: tuple[str, ...]
    """Block class of every block, in execution order."""
    layer_classes: frozenset[str]
    """The classes that are repeated layers (embedding and head are not)."""
    blocks: dict[str, BlockFacts]
    topology: Topology
    job: Job
    framework: Framework
    optimizer: Optimizer
    tokens_per_sample: int = 1
    tp_sizes: tuple[int, ...] = (1,)
    ep_sizes: tuple[int, ...] = (1,)
    cp_sizes: tuple[int, ...] = (1,)
    order: tuple[str, ...] = DEFAULT_ORDER
    pipelines: bool = True
    """Whether the framework can cut this model into stages."""

    @property
    def counts(self) -> dict[str, int]:
        """How many blocks of each class, in order of first appearance."""
        return dict(Counter(self.chain))

    @property
    def layers(self) -> int:
        """Number of repeated layers."""
        return sum(n for name, n in self.counts.items() if name in self.layer_classes)

    @property
    def forward_flops_per_sample(self) -> float:
        """Forward FLOPs of the whole model for one sample."""
        return sum(n * self.blocks[name].forward_flops_per_sample for name, n in self.counts.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What any splits take at least for one microbatch, hidden communication aside: as far as is known."""

    total_s: float = 0.0
    """All blocks."""
    blocks_s: Mapping[str, float] = field(default_factory=dict)
    """One block of some classes."""

    def times(self, factor: float) -> Floor:
        """So many times the seconds."""
        return Floor(
            total_s=self.total_s * factor,
            blocks_s={name: seconds * factor for name, seconds in self.blocks_s.items()},
        )

    def plus(self, other: Floor) -> Floor:
        """What comes on top of it."""
        both = self.blocks_s.keys() & other.blocks_s.keys()
        return Floor(
            total_s=self.total_s + other.total_s,
            blocks_s={name: self.blocks_s[name] + other.blocks_s[name] for name in both},
        )

    def raised(self, other: Floor) -> Floor:
        """The more that either knows."""
        names = self.blocks_s.keys() | other.blocks_s.keys()
        return Floor(
            total_s=max(self.total_s, other.total_s),
            blocks_s={n: max(self.blocks_s.get(n, 0.0), other.blocks_s.get(n, 0.0)) for n in names},
        )


NOTHING_KNOWN = Floor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """The cost models, as functions."""

    intra: Intra
    collective_time: CollectiveTime
    kernel_time: KernelTime
    floor: Callable[[Mesh, int], Floor] = lambda mesh, micro_batch: NOTHING_KNOWN
    """Mesh and microbatch size -> what any splits take."""
    splits_floor: Callable[[Mesh, int], Floor] = lambda mesh, micro_batch: NOTHING_KNOWN
    """The same of the splits that `intra` gives, before it works out what their blocks cost."""
    batch_slack: float = 1.0
    """A microbatch of b samples takes at least (1 - slack) b/B of the time of one of B (`solve.batch_slack`);
    1: nothing is known."""
    kernel_slack: float = 1.0
    """A kernel on a part of the work takes at least (1 - slack) of that part of the time; 1: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the space: all but the stages, the recompute modes and the intra-op solution."""

    mesh: Mesh
    micro_batch: int
    microbatches: int
    zero_stage: int
    schedule: str
    virtual_stages: int
    shard_group: int | None = None
    """Neighbours along dp that ZeRO shards over, other groups holding copies (HSDP); None: all replicas."""

    @property
    def key(self) -> tuple:
        """A total order that breaks ties the same way every time: the simpler plan first.

        Simpler is: fewer axes larger than one, then smaller ones, fewer virtual stages, less sharding,
        ranks in the usual order.
        """
        m = self.mesh
        axes = (m.pp > 1) + (m.dp > 1) + (m.cp > 1) + (m.ep > 1) + (m.tp > 1)
        sharded = (self.zero_stage, self.shard_group or 0)
        rest = (m.order != DEFAULT_ORDER, m.order, m.dp, self.schedule)
        return (axes, m.pp, m.tp, m.ep, m.cp, self.virtual_stages, *sharded, self.micro_batch, *rest)

    @property
    def fill_ways(self) -> int:
        """Into how many parts the schedule cuts the pipeline's fill (see `schedule.fill_ways`)."""
        return fill_ways(self.schedule, self.virtual_stages)

    def __str__(self) -> str:
        stages = f", {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
        schedule = "" if self.schedule == SCHEDULE_NONE else f", {self.schedule}{stages}"
        group = f" in groups of {self.shard_group}" if self.shard_group else ""
        return f"{self.mesh}, ZeRO-{self.zero_stage}{group}, microbatch {self.micro_batch}{schedule}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A candidate with everything decided, and what it costs."""

    candidate: Candidate
    intra: IntraSolution
    stages: tuple[Stage, ...]
    prediction: Prediction
    communications: tuple[Communication, ...]
    bound_s: float
    """No choice of stages, recompute or splits makes this candidate faster than this."""
    solver: str

    @property
    def step_time_s(self) -> float:
        """Predicted step time."""
        return self.prediction.step_time_s

    @property
    def recompute(self) -> str:
        """`none`, `selective`, `full`, or `mixed`, over all blocks that have a choice."""
        runs = [run for stage in self.stages for run in stage.blocks]
        free = [run for run in runs if len(self.intra.blocks[run[0]].saved_bytes) > 1]
        modes = {mode for _, _, mode in free or runs}
        return modes.pop() if len(modes) == 1 else "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """Where a running search stands."""

    considered: int
    pruned: int
    priced: int
    incumbent_s: float | None
    bound_s: float
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The best plan found, its certificate, and the runners-up."""

    best: Priced
    alternatives: tuple[Alternative, ...]
    summary: SearchSummary
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = field(default=())
    """Priced plans that none beats in both time and memory, fastest first."""


SearchResult = Outcome | Infeasible
