"""A policy as a Hugging Face folder: what ``AutoModelForCausalLM`` and vLLM load."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:  # imports peft
    from learners.models.lora import AdapterCopy

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


@dataclass(frozen=True)
class PolicyCopy:
    """A policy's weights in host memory, which no later step changes."""

    source: Path
    """The folder it was built from: configuration and tokenizer come from there."""
    dtype: str
    """``bfloat16``"""
    tensors: dict[str, torch.Tensor]
    """By Hugging Face name, a tied one once, adapters merged; empty on every rank but 0."""
    adapter: AdapterCopy | None = None
    """With ``learners.lora``, what was merged."""

    def write(self, directory: Path) -> None:
        """Write the folder, tokenizer included.

        Raises:
            OSError: the folder cannot be written; so does ``SafetensorError``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        copy_policy_files(self.source, directory, self.dtype)
        save_file(self.tensors, directory / "model.safetensors", metadata={"format": "pt"})


def copy_policy_files(source: Path, target: Path, dtype: str) -> None:
    """Copy configuration and tokenizer of a Hugging Face folder, but not its weights."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES) and file.resolve().parent != target.resolve():
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = dtype  # transformers loads in this dtype unless told otherwise
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
