"""Model families that people train, each as published but for its depth: what planning must cover.

A family is a Hugging Face configuration (its `config.json` as a dict) or a function that builds a
module, with example inputs. `full` holds what the test's shallow configuration leaves out; merged in, it
is the published model. Modules are built on the meta device, so that no size costs anything.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Inputs = Callable[[int, int], dict[str, torch.Tensor] | tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture at a published size, cut in depth."""

    name: str
    classes: int
    """How many classes of repeated layers it folds into."""
    decoder_only: bool = False
    """Decoder-only language models: every FLOP must lie under a rule."""
    config: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)
    """The published values of what `config` cuts short."""
    build: Callable[..., nn.Module] | None = None
    inputs: Inputs | None = None
    package: str = "torch"
    """What must be installed: `transformers`, `timm`, `diffusers`."""
    seq_len: int = 1024
    traced_whole: bool = False
    """Its layers depend on each other, so that none can be left out of the trace."""

    def published(self) -> dict[str, Any]:
        """The configuration at full depth."""
        return self.config | self.full


def _hf(name: str, model_type: str, *, classes: int = 1, full: dict[str, Any], **config: Any) -> Family:
    own = {key: config.pop(key) for key in ("decoder_only", "seq_len") if key in config}
    return Family(
        name=name,
        classes=classes,
        config={"model_type": model_type} | config,
        full=full,
        package="transformers",
        **own,
    )


def _lm(name: str, model_type: str, **config: Any) -> Family:
    """A decoder-only language model."""
    return _hf(name, model_type, decoder_only=True, **config)


SLIDING_EVERY_OTHER = ["sliding_attention", "full_attention"]
LOCAL_FIVE_OF_SIX = ["sliding_attention"] * 5 + ["full_attention"]

LANGUAGE = (
    _lm("GPT-2 XL", "gpt2", n_embd=1600, n_head=25, n_layer=4, full={"n_layer": 48}),
    _lm(
        "Llama 3 8B", "llama", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192, num_hidden_layers=4,
        full={"num_hidden_layers": 32},
    ),
    _lm(
        "Mistral 7B", "mistral", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=32000, sliding_window=4096, num_hidden_layers=4,
        full={"num_hidden_layers": 32},
    ),
    _lm(
        "Qwen2 7B", "qwen2", hidden_size=3584, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, vocab_size=152064, num_hidden_layers=4, full={"num_hidden_layers": 28},
    ),
    _lm(
        "Qwen3 8B", "qwen3", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, vocab_size=151936, num_hidden_layers=4, full={"num_hidden_layers": 36},
    ),
    _lm(
        "Gemma 2 9B", "gemma2", hidden_size=3584, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
        intermediate_size=14336, vocab_size=256000, sliding_window=4096, num_hidden_layers=6, classes=2,
        full={"num_hidden_layers": 42},
    ),
    _lm(
        "Gemma 3 12B", "gemma3_text", hidden_size=3840, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, intermediate_size=15360, vocab_size=262208, sliding_window=1024, num_hidden_layers=12,
        classes=2, layer_types=LOCAL_FIVE_OF_SIX * 2, seq_len=2048,
        full={"num_hidden_layers": 48, "layer_types": LOCAL_FIVE_OF_SIX * 8},
    ),
    _lm(
        "Phi-3 mini", "phi3", hidden_size=3072, num_attention_heads=32, num_key_value_heads=32,
        intermediate_size=8192, vocab_size=32064, num_hidden_layers=4, full={"num_hidden_layers": 32},
    ),
    _lm(
        "Phi-3 medium", "phi3", hidden_size=5120, num_attention_heads=40, num_key_value_heads=10,
        intermediate_size=17920, vocab_size=32064, num_hidden_layers=4, full={"num_hidden_layers": 40},
    ),
    _lm(
        "OPT 6.7B", "opt", hidden_size=4096, num_attention_heads=32, ffn_dim=16384, vocab_size=50272,
        word_embed_proj_dim=4096, num_hidden_layers=4, full={"num_hidden_layers": 32},
    ),
    _lm("BLOOM 7B", "bloom", hidden_size=4096, n_head=32, vocab_size=250880, n_layer=4, full={"n_layer": 30}),
    _lm(
        "Falcon 7B", "falcon", hidden_size=4544, num_attention_heads=71, vocab_size=65024,
        num_hidden_layers=4, full={"num_hidden_layers": 32},
    ),
    _lm(
        "Falcon 40B", "falcon", hidden_size=8192, num_attention_heads=128, num_kv_heads=8, vocab_size=65024,
        new_decoder_architecture=True, num_hidden_layers=4, full={"num_hidden_layers": 60},
    ),
    _lm(
        "Falcon RW 1B", "falcon", hidden_size=2048, num_attention_heads=32, vocab_size=50304, alibi=True,
        multi_query=False, parallel_attn=False, bias=True, num_hidden_layers=4,
        full={"num_hidden_layers": 24},
    ),
    _lm(
        "GPT-NeoX 20B", "gpt_neox", hidden_size=6144, num_attention_heads=64, intermediate_size=24576,
        vocab_size=50432, num_hidden_layers=4, full={"num_hidden_layers": 44},
    ),
    _lm(
        "GPT-OSS 20B", "gpt_oss", hidden_size=2880, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, intermediate_size=2880, num_local_experts=32, vocab_size=201088, num_hidden_layers=6,
        classes=2, layer_types=SLIDING_EVERY_OTHER * 3,
        full={"num_hidden_layers": 24, "layer_types": SLIDING_EVERY_OTHER * 12},
    ),
    _lm(
        "Mixtral 8x7B", "mixtral", hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
        num_hidden_layers=4, full={"num_hidden_layers": 32},
    ),
    _lm(
        "Qwen3 30B-A3B", "qwen3_moe", hidden_size=2048, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
        num_hidden_layers=4, full={"num_hidden_layers": 48},
    ),
    _lm(
        "DeepSeek-V3", "deepseek_v3", num_hidden_layers=7, first_k_dense_replace=3, classes=2,
        full={"num_hidden_layers": 61},
    ),
    _lm(
        "Llama 4 Scout", "llama4_text", hidden_size=5120, num_attention_heads=40, num_key_value_heads=8,
        head_dim=128, intermediate_size=8192, intermediate_size_mlp=16384, num_local_experts=16,
        num_experts_per_tok=1, vocab_size=202048, interleave_moe_layer_step=1, num_hidden_layers=8, classes=2,
        full={"num_hidden_layers": 48},
    ),
    _lm(
        "Mamba 2.8B", "mamba", hidden_size=2560, num_hidden_layers=4, vocab_size=50280, seq_len=64,
        full={"num_hidden_layers": 64},
    ),
    _lm(
        "Mamba-2 2.7B", "mamba2", hidden_size=2560, num_heads=80, head_dim=64, state_size=128, n_groups=1,
        vocab_size=50288, num_hidden_layers=4, full={"num_hidden_layers": 64},
    ),
)  # fmt: skip

ENCODERS = (
    _hf("BERT large", "bert", hidden_size=1024, num_attention_heads=16, intermediate_size=4096,
        num_hidden_layers=4, seq_len=512, full={"num_hidden_layers": 24}),
    _hf("RoBERTa large", "roberta", hidden_size=1024, num_attention_heads=16, intermediate_size=4096,
        architectures=["RobertaForSequenceClassification"], vocab_size=50265, max_position_embeddings=514,
        num_hidden_layers=4, seq_len=512, full={"num_hidden_layers": 24}),
    _hf("T5 3B", "t5", d_model=1024, d_kv=128, d_ff=16384, num_heads=32, num_layers=5, num_decoder_layers=5,
        classes=4, seq_len=512, full={"num_layers": 24, "num_decoder_layers": 24}),
    _hf("Whisper large", "whisper", d_model=1280, encoder_attention_heads=20, decoder_attention_heads=20,
        encoder_ffn_dim=5120, decoder_ffn_dim=5120, encoder_layers=4, decoder_layers=4, num_mel_bins=80,
        max_target_positions=448, classes=2, seq_len=448,
        full={"encoder_layers": 32, "decoder_layers": 32}),
    _hf("ViT huge", "vit", hidden_size=1280, num_attention_heads=16, intermediate_size=5120, image_size=224,
        patch_size=14, architectures=["ViTForImageClassification"], num_hidden_layers=4,
        full={"num_hidden_layers": 32}),
)  # fmt: skip


def _llava(text_layers: int, vision_layers: int) -> dict[str, Any]:
    """LLaVA 1.5 7B: the projector reads the vision tower's last but one layer."""
    return {
        "text_config": {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
                        "intermediate_size": 11008, "vocab_size": 32064, "num_hidden_layers": text_layers},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "num_attention_heads": 16,
                          "intermediate_size": 4096, "patch_size": 14, "image_size": 336,
                          "num_hidden_layers": vision_layers},
    }  # fmt: skip


TWO_TOWERS = (
    _hf("LLaVA 1.5 7B", "llava", image_token_index=32000, vision_feature_layer=-2, classes=2, seq_len=2048,
        full=_llava(32, 24), **_llava(4, 4)),
)  # fmt: skip


def _clip(text_layers: int = 4, vision_layers: int = 4) -> nn.Module:
    import transformers

    config = transformers.CLIPConfig(
        text_config={"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": text_layers},
        vision_config={"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
                       "patch_size": 14, "num_hidden_layers": vision_layers},
        projection_dim=768,
    )  # fmt: skip
    return transformers.CLIPModel(config)


def _clip_inputs(batch: int, seq: int) -> dict[str, Any]:
    return {
        "input_ids": torch.zeros(batch, 77, dtype=torch.long),
        "pixel_values": torch.zeros(batch, 3, 224, 224),
        "return_loss": True,
    }


class Classifier(nn.Module):
    """A recurrent text classifier over padded batches."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50_000, 512)
        self.recurrent = cell(512, 1024, num_layers=layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2048, 20)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the class."""
        states, _ = self.recurrent(self.embedding(tokens))
        return F.cross_entropy(self.head(states[:, -1]), labels)


def _classifier_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return {"tokens": tokens, "labels": torch.zeros(batch, dtype=torch.long)}


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Perceptron(nn.Module):
    """An MLP with equal hidden layers, a dict as its output and keyword-only arguments."""

    def __init__(self, width: int = 8192, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(784, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        )
        self.last = nn.Linear(width, 10)

    def forward(self, *, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits and the loss."""
        logits = self.last(self.blocks(self.first(images.flatten(1))))
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def _image_inputs(size: int, channels: int = 3) -> Inputs:
    def inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
        return {
            "images": torch.zeros(batch, channels, size, size),
            "labels": torch.zeros(batch, dtype=torch.long),
        }

    return inputs


class Recommender(nn.Module):
    """DLRM: bags of ids in tables of up to 100 million rows, dot products, two MLPs."""

    def __init__(
        self, rows: tuple[int, ...] = (100_000_000, 40_000_000, 10_000_000, 500_000, 10_000)
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 128, mode="sum") for n in rows)
        self.bottom = _mlp(13, 512, 256, 128)
        pairs = len(rows) * (len(rows) + 1) // 2
        self.top = _mlp(128 + pairs, 1024, 1024, 512, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, clicks: torch.Tensor) -> torch.Tensor:
        """Binary cross-entropy of the clicks."""
        x = F.relu(self.bottom(dense))
        bags = [table(part) for table, part in zip(self.tables, ids.unbind(1), strict=True)]
        features = torch.stack([x, *bags], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        row, column = torch.tril_indices(features.shape[1], features.shape[1], offset=-1, device="meta")
        score = self.top(torch.cat([x, products[:, row, column]], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicks)


def _recommender_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {
        "dense": torch.zeros(batch, 13),
        "ids": torch.zeros(batch, 5, 20, dtype=torch.long),
        "clicks": torch.zeros(batch),
    }


class TwoTower(nn.Module):
    """Retrieval: users and items embedded by towers of their own, in-batch softmax."""

    def __init__(self, users: int = 50_000_000, items: int = 10_000_000) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 128), nn.Embedding(items, 128)
        self.user_tower, self.item_tower = _mlp(128, 1024, 512, 128), _mlp(128, 1024, 512, 128)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the right item among the batch's."""
        left = F.normalize(self.user_tower(self.users(user)), dim=-1)
        right = F.normalize(self.item_tower(self.items(item)), dim=-1)
        return F.cross_entropy(left @ right.T / 0.05, torch.arange(user.shape[0], device=user.device))


def _two_tower_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {"user": torch.zeros(batch, dtype=torch.long), "item": torch.zeros(batch, dtype=torch.long)}


class Adapted(nn.Module):
    """A frozen linear layer with a trainable product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Like the layer, plus what was learnt."""
        return self.base(x) + self.scale * self.up(self.down(x))


def adapt(model: nn.Module, names: tuple[str, ...], rank: int = 16, alpha: float = 32.0) -> nn.Module:
    """Freeze a model and put adapters beside the linear layers of those names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, Adapted(child, rank, alpha))
    return model


def _lora(layers: int = 4) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        vocab_size=128256, num_hidden_layers=layers, use_cache=False,
    )  # fmt: skip
    return adapt(transformers.LlamaForCausalLM(config), ("q_proj", "k_proj", "v_proj", "o_proj"))


def _lora_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


PLAIN = (
    Family(name="Llama 3 8B, LoRA", classes=1, decoder_only=True, build=_lora, inputs=_lora_inputs,
           package="transformers", full={"layers": 32}),
    Family(name="CLIP large", classes=2, build=_clip, inputs=_clip_inputs, package="transformers",
           full={"text_layers": 12, "vision_layers": 24}),
    Family(name="MLP", classes=1, build=Perceptron, inputs=_image_inputs(28, 1), full={"layers": 24}),
    Family(name="LSTM classifier", classes=0, build=lambda: Classifier(nn.LSTM), inputs=_classifier_inputs,
           seq_len=32),
    Family(name="GRU classifier", classes=0, build=lambda: Classifier(nn.GRU), inputs=_classifier_inputs,
           seq_len=32),
    Family(name="DLRM", classes=0, build=Recommender, inputs=_recommender_inputs),
    Family(name="Two towers", classes=0, build=TwoTower, inputs=_two_tower_inputs),
)  # fmt: skip


# --------------------------------------------------------------------------- other packages


class _Anything(types.ModuleType):
    """A module that has every attribute: what timm imports of torchvision but does not use to build."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Enumeration


class _Words(type):
    """Every attribute of such a class is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name.lower()


class _Enumeration(metaclass=_Words):
    """Stands for any class of torchvision."""


class _Torchvision:
    """Finds every torchvision module; only used where the real one is missing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A spec for `torchvision` and what is in it."""
        if name.partition(".")[0] != "torchvision":
            return None
        return ModuleSpec(name, self, is_package=True)  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """An empty module."""
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def _timm(name: str, **options: Any) -> nn.Module:
    try:
        import torchvision  # noqa: F401  # type: ignore[import-not-found]
    except ImportError:
        finder = _Torchvision()
        sys.meta_path.append(finder)  # type: ignore[arg-type]
        try:
            import timm
        finally:
            sys.meta_path.remove(finder)  # type: ignore[arg-type]
            for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
                del sys.modules[module]
    import timm

    return _WithLabels(timm.create_model(name, **options))


class _WithLabels(nn.Module):
    """An image classifier and its cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the class."""
        return F.cross_entropy(self.network(images), labels)


def _vision(name: str, model: str, classes: int) -> Family:
    return Family(
        name=name, classes=classes, build=lambda: _timm(model), inputs=_image_inputs(224), package="timm"
    )


VISION = (
    _vision("ResNet-50", "resnet50", 4),
    _vision("Wide ResNet-50-2", "wide_resnet50_2", 4),
    _vision("ConvNeXt base", "convnext_base", 4),
    _vision("Swin base", "swin_base_patch4_window7_224", 2),
)


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel  # pyright: ignore[reportPrivateImportUsage]

    return UNet2DConditionModel(cross_attention_dim=768)


def _unet_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {
        "sample": torch.zeros(batch, 4, 64, 64),
        "timestep": torch.zeros(batch, dtype=torch.long),
        "encoder_hidden_states": torch.zeros(batch, 77, 768),
    }


def _dit(num_layers: int = 5) -> nn.Module:
    from diffusers import DiTTransformer2DModel  # pyright: ignore[reportPrivateImportUsage]

    return DiTTransformer2DModel(
        num_attention_heads=16, attention_head_dim=72, in_channels=4, out_channels=8, sample_size=32,
        num_layers=num_layers,
    )  # fmt: skip


def _dit_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.zeros(batch, 4, 32, 32),
        "timestep": torch.zeros(batch, dtype=torch.long),
        "class_labels": torch.zeros(batch, dtype=torch.long),
    }


def _sd3(num_layers: int = 5) -> nn.Module:
    from diffusers import SD3Transformer2DModel  # pyright: ignore[reportPrivateImportUsage]

    return SD3Transformer2DModel(
        sample_size=64, num_layers=num_layers, num_attention_heads=24, attention_head_dim=64,
        caption_projection_dim=1536,
    )  # fmt: skip


def _sd3_inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.zeros(batch, 16, 64, 64),
        "encoder_hidden_states": torch.zeros(batch, 154, 4096),
        "pooled_projections": torch.zeros(batch, 2048),
        "timestep": torch.zeros(batch, dtype=torch.long),
    }


DIFFUSION = (
    Family(name="UNet (SD 1.5)", classes=1, traced_whole=True, build=_unet, inputs=_unet_inputs,
           package="diffusers"),
    Family(name="DiT XL/2", classes=1, build=_dit, inputs=_dit_inputs, package="diffusers",
           full={"num_layers": 28}),
    Family(name="SD3 medium", classes=2, build=_sd3, inputs=_sd3_inputs, package="diffusers",
           full={"num_layers": 24}),
)  # fmt: skip

FAMILIES = {
    family.name: family for family in (*LANGUAGE, *ENCODERS, *TWO_TOWERS, *PLAIN, *VISION, *DIFFUSION)
}
