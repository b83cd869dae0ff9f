"""Models of given sizes with random weights, and the sizes of published ones: for ``bench gpu`` and ``bench learner``.

A shape is a ``ModelShape``; ``write_policy`` makes a Hugging Face folder of the family that it belongs to: Qwen3 has
norms of queries and keys, Qwen2 has biases, Llama has neither.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ragr1_actors.core.models.huggingface import AutoModelForCausalLM
from ragr1_actors.core.models.model_shape import ModelShape
from ragr1_actors.planning.tiny_policy import train_tokenizer

SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
"""Made by ``python -m benchmarks.real.models``; where it is, the shape ``135m`` has its weights."""


def make_shape(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int, **options: Any
) -> ModelShape:
    """A shape with tied embeddings whose heads share the width out, unless ``options`` say otherwise."""
    options = {"head_dim": hidden_size // num_heads, "is_tied": True} | options
    return ModelShape(hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, **options)


SMALL = make_shape(128, 344, 4, 4, 2, vocab_size=2048, has_qkv_bias=True)
"""Runs on a CPU in a second."""
QWEN25 = {size.lower(): ModelShape.of(f"Qwen/Qwen2.5-{size}") for size in ("0.5B", "1.5B", "3B", "7B")}
QWEN25["7b"] = replace(QWEN25["7b"], num_layers=8)
"""8 of 28 layers, so that it fits beside its gradient on any card."""
_QWEN3: dict[str, Any] = {"head_dim": 128, "vocab_size": 151_936, "has_qk_norm": True}
SERVED = {
    "135m": make_shape(576, 1536, 30, 9, 3, vocab_size=49_152),
    "0.6b": make_shape(1024, 3072, 28, 16, 8, **_QWEN3),
    "1.7b": make_shape(2048, 6144, 28, 16, 8, **_QWEN3),
    "4b": make_shape(2560, 9728, 36, 32, 8, **_QWEN3),
}
"""SmolLM2's and Qwen3's, which the engine and the learner both run."""
SHAPES = QWEN25 | SERVED


def policy_of(name: str, directory: Path) -> Path:
    """The folder of a shape, in bf16: SmolLM2's own weights if they are there, else random ones in ``directory``."""
    if name == "135m" and SMOLLM2.is_dir():
        return SMOLLM2
    folder = directory / name
    return folder if folder.is_dir() else write_policy(folder, SHAPES[name], torch.bfloat16)


def write_policy(directory: Path, shape: ModelShape, dtype: torch.dtype = torch.float32) -> Path:
    """Write random weights, made on the GPU if there is one, and a tokenizer of bytes; return ``directory``."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # of files on this disk
    family = "qwen3" if shape.has_qk_norm else "qwen2" if shape.has_qkv_bias else "llama"
    config = AutoConfig.for_model(
        family,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=16_384,
        tie_word_embeddings=shape.is_tied,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    train_tokenizer((), vocab_size=0).save_pretrained(directory)
    return directory
