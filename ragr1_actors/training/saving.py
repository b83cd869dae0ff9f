"""Checkpoints written while training goes on: one at a time, whole or absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learners.learner_group import LearnerGroup
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.files import LEARNER_FILE, write_json
from ragr1_actors.runs.checkpoint import CheckpointStore
from ragr1_actors.runs.run_state import STATE_FILE


class CheckpointSaver:
    """Between the checkpoints of a run and its learners.

    The learners pause for a copy of their state. A thread of rank 0 writes it, while the next iterations go on; the
    checkpoint gets its name when somebody looks, at the latest when the next one begins.
    """

    def __init__(self, store: CheckpointStore, learners: LearnerGroup) -> None:
        """Save ``learners`` into ``store``."""
        self._store = store
        self._learners = learners
        self._step: int | None = None
        self._writing = Path()

    def begin(self, step: int, state: dict[str, Any], score: float | None) -> None:
        """Begin the checkpoint ``step_<step>``, once the one before is whole.

        Args:
            step: iterations done.
            state: JSON, written beside what is the learners' own.
            score: of ``checkpointing.best_metric``, where this policy was evaluated.

        Raises:
            UserError: there is no room on disk, or the folder cannot be written.
        """
        self.finish()
        self._writing = self._store.begin(step, lambda folder: write_json(folder / STATE_FILE, state), score)
        self._learners.begin_save(self._writing)
        self._step = step

    def look(self) -> None:
        """Give the checkpoint its name if it is written.

        Raises:
            UserError: it could not be written.
        """
        if self._step is not None and self._learners.is_written():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is whole, where one was begun.

        Raises:
            UserError: it could not be written.
        """
        if self._step is None:
            return
        step, self._step = self._step, None
        final = self._store.commit(step, self._finish_writing)
        self._learners.saved(self._writing, final)

    def _finish_writing(self) -> None:
        self._learners.finish_save()
        if not (self._writing / LEARNER_FILE).is_file():
            raise UserError(
                f"{self._writing} does not hold what learner rank 0 wrote there; put --run-dir on a file system that "
                "its node and this one share"
            )

    def restore(self, checkpoint: Path) -> None:
        """Bring the learners to where a checkpoint was taken, on whatever number of ranks.

        Raises:
            DataError: a file of it is damaged, or of another model.
        """
        self._learners.load_state(checkpoint / LEARNER_FILE)
