"""Hugging Face configurations: models are built, cut and traced; mistakes are one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tpplan.planner.errors import ModelError
from tpplan.planner.graph import TracedGraph
from tpplan.planner.trace import trace_source

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 128}
LLAMA = SMALL | {"model_type": "llama", "num_key_value_heads": 2, "num_hidden_layers": 5}
LAYERS = {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 8}
CONFIGS: dict[str, tuple[dict[str, Any], list[tuple[str, int, tuple[int, ...]]]]] = {
    "llama": (LLAMA | {"architectures": ["LlamaForCausalLM"]}, [("model.layers", 2, (0,) * 5)]),
    "no architecture": (LLAMA, [("model.layers", 2, (0,) * 5)]),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 4, "vocab_size": 128},
        [("transformer.h", 2, (0,) * 4)],
    ),
    "mixtral": (
        SMALL | LAYERS | {"model_type": "mixtral", "num_local_experts": 4},
        [("model.layers", 2, (0,) * 6)],
    ),
    "gemma2": (SMALL | LAYERS | {"model_type": "gemma2"}, [("model.layers", 2, (0, 1) * 3)]),
    "moe every other layer": (
        SMALL
        | LAYERS
        | {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "num_experts": 4, "num_experts_per_tok": 2},
        [("model.layers", 2, (0, 1) * 3)],
    ),
    "bert": (SMALL | {"model_type": "bert", "num_hidden_layers": 4}, [("bert.encoder.layer", 2, (0,) * 4)]),
    "t5": (
        {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 4},
        [("encoder.block", 3, (0, 1, 1, 1)), ("decoder.block", 3, (0, 1, 1, 1))],
    ),
    "vit": (
        SMALL | {"model_type": "vit", "num_hidden_layers": 4, "image_size": 32, "patch_size": 8},
        [("vit.layers", 2, (0,) * 4)],
    ),
}  # fmt: skip

TEXT = SMALL | LAYERS | {"vocab_size": 100}
VISION = {
    "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 4,
    "patch_size": 14, "image_size": 56,
}  # fmt: skip
WITH_IMAGES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "llava": (
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model"},
            "image_token_index": 99,
        },
        {"language_model": (0,) * 6, "vision_tower.encoder": (0,) * 4},
    ),
    "gemma3": (
        {
            "text_config": TEXT | {"model_type": "gemma3_text"},
            "vision_config": VISION | {"model_type": "siglip_vision_model"},
            "image_token_index": 99,
            "mm_tokens_per_image": 4,
        },
        {"language_model": (0, 0, 0, 0, 0, 5), "vision_tower.encoder": (0,) * 4},
    ),
}

pytest.importorskip("transformers")


def write(folder: Path, config: dict[str, Any] | str) -> str:
    """A folder with a config.json; its path."""
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return str(folder)


def trace(folder: Path, config: dict[str, Any], **options: Any) -> TracedGraph:
    """The graph of a configuration."""
    return trace_source(write(folder, config), **{"seq_len": 16, **options})


@pytest.mark.parametrize("case", CONFIGS)
def test_families_are_traced_and_cut(tmp_path: Path, case: str, capfd: pytest.CaptureFixture):
    config, repeats = CONFIGS[case]
    graph = trace(tmp_path, config)
    assert [(repeat.path, repeat.traced, repeat.classes) for repeat in graph.repeats] == repeats
    assert graph.warnings == ()
    assert graph.values[graph.output].shape == ()
    assert graph.nodes[-1].target in ("aten.cross_entropy_loss.default", "aten.mean.default")
    assert graph.name == tmp_path.name
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_both_towers_of_a_model_with_images_are_traced(tmp_path: Path, kind: str):
    config, layers = WITH_IMAGES[kind]
    graph = trace(tmp_path, config | {"model_type": kind}, seq_len=32)
    assert graph.warnings == ()
    assert {repeat.path: repeat.classes for repeat in graph.repeats} == {
        f"model.{tower}.layers": classes for tower, classes in layers.items()
    }
    assert {graph.values[name].shape for name in graph.inputs} == {(2, 32), (2, 3, 56, 56)}


def test_images_in_an_unknown_form_are_not_left_out_of_the_plan(tmp_path: Path):
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32}
    config = {"model_type": "qwen2_vl", "text_config": TEXT, "vision_config": vision}
    with pytest.raises(ModelError, match="no example batch is known for Qwen2VLForConditionalGeneration"):
        trace(tmp_path, config)


def test_causal_attention_needs_no_mask(tmp_path: Path):
    graph = trace(tmp_path, LLAMA)
    attention = [node for node in graph.nodes if "scaled_dot_product_attention" in node.target]
    assert [node.args[3:6] for node in attention] == [(None, 0.0, True)] * 2
    assert not any("aten.index" in node.target for node in graph.nodes)


def test_sliding_attention_keeps_its_mask_where_it_matters(tmp_path: Path):
    config = SMALL | LAYERS | {"model_type": "mistral", "sliding_window": 8}
    (short, _), (long, _) = (
        [node for node in trace(tmp_path, config, seq_len=length).nodes if "scaled_dot" in node.target]
        for length in (8, 16)
    )
    assert short.args[3] is None
    assert long.args[3] is not None


LENGTHS = {
    "the configuration's": (LLAMA | {"max_position_embeddings": 512}, 512),
    "the kind's": ({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 128}, 1024),
    "at most 8192": (LLAMA | {"max_position_embeddings": 131072, "num_hidden_layers": 1}, 8192),
    "after padding": (SMALL | {"model_type": "roberta", "max_position_embeddings": 514}, 512),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_a_configuration_says_how_long_a_sequence_is(tmp_path: Path, case: str):
    config, length = LENGTHS[case]
    assert trace(tmp_path, config, seq_len=None).seq_len == length
    assert trace(tmp_path, config, seq_len=16).seq_len == 16


def test_quantised_groups_that_a_split_would_cut_are_named(tmp_path: Path):
    config = LLAMA | {
        "intermediate_size": 384,
        "quantization_config": {"quant_method": "awq", "group_size": 64},
    }
    (warning,) = trace(tmp_path, config).warnings
    assert warning == "weights quantised in groups of 64: of 384 columns, tp=1 or 2 leaves groups whole"
    config["quantization_config"] = {"quant_method": "awq", "group_size": 16}
    assert trace(tmp_path, config).warnings == ()


def test_experts_are_grouped_products(tmp_path: Path):
    graph = trace(tmp_path, CONFIGS["mixtral"][0] | {"experts_implementation": "eager"})
    assert [node.target for node in graph.nodes].count("aten._grouped_mm.default") == 4


def test_parameters_are_those_of_the_full_model(tmp_path: Path):
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert trace(tmp_path, LLAMA).parameters == 5 * layer + 2 * 128 * 32 + 32
    assert trace(tmp_path, LLAMA | {"tie_word_embeddings": True}).parameters == 5 * layer + 128 * 32 + 32


BAD = {
    "not JSON": ("{", "is not JSON"),
    "a list": ("[]", "has no model_type"),
    "another JSON": ('{"a": 1}', "has no model_type"),
    "unknown kind": ('{"model_type": "lama"}', "model_type 'lama' is unknown.*did you mean 'llama'"),
    "unknown class": (
        json.dumps(LLAMA | {"architectures": ["MyLlama"]}),
        "architecture 'MyLlama' is unknown",
    ),
    "wrong type": (json.dumps(LLAMA | {"hidden_size": "wide"}), "config.json"),
    "impossible": (json.dumps(LLAMA | {"vocab_size": -1}), "LlamaForCausalLM cannot be built"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_line(tmp_path: Path, case: str):
    text, message = BAD[case]
    with pytest.raises(ModelError, match=message) as raised:
        trace_source(write(tmp_path, text), seq_len=16)
    assert "\n" not in str(raised.value)


def test_transformers_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"needs transformers: pip install tpplan\[hf\]"):
        trace(tmp_path, LLAMA)
