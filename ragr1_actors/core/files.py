"""Files and folders that are whole or absent, and the two formats that a run stores: JSON and safetensors."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragr1_actors.core.errors import DataError, first_problem

POLICY_FOLDER = "policy"
"""In a checkpoint: the policy as a Hugging Face folder."""
ADAPTER_FOLDER = "adapter"
"""In a checkpoint of a run with ``learners.lora``: the adapters, for peft to load beside the stage's first policy."""
LEARNER_FILE = "learner.safetensors"
"""In a checkpoint: the learners' state."""
WRITING = ".writing_"
"""Prefix of files and folders that are being written, or were left by a crash: never read."""

T = TypeVar("T")
_WHOLE_UP_TO = 64 * 2**20
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 2**16
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors words an errno


def write_file(final: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` create a file that gets the name ``final`` once it is whole and on disk; it replaces another.

    ``write_file(path, lambda writing: writing.write_text(text, "utf-8"))``. The temporary name is unique: several
    processes may write one file, and the last one to finish wins.

    Raises:
        OSError: the file cannot be written; ``final`` is then as it was, and so it is where ``write`` raises.
    """
    writing = final.with_name(f"{WRITING}{secrets.token_hex(4)}_{final.name}")
    try:
        write(writing)
        sync(writing)
        writing.replace(final)
        sync(final.parent)
    finally:
        writing.unlink(missing_ok=True)


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a folder that gets the name ``final`` once it is whole; another of that name is replaced."""
    writing = final.with_name(f"{WRITING}{final.name}")
    shutil.rmtree(writing, ignore_errors=True)  # of an earlier process that was killed
    try:
        writing.mkdir(parents=True)
        write(writing)
        sync_tree(writing)
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def is_no_room(error: BaseException) -> bool:
    """Return whether an error of Python or safetensors says that a disk, a quota or a limit on files is used up."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError | SafetensorError) and error_number(error) in full


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write named arrays of any shape as one safetensors file; ``OSError``, such as ``ENOSPC``, if that fails."""
    contiguous = {name: np.ascontiguousarray(tensor).reshape(tensor.shape) for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path)
    except SafetensorError as error:
        raise OSError(error_number(error), str(error), str(path)) from error


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read the file of ``write_tensors`` as read-only views of mapped pages, which the processes of one node share.

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


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON with sorted keys. Numbers must be finite."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file; ``DataError`` if it is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_json_as(kind: type[T], path: Path) -> T:
    """Read a JSON file as a dataclass or pydantic model; ``DataError`` as of ``read_json`` and ``validated``."""
    return validated(kind, read_json(path), str(path))


def validated(kind: type[T], value: Any, where: str) -> T:
    """Return ``value``, read from the file ``where``, as a dataclass or model; ``DataError`` on the first wrong key."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        name, _, problem = first_problem(error)
        raise DataError(f"{where} is damaged: {name or 'the whole file'}: {problem}") from error


def error_number(error: OSError | SafetensorError) -> int:
    """Return the errno of an error of Python or safetensors; ``EIO`` if it has none."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else errno.EIO


def fingerprint_file(path: Path) -> str:
    """Return a SHA-256 over a file's size and content.

    Of a file over 64 MiB only 64 blocks of 64 KiB are read, evenly spread, the first and the last byte among them: a
    replica must not read 60 GB before it serves. That finds truncation and another file, not one changed byte.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_UP_TO:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(str(size).encode())
        for index in range(_NUM_SAMPLES):
            file.seek(index * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def sync_tree(directory: Path) -> None:
    """Wait until a folder and everything in it are on disk."""
    for entry in sorted(directory.rglob("*")):
        sync(entry)
    sync(directory)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
