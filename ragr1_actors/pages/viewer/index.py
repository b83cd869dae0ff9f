"""Index of a run: the parts of all its files of trajectories, as they appear, in one snapshot.

::

    trajectories/*.arrow ──► Index.refresh() ──► parts on disk ──► Snapshot (scalars in memory, texts mapped)

A snapshot never changes: a query reads one while the next one is made.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError, one_line
from ragr1_actors.pages.viewer.parts import (
    PART_SCHEMA,
    STAGES,
    IndexedFile,
    Origin,
    Source,
    keep_part,
    make_part,
    read_part,
)

PARTS = "view"
"""Name of the folder in a run with the parts; it can be removed at any time."""
_SCALARS = tuple(field.name for field in PART_SCHEMA if not pa.types.is_string(field.type))
_PUBLISH_INTERVAL_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """Rows of all parts, in the order in which the run wrote them. About 70 bytes per row are in memory."""

    version: int
    """Version, which rises with every change."""
    parts: tuple[IndexedFile, ...]
    num_files: int
    """Number of files of trajectories in the run; more than ``parts`` while the index is made."""
    problems: tuple[str, ...] = ()
    """Sentence for each file that cannot be read, and one if parts cannot be written."""

    @cached_property
    def starts(self) -> NDArray[np.int64]:  # [num_parts + 1]
        """Return the first row of each part, and the number of rows."""
        return np.cumsum([0, *(part.table.num_rows for part in self.parts)])

    @property
    def num_rows(self) -> int:
        """Number of trajectories."""
        return int(self.starts[-1])

    @cached_property
    def iterations(self) -> list[int]:  # [num_parts]
        """Return the iteration of each part; evaluations after training count as the last iteration."""
        last = max((part.origin.iteration for part in self.parts), default=0)
        return [last if part.origin.is_after_training else part.origin.iteration for part in self.parts]

    @cached_property
    def scalars(self) -> dict[str, NDArray[Any]]:  # [num_rows] each
        """Return the columns without text, and ``iteration``, ``stage`` (of ``STAGES``) and ``part`` of each row."""
        table = self._concatenated(_SCALARS)
        evidence = table.schema.get_field_index("has_evidence")  # null if it is not known
        table = table.set_column(evidence, "has_evidence", table.column(evidence).fill_null(False))
        columns = {name: table.column(name).to_numpy() for name in _SCALARS}
        counts = np.diff(self.starts)
        origins = [part.origin for part in self.parts]
        columns["iteration"] = np.repeat(np.array(self.iterations, np.int64), counts)
        columns["stage"] = np.repeat(np.array([STAGES.index(o.stage) for o in origins], np.int8), counts)
        columns["part"] = np.repeat(np.arange(len(origins), dtype=np.int32), counts)
        return columns

    @cached_property
    def strings(self) -> pa.Table:
        """Return the columns of text, which are mapped, not read."""
        return self._concatenated(tuple(name for name in PART_SCHEMA.names if name not in _SCALARS))

    def _concatenated(self, names: Sequence[str]) -> pa.Table:
        tables = [part.table.select(names).replace_schema_metadata() for part in self.parts]
        return pa.concat_tables([pa.schema([PART_SCHEMA.field(name) for name in names]).empty_table(), *tables])


class Index:
    """Newest snapshot of a run. One thread at a time calls ``refresh``; any thread reads ``snapshot``."""

    def __init__(self, trajectories: Path, parts: Path) -> None:
        """Index the files of the folder ``trajectories``, and keep the parts in the folder ``parts``."""
        self._trajectories, self._directory = trajectories, parts
        self._parts: dict[Path, IndexedFile] = {}
        self._refused: dict[Source, str] = {}
        self._odd: tuple[str, ...] = ()
        self._unwritten = ""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.snapshot = Snapshot(0, (), 0)

    def refresh(self) -> bool:
        """Look for new, changed and removed files; return whether there were any.

        Snapshots appear meanwhile, so that the newest files can be seen while older ones are still indexed. A part that
        cannot be written is kept in memory.
        """
        with self._lock:
            sources, odd = self._look()
            gone = self._parts.keys() - {source.path for source in sources}
            for path in gone:
                del self._parts[path]
            refused = {source: self._refused[source] for source in sources if source in self._refused}
            is_mended, self._refused = len(refused) < len(self._refused), refused
            is_other, self._odd = odd != self._odd, odd
            new = [s for s in sources if s not in self._refused and not self._holds(s)]
            num_files = len(sources) + len(odd)
            if not (new or gone or is_mended or is_other) and num_files == self.snapshot.num_files:
                return False
            missing = [source for source in new if not self._map(source)]
            self._publish(num_files)
            published = time.monotonic()
            for source in missing:
                if self._stopped.is_set():
                    break
                self._make(source)
                if time.monotonic() - published > _PUBLISH_INTERVAL_S:
                    self._publish(num_files)
                    published = time.monotonic()
            self._publish(num_files)
            return True

    def stop(self) -> None:
        """Let ``refresh`` return soon."""
        self._stopped.set()

    def _look(self) -> tuple[list[Source], tuple[str, ...]]:
        """Return the files, the newest iterations first, and a sentence for each entry that is not such a file."""
        sources, odd = [], []
        found = self._trajectories.glob("*.arrow")
        for path in sorted(found, key=lambda path: Origin.of(path.stem), reverse=True):
            if path.name.startswith("."):
                continue
            try:
                if not path.name.isprintable():  # JSON cannot name a file that is not UTF-8
                    raise DataError(f"{path.name!a} has characters that the page cannot show; rename it")
                sources.append(Source.of(path))
            except (OSError, DataError) as error:
                if path.is_symlink() or not isinstance(error, FileNotFoundError):  # else the run is rolling back
                    odd.append(str(error) if isinstance(error, DataError) else _unreadable(path, error))
        return sources, tuple(odd)

    def _holds(self, source: Source) -> bool:
        held = self._parts.get(source.path)
        if held is None or held.source != source:
            return False
        try:  # a part that was changed where it is mapped is made again
            return held.kept is None or Source.of(held.kept.path) == held.kept
        except (OSError, DataError):
            return False

    def _map(self, source: Source) -> bool:
        part = read_part(self._directory / source.path.name, source)
        if part is not None:
            self._parts[source.path] = part
        return part is not None

    def _make(self, source: Source) -> None:
        try:
            part = make_part(source, self._stopped.is_set)
        except DataError as error:
            logger.warning("%s", error)
            self._parts.pop(source.path, None)
            self._refused[source] = str(error)
            return
        if part is not None:
            self._parts[source.path] = self._kept(part)

    def _kept(self, part: IndexedFile) -> IndexedFile:
        kept = self._directory / part.source.path.name
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return keep_part(kept, part)
        except OSError as error:  # such as a full disk: the indexed files can be seen all the same
            if not self._unwritten:
                self._unwritten = (
                    f"{kept} cannot be written: {one_line(error)}; the index is in memory for now: free some space, or "
                    "remove what is in its way, and start the viewer again"
                )
                logger.warning("%s", self._unwritten)
            return part

    def _publish(self, num_files: int) -> None:
        parts = tuple(sorted(self._parts.values(), key=lambda part: part.origin))
        found = (*self._odd, *self._refused.values(), self._unwritten)
        problems = tuple(dict.fromkeys(problem for problem in found if problem))
        snapshot = Snapshot(self.snapshot.version + 1, parts, num_files, problems)
        _ = snapshot.scalars, snapshot.strings  # here, not in the first query
        self.snapshot = snapshot


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}; restore it, or remove it from the run"
