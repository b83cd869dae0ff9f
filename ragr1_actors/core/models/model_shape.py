"""Sizes of a decoder-only language model, read from its ``config.json``: parameters, and bytes per token.

Pure arithmetic: no model is loaded. ``ragr1 plan`` computes memory and time from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import ConfigError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl")
"""Values of ``model_type`` whose parameters ``ModelShape`` counts exactly."""

_QWEN25: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151_936, "head_dim": 128}
_QWEN25_TOWER: dict[str, Any] = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    **{"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2},
}
HUB_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN25
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 64},
    "Qwen/Qwen2.5-1.5B": _QWEN25
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-3B": _QWEN25
    | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-7B": _QWEN25
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 152_064},
    "Qwen/Qwen2.5-14B": _QWEN25
    | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40}
    | {"num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 152_064},
    "Qwen/Qwen2.5-VL-7B": {"model_type": "qwen2_5_vl", "vocab_size": 152_064, "tie_word_embeddings": False}
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vision_config": _QWEN25_TOWER | {"out_hidden_size": 3584}},
}
"""Sizes of models that recipes name, from the ``config.json`` on their hub pages; ``-Instruct`` has the same."""


@dataclass(frozen=True)
class VisionTower:
    """Sizes of the part of a model that reads images."""

    num_parameters: int
    """Number of parameters, those that merge patches included: 676,550,144 of Qwen2.5-VL-7B."""
    layers: ModelShape
    """Sizes of its layers, as far as they decide over activations."""
    patches_per_token: int
    """Number of patches of a placeholder."""


def vision_tower(model_type: str, config: Mapping[str, Any]) -> VisionTower:
    """Read the ``vision_config`` of a ``config.json``; raises as a mapping does that lacks a size."""
    width, inner, depth = (int(config[name]) for name in ("hidden_size", "intermediate_size", "depth"))
    heads, out, merged = (
        int(config["num_heads"]),
        int(config["out_hidden_size"]),
        int(config["spatial_merge_size"]) ** 2,
    )
    is_qwen3 = model_type == "qwen3_vl"
    norm = (2 if is_qwen3 else 1) * width  # with a bias
    mlp = (2 if is_qwen3 else 3) * width * inner + (1 if is_qwen3 else 2) * inner + width
    layer = 2 * norm + 4 * width * width + 4 * width + mlp
    merging = merged * width * (merged * width + 1) + (merged * width + 1) * out
    patch = 3 * int(config.get("temporal_patch_size", 2)) * int(config["patch_size"]) ** 2 * width
    total = patch + depth * layer + norm + merging
    if is_qwen3:  # places of patches are learned, and some layers have a merging of their own, with a wider norm
        deep = len(config["deepstack_visual_indexes"])
        total += width + int(config["num_position_embeddings"]) * width + deep * (merged * norm + merging)
    layers = ModelShape(width, inner, depth, heads, heads, width // heads, 1, is_tied=True)
    return VisionTower(total, layers, merged)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder with gated MLP and grouped-query attention."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    """Whether the head's weight is the embedding's."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    vision: VisionTower | None = None
    """Sizes of what reads images; None for a model of texts."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> Self:
        """Read the contents of a ``config.json``; ``name`` is for the error message.

        Raises:
            ConfigError: the architecture is not one of ``MODEL_TYPES``, or a size is missing.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"{name}: its config.json is {type(config).__name__}, expected an object; copy it again")
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"{name}: its memory cannot be computed: got model_type {model_type!r}, expected one of "
                f"{', '.join(MODEL_TYPES)}"
            )
        vision, whole = None, config
        try:
            if "vision_config" in config:
                vision, config = vision_tower(model_type, config["vision_config"]), config.get("text_config", config)
            num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
            shape = cls(
                hidden_size=hidden_size,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or hidden_size // num_heads),
                vocab_size=int(config["vocab_size"]),
                is_tied=bool(whole.get("tie_word_embeddings", False)),
                has_qkv_bias=model_type in ("qwen2", "qwen2_5_vl") or bool(config.get("attention_bias", False)),
                has_qk_norm=model_type in ("qwen3", "qwen3_vl"),
                vision=vision,
            )
        except KeyError as error:
            raise ConfigError(f"{name}: its config.json has no {error.args[0]}; take a whole model folder") from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"{name}: a size in its config.json is no number: {error}; copy it again") from error
        sizes = {key: value for key, value in asdict(shape).items() if type(value) is int}
        if wrong := [f"{key} {value}" for key, value in sizes.items() if value < 1]:
            raise ConfigError(f"{name}: its config.json gives {wrong[0]}, expected at least 1; copy it again")
        return shape

    @classmethod
    def of(cls, model: str) -> Self:
        """Read a Hugging Face folder or hub name.

        A hub name outside ``HUB_CONFIGS`` is looked up in the local cache of the hub, then on the hub.

        Raises:
            ConfigError: there is no ``config.json``, or it is not one of ``MODEL_TYPES``.
        """
        known, is_folder = HUB_CONFIGS.get(model.removesuffix("-Instruct")), Path(model).is_dir()
        if known is not None and not is_folder:  # a folder of this name is what is loaded
            return cls.from_config(known, model)
        path = Path(model) / "config.json"
        if is_folder and not path.is_file():
            raise ConfigError(f"policy.model: the folder {model} holds no config.json; name a whole model folder")
        if not path.is_file():
            path = _hub_file(model)
        return cls.from_config(read_json(path, "copy the model again"), model)

    @property
    def attention_size(self) -> int:
        """Width of the queries: heads times head dimension."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        attention = 2 * self.hidden_size * (self.attention_size + self.kv_size)
        biases = (self.attention_size + 2 * self.kv_size) * self.has_qkv_bias
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.has_qk_norm
        return attention + biases + norms + 3 * self.hidden_size * self.intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; an untied head has as many in addition."""
        return self.vocab_size * self.hidden_size

    @property
    def backbone_parameters(self) -> int:
        """Parameters without the head: embedding, layers, the last norm and the vision tower."""
        seeing = 0 if self.vision is None else self.vision.num_parameters
        return self.embedding_parameters + self.num_layers * self.layer_parameters + self.hidden_size + seeing

    @property
    def num_parameters(self) -> int:
        """Number of parameters, a tied head counted once: 7,615,616,512 for Qwen2.5-7B."""
        return self.backbone_parameters + (0 if self.is_tied else self.embedding_parameters)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes of keys and values of one token in all layers: 57,344 for Qwen2.5-7B in bfloat16."""
        return 2 * self.num_layers * self.kv_size * element_bytes

    @property
    def forward_flops_per_token(self) -> int:
        """FLOPs per token of one forward pass without attention's pairs: 2 per parameter of the layers and the head.

        Source: Chowdhery et al., arXiv:2204.02311, appendix B. With a vision tower all tokens count as of images.
        """
        seeing = 0 if self.vision is None else self.vision.patches_per_token * self.vision.num_parameters
        return 2 * (self.num_layers * self.layer_parameters + self.embedding_parameters + seeing)


def _hub_file(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"policy.model: {model!r} is no folder with a config.json, and the hub did not give one "
            f"({type(error).__name__}); name a folder, or download the model first"
        ) from error
