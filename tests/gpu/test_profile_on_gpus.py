"""The profiler on NVIDIA GPUs: what it measures, over NCCL where there are two, and how well it predicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tpplan.planner.cost import Origin
from tpplan.planner.estimate.collectives import model
from tpplan.planner.fold import build
from tpplan.planner.layout import Collective
from tpplan.planner.trace import trace_source
from tpplan.profiler import block
from tpplan.topologies import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA = str(EXAMPLES / "llama3_8b.py")
SEQ_LEN = 4096
BLOCK_ERROR = 0.25
"""Of a block's predicted time before it was measured. The efficiency curves' own error is up to 25%."""
RUN_LIMIT_S = 600


def profile(output: Path, *options: str, ranks: int = 1) -> dict[str, Any]:
    """Run `tpplan profile --quick` on so many GPUs; the file's data."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    )
    command = [sys.executable, *launch, "-m", "tpplan", "profile", "--quick", "--quiet", "-o", str(output)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(output.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One GPU, with a block of Llama-3-8B."""
    output = tmp_path_factory.mktemp("gpu") / "one.yaml"
    profile(output, "--model", LLAMA, "--seq-len", str(SEQ_LEN))
    return output


def test_the_device_is_measured(alone: Path):
    device = load_file(alone).device
    assert {"gemm", "attention", "attention_backward", "grouped_gemm", "memory"} <= device.efficiency.keys()
    assert all(device.efficiency[name].origin == Origin.MEASURED for name in ("gemm", "attention", "memory"))
    assert device.memory_bytes == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=1e-3)
    assert 0.3 < max(share for _, share in device.efficiency["gemm"].curve) <= 1.0


def test_held_back_kernels_are_predicted(alone: Path):
    record = yaml.safe_load(alone.read_text())["profile"]["check"]["kernels"]
    assert record["sizes"] >= 10
    assert record["median_error"] < 0.10


def test_a_block_of_llama_is_predicted_before_and_exact_after(alone: Path):
    """Before: from kernels alone. After: with the scale that the block itself gave."""
    topology = load_file(alone)
    scale = next(one for one in topology.scales if (one.name, one.framework) == ("kernels", "torch"))
    assert abs(scale.value - 1.0) < BLOCK_ERROR, scale
    assert "one block of llama3_8b.py, forward and backward" in scale.source


def test_the_scale_is_measured_over_predicted(alone: Path):
    topology = load_file(alone)
    traced = trace_source(LLAMA, seq_len=SEQ_LEN, batch=block.BATCH, dtype="bf16")
    predicted_s = block.predict(build(traced), topology, "torch", module="layers.*", dtype="bf16")
    scale = next(one for one in topology.scales if one.framework == "torch")
    again_s = measured_block_s()
    assert predicted_s * scale.value == pytest.approx(again_s, rel=0.10)


def measured_block_s() -> float:
    """The same block timed here, by CUDA events."""
    from tpplan.planner.trace.layer import first_layer

    layer = first_layer(LLAMA, batch=block.BATCH, seq_len=SEQ_LEN, dtype="bf16")
    step = block.step_of(layer, torch.device("cuda"))
    for _ in range(5):
        step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / 20


def test_collectives_over_nccl(tmp_path: Path):
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two CUDA devices")
    output = tmp_path / "all.yaml"
    record = profile(output, ranks=count)["profile"]
    assert record["backend"] == "nccl"
    assert record["check"]["collectives"]["median_error"] < 0.15
    topology = load_file(output)
    span = topology.span(size=count, stride=1)
    for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        assert model(topology).time(collective, 2**26, span).origin != Origin.MODELLED
