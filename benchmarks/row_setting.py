"""The cluster and the framework profile of a published run.

In: a `Row`. Out: a `Topology` (device file, node and network of the row; memory without limit, so that
a plan which ran is never called too large) and a `Framework` profile: the product's own profile of the
family, with what that source's software generation did differently.
"""

from __future__ import annotations

from dataclasses import replace

from tpplan.planner.estimate.frameworks import FRAMEWORKS
from tpplan.planner.profile import Framework
from tpplan.planner.topology import Topology
from tpplan.topologies import load

from .rows import Row

UNLIMITED_BYTES = 10**15
BITS = 8
GIGA = 1e9

CLUSTERS = {
    "A100-SXM4-80GB": "dgx-a100-80",
    "A100-SXM4-40GB": "dgx-a100-40",
    "A100-SXM4 (memory size not stated)": "hgx-a100-4nic",
    "H100-SXM5-80GB": "dgx-h100",
    "H100-96GB-HBM2e-500W (Grand Teton)": "grand-teton-h100",
    "B200-SXM": "dgx-b200",
}
"""Bundled cluster for each published device name; network bandwidth is overridden where stated."""

FLASH_2 = 0.65
"""FlashAttention-2 on Hopper over the device file's curve: 35% of peak (arXiv:2407.08608, figure 5)."""
CUDNN_9 = 1.2
"""cuDNN 9 attention over the same curve: 0.6 and more of peak forward (NVIDIA cuDNN 9 notes)."""

MEGATRON = FRAMEWORKS["megatron"]
MEGATRON_2021 = replace(
    MEGATRON,
    attention="materialised",  # before FlashAttention
    accumulation_bytes=10.0,  # main_grad += grad: fp32 read and written, fp16 read
    sync_bytes=2,  # fp16 gradients are reduced as they are
    dp_overlap=0.0,  # the local DDP wrapper reduces after the last backward
    gather_overlap=0.0,
    tp_overlap=0.0,
)
MEGATRON_2022 = replace(MEGATRON_2021, accumulation_bytes=0.0)  # --gradient-accumulation-fusion
MEGATRON_PLAIN = replace(
    MEGATRON, attention_efficiency=CUDNN_9, tp_overlap=0.0, dp_overlap=0.0, gather_overlap=0.0
)
MEGATRON_RECIPES = replace(
    MEGATRON,
    tp_overlap=0.7,  # user buffers, in NVIDIA's own recipes
    p2p_overlap=0.8,  # interleaved schedules send while they compute
    cp_overlap=0.9,  # ring attention
    dedups_routing=True,  # DeepEP and HybridEP send a token once to each node
)
TORCH = replace(
    FRAMEWORKS["torch"],
    attention_efficiency=FLASH_2,
    eager_traffic=2.0,  # RMSNorm and rotary embeddings of several kernels, partly in fp32
)
AUTOMODEL = replace(
    TORCH,  # FSDP2 around Transformer Engine's attention, norms and rotary embeddings
    attention_efficiency=CUDNN_9,
    fuses_pointwise=True,
)
COMPOSER = replace(
    TORCH,
    name="composer",
    attention_efficiency=0.55,  # FlashAttention in Triton on A100, version 2 with ALiBi on H100
)
MEGATRON_DEEPSPEED = replace(
    FRAMEWORKS["deepspeed"],
    attention="materialised",
    accumulation_bytes=6.0,  # autograd adds fp16 gradients in place
    fuses_pointwise=True,  # Megatron's kernels
    scatters_handover=True,
    saves_gathered_input=False,
    dp_overlap=0.0,  # the pipeline engine reduces after the last microbatch
    gather_overlap=0.0,
)
ZERO_2021 = replace(
    MEGATRON_DEEPSPEED,
    fuses_pointwise=True,
    dp_overlap=1.0,  # prefetching hides gathers wholly where computation is long enough
    gather_overlap=1.0,
    gather_bytes_per_s=17e9,  # about one InfiniBand port: read off the six rows, 16 to 21 GB/s each
)

PROFILES = {
    "sc21": MEGATRON_2021,
    "seqsel": MEGATRON_2022,
    "simumax": MEGATRON_PLAIN,
    "mbridge": replace(MEGATRON_RECIPES, attention_efficiency=CUDNN_9),
    "nemo2407": replace(MEGATRON_RECIPES, attention_efficiency=FLASH_2),
    "dgxc": MEGATRON_RECIPES,
    "tt": TORCH,
    "automodel": AUTOMODEL,
    "mpt": COMPOSER,
    "mtnlg": MEGATRON_DEEPSPEED,
    "vtrain": MEGATRON_DEEPSPEED,
}
"""What each source ran: the product's profile of the family as that software generation differed."""
PURE = "PURE"
EP_OVERLAP = 0.7
"""DeepSeek recipes run the all-to-all of one microbatch beside another's computation; share as tp's."""
ASYNC_TP_OVERLAP = 0.7
"""As user buffers: async tensor parallelism is the same idea in torch."""


def topology_of(row: Row) -> Topology:
    """The cluster of the run. Raises `ValueError` for a device without a bundled cluster."""
    name = str(row.hardware["gpu"])
    if name not in CLUSTERS:
        raise ValueError(f"no bundled cluster for {name!r}; known are {', '.join(sorted(CLUSTERS))}")
    topology = load(CLUSTERS[name])
    nodes = -(-row.gpus // topology.devices_per_node)
    levels = topology.with_nodes(nodes).levels
    node, network = levels[0], levels[-1]
    node = replace(node, size=row.gpus // nodes)
    nic_gbps, nics = row.hardware.get("nic_gbps"), row.hardware.get("nics_per_node")
    if nic_gbps and nics:
        per_device = nic_gbps * nics * GIGA / BITS / row.hardware["gpus_per_node"]
        network = replace(network, bytes_per_s=per_device)
    device = replace(topology.device, memory_bytes=UNLIMITED_BYTES)
    return replace(topology, device=device, levels=(node, *levels[1:-1], network))


def family_of(row: Row) -> str:
    """The bundled profile that the row's profile was made of."""
    return next(name for name, f in FRAMEWORKS.items() if f.description == framework_of(row).description)


def framework_of(row: Row) -> Framework:
    """The profile of the run's software. Raises `ValueError` for an unknown source."""
    if row.source not in PROFILES:
        raise ValueError(f"no framework is known for source {row.source!r}")
    if row.source == "sc21" and row.plan.zero == 3:
        return ZERO_2021
    profile = PROFILES[row.source]
    if row.options.get("compile"):
        profile = replace(profile, fuses_pointwise=True)
    if row.options.get("async_tp"):
        profile = replace(profile, tp_overlap=ASYNC_TP_OVERLAP)
    if row.source == "mbridge" and row.dims.kv_rank:
        profile = replace(profile, ep_overlap=EP_OVERLAP)
    if row.options.get("mp_mode") == PURE:
        profile = replace(profile, sync_bytes=2, gradient_bytes=2)
    return profile
