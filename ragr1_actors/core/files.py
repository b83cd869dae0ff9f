"""Files and folders that are whole or absent, JSON and safetensors, and data files told by their first bytes."""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import json
import lzma
import math
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragr1_actors.core.errors import DataError, first_problem, one_line

POLICY_FOLDER = "policy"
"""In a checkpoint: the policy as a Hugging Face folder."""
ADAPTER_FOLDER = "adapter"
"""In a checkpoint of a run with ``learners.lora``: the adapters, for peft to load beside the stage's first policy."""
POLICY_FILES = ("config.json", "model.safetensors")
"""What the folder of a policy has at least."""
LEARNER_FILE = "learner.safetensors"
"""In a checkpoint: the learners' state; of several ranks, the part of rank 0. See ``learner_files``."""
LEARNER_PREFIX = "learner"
"""With what the names of ``learner_files`` begin."""
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


def write_folder(final: Path, write: Callable[[Path], None], files: Collection[str]) -> None:
    """Have ``write`` fill a folder that gets the name ``final`` once it is whole; another of that name is replaced.

    Raises:
        DataError: ``write`` did not write one of ``files`` where this process sees it; ``final`` does not change.
    """
    writing = final.with_name(f"{WRITING}{final.name}")
    shutil.rmtree(writing, ignore_errors=True)  # of an earlier process that was killed
    try:
        writing.mkdir(parents=True)
        write(writing)
        if missing := [name for name in files if not (writing / name).is_file()]:
            raise DataError(
                f"{final} was written without {', '.join(missing)}; if another node wrote it, put it on a file system "
                "that all nodes share"
            )
        sync_tree(writing)
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def check_seen(name: str | Path) -> None:
    """Return if ``name`` is a folder on this node, or no absolute path: then it may be a name on a model hub.

    Raises:
        DataError: the node of the driver has this folder, and this node does not.
    """
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise DataError(
            f"node {socket.gethostname()} does not see the folder {name}; put it on a file system that all nodes share "
            "or --run-dir on a storage, such as s3://bucket/runs/mine"
        )


def answer_probe(probe: Path, *, replies: bool) -> str:
    """Return the name of this node if it does not see the file ``probe``, else an empty text.

    With ``replies`` write ``reply_to(probe)``; a node that cannot is returned, too.
    """
    try:
        if not probe.is_file():
            return socket.gethostname()
        if replies:
            reply_to(probe).touch()
    except OSError:
        return socket.gethostname()
    return ""


def reply_to(probe: Path) -> Path:
    """Return the file that ``answer_probe`` writes."""
    return probe.with_name(f"{probe.name}_reply")


def is_no_room(error: BaseException) -> bool:
    """Return whether an error of Python or safetensors says that a disk, a quota or a limit on files is used up."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError | SafetensorError) and error_number(error) in full


def learner_files(num_ranks: int) -> list[str]:
    """Return the files of the learners' state by rank: ``["learner.safetensors", "learner_1.safetensors"]``."""
    name = Path(LEARNER_FILE)
    return [LEARNER_FILE, *(f"{name.stem}_{rank}{name.suffix}" for rank in range(1, num_ranks))]


def rank_part(rank: int) -> str:
    """Return the name of what a learner rank writes of a folder: ``rank_0``."""
    return f"rank_{rank}"


@dataclass(frozen=True)
class Part:
    """Consecutive elements of a tensor."""

    values: NDArray[Any]
    """``[n]``"""
    start: int
    """Index of the first of them in the flat tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


class Tensors(Mapping[str, NDArray[Any]]):
    """Whole tensors by name, out of parts; each is put together when it is read."""

    def __init__(self, parts: Iterable[Mapping[str, Part]]) -> None:
        """Take the parts of several owners; ``DataError`` if some of a tensor's elements are missing."""
        self._parts: dict[str, list[Part]] = {}
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
_PARTS = TypeAdapter(dict[str, tuple[int, tuple[int, ...]]])
"""Of the tensors in a file that are not whole: index of the first element, and the whole shape."""


def write_parts(path: Path, parts: Mapping[str, Part], source: str = "") -> None:
    """Write one safetensors file: whole tensors in their shapes, others flat, with their places as metadata.

    ``source`` names what the parts are of; ``read_learner`` refuses parts of different sources.

    Raises:
        OSError: the file cannot be written, such as ``ENOSPC``.
    """
    tensors: dict[str, NDArray[Any]] = {}
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, part in parts.items():
        values = np.ascontiguousarray(part.values)
        if values.size == math.prod(part.shape):
            tensors[name] = values.reshape(part.shape)
        else:
            tensors[name], places[name] = values, (part.start, part.shape)
    try:
        save_file(tensors, path, metadata={"parts": _PARTS.dump_json(places).decode(), "source": source})
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
    except ValueError as error:  # a DataError, or of pydantic
        raise DataError(f"{path.parent} is damaged: {error}") from error


def _read_parts(file: Path) -> tuple[dict[str, Part], str]:
    """Return the parts in a file, and their source."""
    tensors = read_tensors(file)
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata() or {}
    places = _PARTS.validate_json(metadata.get("parts", "{}"))
    parts = {name: Part(tensor.ravel(), *places.get(name, (0, tensor.shape))) for name, tensor in tensors.items()}
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


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON with sorted keys. Numbers must be finite."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")


_PACKED: dict[bytes, tuple[str, Callable[[BinaryIO], Any]]] = {
    b"\x1f\x8b": ("gzip", lambda file: gzip.GzipFile(fileobj=file)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
}
_FOREIGN = {
    b"version https://git-lfs": "a Git LFS pointer in place of the file; fetch the file with `git lfs pull`",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; decompress it, or compress it with gzip",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"ARROW1\0\0": "an Arrow file; write it as Parquet or JSON lines",
    b"\xff\xff\xff\xff": "a stream of Arrow, as save_to_disk writes it; write it as Parquet or JSON lines",
    b"\xff\xfe": "text in UTF-16; save it as UTF-8",
    b"\xfe\xff": "text in UTF-16; save it as UTF-8",
}
"""How files begin that no reader of tasks or passages knows, and what to do about each."""
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
_PARQUET = b"PAR1"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open text or a Parquet table for reading bytes, decompressed where the first bytes say gzip, bzip2 or xz.

    Raises:
        DataError: it cannot be read, also in the block, what is compressed ends too early or is damaged, or its first
            bytes say that it is something else.
    """
    try:
        file: BinaryIO = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        start = file.read(32)
        file.seek(0)
        if known := next((what for magic, what in _FOREIGN.items() if start.startswith(magic)), ""):
            raise DataError(f"{path}: {known}")
        name, unpack = next((found for magic, found in _PACKED.items() if start.startswith(magic)), ("", None))
        if unpack is None:
            yield file
            return
        try:
            yield unpack(file)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"{path}: not a whole {name} file ({error}); fetch it again") from error


def unpacked_name(path: Path) -> Path:
    """Return a path without the ending of a compression: ``popqa.tsv`` of ``popqa.tsv.gz``."""
    return path.with_suffix("") if path.suffix in _PACKED_SUFFIXES else path


def is_parquet(path: Path) -> bool:
    """Return whether a file begins as a Parquet table does."""
    with opened(path) as file:
        return file.read(len(_PARQUET)) == _PARQUET


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet table; memory holds a thousand.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    import pyarrow as pa  # a quarter of a second that other readers of this module need not wait
    import pyarrow.parquet as pq

    with opened(path) as content:
        if isinstance(content, gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile):
            raise DataError(f"{path}: a Parquet table that is compressed as a whole; decompress it")
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is no Parquet file that can be read ({one_line(error)}); fetch it again") from error


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
