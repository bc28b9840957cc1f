"""Published configurations, whole and cold: a new process plans each within 20 s of CPU and 1.5 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .models import SLIDING_EVERY_OTHER
from .test_models import skip_without

LIMIT_S = 20.0
"""Processor seconds, so that a busy machine does not fail the test; an idle one takes as long."""
LIMIT_BYTES = 1.5e9
LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3.1 8B": (LLAMA | {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 14336,
                              "num_hidden_layers": 32}, 8),
    "Llama 3.1 70B": (LLAMA | {"hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672,
                               "num_hidden_layers": 80}, 16),
    "Llama 3.1 405B": (LLAMA | {"hidden_size": 16384, "num_attention_heads": 128, "intermediate_size": 53248,
                                "num_hidden_layers": 126}, 64),
    "Mixtral 8x7B": ({
        "model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        "num_hidden_layers": 32, "max_position_embeddings": 32768}, 8),
    "Qwen3 30B-A3B": ({
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "num_hidden_layers": 48,
        "max_position_embeddings": 40960}, 8),
    "GPT-OSS 120B": ({
        "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
        "vocab_size": 201088, "num_hidden_layers": 36, "sliding_window": 128,
        "layer_types": SLIDING_EVERY_OTHER * 18, "max_position_embeddings": 131072}, 32),
}  # fmt: skip
"""Configuration and nodes of eight H100."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_is_planned_cold(name: str, tmp_path: Path):
    skip_without("transformers")
    config, nodes = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["suggest", str(tmp_path), "-t", f"dgx-h100:{nodes}", "--no-cache", "--json", "-q"]
    with subprocess.Popen([sys.executable, "-m", "tpplan", *command], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        document = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert document["plan"]["layers_per_stage"]
    assert sum(document["plan"]["layers_per_stage"]) == config["num_hidden_layers"]
    assert usage.ru_utime + usage.ru_stime <= LIMIT_S
    assert usage.ru_maxrss * 1024 <= LIMIT_BYTES
