"""The learners' state on disk: a safetensors file per rank, whose parts are put together to whole tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragr1_actors.core.disk.files import error_number
from ragr1_actors.core.disk.json_files import validated
from ragr1_actors.core.errors import DataError

LEARNER_FILE = "learner.safetensors"
"""File in a checkpoint with the learners' state; of several ranks, the part of rank 0. See ``learner_files``."""
LEARNER_PREFIX = "learner"
"""Beginning of the names of ``learner_files``."""


def learner_files(num_ranks: int) -> list[str]:
    """Return the files of the learners' state by rank: ``["learner.safetensors", "learner_1.safetensors"]``."""
    name = Path(LEARNER_FILE)
    return [LEARNER_FILE, *(f"{name.stem}_{rank}{name.suffix}" for rank in range(1, num_ranks))]


def rank_part(rank: int) -> str:
    """Return the name of a learner rank's part of a folder: ``rank_0``."""
    return f"rank_{rank}"


@dataclass(frozen=True)
class TensorPart:
    """Consecutive elements of a tensor."""

    values: NDArray[Any]
    """Values of the elements, ``[n]``."""
    start: int
    """Index of the first element in the flat tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


class Tensors(Mapping[str, NDArray[Any]]):
    """Whole tensors by name, made of parts; each is put together when it is read."""

    def __init__(self, parts: Iterable[Mapping[str, TensorPart]]) -> None:
        """Take the parts of several owners; raises ``DataError`` if some of a tensor's elements are missing."""
        self._parts: dict[str, list[TensorPart]] = {}
        for owned in parts:
            for name, part in owned.items():
                self._parts.setdefault(name, []).append(part)
        for name, found in self._parts.items():
            found.sort(key=lambda part: part.start)
            stop, size = 0, math.prod(found[0].shape)
            for part in found:
                stop = stop + part.values.size if part.start == stop else -1
            if stop != size:
                num_found = sum(part.values.size for part in found)
                raise DataError(f"there are {num_found} of {size} elements of {name}; the file of a rank is missing")

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return a tensor; a view, if it has one part."""
        parts = self._parts[name]
        values = parts[0].values if len(parts) == 1 else np.concatenate([part.values for part in parts])
        return values.reshape(parts[0].shape)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._parts)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._parts)


_RANK = re.compile(r".+_\d+")
_Places = dict[str, tuple[int, tuple[int, ...]]]
"""Places of the tensors in a file that are not whole: index of the first element, and the whole shape."""


def write_parts(path: Path, parts: Mapping[str, TensorPart], source: str = "") -> None:
    """Write one safetensors file: whole tensors in their shapes, others flat, with their places in its metadata.

    ``source`` names the owner of the parts; ``read_learner`` refuses parts of different sources.

    Raises:
        OSError: the file cannot be written, such as ``ENOSPC``.
    """
    tensors: dict[str, NDArray[Any]] = {}
    places: _Places = {}
    for name, part in parts.items():
        values = np.ascontiguousarray(part.values)
        if values.size == math.prod(part.shape):
            tensors[name] = values.reshape(part.shape)
        else:
            tensors[name], places[name] = values, (part.start, part.shape)
    try:
        save_file(tensors, path, metadata={"parts": json.dumps(places), "source": source})
    except SafetensorError as error:
        raise OSError(error_number(error), str(error), str(path)) from error


def read_learner(path: Path) -> Tensors:
    """Read the learners' state of any number of ranks; ``path`` is the file of rank 0, the others are beside it.

    Raises:
        DataError: a file is missing or damaged.
    """
    others = (file for file in path.parent.glob(f"{path.stem}_*{path.suffix}") if _RANK.fullmatch(file.stem))
    sources: dict[str, str] = {}
    found = []
    try:
        for file in (path, *others):
            parts, source = _read_parts(file)
            found.append(parts)
            sources[source] = file.name
        if len(sources) > 1:
            raise DataError(f"{' and '.join(sources.values())} are of different checkpoints")
        return Tensors(found)
    except DataError as error:
        raise DataError(f"{path.parent} is damaged: {error}") from error


def _read_parts(file: Path) -> tuple[dict[str, TensorPart], str]:
    """Return the parts in a file, and their source."""
    tensors = read_tensors(file)
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata() or {}
    places = validated(_Places, metadata.get("parts", "{}").encode(), str(file))
    parts = {name: TensorPart(tensor.ravel(), *places.get(name, (0, tensor.shape))) for name, tensor in tensors.items()}
    return parts, metadata.get("source", "")


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read a safetensors file as read-only views of mapped pages, which the processes of one node share.

    Raises:
        DataError: the file is missing, is not a whole safetensors file, or holds bfloat16, which numpy lacks.
    """
    import torch  # safe_open maps the file for torch; for numpy it copies every tensor into private memory

    tensors: dict[str, NDArray[Any]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor: torch.Tensor = file.get_tensor(name)
                tensors[name] = tensor.numpy()
                tensors[name].flags.writeable = False
    except (OSError, SafetensorError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return tensors
