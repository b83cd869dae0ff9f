"""Export of the policy: weights by Hugging Face name, gathered from the engine, and the Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from learners.deepspeed.deepspeed_engine import DeepSpeedEngine, State, WholeTensor
from ragr1_actors.core.config import LoraSettings
from ragr1_actors.core.disk.digests import LIST_FILE, check_digests, write_list
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.models.model_files import is_weight

if TYPE_CHECKING:  # imports peft
    from learners.models.lora import AdapterCopy


def policy_tensors(
    engine: DeepSpeedEngine, lora: LoraSettings | None, *, adapters_only: bool = False
) -> Iterator[WholeTensor]:
    """Yield every parameter of the policy by Hugging Face name, a tied one once. All ranks gather in the same order.

    With ``lora``, adapters are merged into their weights; ``adapters_only`` yields the adapters instead.
    """
    tensors: Iterator[WholeTensor]
    if lora is None:
        tensors = (engine.whole(name, parameter) for name, parameter in engine.module.named_parameters())
    else:
        from learners.models.lora import adapter_tensors, merged_tensors  # imports peft

        tensors = adapter_tensors(engine) if adapters_only else merged_tensors(engine)
    return (tensor._replace(name=tensor.name.removeprefix("model.")) for tensor in tensors)


def copy_tensors(tensors: Iterator[WholeTensor], rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gather tensors; return them by name in rank 0's memory, and none on the other ranks. All ranks call."""
    copies = {}
    for name, _, gather in tensors:
        whole = gather()
        if rank == 0:
            copies[name] = whole.to("cpu", dtype).contiguous()
    return copies


def copy_arrays(tensors: Iterator[WholeTensor], rank: int, is_tied: bool, dtype: torch.dtype = torch.float32) -> State:
    """Gather tensors as arrays, a tied ``lm_head.weight`` too; uint16 holds the bits of bfloat16, as NumPy has none."""
    copies = copy_tensors(tensors, rank, dtype)
    if dtype == torch.bfloat16:
        copies = {name: copy.view(torch.uint16) for name, copy in copies.items()}
    weights: State = {name: copy.numpy() for name, copy in copies.items()}
    for name in ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"):
        if is_tied and name in weights:
            weights["lm_head.weight"] = weights[name]
    return weights


@dataclass(frozen=True)
class PolicyCopy:
    """Copy of a policy's weights in the host's memory, to be written while learning continues."""

    source: Path
    """Folder from which the policy was built: configuration and tokenizer are copied from it."""
    dtype: str
    """Type of the weights, such as ``bfloat16``."""
    tensors: dict[str, torch.Tensor]
    """Tensors by Hugging Face name, a tied one once, adapters merged; empty on every rank except 0."""
    adapter: AdapterCopy | None = None
    """Adapters that were merged, with ``learners.lora``."""

    def write(self, directory: Path) -> None:
        """Write the folder that ``AutoModelForCausalLM`` and vLLM load, tokenizer and ``digests.json`` included.

        Raises:
            OSError: the folder cannot be written; or ``SafetensorError``.
            DataError: a file to be copied was damaged meanwhile.
        """
        check_digests(self.source, is_read=lambda name: not is_weight(name))
        directory.mkdir(parents=True, exist_ok=True)
        for file in self.source.iterdir():
            is_copied = file.name != LIST_FILE and not is_weight(file.name)
            if file.is_file() and is_copied and file.resolve().parent != directory.resolve():
                shutil.copyfile(file, directory / file.name)
        config = read_json(self.source / "config.json")
        config["dtype"] = self.dtype  # transformers loads in this dtype by default
        (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        save_file(self.tensors, directory / "model.safetensors", metadata={"format": "pt"})
        write_list(directory)
