"""A Hugging Face configuration -> a model on meta and a training batch for it.

Only the configuration is read: no weights, no tokenizer, and nothing is ever downloaded. Experts run
through grouped matrix products, and attention through fused attention with its causal flag where
the mask of the example (which has no padding) is the plain causal one, as it does in training.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..divisibility import whole_groups
from ..errors import ModelError, did_you_mean
from ..graph_cache import DEFAULT_SEQ_LEN, LONGEST_DEFAULT_SEQ_LEN, TraceOptions
from .export import default_loss, describe, silence
from .source import Loaded, prepare

ATTENTION = "tpplan_sdpa"
"""Name under which `sdpa` with a causal flag is registered with transformers."""
AUTO_MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
"""Where to look for a class when the configuration names none, in this order."""
LENGTHS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len", "seq_length")
"""Where configurations say how long a sequence may be."""
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer")
"""Kinds whose positions are counted from the padding token's id: they have so many fewer."""
WITH_ONE_IMAGE = ("llava", "vipllava", "paligemma", "gemma3")
"""Kinds whose example may hold one image of the vision tower's own size, as pixels."""
TENSOR_SIZES = (1, 2, 4, 8)
"""Tensor-parallel sizes that a quantised model is asked about: those inside a node."""
AUDIO_FRAMES = 3000
"""Mel frames of one example for speech models: 30 s at 10 ms a frame."""


def from_config(path: Path, options: TraceOptions) -> Loaded:
    """Build the model that a `config.json` describes.

    Raises:
        ModelError: transformers is missing, or the configuration is malformed or of an unknown kind.
    """
    try:
        with silence():
            import transformers
    except ImportError:
        raise ModelError(f"{path.name} needs transformers: pip install tpplan[hf]") from None
    config = _read_config(path, transformers)
    model_class = _model_class(config, path, transformers)
    try:
        with silence(), torch.device("meta"):
            model = model_class(config)
            _use_causal_flag(model)
    except Exception as error:
        raise ModelError(f"{path.name}: {model_class.__name__} cannot be built: {describe(error)}") from None
    seq_len = options.seq_len or _own_seq_len(config)
    try:
        with torch.device("meta"):
            inputs = _inputs(model, options.batch, seq_len)
            if options.mode == "serve" and not config.is_encoder_decoder:
                inputs.pop("labels", None)
    except AttributeError as error:
        raise ModelError(f"{path.name}: {_write_a_file(model)} ({describe(error)})") from None
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    loaded = prepare(name, model, (), inputs, default_loss, dtype=options.dtype, seq_len=seq_len)
    return replace(loaded, warnings=_split_groups(config))


def _split_groups(config: Any) -> tuple[str, ...]:
    """Which tensor-parallel sizes would cut groups of weights that share a quantisation scale."""
    scheme = getattr(config, "quantization_config", None) or {}
    group = scheme.get("group_size") or (scheme.get("weight_block_size") or [None])[0]
    width = getattr(config.get_text_config(), "intermediate_size", None)
    if not isinstance(group, int) or not isinstance(width, int) or group < 1:
        return ()
    whole = whole_groups(width, group, TENSOR_SIZES)
    if whole == TENSOR_SIZES:
        return ()
    sizes = " or ".join(map(str, whole)) or "no size"
    return (f"weights quantised in groups of {group}: of {width:,} columns, tp={sizes} leaves groups whole",)


def _own_seq_len(config: Any) -> int:
    """The longest sequence that the configuration allows, within what training at full length takes."""
    config = config.get_text_config()
    limits = (getattr(config, name, None) for name in LENGTHS)
    longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), DEFAULT_SEQ_LEN)
    if config.model_type in POSITIONS_AFTER_PADDING:
        longest -= config.pad_token_id + 1
    return min(longest, LONGEST_DEFAULT_SEQ_LEN)


def _read_config(path: Path, transformers: Any) -> Any:
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise ModelError(f"{path.name} has no model_type: it is not a Hugging Face configuration")
    known = transformers.CONFIG_MAPPING
    kind = document["model_type"]
    if kind not in known:
        raise ModelError(
            f"{path.name}: model_type {kind!r} is unknown to transformers "
            f"{transformers.__version__}{did_you_mean(kind, known.keys())}"
        )
    try:
        with silence():
            document.pop("experts_implementation", None)  # the default, grouped products, has static shapes
            config = known[kind].from_dict(document)
    except Exception as error:
        raise ModelError(f"{path.name}: {describe(error)}") from None
    _configure(config)
    return config


def _configure(config: Any) -> None:
    """No cache of keys and values, also in the parts of a composite model."""
    config.use_cache = False
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            _configure(part)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


def _model_class(config: Any, path: Path, transformers: Any) -> Any:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is None:
            raise ModelError(
                f"{path.name}: architecture {name!r} is unknown to transformers {transformers.__version__}"
            )
        return found
    for mapping in AUTO_MAPPINGS:
        found = getattr(transformers, mapping).get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    raise ModelError(f"{path.name}: transformers has no model for {type(config).__name__}")


def _use_causal_flag(model: Any) -> None:
    """Let attention use its causal flag: while exporting, transformers always writes the mask out."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def mask(
        *, q_length: int, kv_length: int, attention_mask: Any = None, local_size: Any = None, **more: Any
    ):
        skips = more.get("allow_is_causal_skip", True) or more.get("allow_is_bidirectional_skip", False)
        if skips and q_length == kv_length and (local_size is None or kv_length <= local_size):
            return None
        return sdpa_mask(q_length=q_length, kv_length=kv_length, local_size=local_size, **more)

    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(ATTENTION, sdpa_attention_forward)
        AttentionMaskInterface.register(ATTENTION, mask)
        model.set_attn_implementation(ATTENTION)


def listen_to_layers(module: nn.Module) -> None:
    """Let transformers hook its layers now: it does so once, on first use, when some may be cut away."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    modeling = sys.modules.get("transformers.modeling_utils")  # without it, no model of theirs is here
    install = getattr(capturing, "maybe_install_capturing_hooks", None)
    if install is None or modeling is None:
        return
    for part in module.modules():
        if isinstance(part, modeling.PreTrainedModel):
            install(part)


def _inputs(model: Any, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """A batch without padding, with labels where the model takes them."""
    main, config = model.main_input_name, model.config
    if main == "input_ids":
        tokens = torch.zeros(batch, seq_len, dtype=torch.long)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    elif main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        inputs = {"pixel_values": torch.zeros(batch, vision.num_channels, *_pair(vision.image_size))}
    elif main == "input_features":
        inputs = {"input_features": torch.zeros(batch, config.num_mel_bins, AUDIO_FRAMES)}
    else:
        raise ModelError(_write_a_file(model))
    accepted = inspect.signature(model.forward).parameters
    if main == "input_ids" and "pixel_values" in accepted:
        inputs["pixel_values"] = _image(model, batch)
    if "labels" in accepted:
        per_example = type(model).__name__.endswith(("SequenceClassification", "ImageClassification"))
        inputs["labels"] = torch.zeros((batch,) if per_example else (batch, seq_len), dtype=torch.long)
    if "decoder_attention_mask" in accepted:
        inputs["decoder_attention_mask"] = torch.ones(batch, seq_len, dtype=torch.long)
    if "decoder_input_ids" in accepted and "labels" not in accepted:
        inputs["decoder_input_ids"] = torch.zeros(batch, seq_len, dtype=torch.long)
    return {name: value for name, value in inputs.items() if name in accepted}


def _image(model: Any, batch: int) -> torch.Tensor:
    """One image a sample, so that the vision tower is planned too."""
    if model.config.model_type not in WITH_ONE_IMAGE:
        raise ModelError(_write_a_file(model))
    vision = model.config.vision_config
    return torch.zeros(batch, vision.num_channels, *_pair(vision.image_size))


def _write_a_file(model: Any) -> str:
    return (
        f"no example batch is known for {type(model).__name__}, which takes {model.main_input_name}: write a "
        "model.py with build_model() and example_inputs(batch, seq)"
    )


def _pair(size: int | tuple[int, int] | list[int]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)
