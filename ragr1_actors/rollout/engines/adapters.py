"""Merging of adapters into a policy in an engine: A and B come from the learner, the other weights from the disk.

::

    update           lora_base = AdapterBase(folder, scaling)
                     ...q_proj.lora_A.weight, ...q_proj.lora_B.weight  ──┐
    folder, mapped   ...q_proj.weight = W ───────────────────────────────┴──► W + scaling * B A, in the engine's dtype

Every update begins at the W of the folder: no adapter is subtracted from a merged weight, so that rounding errors do
not add up over updates. Nothing is kept: all processes of a node share the pages of the folder's files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from cluster.storage import StoredFolder
from ragr1_actors.core.disk.digests import check_digests
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import EngineError, UserError
from ragr1_actors.core.models.model_files import is_weight
from ragr1_actors.core.weight_transport import AdapterBase

_INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_FILE = "model.safetensors"


def base_names(base: AdapterBase) -> list[str]:
    """Return the names of all weights of the base; ``EngineError`` if the folder is not on this node."""
    return sorted(_read_weights(base))


def merged_weights(
    adapters: Mapping[str, torch.Tensor],
    base: AdapterBase,
    dtype: torch.dtype,
    device: torch.device,
    names: Collection[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights by their Hugging Face names, with the adapters merged on ``device``, in the engine's ``dtype``.

    ``adapters`` has all adapters of the policy, by the names of their layers: ``...q_proj.lora_A.weight``. ``names``
    are the weights to yield; None means those with an adapter.

    Raises:
        EngineError: the folder is not on this node, or its policy does not have these layers.
    """
    weights = _read_weights(base)
    adapted = {f"{layer}.weight": layer for layer in _layers(adapters)}
    for name in adapted.keys() - weights.keys():
        raise EngineError(f"{base.folder} has no {name}, which an adapter came for; look which policy it is")
    for name in adapted if names is None else names:
        if name not in adapted:
            yield name, weights[name]
            continue
        a_RI, b_OR = (adapters[f"{adapted[name]}.lora_{part}.weight"].to(device).float() for part in "AB")
        weight_OI = weights[name].to(a_RI.device, dtype)
        yield name, (weight_OI.float() + base.scaling * (b_OR @ a_RI)).to(dtype)


def _layers(adapters: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the layers that have an adapter: ``model.layers.0.self_attn.q_proj``."""
    parts = {(*name.rpartition(".lora_")[::2],) for name in adapters}
    layers = sorted({layer for layer, _ in parts})
    expected = {(layer, part) for layer in layers for part in ("A.weight", "B.weight")}
    missing = [".lora_".join(pair) for pair in expected - parts]
    if missing or not layers:
        raise EngineError(f"weight update lacks {len(missing)} adapters, {min(missing, default='all')} among them")
    return layers


def _read_weights(base: AdapterBase) -> dict[str, torch.Tensor]:
    """Map the weights of a policy; nothing is read before it is used."""
    try:
        directory = StoredFolder.of(base.reference).fetch() if base.reference else Path(base.folder)
        if not directory.is_dir():
            directory = Path(snapshot_download(base.folder, allow_patterns=["*.safetensors", _INDEX_FILE]))
        check_digests(directory, is_weight)
        index = directory / _INDEX_FILE
        files = [_WEIGHT_FILE]
        if index.is_file():
            files = sorted(set(read_json(index)["weight_map"].values()))
        return {name: tensor for file in files for name, tensor in load_file(directory / file).items()}
    except (OSError, ValueError, KeyError, SafetensorError, HFValidationError, UserError) as error:
        raise EngineError(
            f"cannot read the weights of {base.folder}, which adapters are merged into: {error}; with learners.lora "
            "every node of an env runner must have this folder, with weights in safetensors: put --run-dir and "
            "policy.model on a file system that they share, or --run-dir on a storage"
        ) from error
