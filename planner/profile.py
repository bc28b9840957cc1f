"""Nouns for how software runs a plan: the job, the optimizer and the framework.

A framework profile holds the few, named facts that differ between runtimes; every prediction
names the profile it used.
"""

from __future__ import annotations

from dataclasses import dataclass

from .topology import HostTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Optimizer state per trainable parameter."""

    name: str
    state_bytes: float
    """Bytes of moments per parameter."""
    factored: bool = False
    """Second moments are stored per row and column: next to nothing."""


OPTIMIZERS = {
    "adamw": Optimizer(name="adamw", state_bytes=8),
    "sgd": Optimizer(name="sgd", state_bytes=0),
    "adagrad": Optimizer(name="adagrad", state_bytes=4),
    "adafactor": Optimizer(name="adafactor", state_bytes=0, factored=True),
    "none": Optimizer(name="none", state_bytes=0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """What a runtime adds to the arithmetic. Fractions lie in [0, 1]; sizes are bytes."""

    name: str
    description: str
    gradient_bytes: int
    """Bytes per gradient element as accumulated over microbatches."""
    sync_bytes: int
    """Bytes per gradient element on the wire."""
    master_bytes: int
    """Bytes per parameter of an fp32 master copy when parameters are 16 bit, else 0."""
    dp_overlap: float
    """Share of the gradient synchronisation that may hide behind the backward pass."""
    gather_overlap: float
    """Share of parameter all-gathers that may hide behind computation."""
    tp_overlap: float
    """Share of tensor-parallel collectives hidden behind computation."""
    saves_gathered_input: bool
    """Whether a gathered activation is kept for backward (else the shard is, and gathered again)."""
    logits_bytes_per_element: float
    """Live bytes per logit at the loss, beyond what the graph says (0: trust the graph)."""
    allocator_reserve: tuple[float, float]
    """Reserved over allocated memory: typical and upper factor."""
    context_bytes: float
    """Device context, libraries and communicators."""
    step_overhead_s: float
    """Host time per step that nothing hides (data, logging, synchronisation)."""
    source: str
    fuses_pointwise: bool = False
    """Whether neighbouring pointwise ops run as one kernel (a compiler or hand-fused kernels)."""
    attention: str = "flash"
    """`flash`, or `materialised`: scores are written to memory (`estimate/as_run.py`)."""
    attention_efficiency: float = 1.0
    """Attention kernels' utilisation over the device file's, which describes its best ones."""
    selective: str = "cheap"
    """What selective recomputation runs again: `cheap` (all but matrix products and attention),
    `attention` (the attention core alone), `alternate` (cheap ops and every second product), or `results`
    (as `cheap`, and what is kept are these results and those of collectives, whoever reads them)."""
    cp_overlap: float = 0.0
    """Share of context parallelism's key and value exchange that attention hides."""
    ep_overlap: float = 0.0
    """Share of expert parallelism's all-to-all that computation hides."""
    p2p_overlap: float = 0.0
    """Share of hand-overs between pipeline stages that computation hides."""
    scatters_handover: bool = False
    """Whether tp ranks send a part each of what they all hold, and gather it on the other side."""
    gather_bytes_per_s: float | None = None
    """What parameter gathers and gradient reductions of ZeRO-3 reach at most; None: the links decide."""
    logits_bytes: float | None = None
    """All live bytes per logit at the loss, instead of what the graph keeps of them; None: the graph's."""
    split_logits_bytes: float | None = None
    """The same where tp splits the vocabulary; None: as many."""
    weight_gradient_bytes: float = 0.0
    """Per matrix parameter of one layer: buffers for weight gradients that are added elsewhere."""
    weights_inside_experts: bool = False
    """Whether routing weights multiply inside the experts, so that their results are not kept."""
    accumulation_bytes: float = 0.0
    """Memory traffic per trainable parameter and microbatch of adding its gradient to the accumulator; 0
    where the matrix product adds in place."""
    eager_traffic: float = 1.0
    """Memory traffic of norms and pointwise ops over one read of each input and one write of each output:
    ops made of several kernels, intermediate results in fp32. Not where a compiler fuses them."""
    keeps_gathered_in_pipeline: bool = False
    """Whether ZeRO-3 under pipeline stages gathers parameters once a step and keeps them and their whole
    gradients until its end (they would else move for every microbatch)."""
    keeps_root_gathered: bool = False
    """Whether ZeRO-3 keeps the parameters outside repeated layers whole from forward to backward."""
    gathers_in_own_pool: bool = False
    """Whether parameters are gathered into a buffer of another stream's memory pool, then copied out."""
    computes_with_copies: bool = False
    """Whether below ZeRO-3 the parameters of a step are copies beside those that are stored and updated."""
    reduces_in_own_pool: bool = False
    """Whether gradients that stay whole through a step are reduced into shards of their own beside them."""
    receive_buffers: float = 0.0
    """Boundary tensors that a pipeline stage sets aside for every microbatch, in flight or not."""
    keeps_outputs: bool = False
    """Whether the last stage keeps what the model returns, for every microbatch, until the step's end."""
    converts_parameters: bool = True
    """Whether a weight that several places read, as an embedding and a head do, may be stored in a layout
    that one of them has to convert it from."""
    converts_on_borders: bool = False
    """Whether layouts along tp change only where modules begin and end (`planner/borders.py`)."""
    sums_tied_shards: bool = False
    """Whether stages that hold one tied parameter sum its gradient once it is sharded, and not whole."""
    runs_selective_once: bool = False
    """Whether selective recomputation rules out schedules that run backward in two parts (PyTorch's)."""
    recomputes_in_one_part: bool = False
    """Whether stages that recompute run their backward in one part under schedules that run it in two."""
    recompute_stops_early: bool = False
    """Whether full recomputation ends once everything kept is back (PyTorch's non-reentrant checkpoints)."""
    follows_tensors: bool = False
    """Whether memory is that of the fullest moment, tensor by tensor (`estimate/moments.py`): gradients from
    their first backward on, activations until their own. Else the sum of what each kind takes at the most."""
    routes_own_tokens: bool = False
    """Whether tp ranks route each its own part of the sequences to experts, the router being whole."""
    dedups_routing: bool = False
    """Whether a token that several experts of one node take crosses the network once."""
    routing_s: float = 0.0
    """Host time per mixture-of-experts layer and microbatch, each way, that nothing hides."""
    host: HostTime | None = None
    """Host time per operation, where the cluster is one of CPUs and was measured; None: hidden."""


def hidden_share(framework: Framework, axis: str) -> float:
    """Share of the collectives along a mesh axis, inside a block, that computation may hide."""
    shares = {"tp": framework.tp_overlap, "cp": framework.cp_overlap, "ep": framework.ep_overlap}
    return shares[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user wants done."""

    mode: str
    objective: str
    global_batch: int
    """Sequences (or samples) per optimizer step."""
    seq_len: int
    dtype: str
    optimizer: str
    framework: str
    """Training framework, or serving engine."""
    output_len: int = 0
    """Tokens that a served sequence makes after its prompt of `seq_len`; 0 when training."""
