"""The checkpoints of a run: folders that are whole or absent, and ``state.json``, the position of the run in each.

::

    checkpoints/
      step_10/            whole: it was renamed once everything in it was on disk
        digests.json      the files with their sizes and digests
        policy/           Hugging Face folder, with its own list
        learner.safetensors, learner_1.safetensors, ...   one of each learner rank
        state.json        ``RunState``
      step_20/
      best -> step_10     only with checkpointing.best_metric; a link, so that best/policy is an ordinary folder
      .writing_step_30/   being written, or left by a crash; never read, removed before the next one is written

Nothing is pickled: loading a checkpoint from another source cannot run code.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError

from ragr1_actors.core.digests import LIST_FILE, Digests, check_digests, digest_files, write_list
from ragr1_actors.core.errors import DataError, UserError, first_problem
from ragr1_actors.core.files import (
    WRITING,
    error_number,
    is_no_room,
    learner_files,
    read_json_as,
    sync,
    sync_tree,
    write_json,
)
from ragr1_actors.core.folders import AnyFolder, Sink, compared, part_of
from ragr1_actors.core.types import FailedTask
from ragr1_actors.runs.report import StageReport, TaskCounts
from ragr1_actors.runs.telemetry.alarms import GuardState

STATE_FILE = "state.json"
SCORE_FILE = "score.json"
"""The policy's score on the held-out tasks: ``{"metric": "em", "value": 0.93}``."""
BEST = "best"
_STEP = re.compile(r"step_(\d+)")
_REPLACED = ".replaced_"

logger = logging.getLogger(__name__)


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Books(_Stored):
    """The return value of ``TaskLedger.get_state``."""

    epoch: int = Field(ge=0)
    order: str
    """Positions of the tasks that are left, in the order in which they come: int32 in base64, for 100,000 numbers of
    JSON take a tenth of a second."""
    due: bool
    """Whether the curriculum is asked for another order of them before the next one is issued."""
    issued: str
    """A bit for each task, whether it was issued in this epoch, in base64."""
    skipped: str
    """The same of those that were skipped."""
    never_issued: int = Field(ge=0)
    """Tasks that earlier epochs left out; they count as lost."""
    tasks: str
    """Hash of the ids and questions of the training tasks, in their order."""
    outstanding: list[tuple[str, int, int, int, int]]
    """Task id, epoch, attempt, failures and outages of each task that was issued and not yet trained: those in flight,
    and those whose group was finished. A resumed run samples them again."""
    counts: TaskCounts
    stats: str
    """``pack_stats`` of ``training/task_stats.py``."""
    failed_tasks: list[FailedTask]


class RunState(_Stored):
    """The content of ``state.json``: how far the run was at the checkpoint."""

    sft_step: int = Field(ge=0)
    iteration: int = Field(ge=0)
    policy_version: int = Field(ge=0)
    learner: str
    """Name of the learner that wrote the tensors; empty before the first one."""
    sampler: Books
    extra: dict[str, Any]
    """Data of the caller of ``Algorithm.save``; of a ``TrainingRun`` the fields of ``Standing``."""


class Standing(_Stored):
    """What ``TrainingRun`` stores in addition: the wall time so far in seconds, the finished stages and the guard."""

    wall_s: float
    stages: list[StageReport]
    guard: GuardState = GuardState()


def read_state(checkpoint: AnyFolder) -> RunState:
    """Read ``state.json`` of a checkpoint; ``DataError`` if it is missing or damaged."""
    folder = compared(part_of(checkpoint, STATE_FILE, LIST_FILE), STATE_FILE)
    return read_json_as(RunState, folder / STATE_FILE)


class Checkpoints(Protocol):
    """The checkpoints of one run, see ``CheckpointStore``; each is whole or absent."""

    def begin(self, step: int, write: Callable[[Path], None], score: float | None = None) -> Path | Sink:
        """Return where the learner ranks write the checkpoint of ``step``; ``write`` has written the driver's part."""
        ...

    def commit(self, step: int, finish: Callable[[], Digests] = ..., num_ranks: int = 0) -> AnyFolder:
        """Call ``finish``, which returns what the ranks wrote, make the checkpoint whole, and return it.

        What is not kept is removed.
        """
        ...

    def is_best(self, score: float) -> bool:
        """Return whether a checkpoint with this score would be the best."""
        ...

    def latest(self) -> AnyFolder | None:
        """Return the newest whole checkpoint; None if there is none."""
        ...

    def best_until(self, step: int) -> AnyFolder | None:
        """Return the best checkpoint up to ``step``, the newest if none has a score; None if there is none."""
        ...

    def without(self, checkpoint: AnyFolder) -> str:
        """Return the end of a message on a damaged checkpoint."""
        ...


class CheckpointStore:
    """The checkpoints of one run: ``step_<n>`` folders, the newest ``num_to_keep`` of them and the best one."""

    def __init__(self, directory: Path, num_to_keep: int = 2, best_metric: str = "") -> None:
        """Keep the newest ``num_to_keep`` (at least 1) checkpoints in ``directory``, and that with the best metric.

        The first ``begin`` makes the directory. An empty ``best_metric`` is no scores.
        """
        self._directory = directory
        self._num_to_keep = num_to_keep
        self._best_metric = best_metric

    def begin(self, step: int, write: Callable[[Path], None], score: float | None = None) -> Path:
        """Make the folder that ``commit`` will name ``step_<step>``, call ``write`` with it, and return it.

        More files may be written into it until ``commit``, which replaces a checkpoint of the same step. Only one
        checkpoint is written at a time. ``score`` is the value of ``best_metric``; None keeps the score of the
        checkpoint that is replaced.

        Raises:
            UserError: there is no room on disk, or the folder cannot be written. Earlier checkpoints do not change,
                also not when ``write`` raises.
        """
        writing = self._writing(step)
        with self._cleaned_up():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._clean()
            writing.mkdir()
            before = self._directory / f"step_{step}" / SCORE_FILE
            if score is not None and self._best_metric:
                write_json(writing / SCORE_FILE, {"metric": self._best_metric, "value": score})
            elif before.is_file():
                shutil.copyfile(before, writing / SCORE_FILE)
            write(writing)
        return writing

    def commit(self, step: int, finish: Callable[[], Digests] = dict, num_ranks: int = 0) -> Path:
        """Call ``finish``, wait until the folder of ``begin`` is on disk, and rename it to ``step_<step>``.

        ``finish`` returns the digests of what the ranks wrote, which are listed with the driver's.
        Removes older checkpoints beyond ``num_to_keep``, but not the best one; and newer checkpoints: the run was
        resumed from before them. Raises as ``begin``; ``UserError`` too if one of ``num_ranks`` wrote elsewhere.
        """
        final, writing = self._directory / f"step_{step}", self._writing(step)
        with self._cleaned_up():
            digests = finish()
            for rank, name in enumerate(learner_files(num_ranks) if num_ranks else ()):
                if not (writing / name).is_file():
                    raise UserError(
                        f"{writing} does not hold what learner rank {rank} wrote there; put --run-dir on a file system "
                        "that its node and this one share, or on a storage such as s3://bucket/runs/mine"
                    )
            own = [name for name in (STATE_FILE, SCORE_FILE) if (writing / name).is_file()]
            write_list(writing, digests | digest_files(writing, own))
            sync_tree(writing)
            if final.exists():  # a rename cannot replace a folder with content
                final.rename(self._directory / f"{_REPLACED}{final.name}")
            writing.rename(final)
            sync(self._directory)
            self._prune(step)
        self._clean()
        return final

    def _writing(self, step: int) -> Path:
        return self._directory / f"{WRITING}step_{step}"

    @contextmanager
    def _cleaned_up(self) -> Iterator[None]:
        """Remove what is half written if the block raises, Ctrl-C included."""
        is_whole = False
        try:
            yield
            is_whole = True
        except (OSError, SafetensorError) as error:
            if not is_no_room(error):
                raise UserError(f"cannot write a checkpoint into {self._directory}: {error}") from error
            raise UserError(
                f"no room to write a checkpoint into {self._directory} ({os.strerror(error_number(error))}); free some "
                "space and go on with --resume: earlier checkpoints are whole"
            ) from error
        finally:
            if not is_whole:
                self._clean()

    def is_best(self, score: float) -> bool:
        """Return whether a checkpoint with this score would be the best; False without a ``best_metric``."""
        best = self._best(self._whole())
        return bool(self._best_metric) and (best is None or score > best[0])

    def _best(self, whole: dict[int, Path]) -> tuple[float, Path] | None:
        """Return the highest score and the newest checkpoint with it; None if no checkpoint has a score."""
        newest_first = [path for _, path in sorted(whole.items(), reverse=True)]
        scored = [(score, path) for path in newest_first if (score := self._score(path)) is not None]
        return max(scored, key=lambda entry: entry[0], default=None)

    def _score(self, checkpoint: Path) -> float | None:
        path = checkpoint / SCORE_FILE
        if not self._best_metric:
            return None
        try:
            check_digests(checkpoint, SCORE_FILE.__eq__)
        except DataError as error:
            logger.warning("%s; %s does not count as the best checkpoint", error, checkpoint.name)
            return None
        return read_score(path.read_bytes(), self._best_metric, str(checkpoint)) if path.is_file() else None

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint; None if there is none. Changes nothing on disk."""
        return max(self._whole().items(), default=(0, None))[1]

    def best_until(self, step: int) -> Path | None:
        """Return the best checkpoint up to ``step``, the newest if none has a score; None if there is none."""
        earlier = {number: path for number, path in self._whole().items() if number <= step}
        best = self._best(earlier)
        return best[1] if best else max(earlier.items(), default=(0, None))[1]

    def without(self, checkpoint: AnyFolder) -> str:
        """Return the end of a message on a damaged checkpoint.

        ``"delete the folder runs/mine/checkpoints/step_20 and --resume goes on from step_10"``
        """
        before = [step for step, path in self._whole().items() if path != checkpoint]
        rest = f"goes on from step_{max(before)}" if before else "starts again: there is no other checkpoint"
        return f"delete the folder {checkpoint} and --resume {rest}"

    def _whole(self) -> dict[int, Path]:
        if not self._directory.is_dir():
            return {}
        whole: dict[int, Path] = {}
        # Sorted, so that step_3 comes after .replaced_step_3 and wins; the latter counts only after a crash between
        # the two renames of a replacement.
        for entry in sorted(self._directory.iterdir()):
            match = _STEP.fullmatch(entry.name.removeprefix(_REPLACED))
            if match and entry.is_dir():
                whole[int(match[1])] = entry
        return whole

    def _prune(self, saved: int) -> None:
        whole = self._whole()
        self._remove(path for step, path in whole.items() if step > saved)
        best = self._best(self._whole())
        self._link(best[1] if best else None)
        older = [path for step, path in sorted(whole.items()) if step <= saved][: -self._num_to_keep]
        self._remove(path for path in older if best is None or path != best[1])

    def _remove(self, checkpoints: Iterable[Path]) -> None:
        for path in checkpoints:  # renamed first: an interrupted removal must not leave half a checkpoint under a name
            path.rename(self._directory / f"{WRITING}removed_{path.name}")

    def _link(self, best: Path | None) -> None:
        link, writing = self._directory / BEST, self._directory / f"{WRITING}{BEST}"
        if best is None:
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(best.name):
            writing.symlink_to(best.name)
            writing.rename(link)

    def _clean(self) -> None:
        if not self._directory.is_dir():
            return
        for leftover in self._directory.glob(f"{WRITING}*"):
            if leftover.is_symlink():
                leftover.unlink()
            shutil.rmtree(leftover, ignore_errors=True)
        for replaced in self._directory.glob(f"{_REPLACED}*"):
            final = self._directory / replaced.name.removeprefix(_REPLACED)
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
            else:
                replaced.rename(final)


@dataclass(frozen=True)
class _Score:
    metric: str
    value: float


def read_score(content: bytes, metric: str, where: str) -> float | None:
    """Return the value in ``score.json`` of the checkpoint ``where``; None if it is of another metric, or damaged."""
    try:
        found = _SCORE.validate_json(content)
    except ValidationError as error:  # no reason to end a run
        name, _, problem = first_problem(error)
        logger.warning(
            "%s/%s is damaged: %s: %s; %s does not count as the best checkpoint",
            *(where, SCORE_FILE, name or "the whole file", problem, where.rpartition("/")[2]),
        )
        return None
    return found.value if found.metric == metric else None


_SCORE = TypeAdapter(_Score)
