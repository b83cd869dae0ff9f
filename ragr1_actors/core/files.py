"""Files that are whole or absent: folders renamed into place, JSON, and safetensors. Nothing is pickled."""

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
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragr1_actors.core.errors import DataError

POLICY_FOLDER = "policy"
"""In a checkpoint: a Hugging Face folder."""
ADAPTER_FOLDER = "adapter"
"""In a checkpoint of a run with ``learners.lora``: what peft loads beside the policy that the stage began with."""
LEARNER_FILE = "learner.safetensors"
WRITING = ".writing_"
"""Prefix of what is being written, or was left by a crash: never read."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
"""Of safetensors, in numpy's words; bfloat16 is not one of numpy's."""
_WHOLE_UP_TO = 64 * 2**20
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 2**16
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors words an errno


def write_file(final: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` create a file that gets the name ``final`` once it is whole and on disk.

    ``write_file(path, lambda writing: writing.write_text(text, "utf-8"))``. A file of that name is replaced. The
    temporary name is unique, so that several processes may write one file: the last one to finish wins.

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
    """Have ``write`` fill a folder that gets the name ``final`` once it is whole; a folder of that name is replaced.

    Raises:
        OSError: the folder cannot be written; ``final`` is then as it was, and so it is where ``write`` raises.
    """
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
    """Whether an error of Python's or of safetensors' says that a disk, a quota or a limit on file sizes is full."""
    return isinstance(error, OSError | SafetensorError) and error_number(error) in NO_ROOM


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write named arrays of any shape as one safetensors file.

    Raises:
        OSError: the file cannot be written; ``ENOSPC`` where there is no room.
    """
    contiguous = {name: np.ascontiguousarray(tensor).reshape(tensor.shape) for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path)
    except SafetensorError as error:
        raise OSError(error_number(error), str(error), str(path)) from error


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read what ``write_tensors`` wrote: read-only views of the file, of which nothing is loaded before it is used.

    The processes of a node that read one file share its pages.

    Raises:
        DataError: the file is missing or is not a whole safetensors file.
    """
    try:
        with safe_open(path, framework="np"):  # checks the header against the size
            pass
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        data = np.memmap(path, np.uint8, "r", offset=0)[8 + header_bytes :]
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    header.pop("__metadata__", None)
    tensors: dict[str, NDArray[Any]] = {}
    for name, spec in header.items():
        if spec["dtype"] not in _DTYPES:
            raise DataError(f"{path} cannot be read: {name} is of {spec['dtype']}, expected {', '.join(_DTYPES)}")
        start, end = spec["data_offsets"]
        tensors[name] = np.asarray(data[start:end]).view(_DTYPES[spec["dtype"]]).reshape(spec["shape"])
    return tensors


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON with sorted keys. Numbers must be finite."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DataError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def error_number(error: OSError | SafetensorError) -> int:
    """Return the errno of an error of Python's or of safetensors'; ``EIO`` where it has none."""
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
    """Wait until a folder and all that is in it is on disk."""
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
