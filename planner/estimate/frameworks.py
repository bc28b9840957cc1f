"""What each framework adds to the arithmetic: one table, a source for every number.

Out: `FRAMEWORKS`, the `Framework` profiles by the name a user gives. "Judgement" marks what no source
states; the accuracy benchmark shows what such a number is worth.

Memory per parameter (16-bit weights, AdamW's 8 bytes of moments aside):

    megatron    2 weights + 4 fp32 accumulated gradient + 4 fp32 master
    torch       4 fp32 sharded weights (as 2 + 2 here)  + 4 fp32 gradient
    deepspeed   2 weights + 2 gradient                  + 4 fp32 master
"""

from __future__ import annotations

from ..profile import Framework

GIB = float(2**30)

NCCL_BYTES = 0.35 * GIB
"""NCCL buffers: 0.33 to 0.38 GiB for 2 to 8 ranks (aiconfigurator, nccl_mem_bytes)."""
CONTEXT_BYTES = 0.65 * GIB
"""CUDA context, loaded kernels and cuBLAS workspaces. Judgement: what nvidia-smi shows beyond PyTorch."""
RESERVE = (1.04, 1.09)
"""Reserved over allocated: median 1.040, largest 1.093 of 43 runs (SimuMax, Megatron on B200)."""

MEGATRON = Framework(
    name="megatron",
    description="Megatron-LM core with Transformer Engine and its distributed optimizer",
    gradient_bytes=4,
    sync_bytes=4,
    master_bytes=4,
    dp_overlap=0.8,
    gather_overlap=0.8,
    tp_overlap=0.2,
    saves_gathered_input=False,
    logits_bytes_per_element=0.0,
    allocator_reserve=RESERVE,
    context_bytes=CONTEXT_BYTES + NCCL_BYTES,
    step_overhead_s=0.02,
    fuses_pointwise=True,
    selective="attention",
    scatters_handover=True,
    routing_s=1.5e-3,
    logits_bytes=6.0,
    weight_gradient_bytes=2.0,
    weights_inside_experts=True,
    source=(
        "fuses_pointwise: bias and activation, dropout and residual, rotary and norms are single kernels. "
        "selective: --recompute-granularity selective runs the attention core again. "
        "scatters_handover: on unless --no-scatter-gather-tensors-in-pipeline. "
        "routing_s: token counts are read back before the dispatch; 3 ms a layer fit published runs. "
        "logits_bytes: 2 for the logits, 4 for their fp32 softmax, in which the gradient is made. "
        "weight_gradient_bytes: Transformer Engine's dummy gradients where products add in place. "
        "weights_inside_experts: routing weights multiply the activation function's result. "
        "gradient_bytes, sync_bytes: megatron/training/arguments.py: bf16 accumulates and reduces "
        "gradients in fp32. "
        "master_bytes: megatron/core/optimizer, fp32 main parameters. "
        "dp_overlap, gather_overlap: judgement, with --overlap-grad-reduce and --overlap-param-gather all"
        " but the first and last bucket hide. "
        "tp_overlap: judgement, without user buffers only the backward's gather and reduce-scatter run "
        "beside a weight-gradient matmul. "
        "saves_gathered_input: core/tensor_parallel/layers.py saves the shard and gathers again. "
        "logits_bytes_per_element: vocab-parallel cross entropy works in place. "
        "step_overhead_s: judgement"
    ),
)

TORCH = Framework(
    name="torch",
    description="PyTorch FSDP2, DTensor tensor parallelism and torch.distributed.pipelining (torchtitan)",
    gradient_bytes=4,
    sync_bytes=4,
    master_bytes=2,
    dp_overlap=0.5,
    gather_overlap=0.5,
    tp_overlap=0.0,
    saves_gathered_input=True,
    logits_bytes_per_element=4.0,
    allocator_reserve=RESERVE,
    context_bytes=CONTEXT_BYTES + NCCL_BYTES,
    step_overhead_s=0.02,
    keeps_gathered_in_pipeline=True,
    runs_selective_once=True,
    recompute_stops_early=True,
    selective="alternate",
    logits_bytes=12.0,
    split_logits_bytes=16.0,
    keeps_root_gathered=True,
    gathers_in_own_pool=True,
    reduces_in_own_pool=True,
    receive_buffers=2.0,
    keeps_outputs=True,
    source=(
        "recompute_stops_early: torch.utils.checkpoint without reentrance stops at the last tensor it needs. "
        "selective: torchtitan's per-op policy keeps every second product and attention's results. "
        "logits_bytes: in the backward of an eager cross entropy the fp32 log-softmax, the gradient of the "
        "negative log-likelihood and that of the softmax, 4 bytes each; 16-bit logits are gone by then. "
        "split_logits_bytes: loss_parallel (torch/distributed/tensor/parallel/loss.py) holds four in fp32. "
        "keeps_root_gathered: FSDP2 reshards the root module, with embedding and head, after its backward. "
        "gathers_in_own_pool, reduces_in_own_pool: FSDP2 allocates on its copy-in and reduce streams. "
        "receive_buffers: torch.distributed.pipelining makes one for each microbatch, activations and "
        "gradients (stage.py). keeps_outputs: output_chunks there. "
        "runs_selective_once: torch.utils.checkpoint raises on a second backward of a selective region. "
        "keeps_gathered_in_pipeline: torchtitan's fsdp_reshard_after_forward = default. "
        "gradient_bytes, sync_bytes: torchtitan mixed_precision_reduce = float32. "
        "master_bytes: parameters are stored in fp32, two bytes more than the 16-bit weight, and cast "
        "when gathered. "
        "dp_overlap, gather_overlap: half of FSDP's traffic exposed, read off torchtitan's and MPT's "
        "published runs. "
        "tp_overlap: DTensor's collectives are not overlapped (async TP is off by default). "
        "saves_gathered_input: autograd keeps what the linear read. "
        "logits_bytes_per_element: 14 bytes a logit where the logits are kept, 10 of them in the graph. "
        "step_overhead_s: judgement"
    ),
)

OWN_FRAMEWORK = "tpplan"
"""The framework that this project's runtime is."""
TPPLAN = Framework(
    name=OWN_FRAMEWORK,
    description="this project's runtime: DTensor splits, FSDP2 storage, torch pipeline schedules",
    gradient_bytes=4,
    sync_bytes=4,
    master_bytes=2,
    dp_overlap=0.5,
    gather_overlap=0.5,
    tp_overlap=0.0,
    saves_gathered_input=True,
    logits_bytes_per_element=4.0,
    allocator_reserve=RESERVE,
    context_bytes=CONTEXT_BYTES + NCCL_BYTES,
    step_overhead_s=0.02,
    keeps_gathered_in_pipeline=True,
    recompute_stops_early=True,
    runs_selective_once=True,
    selective="results",
    recomputes_in_one_part=True,
    keeps_root_gathered=True,
    gathers_in_own_pool=True,
    computes_with_copies=True,
    reduces_in_own_pool=True,
    converts_parameters=False,
    converts_on_borders=True,
    sums_tied_shards=True,
    follows_tensors=True,
    routes_own_tokens=True,
    source=(
        "as `torch`, on which this runtime stands: FSDP2's root and pools; no receive buffers "
        "(runtime/handover.py) and no outputs (the loss lies in the last stage). "
        "follows_tensors: what gloo ranks hold at their fullest moment (tests/dist/test_combinations.py). "
        "keeps_gathered_in_pipeline: runtime/data.py. "
        "computes_with_copies: FSDP2 copies parameters out of what it stores, for a group of one rank too "
        "(_fsdp_param_group.py, wait_for_unshard), and so does `replicate`, which is ZeRO-0 here. "
        "selective: runtime/recompute.py. "
        "recomputes_in_one_part: runtime/handover.py. "
        "recompute_stops_early, runs_selective_once: torch.utils.checkpoint without reentrance. "
        "converts_parameters: a parameter has one layout, and is read in it. "
        "converts_on_borders: runtime/moves.py. "
        "sums_tied_shards: runtime/ties.py, after gradients were reduce-scattered. "
        "routes_own_tokens: runtime/routed.py"
    ),
)

DEEPSPEED = Framework(
    name="deepspeed",
    description="DeepSpeed ZeRO, with Megatron-DeepSpeed's tensor and pipeline parallelism",
    gradient_bytes=2,
    sync_bytes=2,
    master_bytes=4,
    dp_overlap=0.5,
    gather_overlap=0.5,
    tp_overlap=0.0,
    saves_gathered_input=True,
    logits_bytes_per_element=4.0,
    allocator_reserve=(1.05, 1.12),
    context_bytes=CONTEXT_BYTES + NCCL_BYTES,
    step_overhead_s=0.05,
    source=(
        "gradient_bytes, master_bytes: ZeRO (arXiv:1910.02054, section 3.1), 2 + 2 + 12 bytes per "
        "parameter with Adam. "
        "sync_bytes: communication_data_type defaults to the training dtype. "
        "dp_overlap, gather_overlap: judgement, overlap_comm and prefetching hide about half. "
        "tp_overlap, saves_gathered_input: judgement, plain autograd. "
        "logits_bytes_per_element: as torch. "
        "allocator_reserve: judgement, ZeRO-3's gathers fragment more. "
        "step_overhead_s: judgement"
    ),
)

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework for framework in (TPPLAN, MEGATRON, TORCH, DEEPSPEED)
}
"""Every framework profile by name."""
