"""Hand-made plans of realistic shape for tests of files and reports. No planner made them."""

from __future__ import annotations

from dataclasses import replace

from tpplan.planner.cost import Communication, Origin
from tpplan.planner.layout import Collective
from tpplan.planner.mesh import Mesh
from tpplan.planner.plan import (
    Alternative,
    ClusterInfo,
    Infeasible,
    Link,
    MemoryPart,
    ModelInfo,
    ModuleLayout,
    ParameterPlacement,
    Plan,
    Prediction,
    SearchSummary,
    Split,
    Stage,
    TimePart,
)
from tpplan.planner.profile import Job

GIB = 2**30
MIB = 2**20
MEASURED, INTERPOLATED, MODELLED = Origin
GATHER, SCATTER, REDUCE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
EXCHANGE, SEND = Collective.ALL_TO_ALL, Collective.SEND_RECV
NVLINK = Link(level="node", size=8, kind="nvlink", bytes_per_s=450e9)


def _cluster(
    name: str, device: str, *, nodes: int, memory_gib: int, network_bytes_per_s: float
) -> ClusterInfo:
    network = Link(level="cluster", size=nodes, kind="infiniband", bytes_per_s=network_bytes_per_s)
    return ClusterInfo(
        topology=name,
        topology_hash="7c1f0e5b9a2d",
        device=device,
        devices=8 * nodes,
        nodes=nodes,
        devices_per_node=8,
        device_memory_bytes=memory_gib * GIB,
        price_per_device_hour=2.5,
        links=(NVLINK, network),
    )


def _memory(**kinds: float) -> tuple[MemoryPart, ...]:
    """Parts from sizes in GiB."""
    return tuple(MemoryPart(kind=kind, bytes=size * GIB) for kind, size in kinds.items())


def _part(label: str, seconds: float, origin: Origin) -> TimePart:
    return TimePart(label=label, seconds=seconds, origin=origin)


def _comm(
    label: str,
    collective: Collective,
    axis: str,
    group_size: int,
    size_bytes: float,
    seconds: float,
    exposed_s: float,
    count: float,
    level: str,
    origin: Origin,
) -> Communication:
    return Communication(
        label=label,
        collective=collective,
        axis=axis,
        group_size=group_size,
        bytes=size_bytes,
        seconds=seconds,
        exposed_s=exposed_s,
        count=count,
        level=level,
        origin=origin,
    )


def _splits(block: str, axis: str, rows: str) -> tuple[Split, ...]:
    """One `module | op | dim or - | words` a line."""
    cells = [[cell.strip() for cell in row.split("|")] for row in rows.strip().splitlines()]
    return tuple(
        Split(block=block, module=module, op=op, axis=axis, dim=None if dim == "-" else dim, words=words)
        for module, op, dim, words in cells
    )


LLAMA_TP = """
layers.*.attn_norm | rms_norm  | sequence | sequence split over tp
layers.*.attn.q    | linear    | heads    | all-gather over sequence -> heads split over tp, column
layers.*.attn.k    | linear    | kv_heads | kv_heads split over tp, column
layers.*.attn.v    | linear    | kv_heads | kv_heads split over tp, column
layers.*.attn      | sdpa      | heads    | heads split over tp
layers.*.attn.out  | linear    | heads    | reduced over heads, row -> reduce-scatter over sequence
layers.*.add_1     | add       | sequence | sequence split over tp
layers.*.mlp_norm  | rms_norm  | sequence | sequence split over tp
layers.*.mlp.gate  | linear    | ffn      | all-gather over sequence -> ffn split over tp, column
layers.*.mlp.up    | linear    | ffn      | ffn split over tp, column
layers.*.mlp.act   | silu      | ffn      | ffn split over tp
layers.*.mlp.down  | linear    | ffn      | reduced over ffn, row -> reduce-scatter over sequence
layers.*.add_2     | add       | sequence | sequence split over tp
"""
EMBED_TP = "embed | embedding | vocab | vocab split over tp -> reduce-scatter over sequence"
HEAD_TP = """
norm    | rms_norm      | sequence | sequence split over tp
lm_head | linear        | vocab    | all-gather over sequence -> vocab split over tp, column
loss    | cross_entropy | vocab    | vocab split over tp; softmax statistics are all-reduced
"""


def _batch_rows(rows: str, axis: str) -> str:
    """The same ops, each with its batch split over `axis`."""
    names = [row.split("|")[:2] for row in rows.strip().splitlines()]
    return "\n".join(f"{module}|{op}|batch|batch split over {axis}" for module, op in names)


def _llama_splits() -> tuple[Split, ...]:
    blocks = (("Embedding", EMBED_TP), ("LlamaBlock", LLAMA_TP), ("Head", HEAD_TP))
    return tuple(
        split
        for block, rows in blocks
        for split in (*_splits(block, "dp", _batch_rows(rows, "dp")), *_splits(block, "tp", rows))
    )


def llama3_8b() -> Plan:
    """Llama-3-8B on 64 H100: dp32 x tp2, ZeRO-1."""
    stage = Stage(
        index=0,
        blocks=(("Embedding", 1, "none"), ("LlamaBlock", 32, "none"), ("Head", 1, "none")),
        first_layer=0,
        layers=32,
        forward_s=0.0712,
        backward_s=0.1455,
        in_flight=1,
        memory=_memory(
            parameters=7.48,
            gradients=14.96,
            optimizer=1.4,
            activations=29.2,
            working=1.6,
            logits=3.9,
            buffers=1.1,
            reserve=3.4,
            context=2.1,
        ),
        peak_memory_bytes=68.3 * GIB,
    )
    waterfall = (
        _part("forward compute", 0.2703, INTERPOLATED),
        _part("backward compute", 0.5402, INTERPOLATED),
        _part("tensor-parallel collectives", 0.0461, INTERPOLATED),
        _part("gradient reduce-scatter, exposed", 0.0113, INTERPOLATED),
        _part("parameter all-gather, exposed", 0.0057, MODELLED),
        _part("optimizer step", 0.0031, MODELLED),
        _part("gradient norm and clipping", 0.0009, MODELLED),
        _part("host overhead", 0.003, MODELLED),
    )
    step_s = sum(part.seconds for part in waterfall)
    return Plan(
        tpplan_version="0.1.0",
        model=ModelInfo(
            name="Llama3",
            source="examples/llama3_8b.py",
            graph_hash="2b9ce0a4f7d1",
            parameters=8_030_261_248,
            trainable_parameters=8_030_261_248,
            layers=32,
            tokens_per_sample=8192,
            forward_flops_per_sample=1.44e14,
        ),
        cluster=_cluster("dgx-h100:8", "H100-SXM5-80GB", nodes=8, memory_gib=80, network_bytes_per_s=50e9),
        job=Job(
            mode="train",
            objective="throughput",
            global_batch=128,
            seq_len=8192,
            dtype="bf16",
            optimizer="adamw",
            framework="torch",
        ),
        mesh=Mesh(dp=32, tp=2),
        zero_stage=1,
        micro_batch=1,
        num_microbatches=4,
        schedule="none",
        virtual_stages=1,
        sequence_parallel=True,
        recompute="none",
        stages=(stage,),
        splits=_llama_splits(),
        parameters=(
            ParameterPlacement(
                fqn="embed.weight",
                shape=(128256, 4096),
                dims=("vocab", "hidden"),
                placements=(("dp", "R"), ("tp", "S(vocab)@0")),
            ),
            ParameterPlacement(
                fqn="layers.*.attn.q.weight",
                shape=(4096, 4096),
                dims=("heads*head_dim", "hidden"),
                placements=(("dp", "R"), ("tp", "S(heads)@0")),
            ),
            ParameterPlacement(
                fqn="layers.*.mlp.down.weight",
                shape=(4096, 14336),
                dims=("hidden", "ffn"),
                placements=(("dp", "R"), ("tp", "S(ffn)@1")),
            ),
            ParameterPlacement(
                fqn="norm.weight", shape=(4096,), dims=("hidden",), placements=(("dp", "R"), ("tp", "R"))
            ),
        ),
        modules=(
            ModuleLayout(
                module="layers.*.attn", axis="tp", inputs=("S(sequence)@1",), outputs=("S(sequence)@1",)
            ),
            ModuleLayout(
                module="layers.*.mlp", axis="tp", inputs=("S(sequence)@1",), outputs=("S(sequence)@1",)
            ),
        ),
        communications=(
            _comm("attn.out -> add", SCATTER, "tp", 2, 64 * MIB, 2.1e-4, 9e-5, 256, "node", INTERPOLATED),
            _comm(
                "mlp_norm -> mlp.gate", GATHER, "tp", 2, 64 * MIB, 2.05e-4, 9e-5, 256, "node", INTERPOLATED
            ),
            _comm("dense gradients", SCATTER, "dp", 32, 16.06e9, 0.184, 0.0113, 1, "cluster", INTERPOLATED),
            _comm(
                "parameters after the update",
                GATHER,
                "dp",
                32,
                8.03e9,
                0.0913,
                0.0057,
                1,
                "cluster",
                MODELLED,
            ),
        ),
        predicted=Prediction(
            step_time_s=step_s,
            step_time_interval_s=(0.812, 0.969),
            tokens_per_s_per_device=128 * 8192 / step_s / 64,
            model_flops_utilization=0.478,
            peak_memory_bytes=68.3 * GIB,
            memory_by_kind_bytes={part.kind: part.bytes for part in stage.memory},
            device_memory_bytes=80 * GIB,
            exposed_communication_s=0.0631,
            bubble_fraction=0.0,
            waterfall=waterfall,
            origin=Origin.MODELLED,
        ),
        search=SearchSummary(
            meshes_considered=412,
            meshes_pruned=371,
            pruned_by=(("roofline above the incumbent", 288), ("memory", 83)),
            lower_bound_s=0.8792,
            gap=0.00163,
            solver="HiGHS 1.11.0",
            complete=True,
        ),
        reasons=(
            "tp=2 halves the activations, which would not fit at tp=1 without recomputing.",
            "tp=4 costs 24 ms more in collectives than the memory it frees can win back.",
            "no pipeline: the model's state fits without one, and a bubble would cost at least 4 %.",
        ),
        alternatives=(
            Alternative(
                mesh=Mesh(dp=64),
                zero_stage=3,
                micro_batch=1,
                num_microbatches=2,
                recompute="selective",
                step_time_s=0.931,
                peak_memory_bytes=58.1 * GIB,
                seeded_as="FSDP",
                reason="recomputes attention to fit, and gathers every parameter twice per microbatch",
            ),
            Alternative(
                mesh=Mesh(dp=16, tp=4),
                zero_stage=1,
                micro_batch=1,
                num_microbatches=8,
                recompute="none",
                step_time_s=0.944,
                peak_memory_bytes=41.0 * GIB,
                reason="70 ms of exposed tensor-parallel collectives against 46 ms",
            ),
            Alternative(
                mesh=Mesh(pp=2, dp=16, tp=2),
                zero_stage=1,
                micro_batch=1,
                num_microbatches=8,
                recompute="none",
                step_time_s=1.012,
                peak_memory_bytes=52.9 * GIB,
                seeded_as="Megatron 3D",
                reason="11 % pipeline bubble",
            ),
        ),
        warnings=("this cluster was not measured: times follow published curves; run `tpplan profile`.",),
    )


def _gpt3_stage(index: int) -> Stage:
    """Stage `index` of eight; the first holds the embedding, the last the head."""
    first, last, in_flight = index == 0, index == 7, 8 - index
    ends = ((("Embedding", 1, "none"),) if first else (), (("Head", 1, "none"),) if last else ())
    activations = 4.4 * in_flight
    memory = _memory(
        parameters=5.2 + 0.15 * (first or last),
        gradients=10.4,
        optimizer=4.1,
        activations=activations,
        working=1.2,
        logits=2.4 * last,
        reserve=2.2,
        context=2.1,
    )
    return Stage(
        index=index,
        blocks=(*ends[0], ("GPTBlock", 8, "selective"), ("GPTBlock", 4, "none"), *ends[1]),
        first_layer=12 * index,
        layers=12,
        forward_s=0.0521,
        backward_s=0.1107,
        in_flight=in_flight,
        memory=memory,
        peak_memory_bytes=sum(part.bytes for part in memory) + 1.5 * GIB,
    )


def _gpt3_tensor_parallel() -> tuple[Communication, ...]:
    names = ("attn.out", "mlp.down", "backward of attn.qkv", "backward of mlp.up")
    return (
        *(
            _comm(f"{n} -> residual", SCATTER, "tp", 8, 48 * MIB, 3.1e-4, 3.1e-4, 2304, "node", MEASURED)
            for n in names
        ),
        *(
            _comm(f"norm gradients {i}", REDUCE, "tp", 8, 12288, 2e-5, 0, 1, "node", MODELLED)
            for i in range(9)
        ),
    )


def gpt3_175b() -> Plan:
    """GPT-3 175B on 1,024 A100: pp8 x dp16 x tp8, interleaved 1F1B."""
    stages = tuple(_gpt3_stage(index) for index in range(8))
    fullest = max(stages, key=lambda stage: stage.peak_memory_bytes)
    waterfall = (
        _part("forward compute", 4.21, INTERPOLATED),
        _part("backward compute", 8.43, INTERPOLATED),
        _part("recompute", 0.61, INTERPOLATED),
        _part("tensor-parallel collectives", 1.94, MEASURED),
        _part("pipeline bubble", 0.88, MODELLED),
        _part("stage to stage", 0.09, MODELLED),
        _part("gradient synchronisation, exposed", 0.21, INTERPOLATED),
        _part("optimizer step", 0.04, MODELLED),
    )
    step_s = sum(part.seconds for part in waterfall)
    base = llama3_8b()
    rival = Alternative(
        mesh=Mesh(pp=16, dp=8, tp=8),
        zero_stage=1,
        micro_batch=1,
        num_microbatches=192,
        recompute="none",
        step_time_s=17.02,
        peak_memory_bytes=71.4 * GIB,
        seeded_as="Megatron 3D",
        reason="8.1 % pipeline bubble against 5.4 %",
    )
    return replace(
        base,
        reasons=(
            "pp=8 x tp=8 is the smallest slice whose state fits; tp stays inside the NVLink domain.",
            "interleaving four virtual stages cuts the bubble from 14 % to 5.4 %.",
        ),
        alternatives=(
            rival,
            replace(rival, mesh=Mesh(pp=4, dp=32, tp=8), seeded_as=None, reason="full recompute"),
        ),
        model=ModelInfo(
            name="GPT3",
            source="examples/gpt3_175b.py",
            graph_hash="90d1c7ab33ef",
            parameters=174_591_683_584,
            trainable_parameters=174_591_683_584,
            layers=96,
            tokens_per_sample=2048,
            forward_flops_per_sample=7.3e14,
        ),
        cluster=_cluster(
            "dgx-a100-80:128", "A100-SXM4-80GB", nodes=128, memory_gib=80, network_bytes_per_s=25e9
        ),
        job=replace(base.job, global_batch=1536, seq_len=2048, framework="megatron"),
        mesh=Mesh(pp=8, dp=16, tp=8),
        num_microbatches=96,
        schedule="interleaved-1f1b",
        virtual_stages=4,
        recompute="mixed",
        stages=stages,
        splits=(
            *_splits("GPTBlock", "tp", LLAMA_TP.replace("layers.*", "transformer.h.*")),
            *_splits("Embedding", "tp", EMBED_TP),
            *_splits("Head", "tp", HEAD_TP),
        ),
        communications=(
            *_gpt3_tensor_parallel(),
            _comm(
                "activations to the next stage",
                SEND,
                "pp",
                2,
                6 * MIB,
                2.6e-4,
                2e-5,
                768,
                "cluster",
                MODELLED,
            ),
            _comm("dense gradients", SCATTER, "dp+cp", 16, 5.46e9, 0.29, 0.21, 1, "cluster", INTERPOLATED),
        ),
        predicted=replace(
            base.predicted,
            step_time_s=step_s,
            step_time_interval_s=(15.4, 17.6),
            tokens_per_s_per_device=1536 * 2048 / step_s / 1024,
            model_flops_utilization=0.523,
            peak_memory_bytes=fullest.peak_memory_bytes,
            memory_by_kind_bytes={part.kind: part.bytes for part in fullest.memory},
            exposed_communication_s=2.24,
            bubble_fraction=0.0536,
            waterfall=waterfall,
        ),
        search=replace(
            base.search,
            meshes_considered=2316,
            meshes_pruned=2270,
            lower_bound_s=15.87,
            gap=0.0329,
            complete=False,
        ),
    )


MOE_EP = """
layers.*.attn        | sdpa           | batch   | batch split over ep
layers.*.moe.router  | linear         | batch   | batch split over ep
layers.*.moe.experts | grouped_matmul | experts | experts split over ep; tokens go and return by all-to-all
"""


def mixtral_8x7b() -> Plan:
    """Mixtral-8x7B on 64 H200 with expert parallelism over nodes' neighbours."""
    base = llama3_8b()
    all_to_all = _comm(
        "tokens to experts", EXCHANGE, "ep", 8, 256 * MIB, 9.2e-4, 9.2e-4, 512, "node", MODELLED
    )
    return replace(
        base,
        model=replace(
            base.model, name="Mixtral", source="mixtral-8x7b/config.json", parameters=46_702_792_704
        ),
        cluster=_cluster("hgx-h200:8", "H200-SXM-141GB", nodes=8, memory_gib=141, network_bytes_per_s=50e9),
        mesh=Mesh(dp=8, ep=8, order=("pp", "cp", "tp", "dp", "ep")),
        zero_stage=2,
        sequence_parallel=False,
        recompute="selective",
        splits=(
            *_splits("MixtralBlock", "ep", MOE_EP),
            *_splits("Embedding", "ep", _batch_rows(EMBED_TP, "ep")),
        ),
        communications=(
            all_to_all,
            replace(all_to_all, label="tokens back from experts"),
            *base.communications[2:],
        ),
        predicted=replace(base.predicted, device_memory_bytes=141 * GIB),
    )


def llama3_70b_on_rtx4090() -> Infeasible:
    """A 70B model that eight 24 GiB devices cannot train."""
    return Infeasible(
        reason="parameters, gradients and optimizer state alone need 141.3 GiB a device at tp=8, ZeRO-3",
        short_by_bytes=117.9 * GIB,
        nearest_fix="8x-rtx4090:7 (56 devices) would fit with pp=7 x tp=8 and full recompute",
        closest={"pp": 1, "dp": 1, "cp": 1, "ep": 1, "tp": 8},
    )


ALL_PLANS = {"llama3_8b": llama3_8b, "gpt3_175b": gpt3_175b, "mixtral_8x7b": mixtral_8x7b}
