"""Models with the sizes of published ones and random weights: what ``bench gpu`` measures.

A shape is a ``ModelShape``; ``write_policy`` makes a Hugging Face folder of the family that it belongs to: Qwen3 has
norms of queries and keys, Qwen2 has biases, Llama has neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ragr1_actors.core.models.huggingface import AutoModelForCausalLM
from ragr1_actors.core.models.model_shape import ModelShape
from ragr1_actors.training.tiny_policy import train_tokenizer

SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
"""Made by ``python -m benchmarks.real.models``; where it is, the shape ``135m`` has its weights."""


def _shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **options: Any) -> ModelShape:
    options = {"head_dim": hidden // heads, "vocab_size": 151_936, "is_tied": True} | options
    return ModelShape(hidden, intermediate, layers, heads, kv_heads, **options)


SMALL = _shape(128, 344, 4, 4, 2, vocab_size=2048, has_qkv_bias=True)
"""Runs on a CPU in a second."""
QWEN25 = {
    "0.5b": _shape(896, 4864, 24, 14, 2, has_qkv_bias=True),
    "1.5b": _shape(1536, 8960, 28, 12, 2, has_qkv_bias=True),
    "3b": _shape(2048, 11_008, 36, 16, 2, has_qkv_bias=True),
    "7b": _shape(3584, 18_944, 8, 28, 4, has_qkv_bias=True, vocab_size=152_064, is_tied=False),
}
"""Qwen2.5's; the 7B shape has 8 of its 28 layers, so that it fits beside its gradient on any card."""
SERVED = {
    "135m": _shape(576, 1536, 30, 9, 3, vocab_size=49_152),
    "0.6b": _shape(1024, 3072, 28, 16, 8, head_dim=128, has_qk_norm=True),
    "1.7b": _shape(2048, 6144, 28, 16, 8, head_dim=128, has_qk_norm=True),
    "4b": _shape(2560, 9728, 36, 32, 8, head_dim=128, has_qk_norm=True),
}
"""SmolLM2's and Qwen3's, which the engine and the learner both run."""
SHAPES = QWEN25 | SERVED


def policy_of(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The folder of the shape ``name``: SmolLM2's own weights if they are there, else random ones in ``directory``."""
    if name == "135m" and SMOLLM2.is_dir():
        return SMOLLM2
    folder = directory / name
    return folder if folder.is_dir() else write_policy(folder, SHAPES[name], dtype)


def write_policy(directory: Path, shape: ModelShape, dtype: torch.dtype) -> Path:
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
