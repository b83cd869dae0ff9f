"""A policy trained by adapters, as an engine gets it: A and B from the learner, the weights beside them from the disk.

::

    update           lora_base = AdapterBase(folder, scaling)
                     ...q_proj.lora_A.weight, ...q_proj.lora_B.weight  ──┐
    folder, mapped   ...q_proj.weight = W ───────────────────────────────┴──► W + scaling * B A, in the engine's dtype

Every update begins at the W of the folder: nothing is taken out of a merged weight again, so that no rounding adds up
over updates, and nothing is kept, as all processes of a node share the pages of the folder's files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from cluster.weights.weight_stream import Weights
from ragr1_actors.core.errors import EngineError
from ragr1_actors.core.weight_transport import AdapterBase

_INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_FILE = "model.safetensors"
_SOME = 16
"""Weights merged between two passes of a model."""


def merged_weights(
    adapters: Mapping[str, torch.Tensor],
    base: AdapterBase,
    dtype: torch.dtype,
    *,
    adapted_only: bool = False,
    is_tied: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights by their Hugging Face names, those that have an adapter merged, on its device.

    Args:
        adapters: all of the policy's, by the names of their layers: ``...q_proj.lora_A.weight``.
        base: what they are merged into.
        dtype: of the engine, in which the learner has the base, too.
        adapted_only: leave out what has no adapter.
        is_tied: yield the embedding as ``lm_head.weight`` too.

    Raises:
        EngineError: the folder is not on this node, or not that of a policy with these adapters.
    """
    weights = _read_weights(base.folder)
    for name in [f"{layer}.weight" for layer in _layers(adapters)]:
        if name not in weights:
            raise EngineError(f"{base.folder} has no {name}, which an adapter came for; look which policy it is")
    for name in sorted(weights):
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in adapters:
            a_RI, b_OR = adapters[f"{layer}.lora_A.weight"].float(), adapters[f"{layer}.lora_B.weight"].float()
            weight_OI = weights[name].to(a_RI.device, dtype)
            yield name, (weight_OI.float() + base.scaling * (b_OR @ a_RI)).to(dtype)
        elif not adapted_only:
            yield name, weights[name]
            if is_tied and name == "model.embed_tokens.weight":
                yield "lm_head.weight", weights[name]


class Source(Protocol):
    """Where weights come from, some at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether everything has been taken."""
        ...

    def take(self) -> Weights:
        """Return what there is; it may be nothing."""
        ...


class MergedSource:
    """Merges the adapters of another source, once all of them are there."""

    def __init__(self, adapters: Source, base: AdapterBase, dtype: torch.dtype, *, is_tied: bool) -> None:
        """Merge into all of ``base``; see ``merged_weights``."""
        self._source = adapters
        self._adapters: dict[str, torch.Tensor] = {}
        self._merge = partial(merged_weights, self._adapters, base, dtype, is_tied=is_tied)
        self._merged: Iterator[tuple[str, torch.Tensor]] | None = None
        self.is_complete = False

    def take(self) -> Weights:
        """Return some merged weights."""
        if self._merged is None:
            self._adapters |= dict(self._source.take())
            if self._source.is_complete:
                self._merged = self._merge()
            return []
        weights = list(islice(self._merged, _SOME))
        self.is_complete = not weights
        return weights


def _layers(adapters: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the layers that have an adapter: ``model.layers.0.self_attn.q_proj``."""
    parts = {(*name.rpartition(".lora_")[::2],) for name in adapters}
    layers = sorted({layer for layer, _ in parts})
    missing = [
        f"{layer}.lora_{part}" for layer in layers for part in ("A.weight", "B.weight") if (layer, part) not in parts
    ]
    if missing or not layers:
        raise EngineError(f"weight update lacks {len(missing)} adapters, {min(missing, default='all')} among them")
    return layers


def _read_weights(folder: str) -> dict[str, torch.Tensor]:
    """Map the weights of a policy; nothing is read before it is used."""
    try:
        directory = Path(folder)
        if not directory.is_dir():
            directory = Path(snapshot_download(folder, allow_patterns=["*.safetensors", _INDEX_FILE]))
        index = directory / _INDEX_FILE
        files = [_WEIGHT_FILE]
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    except (OSError, ValueError, KeyError, SafetensorError, HFValidationError) as error:
        raise EngineError(
            f"cannot read the weights of {folder}, which adapters are merged into: {error}; with learners.lora every "
            "node of an env runner must have this folder, with weights in safetensors: put --run-dir and policy.model "
            "on a file system that they share"
        ) from error
