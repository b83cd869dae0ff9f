"""Checkpoints of a run: folders that are whole or absent, each with ``state.json``, the position of the run.

::

    checkpoints/
      step_10/            whole: it was renamed once everything in it was on disk
        digests.json      the files with their sizes and digests
        policy/           Hugging Face folder, with its own list
        adapter/          of a run with ``learners.lora``: the adapters alone, with their own list
        learner.safetensors, learner_1.safetensors, ...   weights, optimizer and schedule, a part per learner rank;
                          the names of the tensors are those of ``Learner.get_parts``
        state.json        ``RunState``: how far the run was, the books of its tasks, what its guard has seen
        score.json        only with checkpointing.best_metric: the policy's score on the held-out tasks
      step_20/
      best -> step_10     only with checkpointing.best_metric; a link, so that best/policy is an ordinary folder
      .writing_step_30/   being written, or left by a crash; never read, removed before the next one is written

After SFT a run also needs ``policy_sft``, beside ``checkpoints``. At a URI they are objects, see ``storage/store.py``.
Nothing is pickled: loading a checkpoint from another source cannot run code.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError

from ragr1_actors.core.disk.digests import LIST_FILE, Digests, digest_files, write_list
from ragr1_actors.core.disk.files import CHECKPOINTS, error_number, is_no_room
from ragr1_actors.core.disk.folders import AnyFolder, FolderWriter, compared, part_of
from ragr1_actors.core.disk.json_files import read_json_as, validated, write_json
from ragr1_actors.core.disk.learner_state import LEARNER_PREFIX
from ragr1_actors.core.errors import DataError, UserError
from ragr1_actors.core.types import FailedTask
from ragr1_actors.runs.report import StageReport, TaskCounts
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.events import GuardState

if TYPE_CHECKING:  # imports Ray
    from learners.ranks.learner_group import LearnerGroup

STATE_FILE = "state.json"
SCORE_FILE = "score.json"
"""File with the policy's score on the held-out tasks: ``{"metric": "em", "value": 0.93}``."""
BEST = "best"
_STEP = re.compile(rf"{CHECKPOINTS}/step_(\d+)")

logger = logging.getLogger(__name__)


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskLedgerState(_Stored):
    """Books of the tasks, as ``TaskLedger.get_state`` returns them."""

    epoch: int = Field(ge=0)
    order: str
    """Positions of the tasks that are left, in their order: int32 in base64, since 100,000 numbers of JSON take a tenth
    of a second."""
    due: bool
    """Whether the curriculum is asked for another order before the next task is issued."""
    issued: str
    """Bit per task, whether it was issued in this epoch, in base64."""
    skipped: str
    """Bit per task, whether it was skipped in this epoch, in base64."""
    never_issued: int = Field(ge=0)
    """Number of tasks that earlier epochs left out; they count as lost."""
    tasks: str
    """Hash of the ids and questions of the training tasks, in their order."""
    outstanding: list[tuple[str, int, int, int, int]]
    """Task id, epoch, attempt, failures and outages of each task that was issued and not yet trained, in flight or with
    a finished group. A resumed run samples them again."""
    counts: TaskCounts
    stats: str
    """Stats of the tasks, packed by ``pack_stats`` of ``envs/tasks/curriculum.py``."""
    failed_tasks: list[FailedTask]


class RunState(_Stored):
    """Content of ``state.json``: the position of the run at the checkpoint."""

    sft_step: int = Field(ge=0)
    iteration: int = Field(ge=0)
    policy_version: int = Field(ge=0)
    learner: str
    """Name of the learner that wrote the tensors; empty before the first one."""
    task_ledger: TaskLedgerState
    extra: dict[str, Any]
    """Data of the caller of ``Algorithm.save``; of a ``TrainingRun`` the fields of ``TrainingRunState``."""


class TrainingRunState(_Stored):
    """Data that ``TrainingRun`` adds: wall time so far in seconds, finished stages and guard."""

    wall_s: float
    stages: list[StageReport]
    guard: GuardState = GuardState()


def read_state(checkpoint: AnyFolder) -> RunState:
    """Read ``state.json`` of a checkpoint; ``DataError`` if it is missing or damaged."""
    folder = compared(part_of(checkpoint, STATE_FILE, LIST_FILE), STATE_FILE)
    return read_json_as(RunState, folder / STATE_FILE)


class Checkpoints:
    """Checkpoints of one run: the newest ``num_to_keep`` and the best one; each is whole or absent."""

    def __init__(self, store: RunStore, num_to_keep: int = 2, best_metric: str = "") -> None:
        """Keep the newest ``num_to_keep`` (at least 1) checkpoints, and the one with the best metric, if it is
        named."""
        self._store = store
        self._folders = store.folders
        self._num_to_keep = num_to_keep
        self._best_metric = best_metric
        self._digests: Digests = {}  # digests of the driver's files

    def begin(self, step: int, write: Callable[[Path], None], score: float | None = None) -> FolderWriter:
        """Begin a checkpoint, call ``write`` with a folder for the driver's files, and return the writer for the ranks.

        Only one checkpoint is written at a time; ``commit`` replaces one of the same step. ``score`` is the value of
        ``best_metric``; None keeps the score of the checkpoint that is replaced.

        Raises:
            UserError: the disk is full, or the files cannot be written. Earlier checkpoints do not change, even if
                ``write`` raises.
        """
        name = checkpoint_name(step)
        with self._discarded_if_it_fails(name):
            if score is None and (before := self._folders.find(name)) is not None:
                score = self._score(before)
            writer = self._folders.begin(name)
            with writer.part("driver") as folder:
                if score is not None and self._best_metric:
                    write_json(folder / SCORE_FILE, {"metric": self._best_metric, "value": score})
                write(folder)
                self._digests = digest_files(folder, sorted(one.name for one in folder.iterdir() if one.is_file()))
            self._writer = writer
        return writer

    def commit(self, step: int, finish: Callable[[], Digests] = dict) -> AnyFolder:
        """Call ``finish``, which returns the digests of the ranks' files, make the checkpoint whole, and return it.

        It removes older checkpoints beyond ``num_to_keep``, except the best one, and newer checkpoints, before which
        the run was resumed. Errors are as in ``begin``; ``UserError`` also if a rank wrote elsewhere.
        """
        name = checkpoint_name(step)
        with self._discarded_if_it_fails(name):
            digests = finish() | self._digests
            with self._writer.part("list") as folder:
                write_list(folder, digests)
            self._store.upload()  # the checkpoint refers to files such as the metrics so far
            found = self._folders.commit(name, [*digests, LIST_FILE])
            self._prune(step)
        return found

    @contextmanager
    def _discarded_if_it_fails(self, name: str) -> Iterator[None]:
        """Remove the unfinished checkpoint if the block raises, Ctrl-C included."""
        is_whole, place = False, f"{self._store}/{CHECKPOINTS}"
        try:
            yield
            is_whole = True
        except (OSError, SafetensorError) as error:
            if not is_no_room(error):
                raise UserError(f"cannot write a checkpoint into {place}: {error}") from error
            raise UserError(
                f"no room to write a checkpoint into {place} ({os.strerror(error_number(error))}); free some space and "
                "go on with --resume: earlier checkpoints are whole"
            ) from error
        finally:
            if not is_whole:
                self._folders.discard(name)

    def is_best(self, score: float) -> bool:
        """Return whether a checkpoint with this score would be the best; False without a ``best_metric``."""
        best = self._best(self._whole())
        return bool(self._best_metric) and (best is None or score > best[0])

    def latest(self) -> AnyFolder | None:
        """Return the newest whole checkpoint; None if there is none. Nothing is changed."""
        return max(self._whole().items(), default=(0, None))[1]

    def best_until(self, step: int) -> AnyFolder | None:
        """Return the best checkpoint up to ``step``, the newest if none has a score; None if there is none."""
        earlier = {number: found for number, found in self._whole().items() if number <= step}
        best = self._best(earlier)
        return earlier[best[1]] if best else max(earlier.items(), default=(0, None))[1]

    def recovery_hint(self, checkpoint: AnyFolder) -> str:
        """Return the end of a message on a damaged checkpoint.

        ``"delete the folder runs/mine/checkpoints/step_20 and --resume goes on from step_10"``
        """
        before = [step for step, found in self._whole().items() if str(found) != str(checkpoint)]
        rest = f"goes on from step_{max(before)}" if before else "starts again: there is no other checkpoint"
        return f"delete {self._folders.handle(checkpoint)} and --resume {rest}"

    def _whole(self) -> dict[int, AnyFolder]:
        steps = [int(match[1]) for name in self._folders.names(CHECKPOINTS) if (match := _STEP.fullmatch(name))]
        found = {step: self._folders.find(checkpoint_name(step)) for step in sorted(steps)}
        return {step: folder for step, folder in found.items() if folder is not None}

    def _best(self, whole: Mapping[int, AnyFolder]) -> tuple[float, int] | None:
        """Return the highest score and the newest checkpoint with it; None if no checkpoint has a score."""
        scores = ((self._score(folder), step) for step, folder in whole.items())
        return max(((score, step) for score, step in scores if score is not None), default=None)

    def _score(self, checkpoint: AnyFolder) -> float | None:
        """Return the value of ``best_metric`` in ``score.json``; None if it is missing or damaged."""
        if not self._best_metric:
            return None
        try:
            content = self._folders.read(checkpoint, SCORE_FILE)
            found = None if content is None else validated(_Score, content, f"{checkpoint}/{SCORE_FILE}")
        except DataError as error:  # no reason to end a run
            logger.warning("%s; %s does not count as the best checkpoint", error, str(checkpoint).rpartition("/")[2])
            return None
        return found.value if found is not None and found.metric == self._best_metric else None

    def _prune(self, saved: int) -> None:
        whole = self._whole()
        until = {step: folder for step, folder in whole.items() if step <= saved}
        best = self._best(until)
        kept = {*sorted(until)[-self._num_to_keep :], *([best[1]] if best else [])}
        self._folders.link(f"{CHECKPOINTS}/{BEST}", checkpoint_name(best[1]) if best else None)
        self._folders.remove([checkpoint_name(step) for step in whole if step not in kept])
        self._folders.clean(CHECKPOINTS)


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint in its run: ``checkpoints/step_20``."""
    return f"{CHECKPOINTS}/step_{step}"


@dataclass(frozen=True)
class _Score:
    metric: str
    value: float


class CheckpointSaver:
    """Writes checkpoints of the learners while training continues: one at a time, each whole or absent.

    The learners pause for a copy of their state. A thread of each rank writes its part during the next iterations. The
    checkpoint gets its name in ``commit_if_written`` or ``finish``, at the latest when the next one begins.
    """

    def __init__(self, checkpoints: Checkpoints, learners: LearnerGroup) -> None:
        """Take the checkpoints and the learners to save."""
        self._checkpoints = checkpoints
        self._learners = learners
        self._begun: tuple[int, FolderWriter] | None = None

    def begin(self, step: int, state: dict[str, Any], score: float | None) -> None:
        """Begin the checkpoint ``step_<step>``, once the previous one is whole; errors as in ``Algorithm.save``."""
        self.finish()
        writer = self._checkpoints.begin(step, lambda folder: write_json(folder / STATE_FILE, state), score)
        self._learners.begin_save(writer)
        self._begun = step, writer

    def commit_if_written(self) -> None:
        """Give the checkpoint its name if it is written, else return at once. Raises as ``finish``."""
        if self._begun is not None and self._learners.is_written():
            self.finish()

    def finish(self) -> None:
        """Wait until a begun checkpoint is whole; raises ``UserError`` if it could not be written."""
        if self._begun is None:
            return
        (step, writer), self._begun = self._begun, None
        final = self._checkpoints.commit(step, self._learners.finish_save)
        self._learners.saved(writer, part_of(final, LEARNER_PREFIX, LIST_FILE))
