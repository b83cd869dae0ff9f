"""Files and folders: whole or absent, locked, JSON and safetensors, and data files told by their first bytes."""

from __future__ import annotations

import bz2
import errno
import fcntl
import gzip
import hashlib
import json
import logging
import lzma
import math
import os
import re
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragr1_actors.core.errors import DataError, UserError, one_line, shortened

POLICY_FOLDER = "policy"
"""Name of the folder in a checkpoint with the policy as a Hugging Face folder."""
ADAPTER_FOLDER = "adapter"
"""Name of the folder in a checkpoint with ``learners.lora`` that has the adapters, for peft to load."""
POLICY_FILES = ("config.json", "model.safetensors")
"""Files that the folder of a policy must have."""
LEARNER_FILE = "learner.safetensors"
"""File in a checkpoint with the learners' state; of several ranks, the part of rank 0. See ``learner_files``."""
LEARNER_PREFIX = "learner"
"""Beginning of the names of ``learner_files``."""
WRITING = ".writing_"
"""Prefix of files and folders that are being written, or were left by a crash; they are not read."""
REMOVED, REPLACED = ".removed_", ".replaced_"
"""Prefixes of folders that are being removed, and that another takes the place of."""

T = TypeVar("T")
logger = logging.getLogger(__name__)
_WHOLE_UP_TO = 64 * 2**20
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 2**16
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # errno in the messages of safetensors


def write_file(final: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` create a file that gets the name ``final`` once it is whole and on disk; it replaces another.

    ``write_file(path, lambda writing: writing.write_text(text, "utf-8"))``. The temporary name is unique: several
    processes may write one file, and the last one to finish wins.

    Raises:
        OSError: the file cannot be written; then, and if ``write`` raises, ``final`` does not change.
    """
    writing = final.with_name(f"{WRITING}{secrets.token_hex(4)}_{final.name}")
    try:
        write(writing)
        publish(writing, final)
    finally:
        writing.unlink(missing_ok=True)


def publish(writing: Path, final: Path, *, is_on_disk: bool = False) -> Path:
    """Give a whole file or folder its final name, and return it; a file, or an empty folder, of that name is replaced.

    The name appears after the content is on disk; ``is_on_disk`` says that it is there already, or need not be.
    """
    if not is_on_disk:
        sync_tree(writing)
    writing.replace(final)
    if not is_on_disk:
        sync(final.parent)
    return final


def write_folder(final: Path, write: Callable[[Path], None], files: Collection[str]) -> None:
    """Let ``write`` fill a folder that gets the name ``final`` once it is whole; it replaces another.

    Raises:
        DataError: this process does not see one of ``files`` after ``write``; ``final`` does not change.
    """
    try:
        write(begin_folder(final))
        finish_folder(final, files)
    finally:
        settle_folder(final)


def begin_folder(final: Path) -> Path:
    """Return an empty folder beside ``final``, which gets this name by ``finish_folder``; others may write in it."""
    settle_folder(final)
    writing = final.with_name(f"{WRITING}{final.name}")
    writing.mkdir(parents=True)
    return writing


def finish_folder(final: Path, files: Collection[str]) -> None:
    """Give the folder that was begun its name once it is on disk; another of that name is replaced.

    Raises:
        DataError: one of ``files`` is not in it where this process sees it; ``final`` does not change.
    """
    writing = final.with_name(f"{WRITING}{final.name}")
    if missing := [name for name in files if not (writing / name).is_file()]:
        raise DataError(
            f"{final} was written without {', '.join(missing)}; if another node wrote it, put it on a file system "
            "that all nodes share, or --run-dir on a storage such as s3://bucket/runs/mine"
        )
    if final.exists():  # a rename cannot replace a folder with content
        sync_tree(writing)
        publish(final, _replaced(final), is_on_disk=True)
    publish(writing, final)
    settle_folder(final)


def settle_folder(final: Path) -> None:
    """Remove what was begun of a folder, and end what a crash left between the renames of ``finish_folder``."""
    for left in (final.with_name(f"{prefix}{final.name}") for prefix in (WRITING, REMOVED)):
        if left.is_symlink():
            left.unlink()
        shutil.rmtree(left, ignore_errors=True)
    if final.exists():
        shutil.rmtree(_replaced(final), ignore_errors=True)
    elif _replaced(final).exists():
        publish(_replaced(final), final, is_on_disk=True)


def settle_folders(directory: Path) -> None:
    """Settle every folder of a directory."""
    for prefix in (WRITING, REMOVED, REPLACED):
        for left in directory.glob(f"{prefix}*"):
            settle_folder(directory / left.name.removeprefix(prefix))


def find_folder(final: Path) -> Path | None:
    """Return a whole folder; after a crash between the renames of ``finish_folder`` the one that was replaced."""
    return next((path for path in (final, _replaced(final)) if path.is_dir()), None)


def remove_folder(folder: Path) -> None:
    """Remove a folder, its name first: half a folder must not keep it."""
    removed = publish(folder, folder.with_name(f"{REMOVED}{folder.name}"), is_on_disk=True)
    shutil.rmtree(removed, ignore_errors=True)


def _replaced(final: Path) -> Path:
    return final.with_name(f"{REPLACED}{final.name}")


def lock(path: Path, *, is_folder: bool = False, is_shared: bool = False, waits: bool = False) -> int:
    """Lock a file, which is made if it is missing, or a folder; return the descriptor that holds it until it is closed.

    The kernel's lock ends with the process, however that ends; a child that inherits the descriptor holds it, too.
    ``filelock`` locks no folder, has no shared lock but by a database, and gives away no descriptor.

    Raises:
        BlockingIOError: another descriptor holds it, and ``waits`` is false.
        OSError: it cannot be opened, or its file system has no locks.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW if is_folder else os.O_RDWR | os.O_CREAT
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed or renamed it


@contextmanager
def locked(path: Path, *, is_folder: bool = False, waits: bool = True) -> Iterator[None]:
    """Hold what ``lock`` locks while the block runs; raises what it raises."""
    descriptor = lock(path, is_folder=is_folder, waits=waits)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def held_alone(path: Path, taken: UserError, *, is_folder: bool = False) -> Iterator[None]:
    """Hold what ``lock`` locks while the block runs; a file system without locks is only warned of.

    Raises:
        UserError: ``taken``, if another process holds it.
        OSError: it cannot be opened.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(path, is_folder=is_folder, waits=False))
        except BlockingIOError as error:
            raise taken from error
        except OSError as error:
            if error.filename is not None:  # it cannot be opened
                raise
            logger.warning("%s cannot be locked (%s): start one process only", path, error.strerror)
        yield


def check_seen(name: str | Path) -> None:
    """Return if ``name`` is a folder on this node, or no absolute path, and so maybe a name on a model hub.

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

    With ``replies`` it writes ``reply_to(probe)``; a node that cannot is returned, too.
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
    """Return whether an error of Python or safetensors means that a disk, a quota or a limit on files is used up."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError | SafetensorError) and error_number(error) in full


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
"""First bytes of files that no reader of tasks or passages knows, and what to do about each."""
_PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
_PARQUET = b"PAR1"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open text or a Parquet table for reading bytes, decompressed if the first bytes mean gzip, bzip2 or xz.

    Raises:
        DataError: it cannot be read, also within the block, it is compressed and damaged or cut off, or its first bytes
            mean another format.
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
    """Return a path without the ending of a compression: ``popqa.tsv`` for ``popqa.tsv.gz``."""
    return path.with_suffix("") if path.suffix in _PACKED_SUFFIXES else path


def is_parquet(path: Path) -> bool:
    """Return whether a file begins like a Parquet table."""
    with opened(path) as file:
        return file.read(len(_PARQUET)) == _PARQUET


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet table; memory holds a thousand.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    import pyarrow as pa  # takes a quarter of a second that other readers of this module do not need
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


def read_json(path: Path, remedy: str = "") -> Any:
    """Read a JSON file; ``DataError`` if it is missing or is not JSON. ``remedy`` ends its message: what to do."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}{remedy and f'; {remedy}'}") from error


def read_json_as(kind: type[T], path: Path, remedy: str = "") -> T:
    """Read a JSON file as a dataclass or pydantic model; raises ``DataError`` as ``read_json`` and ``validated``."""
    return validated(kind, read_json(path, remedy), str(path), remedy)


def read_json_lines(kind: type[T], path: Path, remedy: str) -> list[T]:
    """Read the lines of a file of JSON lines, but one that a crash cut off; ``remedy`` says what to do with a bad line.

    Raises:
        DataError: a line is no ``kind``; the message has its number.
    """
    lines = path.read_bytes().split(b"\n")[:-1]  # the text after the last newline is empty or cut off
    return [validated(kind, line, f"{path}, line {number}", remedy) for number, line in enumerate(lines, start=1)]


def validated(kind: type[T], value: Any, where: str, remedy: str = "") -> T:
    """Return what ``checked`` does, read from the file ``where``; ``DataError`` on the first wrong key."""

    def refuse(name: str, got: Any, problem: str) -> DataError:
        what = f"{name}: {problem}, got {shortened(repr(got))}" if name else problem
        return DataError(f"{where} is damaged: {what}{remedy and f'; {remedy}'}")

    return checked(kind, value, refuse)


def checked(kind: type[T], value: Any, refuse: Callable[[str, Any, str], Exception]) -> T:
    """Return a value, or what JSON in UTF-8 says (``bytes``), as a dataclass, a model or a collection of these.

    Raises:
        Exception: what ``refuse`` makes of the first wrong key (empty if it is the whole), its value and what is wrong.
    """
    adapter: TypeAdapter[T] = _adapter(cast(Any, kind))
    try:
        return adapter.validate_json(value) if isinstance(value, bytes) else adapter.validate_python(value)
    except ValidationError as error:
        problem = first_problem(error)
        assert problem is not None
        raise refuse(*problem) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def first_problem(error: object) -> tuple[str, Any, str] | None:
    """Return what ``checked`` tells of pydantic's error, which a library may raise, too; None of anything else."""
    if not isinstance(error, ValidationError):
        return None
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "model_type":  # pydantic names our class, which is not a word of a recipe
        message = "expected keys with values, such as {key: value}"
    return ".".join(str(part) for part in first["loc"]), first["input"], f"{message[:1].lower()}{message[1:]}"


def error_number(error: OSError | SafetensorError) -> int:
    """Return the errno of an error of Python or safetensors; ``EIO`` if it has none."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else errno.EIO


def fingerprint_file(path: Path) -> str:
    """Return a SHA-256 over a file's size and content.

    In a file over 64 MiB it reads only 64 blocks of 64 KiB, evenly spread, with the first and the last byte, as a
    replica must not read 60 GB before it serves. This finds truncation and another file, but not one changed byte.
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
