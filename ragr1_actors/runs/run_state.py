"""``state.json`` of a checkpoint: where a run stands, beside the tensors of its learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragr1_actors.core.errors import DataError
from ragr1_actors.core.files import read_json
from ragr1_actors.runs.report import StageReport

STATE_FILE = "state.json"


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Counts(_Stored):
    """What ``TaskSampler.counts`` returns."""

    issued: int = Field(ge=0)
    trained: int = Field(ge=0)
    failed: int = Field(ge=0)
    lost: int
    doubled: int = Field(ge=0)


class Books(_Stored):
    """What ``TaskSampler.get_state`` returns."""

    epoch: int = Field(ge=0)
    cursor: int = Field(ge=0)
    outstanding: list[tuple[str, int, int]]
    """Task id, epoch, attempt."""
    counts: Counts


class RunState(_Stored):
    """Where a run stands."""

    sft_step: int = Field(ge=0)
    iteration: int = Field(ge=0)
    policy_version: int = Field(ge=0)
    learner: str
    """Name of the learner whose tensors stand beside this; empty before the first."""
    sampler: Books
    extra: dict[str, Any]
    """The caller's own: of a ``TrainingRun`` a ``Standing``."""


class Standing(_Stored):
    """What ``TrainingRun`` knows of a run beside the algorithm's own."""

    wall_s: float
    stages: list[StageReport]


S = TypeVar("S", bound=_Stored)


def read_state(checkpoint: Path) -> RunState:
    """Read ``state.json`` of a checkpoint.

    Raises:
        DataError: the file is missing, is not JSON, or holds something else; the message names it.
    """
    path = checkpoint / STATE_FILE
    return _validated(RunState, read_json(path), str(path))


def read_standing(extra: dict[str, Any]) -> Standing:
    """Read ``RunState.extra`` of a ``TrainingRun``.

    Raises:
        DataError: it holds something else.
    """
    return _validated(Standing, extra, f"extra in {STATE_FILE}")


def _validated(kind: type[S], value: Any, where: str) -> S:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{where} is damaged: {name or 'all of it'}: {first['msg'].lower()}") from error
