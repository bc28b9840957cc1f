"""What autograd keeps of whole models: the planner's bytes against those of a real run on the CPU.

Each family is built twice from one small configuration: once as `suggest` traces it, folded to block classes,
and once with real weights, whose forward pass announces every tensor it keeps; each storage counts once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from tpplan.planner.coverage import by_target
from tpplan.planner.fold import build
from tpplan.planner.graph import Graph
from tpplan.planner.trace import huggingface, saved, trace_source
from tpplan.planner.trace.export import default_loss, silence

from .models import (
    Classifier,
    Perceptron,
    Recommender,
    TwoTower,
    _classifier_inputs,
    _dit,
    _dit_inputs,
    _image_inputs,
    _recommender_inputs,
    _timm,
    _two_tower_inputs,
    adapt,
)
from .test_models import skip_without
from .test_trace_saved import real_saved_bytes

BATCH, LENGTH = 2, 16
WITHIN = 0.005
"""Rotary tables are made once, of a size that no batch changes: they are not counted as activations."""
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 96,
    "num_hidden_layers": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
LOCAL = {"sliding_window": 4}
CLIP = SIZES | {"model_type": "clip_vision_model", "patch_size": 14, "image_size": 28}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "vocab_size": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "llama": GROUPED,
    "mistral": GROUPED | LOCAL,
    "qwen3": GROUPED,
    "gemma2": GROUPED | LOCAL,
    "gemma3_text": GROUPED | LOCAL | {"num_hidden_layers": 12},
    "phi3": GROUPED | {"pad_token_id": 0, "resid_pdrop": 0.0},
    "opt": {"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 128, "vocab_size": 96, "dropout": 0.0,
            "word_embed_proj_dim": 64, "num_hidden_layers": 4, "max_position_embeddings": 64},
    "bloom": {"hidden_size": 64, "n_head": 4, "n_layer": 4, "vocab_size": 96, "hidden_dropout": 0.0,
              "attention_dropout": 0.0},
    "falcon": SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gpt_neox": SIZES,
    "gpt_oss": GROUPED | LOCAL | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 6,
                                  "layer_types": ["sliding_attention", "full_attention"] * 3},
    "mixtral": GROUPED | {"num_local_experts": 4},
    "qwen3_moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": SIZES | {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 3, "num_hidden_layers": 7,
        "num_key_value_heads": 4},
    "bert": SIZES,
    "roberta": SIZES | {"max_position_embeddings": 64},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 4, "vocab_size": 96,
           "dropout_rate": 0.0},
    "whisper": {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_layers": 3, "decoder_layers": 3,
                "num_mel_bins": 8, "max_target_positions": 32, "vocab_size": 96, "dropout": 0.0,
                "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    "vit": SIZES | {"image_size": 32, "patch_size": 8, "architectures": ["ViTForImageClassification"]},
    "llava": {"text_config": GROUPED | {"model_type": "llama"}, "vision_config": CLIP,
              "image_token_index": 95},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 96, "state_size": 4},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1,
               "vocab_size": 96, "num_hidden_layers": 4, "chunk_size": 16},
}  # fmt: skip
QUICK = ("gpt2", "llama", "gemma2", "mixtral", "gpt_neox", "bloom", "bert", "t5", "vit", "whisper")
"""Families that the quick tests run: fused and separate projections, biases, masks, experts, two stacks."""
BIASED = ("t5",)
"""Families whose attention has a learnt bias: a CPU has no fused kernel for that, an accelerator has."""


def planned_bytes(graph: Graph) -> float:
    """What the planner says that a forward pass over the traced batch keeps."""
    return sum(group.saved_bytes for group in by_target(graph)) * graph.batch


def images_of(inputs: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Put as many placeholders into the text as the image has features."""
    if "image_token_index" in config:
        inputs["input_ids"][:, :4] = config["image_token_index"]
    return inputs


def kernels_of_a_cpu(kind: str) -> Any:
    """Attention with a learnt bias runs unfused on a CPU."""
    plain = {op: kernel for op, kernel in saved.KERNELS.items() if "attention" not in str(op)}
    return patch.object(saved, "KERNELS", plain) if kind in BIASED else nullcontext()


def slow_unless(quick: bool, name: str) -> Any:
    return pytest.param(name, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("kind", [slow_unless(kind in QUICK, kind) for kind in CONFIGS])
def test_a_configuration_keeps_what_a_real_run_keeps(kind: str, tmp_path: Path):
    skip_without("transformers")
    import transformers

    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[kind] | {"model_type": kind}))
    with kernels_of_a_cpu(kind):
        graph = build(trace_source(str(path), seq_len=LENGTH, batch=BATCH))
    assert graph.warnings == ()
    torch.manual_seed(0)
    config = huggingface._read_config(path, transformers)
    with silence():
        model = huggingface._model_class(config, path, transformers)(config)
    huggingface._use_causal_flag(model)
    inputs = images_of(huggingface._inputs(model, BATCH, LENGTH), CONFIGS[kind])
    assert planned_bytes(graph) == pytest.approx(real_bytes(model, inputs), rel=WITHIN)


def real_bytes(model: nn.Module, inputs: dict[str, Any]) -> int:
    """What a real forward pass in bf16 keeps."""
    model = model.train().to(torch.bfloat16)
    given = {
        name: value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with silence(), torch.backends.mkldnn.flags(enabled=False):
        return real_saved_bytes(model, lambda: default_loss(model(**given), given))


def _lora() -> nn.Module:
    return adapt(Perceptron(64, 4), ("0",), rank=4)


PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any], str]] = {
    "MLP": (partial(Perceptron, 64, 5), _image_inputs(28, 1), "torch"),
    "LoRA": (_lora, _image_inputs(28, 1), "torch"),
    "LSTM": (partial(Classifier, nn.LSTM), _classifier_inputs, "torch"),
    "DLRM": (partial(Recommender, (50, 40, 30, 20, 10)), _recommender_inputs, "torch"),
    "two towers": (partial(TwoTower, 60, 40), _two_tower_inputs, "torch"),
    "ResNet": (partial(_timm, "resnet50"), _image_inputs(64), "timm"),
    "ConvNeXt": (partial(_timm, "convnext_atto"), _image_inputs(64), "timm"),
    "DiT": (_dit, _dit_inputs, "diffusers"),
}

ON_ACCELERATORS = {"DLRM": 5 * BATCH * 20 * 8}
"""Bytes that a CPU's kernel does not keep: which bag each of the 20 ids of the five tables belongs to."""


@pytest.mark.parametrize("name", [slow_unless(PLAIN[name][2] == "torch", name) for name in PLAIN])
def test_a_module_keeps_what_a_real_run_keeps(name: str):
    make, inputs, package = PLAIN[name]
    skip_without(package)
    torch.manual_seed(0)
    model = make()
    graph = build(trace_source(model, example_inputs=inputs, batch=BATCH, seq_len=LENGTH))
    assert graph.warnings == ()
    real = real_bytes(model, inputs(BATCH, LENGTH)) + ON_ACCELERATORS.get(name, 0)
    assert planned_bytes(graph) == pytest.approx(real, rel=WITHIN)
