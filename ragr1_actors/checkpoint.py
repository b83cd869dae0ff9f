"""Checkpoints that are whole or absent, and the two formats they are written in: safetensors and JSON.

::

    checkpoints/
      step_10/            whole: it got its name by one rename, after everything in it was on disk
      step_20/
      .writing_step_30/   being written, or left by a crash; never read, removed before the next is written

Nothing is pickled: a checkpoint that somebody else made cannot run code when it is loaded.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ragr1_actors.errors import DataError, UserError

_STEP = re.compile(r"step_(\d+)")
_WRITING = ".writing_"
_REPLACED = ".replaced_"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors words an errno


class CheckpointStore:
    """The checkpoints of one run: ``step_<n>`` folders, the newest ``num_to_keep`` of them."""

    def __init__(self, directory: Path, num_to_keep: int = 2) -> None:
        """Keep checkpoints in ``directory``, which is made when the first is saved."""
        if num_to_keep < 1:
            raise ValueError(f"got num_to_keep={num_to_keep}, expected at least 1")
        self._directory = directory
        self._num_to_keep = num_to_keep

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Have ``write`` fill a folder, and give it its name ``step_<step>`` once all of it is on disk.

        A checkpoint of that step that exists already is replaced. Older ones beyond ``num_to_keep`` are removed, and so
        are newer ones: they belong to a life of the run that this one has not come to.

        Raises:
            UserError: there is no room on disk, or the folder cannot be written. Earlier checkpoints stay as they are,
                also where ``write`` raises.
        """
        final = self._directory / f"step_{step}"
        writing = self._directory / f"{_WRITING}{final.name}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._clean()
            writing.mkdir()
            write(writing)
            _sync_tree(writing)
            if final.exists():  # a folder with content cannot be renamed over
                final.rename(self._directory / f"{_REPLACED}{final.name}")
            writing.rename(final)
            _sync(self._directory)
            self._prune(step)
        except (OSError, SafetensorError) as error:
            raise _as_user_error(error, self._directory) from error
        finally:  # also where write raised, and on Ctrl-C
            self._clean()
        return final

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint, or None where there is none. Changes nothing on disk."""
        return max(self._whole().items(), default=(0, None))[1]

    def steps(self) -> list[int]:
        """Return the steps of the whole checkpoints, oldest first."""
        return sorted(self._whole())

    def without(self, checkpoint: Path) -> str:
        """Return what to do about a checkpoint that is damaged: ``delete the folder ... and --resume goes on ...``."""
        before = [path for path in self._whole().values() if path != checkpoint]
        rest = f"goes on from {max(before, key=_step).name}" if before else "begins anew, there is no other checkpoint"
        return f"delete the folder {checkpoint} and --resume {rest}"

    def _whole(self) -> dict[int, Path]:
        if not self._directory.is_dir():
            return {}
        whole: dict[int, Path] = {}
        # Sorted, so that step_3 comes after .replaced_step_3 and wins; the latter counts only where a crash fell
        # between the two renames of a replacement.
        for entry in sorted(self._directory.iterdir()):
            match = _STEP.fullmatch(entry.name.removeprefix(_REPLACED))
            if match and entry.is_dir():
                whole[int(match[1])] = entry
        return whole

    def _prune(self, saved: int) -> None:
        not_newer = [step for step in self.steps() if step <= saved]
        for step, path in self._whole().items():
            if step not in not_newer[-self._num_to_keep :]:
                # Renamed first: a removal that is cut short must not leave half a checkpoint with a whole one's name.
                path.rename(self._directory / f"{_WRITING}removed_{path.name}")

    def _clean(self) -> None:
        if not self._directory.is_dir():
            return
        for leftover in self._directory.glob(f"{_WRITING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for replaced in self._directory.glob(f"{_REPLACED}*"):
            final = self._directory / replaced.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(final)


def _step(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def write_folder(final: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a folder that gets its name ``final`` once it is whole; one of that name is replaced."""
    writing = final.with_name(f"{_WRITING}{final.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir(parents=True)
        write(writing)
        _sync_tree(writing)
        shutil.rmtree(final, ignore_errors=True)
        writing.rename(final)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def is_no_room(error: BaseException) -> bool:
    """Whether an error of Python's or of safetensors' says that a disk, a quota or a limit on file sizes is full."""
    return isinstance(error, OSError | SafetensorError) and _errno(error) in _NO_ROOM


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write named arrays of any shape as one safetensors file.

    Raises:
        OSError: the file cannot be written; ``ENOSPC`` where there is no room.
    """
    contiguous = {name: np.ascontiguousarray(tensor).reshape(tensor.shape) for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path)
    except SafetensorError as error:
        raise OSError(_errno(error), str(error), str(path)) from error


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read what ``write_tensors`` wrote.

    Raises:
        DataError: the file is missing or is not a whole safetensors file.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


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


def _as_user_error(error: OSError | SafetensorError, directory: Path) -> UserError:
    number = _errno(error)
    if number in _NO_ROOM:
        return UserError(
            f"no room to write a checkpoint into {directory} ({os.strerror(number)}); free some space and go on with "
            "--resume: the checkpoints written before are whole"
        )
    return UserError(f"cannot write a checkpoint into {directory}: {error}")


def _errno(error: OSError | SafetensorError) -> int:
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    match = _OS_ERROR.search(str(error))
    return int(match[1]) if match else errno.EIO


def _sync_tree(directory: Path) -> None:
    for entry in sorted(directory.rglob("*")):
        _sync(entry)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
