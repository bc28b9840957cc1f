"""The plan: a frozen, versioned, human-readable document, or the answer that nothing fits.

Everything a report, an exporter or the runtime needs is here; none of them sees a solver.
Times are seconds, sizes bytes. `planner.plan_file` reads and writes it as YAML.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cost import Communication, Origin
from .mesh import Mesh
from .profile import Job

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Which model the plan is for."""

    name: str
    source: str
    graph_hash: str
    parameters: int
    trainable_parameters: int
    layers: int
    """Number of repeated layers (all kinds), embedding and head not counted."""
    tokens_per_sample: int
    """Sequence length, or 1 for models without one."""
    forward_flops_per_sample: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level of the cluster's links, as the report names it (see `planner.topology.Level`)."""

    level: str
    size: int
    """Children (devices, or units of the level below) that it joins."""
    kind: str
    bytes_per_s: float
    """Per device and direction, when all devices send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPart:
    """One kind of nodes of a cluster that has several."""

    topology: str
    device: str
    nodes: int
    devices_per_node: int
    device_memory_bytes: int
    price_per_device_hour: float | None = None
    used_devices: int = 0
    """How many of its devices the plan puts to work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInfo:
    """Which hardware the plan is for."""

    topology: str
    topology_hash: str
    device: str
    devices: int
    nodes: int
    devices_per_node: int
    device_memory_bytes: int
    price_per_device_hour: float | None = None
    links: tuple[Link, ...] = ()
    """Innermost first; empty when the planner did not say."""
    parts: tuple[ClusterPart, ...] = ()
    """Its kinds of nodes, where there are several; the fields above then tell of the smallest memory, of all
    devices together and of the link between kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """One kind of memory on the busiest device of a stage."""

    kind: str
    """`parameters`, `gradients`, `optimizer`, `activations`, `working`, `logits`, `buffers`,
    `reserve`, `context`."""
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage."""

    index: int
    blocks: tuple[tuple[str, int, str], ...]
    """(block class, how many, recompute mode), in execution order."""
    first_layer: int
    """Index of the first repeated layer, counted over the whole model."""
    layers: int
    """How many repeated layers the stage holds."""
    forward_s: float
    """One microbatch, compute and exposed collectives."""
    backward_s: float
    in_flight: int
    """Microbatches whose activations are held at the peak."""
    memory: tuple[MemoryPart, ...]
    peak_memory_bytes: float
    """Upper band: what must fit the device."""
    chunk_layers: tuple[int, ...] = ()
    """Repeated layers of each of its virtual stages; empty when there is only one."""
    device: str = ""
    """Name of the device it runs on, where the cluster has several kinds."""
    device_memory_bytes: int | None = None
    """What that device holds; None where all devices are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one op of a block class is split over one mesh axis, in words and by placement."""

    block: str
    module: str
    op: str
    axis: str
    dim: str | None
    """Name of the split iteration dim; None when the op is whole."""
    words: str
    """`ffn split over tp, column`; `reduced over ffn, row -> reduce-scatter over sequence`."""
    source: str = ""
    """`file.py:line` of the user's code that calls the op; empty where the trace does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlacement:
    """Where a parameter's elements lie. `fqn` uses `*` for folded layer indices."""

    fqn: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    """Named dims per axis, factors joined by `*`, e.g. `heads*head_dim`."""
    placements: tuple[tuple[str, str], ...]
    """(mesh axis, `S(ffn)@0` or `R`) for every mesh axis larger than one except pp."""
    dim_sizes: tuple[tuple[int, ...], ...] = ()
    """Extent of every factor in `dims`: a split of an inner factor needs those before it."""
    blocks: tuple[str, ...] = ()
    """Block classes that read it; the first owns it, and in a pipeline every other holds a copy."""
    summed_over_tp: bool = False
    """Whether every rank of tp holds it whole and a term of its gradient."""

    @property
    def is_expert(self) -> bool:
        """Whether it holds a matrix for each expert (a router's weight has one row for each)."""
        return len(self.dims) == 3 and self.dims[0] == "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """Layouts of a module's inputs and outputs along one mesh axis."""

    module: str
    axis: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReshard:
    """What happens to a tensor on the border of a module along one mesh axis, forward and backward."""

    label: str
    """As in `communications`: `layers.*.mlp.down -> layers.*`."""
    axis: str
    module: str
    side: str
    """`output`: what the module makes is moved; `input`: what it reads."""
    source: str
    """Layout in which the producer makes it."""
    target: str
    """Layout in which the consumers read it."""
    gradient: str
    """Layout into which the gradient is brought for the producer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerList:
    """Where the repeated layers of one block class lie in the model."""

    block: str
    module: str
    """`layers.*`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """One bar of the step-time waterfall; the parts add up to the step time."""

    label: str
    seconds: float
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the plan should cost."""

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    tokens_per_s_per_device: float
    model_flops_utilization: float
    peak_memory_bytes: float
    """Of the fullest device, upper band."""
    memory_by_kind_bytes: dict[str, float]
    device_memory_bytes: float
    exposed_communication_s: float
    bubble_fraction: float
    waterfall: tuple[TimePart, ...]
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """The certificate: what was explored, what was ruled out by which bound, and the gap."""

    meshes_considered: int
    meshes_pruned: int
    pruned_by: tuple[tuple[str, int], ...]
    """(bound, number of candidates it ruled out)."""
    lower_bound_s: float
    gap: float
    """(step time - lower bound) / step time."""
    solver: str
    complete: bool
    """False when a time limit or the user (Ctrl-C) stopped the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A runner-up and why it lost."""

    mesh: Mesh
    zero_stage: int
    micro_batch: int
    num_microbatches: int
    recompute: str
    step_time_s: float
    peak_memory_bytes: float
    reason: str
    shard_group: int | None = None
    seeded_as: str | None = None
    """Name of the expert plan it is, e.g. `FSDP`, `Megatron 3D`."""
    tokens_per_s: float | None = None
    """Tokens that it would make on the whole cluster, when serving."""
    size: ClusterSize | None = None
    """What it takes of the cluster, where plans on other numbers of devices stand beside it."""
    gap: float | None = None
    """Of a certificate of its own: no plan for what it demands is faster by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """What the best plan takes on a number of devices."""

    devices: int
    nodes: int
    step_time_s: float
    peak_memory_bytes: float
    device_hours_per_million_tokens: float
    usd_per_million_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something about the cluster that would change the answer, and where it begins to."""

    what: str
    """`bandwidth`, `memory`, `devices`."""
    value: float
    """Bytes per second at which the plan changes; share of the step saved; devices."""
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a plan for serving promises: continuous batching, prompts and decoding on the same devices."""

    engine: str
    prompt_len: int
    output_len: int
    replicas: int
    """Copies of the model."""
    concurrency: int
    """Sequences in flight, all replicas together."""
    max_concurrency: int
    """Sequences of full length that caches and engine hold, all replicas together."""
    token_time_s: float
    """Between two tokens of one sequence, the prompts of the others included."""
    decode_s: float
    """One pass that makes a token for every sequence of a replica."""
    prefill_s: float
    """One prompt that need not wait: the time to its first token."""
    tokens_per_s: float
    """Tokens made by the whole cluster."""
    cache_bytes_per_token: float
    """Keys and values of one token on the fullest device."""
    cache_budget_bytes: float
    """What a device has left for keys and values."""

    @property
    def sequences_per_replica(self) -> int:
        """Most sequences in flight on one replica."""
        return -(-self.concurrency // self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete answer."""

    version: int = PLAN_VERSION
    tpplan_version: str
    model: ModelInfo
    cluster: ClusterInfo
    job: Job
    mesh: Mesh
    zero_stage: int
    micro_batch: int
    num_microbatches: int
    schedule: str
    virtual_stages: int
    sequence_parallel: bool
    recompute: str
    """`none`, `selective`, `full`, or `mixed`."""
    stages: tuple[Stage, ...]
    splits: tuple[Split, ...]
    parameters: tuple[ParameterPlacement, ...]
    modules: tuple[ModuleLayout, ...]
    communications: tuple[Communication, ...]
    predicted: Prediction
    search: SearchSummary
    reasons: tuple[str, ...]
    """Why these sizes, one sentence each, most important first."""
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = ()
    reshards: tuple[PlannedReshard, ...] = ()
    """Conversions on module borders: what the runtime installs."""
    layer_lists: tuple[LayerList, ...] = ()
    routing_modules: tuple[str, ...] = ()
    """Modules that route tokens to experts: beside tp or cp each rank runs them on its own part of the
    sequences."""
    shard_group: int | None = None
    """Data-parallel neighbours that ZeRO shards over, the others holding copies (HSDP); None: all."""
    pareto: tuple[Alternative, ...] = ()
    """Plans that none beats in time, memory, devices and cost at once, fastest first, where it was asked for.
    Older plan files have some that happened to be priced, without `size`."""
    sizes: tuple[ClusterSize, ...] = ()
    """What other numbers of devices would take, where the objective compares them."""
    changes: tuple[Change, ...] = ()
    """What would change the answer, where it was asked for."""
    microbatches_per_part: tuple[int, ...] = ()
    """Microbatches of a data-parallel rank on each kind of nodes, where the kinds have shares of their own;
    ranks are numbered kind by kind, in the order of `cluster.parts`."""
    assumptions: tuple[str, ...] = ()
    """What the prediction rests on beyond the topology: fitted scales, with date, rows and error."""
    serving: Serving | None = None
    """For mode `serve`; a step is then one token of every sequence, `micro_batch` sequences of a pass."""

    @property
    def device_hours_per_million_tokens(self) -> float:
        """Device-hours per million tokens (samples, for models without a sequence)."""
        tokens_per_s = self.predicted.tokens_per_s_per_device * self.cluster.devices
        return self.cluster.devices / tokens_per_s / 3600 * 1e6

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Dollars per million tokens; None where the cluster has no price."""
        price = self.cluster.price_per_device_hour
        return None if price is None else price * self.device_hours_per_million_tokens

    def as_alternative(self, reason: str) -> Alternative:
        """This plan in a few numbers, beside another one. `reason`: what speaks against it."""
        return Alternative(
            mesh=self.mesh,
            zero_stage=self.zero_stage,
            shard_group=self.shard_group,
            micro_batch=self.micro_batch,
            num_microbatches=self.num_microbatches,
            recompute=self.recompute,
            step_time_s=self.predicted.step_time_s,
            peak_memory_bytes=self.predicted.peak_memory_bytes,
            reason=reason,
        )

    def blocks_of(self, block: str) -> int:
        """How many blocks of a class all stages hold together."""
        return sum(number for stage in self.stages for name, number, _ in stage.blocks if name == block)

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Repeated layers in each pipeline stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def rank_order(self) -> tuple[str, ...]:
        """Mesh axes from the slowest-varying to the fastest."""
        return self.mesh.order


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """Nothing fits, with the binding limit and the nearest change that would."""

    reason: str
    short_by_bytes: float
    nearest_fix: str
    closest: dict[str, int] = field(default_factory=dict)
    """Mesh sizes of the candidate that came closest."""
    fixes: tuple[str, ...] = ()
    """Changes that would make it fit, the nearest first."""
