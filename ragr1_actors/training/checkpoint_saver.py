"""Checkpoints written while training continues."""

from __future__ import annotations

from typing import Any

from learners.learner_group import LearnerGroup
from ragr1_actors.core.disk.digests import LIST_FILE
from ragr1_actors.core.disk.files import LEARNER_PREFIX, write_json
from ragr1_actors.core.disk.folders import FolderWriter, part_of
from ragr1_actors.runs.checkpoint import STATE_FILE, Checkpoints


class CheckpointSaver:
    """Writes checkpoints of the learners while training continues: one at a time, each whole or absent.

    The learners pause for a copy of their state. A thread of each rank writes its part during the next iterations. The
    checkpoint gets its name in ``commit_if_written`` or ``finish``, at the latest when the next one begins.
    """

    def __init__(self, checkpoints: Checkpoints, learners: LearnerGroup) -> None:
        """Take the checkpoints and the learners to save."""
        self._checkpoints = checkpoints
        self._learners = learners
        self._step: int | None = None
        self._writer: FolderWriter

    def begin(self, step: int, state: dict[str, Any], score: float | None) -> None:
        """Begin the checkpoint ``step_<step>``, once the previous one is whole; errors as in ``Algorithm.save``."""
        self.finish()
        self._writer = self._checkpoints.begin(step, lambda folder: write_json(folder / STATE_FILE, state), score)
        self._learners.begin_save(self._writer)
        self._step = step

    def commit_if_written(self) -> None:
        """Give the checkpoint its name if it is written, else return at once. Raises as ``finish``."""
        if self._step is not None and self._learners.is_written():
            self.finish()

    def finish(self) -> None:
        """Wait until a begun checkpoint is whole; raises ``UserError`` if it could not be written."""
        if self._step is None:
            return
        step, self._step = self._step, None
        final = self._checkpoints.commit(step, self._learners.finish_save)
        self._learners.saved(self._writer, part_of(final, LEARNER_PREFIX, LIST_FILE))
