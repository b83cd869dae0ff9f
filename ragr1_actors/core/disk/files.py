"""Files and folders that are whole or absent, locks on them, and the names of a run's."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ragr1_actors.core.errors import DataError, UserError

CHECKPOINTS = "checkpoints"
INDEX = "index"
POLICY = "policy"
"""Folder of the policy before training, if the run made it."""
SFT_POLICY = "policy_sft"
"""Folder of the policy at the end of SFT."""
FOLDERS = (INDEX, POLICY, SFT_POLICY, CHECKPOINTS)
"""Folders of a run that are whole or absent; everything else is files that grow."""
MCP_FILE = "mcp_tools.json"
"""File with the tools that each server of ``environment.mcp`` listed before the run."""
POLICY_FOLDER = "policy"
"""Name of the folder in a checkpoint with the policy as a Hugging Face folder."""
ADAPTER_FOLDER = "adapter"
"""Name of the folder in a checkpoint with ``learners.lora`` that has the adapters, for peft to load."""
POLICY_FILES = ("config.json", "model.safetensors")
"""Files that the folder of a policy must have."""
WRITING = ".writing_"
"""Prefix of files and folders that are being written, or were left by a crash; they are not read."""
REMOVED, REPLACED = ".removed_", ".replaced_"
"""Prefixes of folders that are being removed, and that another takes the place of."""

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


def is_no_room(error: BaseException) -> bool:
    """Return whether an error of Python or safetensors means that a disk, a quota or a limit on files is used up."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError | SafetensorError) and error_number(error) in full


def error_number(error: OSError | SafetensorError) -> int:
    """Return the errno of an error of Python or safetensors; ``EIO`` if it has none."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else errno.EIO


def stamp_of(path: Path) -> tuple[int, int]:
    """Return a value that changes if a file is written to or replaced.

    It leaves out the inode: in a container, making a link may copy a file of the image.
    """
    found = path.stat()
    return found.st_size, found.st_mtime_ns


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
