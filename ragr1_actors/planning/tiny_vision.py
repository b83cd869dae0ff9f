"""Makes a tiny random policy that reads images, a Hugging Face folder of Qwen2.5-VL's or Qwen3-VL's shape."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ragr1_actors.core.models.model_shape import ModelShape, vision_tower
from ragr1_actors.core.models.vision import FAMILIES
from ragr1_actors.planning.tiny_policy import INITIALIZER_RANGE, ROPE_THETA, TinyPolicy, train_tokenizer

_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
}
MERGE_SIZE = 2
"""Number of patches of a placeholder, in each direction."""


class TinyVisionPolicy(TinyPolicy):
    """Maker of ``policy.model: tiny_vision``, with ``policy.options``: the sizes of ``tiny``, and those of images."""

    family: Literal["qwen2_5_vl", "qwen3_vl"] = "qwen2_5_vl"
    """Type of transformers whose shape the policy has."""
    vision_layers: int = Field(2, ge=1)
    """Number of layers of the vision tower, which is as wide as the text model."""
    patch_size: int = Field(4, ge=2)
    """Side of a patch in pixels; a placeholder is two patches wide and high."""
    max_image_tokens: int = Field(64, ge=1)
    """Number of placeholders to which a larger image is reduced."""

    @field_validator("num_heads")
    @classmethod
    def _divides_both_axes(cls, num_heads: int, info: ValidationInfo) -> int:
        width = info.data.get("hidden_size", 4 * num_heads)  # missing if it was refused itself
        if width % (4 * num_heads):
            fitting = (width // (4 * num_heads) + 1) * 4 * num_heads
            problem = f"hidden_size is {width}, expected a multiple of four times the heads, such as {fitting}"
            raise ValueError(f"{problem}: places in an image have two axes, of pairs of numbers")
        return num_heads

    @property
    def shape(self) -> ModelShape:
        """Sizes of the policy, for ``ragr1 plan``."""
        vision = _vision_settings(self.family, self.hidden_size, self.vision_layers, self.num_heads, self.patch_size)
        text = super().shape
        if self.family == "qwen3_vl":
            text = replace(text, has_qkv_bias=False, has_qk_norm=True)
        return replace(text, vision=vision_tower(self.family, vision))

    def write(self, directory: Path, texts: Iterable[str], *, seed: int, max_position_embeddings: int) -> None:
        """Write the folder of the policy, whose vocabulary has the commonest words of ``texts``."""
        make_tiny_vision_policy(
            directory, texts, seed=seed, **self.model_dump(), max_position_embeddings=max_position_embeddings
        )


def make_tiny_vision_policy(
    directory: Path,
    texts: Iterable[str],
    *,
    seed: int,
    family: str = FAMILIES[0],
    vocab_size: int = 512,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    vision_layers: int = 2,
    patch_size: int = 4,
    max_image_tokens: int = 64,
    max_position_embeddings: int = 1024,
) -> None:
    """Write tokenizer, image settings and weights to ``directory``; the arguments are those of ``make_tiny_policy``.

    The vision tower is as wide as the text model. ``patch_size`` is in pixels; an image with more placeholders than
    ``max_image_tokens`` is reduced.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, vocab_size - len(_TOKENS))
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in _TOKENS.values()])
    tokenizer.save_pretrained(directory)
    text = _text_settings(family, len(tokenizer), hidden_size, num_layers, num_heads)
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        family,
        text_config=text | {"max_position_embeddings": max_position_embeddings},
        vision_config=_vision_settings(family, hidden_size, vision_layers, num_heads, patch_size),
        tie_word_embeddings=True,
        **{key: tokenizer.convert_tokens_to_ids(name) for key, name in _TOKENS.items()},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).float()
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.float32
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    side = (patch_size * MERGE_SIZE) ** 2
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": side, "longest_edge": max_image_tokens * side},
        "patch_size": patch_size,
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "image_mean": OPENAI_CLIP_MEAN,  # Qwen2.5-VL's, and the defaults; vLLM reads them here
        "image_std": OPENAI_CLIP_STD,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _text_settings(family: str, vocab_size: int, hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    head_dim = hidden_size // num_heads
    sixth = head_dim // 6  # half of a head's dimensions are frequencies, shared by time, height and width
    rope = {
        "rope_type": "default",
        "rope_theta": ROPE_THETA,
        "mrope_section": [head_dim // 2 - 2 * sixth, sixth, sixth],
    }
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True  # vLLM reads it; transformers takes it for granted
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "intermediate_size": 2 * hidden_size,
        "rope_parameters": rope,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
    }


def _vision_settings(family: str, hidden_size: int, num_layers: int, num_heads: int, patch_size: int) -> dict[str, Any]:
    settings = {
        "depth": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_heads": num_heads,
        "out_hidden_size": hidden_size,
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE_SIZE,
        "initializer_range": INITIALIZER_RANGE,
    }
    if family == "qwen3_vl":
        return settings | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return settings | {"window_size": 8 * patch_size * MERGE_SIZE, "fullatt_block_indexes": [*range(num_layers)]}
