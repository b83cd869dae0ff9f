"""What ``ragr1 scale`` and ``ragr1 chaos --run`` order of a live run, and its answer: two small files in its place.

``scale.json`` holds the newest order, and ``scaled.json`` the answer to it. Both are replaced as a whole.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ragr1_actors.core.errors import DataError
from ragr1_actors.core.files import validated, write_file
from ragr1_actors.runs.places import Place, StoredPlace
from ragr1_actors.runs.scaling import FleetName

T = TypeVar("T", bound=BaseModel)
MAX_REPLICAS = 10_000
_ORDER_FILE, _ANSWER_FILE = "scale.json", "scaled.json"


class ScaleOrder(BaseModel):
    """What a person asks of a live run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    order_id: str
    """Unique."""
    sizes: dict[FleetName, Annotated[int, Field(ge=1, le=MAX_REPLICAS)]] = {}
    """Fleets not named keep their sizes. Empty gives all fleets back to their autoscalers."""
    kill: FleetName | Literal["learners"] | None = None
    """Kill an actor of this kind, and nothing else."""


class ScaleAnswer(BaseModel):
    """What the run did about the order with the same id."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    order_id: str
    message: str
    """``runners 2 -> 8``; if refused, why."""
    is_refused: bool = False


def write_order(place: Place, order: ScaleOrder) -> None:
    """Replace the order of a run; ``UserError`` or ``OSError`` if its place cannot be written to."""
    _write(place, _ORDER_FILE, order.model_dump_json())


def read_order(place: Place) -> ScaleOrder | None:
    """Return the newest order of a run, None without any.

    Raises:
        DataError: it is damaged.
        UserError: the place cannot be reached.
    """
    return _read(ScaleOrder, place, _ORDER_FILE)


def withdraw_order(place: Place, order_id: str) -> None:
    """Remove the order if it is still the newest, so that a run that continues later does not find it."""
    newest = read_order(place)
    if newest is None or newest.order_id != order_id:
        return
    if isinstance(place, StoredPlace):
        place.storage.remove([_ORDER_FILE])
    else:
        (place.path / _ORDER_FILE).unlink(missing_ok=True)


def write_answer(place: Place, answer: ScaleAnswer) -> None:
    """Replace the answer of a run; errors as of ``write_order``."""
    _write(place, _ANSWER_FILE, answer.model_dump_json())


def read_answer(place: Place) -> ScaleAnswer | None:
    """Return the newest answer of a run, None without any; errors as of ``read_order``."""
    return _read(ScaleAnswer, place, _ANSWER_FILE)


def _write(place: Place, name: str, content: str) -> None:
    if isinstance(place, StoredPlace):
        place.storage.write(name, content.encode())
    else:
        write_file(place.path / name, lambda writing: writing.write_text(content, encoding="utf-8"))


def _read(kind: type[T], place: Place, name: str) -> T | None:
    if isinstance(place, StoredPlace):
        content = replace(place.storage, retry_s=0).read(name)  # it is read again soon
    else:
        try:
            content = (place.path / name).read_bytes()
        except FileNotFoundError:
            content = None
    if content is None:
        return None
    try:
        return validated(kind, json.loads(content), f"{place}/{name}")
    except ValueError as error:  # not JSON
        raise DataError(f"{place}/{name} is damaged: {error}") from error
