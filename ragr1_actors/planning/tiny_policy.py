"""Makes tiny random policies, of text or with images: ordinary Hugging Face folders, without a model hub.

The tokenizer is byte-level: common words of the given texts are single tokens, and any other text falls back to bytes,
so that no text is lost or unknown.

The model is a small random ``Qwen2ForCausalLM``. ``AutoTokenizer`` loads such a folder with Qwen2's tokenizer class.
That class has its own pre-tokenizer (it cuts numbers into digits) and keeps only vocabulary, merges and added tokens of
the saved one. So the words are added tokens, space included, which load as they were saved.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from ragr1_actors.core.config import PolicySettings
from ragr1_actors.core.models.model_shape import ModelShape, vision_tower
from ragr1_actors.core.models.vision import FAMILIES
from ragr1_actors.core.section import Section

_TAG_NAMES = ("think", "search", "information", "answer")
PROTOCOL_TAGS = tuple(f"<{slash}{name}>" for name in _TAG_NAMES for slash in ("", "/"))
PAD_TOKEN = "<|endoftext|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"
ROPE_THETA = 1_000.0
"""Base of the rotary position embedding; a small base separates near positions well."""
INITIALIZER_RANGE = 0.06
"""Standard deviation of the random weights. With Qwen's 0.02, for wide models, it learns to copy half as fast."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TinyPolicy(Section):
    """Maker of ``policy.model: tiny``, with ``policy.options``: its sizes; the defaults suit two CPU cores."""

    vocab_size: int = Field(2048, ge=300)
    """Number of tokens in the vocabulary."""
    hidden_size: int = Field(128, ge=8)
    """Width; an even multiple of ``num_heads``."""
    num_layers: int = Field(3, ge=1)
    """Number of decoder layers."""
    num_heads: int = Field(4, ge=1, validate_default=True)
    """Number of attention heads."""

    @field_validator("num_heads")
    @classmethod
    def _divides_width(cls, num_heads: int, info: ValidationInfo) -> int:
        width = info.data.get("hidden_size", 2 * num_heads)  # missing if it was refused itself
        if width % (2 * num_heads):
            even = max(4, (width // num_heads + 1) // 2 * 2)
            problem = f"hidden_size is {width}, expected an even multiple of the heads, such as {even * num_heads}"
            raise ValueError(f"{problem}: rotary positions turn pairs of numbers")
        return num_heads

    @property
    def shape(self) -> ModelShape:
        """Sizes of the policy, for ``ragr1 plan``."""
        return ModelShape(
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            vocab_size=self.vocab_size,
            is_tied=True,
            has_qkv_bias=True,
        )

    def write(self, directory: Path, texts: Iterable[str], *, seed: int, max_position_embeddings: int) -> None:
        """Write the folder of the policy, whose vocabulary has the commonest words of ``texts``."""
        make_tiny_policy(
            directory, texts, seed=seed, **self.model_dump(), max_position_embeddings=max_position_embeddings
        )


def make_tiny_policy(
    directory: Path,
    texts: Iterable[str],
    *,
    seed: int,
    vocab_size: int = 2048,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    max_position_embeddings: int = 1024,
) -> None:
    """Write tokenizer and weights to ``directory``, for ``AutoTokenizer`` and ``AutoModelForCausalLM``.

    The commonest words of ``texts`` become tokens, ``vocab_size`` at most. The feed-forward layers are twice as wide as
    ``hidden_size``. ``num_heads`` is for queries, keys and values. ``max_position_embeddings`` is in tokens.
    """
    from ragr1_actors.core.models.huggingface import Qwen2Config, Qwen2ForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save_pretrained(directory)
    config = Qwen2Config(
        **_text_settings(tokenizer, hidden_size, num_layers, num_heads, max_position_embeddings),
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
    )
    _write_model(directory, seed, lambda: Qwen2ForCausalLM(config))


def _text_settings(
    tokenizer: Any, hidden_size: int, num_layers: int, num_heads: int, max_position_embeddings: int
) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "intermediate_size": 2 * hidden_size,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": INITIALIZER_RANGE,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _write_model(directory: Path, seed: int, make: Callable[[], Any]) -> None:
    """Write a model with random weights, like ``save_pretrained`` without its import of DeepSpeed.

    That takes seconds, and warns without a GPU.
    """
    import torch
    from safetensors.torch import save_file

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().float()
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.float32
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Return a byte-level tokenizer with the protocol's tags, the chat template and the commonest words of ``texts``.

    Without merges, a word is one token if it is among the added tokens, else one token per byte. Merges would add
    fragments of every word to the vocabulary, and a tiny model computes every row of it for each token.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = (PAD_TOKEN, START_TOKEN, END_TOKEN)
    room = max(0, vocab_size - len(alphabet) - len(special) - len(PROTOCOL_TAGS))
    words = _commonest_words(chain(texts, ("user", "assistant", "system")), splitter, room)
    vocab = {token: index for index, token in enumerate((*special, *alphabet))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token=PAD_TOKEN,
        chat_template=CHAT_TEMPLATE,
        additional_special_tokens=[START_TOKEN],
        clean_up_tokenization_spaces=False,
    )
    # Tags are not "special", so that decoding keeps them for the environment to parse.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*PROTOCOL_TAGS, *words)])
    return tokenizer


def _commonest_words(texts: Iterable[str], splitter: Any, count: int) -> list[str]:
    """Return up to ``count`` words of more than one byte, commonest first, then in alphabetical order."""
    frequencies: Counter[str] = Counter()
    for text in texts:
        for tag in PROTOCOL_TAGS:
            text = text.replace(tag, "\0")
        for piece in text.split("\0"):
            frequencies.update(piece[start:end] for _, (start, end) in splitter.pre_tokenize_str(piece))
    ranked = sorted(frequencies.items(), key=lambda item: (-item[1], item[0]))
    return [word for word, _ in ranked if len(word.encode()) > 1][:count]


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
    from tokenizers import AddedToken
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, vocab_size - len(_TOKENS))
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in _TOKENS.values()])
    tokenizer.save_pretrained(directory)
    head_dim = hidden_size // num_heads
    sixth = head_dim // 6  # half of a head's dimensions are frequencies, shared by time, height and width
    rope = {
        "rope_type": "default",
        "rope_theta": ROPE_THETA,
        "mrope_section": [head_dim // 2 - 2 * sixth, sixth, sixth],
    }
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True  # vLLM reads it; transformers takes it for granted
    text = _text_settings(tokenizer, hidden_size, num_layers, num_heads, max_position_embeddings)
    config = AutoConfig.for_model(
        family,
        text_config=text | {"head_dim": head_dim, "rope_parameters": rope},
        vision_config=_vision_settings(family, hidden_size, vision_layers, num_heads, patch_size),
        tie_word_embeddings=True,
        **{key: tokenizer.convert_tokens_to_ids(name) for key, name in _TOKENS.items()},
    )
    _write_model(directory, seed, lambda: AutoModelForImageTextToText.from_config(config))
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


POLICIES: dict[str, type[TinyPolicy]] = {"tiny": TinyPolicy, "tiny_vision": TinyVisionPolicy}
"""Known words in ``policy.model``, for policies that are made in the run directory; others are folders or hub names."""


def policy_maker(policy: PolicySettings) -> TinyPolicy | None:
    """Return the maker of the policy; None if ``policy.model`` is a folder or hub name. ``ConfigError``: an option."""
    maker = POLICIES.get(policy.model)
    return None if maker is None else maker.read(policy.options, "policy.options")
