"""Leftovers of killed processes: Ray's processes of a local session, the folder of their files, scratch folders.

A process holds a lock on each folder that it makes here; a folder without a lock belongs to a killed process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.session import watcher
from cluster.session.watcher import Leftover, end
from ragr1_actors.core.disk.files import lock, publish

TEMP = Path("/tmp")
"""Folder of Ray's files, short because the paths of its sockets have at most 107 characters."""
PREFIX = "ragr1-ray-"
SCRATCH, KEPT = "ragr1-scratch-", "ragr1-kept-"
"""Beginnings of names in the folder for temporary files; ``KEPT`` folders hold files that a person may still need."""
_NEW = "ragr1-new-"


def make_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    """Make a folder, and return it with the descriptor of this process's lock on it."""
    made = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    descriptor = lock(made, is_folder=True)
    final = made.with_name(made.name.replace(_NEW, prefix))
    return publish(made, final, is_on_disk=True), descriptor  # never without its lock


def make_scratch() -> tuple[Path, int]:
    """Make a scratch folder of this process by ``make_folder``."""
    return make_folder(SCRATCH, Path(tempfile.gettempdir()))


def keep(folder: Path) -> Path:
    """Rename a folder of ``make_scratch``, so that it stays, and return it."""
    return publish(folder, folder.with_name(folder.name.replace(SCRATCH, KEPT)), is_on_disk=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for a process's own files, and remove it when the block ends."""
    folder, descriptor = make_scratch()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def watched(folder: Path, descriptor: int) -> Iterator[None]:
    """Remove the folder and the processes of a session when the block or this process ends.

    ``descriptor`` is the folder's lock. The watching process holds it, too, until it has done its work.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", watcher.__file__, str(folder), str(os.getpid())],
        stdin=subprocess.PIPE,  # it ends with this process, however that ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        pass_fds=[descriptor],
        start_new_session=True,  # Ctrl-C and the end of a terminal do not reach it
    )
    try:
        yield
    finally:
        process.communicate()
        if process.returncode:  # a signal killed it
            end(folder, spared=os.getpid())


def remove_leftovers() -> Iterator[Leftover]:
    """End the sessions of this user whose drivers are gone, and remove such scratch folders."""
    for folder in [*sorted(TEMP.glob(f"{PREFIX}*")), *sorted(Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"))]:
        try:
            descriptor = lock(folder, is_folder=True)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                yield end(folder)
        finally:
            os.close(descriptor)
