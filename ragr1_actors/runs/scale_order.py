"""Orders of ``ragr1 scale`` and ``ragr1 chaos --run`` to a live run, and its answers: two small files in its store.

``scale.json`` holds the newest order, and ``scaled.json`` the answer to it. Both are replaced as a whole.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ragr1_actors.core.disk.json_files import validated
from ragr1_actors.runs.scaling import FleetName
from ragr1_actors.runs.storage.store import RunStore

T = TypeVar("T", bound=BaseModel)
MAX_REPLICAS = 10_000
_ORDER_FILE, _ANSWER_FILE = "scale.json", "scaled.json"


class ScaleOrder(BaseModel):
    """Order of a person to a live run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    order_id: str
    """Unique id."""
    sizes: dict[FleetName, Annotated[int, Field(ge=1, le=MAX_REPLICAS)]] = {}
    """Sizes of the named fleets; the others keep theirs. Empty gives all fleets back to their autoscalers."""
    kill: FleetName | Literal["learners"] | None = None
    """Kind of which an actor is killed; then nothing else is done."""


class ScaleAnswer(BaseModel):
    """Answer of the run to the order with the same id."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    order_id: str
    message: str
    """Text ``runners 2 -> 8``, or the reason of a refusal."""
    is_refused: bool = False


def write_order(store: RunStore, order: ScaleOrder) -> None:
    """Replace the order of a run; raises ``UserError`` or ``OSError`` if its store cannot be written to."""
    store.write_now(_ORDER_FILE, order.model_dump_json())


def read_order(store: RunStore) -> ScaleOrder | None:
    """Return the newest order of a run, or None.

    Raises:
        DataError: it is damaged.
        UserError: the store cannot be reached.
    """
    return _read(ScaleOrder, store, _ORDER_FILE)


def withdraw_order(store: RunStore, order_id: str) -> None:
    """Remove the order if it is still the newest, so that a run that continues later does not find it."""
    newest = read_order(store)
    if newest is None or newest.order_id != order_id:
        return
    store.remove_now(_ORDER_FILE)


def write_answer(store: RunStore, answer: ScaleAnswer) -> None:
    """Replace the answer of a run; errors as in ``write_order``."""
    store.write_now(_ANSWER_FILE, answer.model_dump_json())


def read_answer(store: RunStore) -> ScaleAnswer | None:
    """Return the newest answer of a run, or None; errors as in ``read_order``."""
    return _read(ScaleAnswer, store, _ANSWER_FILE)


def _read(kind: type[T], store: RunStore, name: str) -> T | None:
    content = store.read_now(name)
    return None if content is None else validated(kind, content, f"{store}/{name}")
