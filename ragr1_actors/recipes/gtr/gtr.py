"""GTR-T: text to SQL with examples that a retriever finds, over the tables of the generated world.

The prompt shows the question-and-SQL pairs that are nearest to the question; one turn writes the SQL, which is run on a
database in memory. Execution accuracy: whether the rows are those of the gold SQL. The published system trains nothing;
here SFT shows SQL that is often wrong, and reinforcement learning is rewarded by execution accuracy.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Iterator, Sequence
from functools import lru_cache

from envs.base import EnvContext
from envs.sources import Split, WorldSource
from envs.tasks.world import EntityKind, make_world
from ragr1_actors import Completion, Passage, StepResult, Task, TextEnv, ToolCall
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Message

COLUMNS = {
    EntityKind.PERSON: "place",
    EntityKind.FILM: "maker",
    EntityKind.COMPANY: "maker",
    EntityKind.CITY: "country",
}
"""The second column of each table; the first is ``name``, the third ``year``."""
MAX_STEPS = 1_000_000
"""Steps of SQLite's virtual machine that one query may take: it stops a join of all people with all people."""
ALLOWED, MAX_BYTES = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}, 100_000
"""Actions that SQL may contain, so no PRAGMA and no ATTACH; size of a value that it may compute."""
NUM_EXAMPLES = 100
FAULTS = 0.5
"""Share of the demonstrations with a fault."""
_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_TEXT = re.compile(r"'\s*(.*?)\s*'")


@lru_cache(maxsize=1)
def _database() -> sqlite3.Connection:
    """Return the tables of world 0, which no SQL of a policy can change."""
    opened = sqlite3.connect(":memory:", check_same_thread=False)
    for kind, column in COLUMNS.items():
        opened.execute(f"CREATE TABLE {kind} (name TEXT PRIMARY KEY, {column} TEXT, year INTEGER)")
    for one in make_world(0).entities.values():
        opened.execute(f"INSERT INTO {one.kind} VALUES (?, ?, ?)", (one.name, one.place_or_maker, one.year))
    opened.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
    opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
    return opened


def execute(sql: str) -> list[str]:
    """Return the values of the first rows, sorted: ``["1931"]``; spaces at the ends of a text do not count.

    Raises ``sqlite3.Error`` on what is no query.
    """
    opened, left = _database(), MAX_STEPS // 1000

    def stop() -> int:
        nonlocal left
        left -= 1
        return left < 0

    opened.set_progress_handler(stop, 1000)
    return sorted(str(value) for row in opened.execute(_TEXT.sub(r"'\1'", sql)).fetchmany(10) for value in row)


def gold_sql(task: Task) -> str:
    """Return the SQL that answers a question of the world."""
    kinds = [make_world(0).entities[name].kind for asked in task.plan for name in asked]
    names = [name for asked in task.plan for name in asked]
    if task.category.startswith("comparison"):
        return f"SELECT MIN(year) FROM {kinds[0]} WHERE name IN ({', '.join(map(_quoted, names))})"
    column = "year" if task.golden_answers[0].isdigit() else COLUMNS[kinds[-1]]
    inner = _quoted(names[0])
    for kind in kinds[:-1]:
        inner = f"(SELECT {COLUMNS[kind]} FROM {kind} WHERE name = {inner})"
    return f"SELECT {column} FROM {kinds[-1]} WHERE name = {inner}"


def _quoted(name: str) -> str:
    return f"' {name} '"  # with spaces, so that its tokens are those of the question


class SqlSource(WorldSource):
    """Questions of the world; its passages are questions with their SQL."""

    def passages(self) -> Sequence[Passage]:
        """Return examples: training questions, with their gold SQL."""
        examples = self.tasks("train")[:NUM_EXAMPLES]
        return [Passage(task.task_id, task.question, f"{task.question} {gold_sql(task)}") for task in examples]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the questions that a table answers."""
        return [task for task in super().tasks(split) if task.plan]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return the gold SQL, or one with a fault: a wrong column, or the largest in place of the smallest."""
        sql = gold_sql(task)
        if rng.random() < FAULTS:
            sql = sql.replace("MIN", "MAX") if "MIN" in sql else re.sub(r"SELECT \w+", "SELECT name", sql, count=1)
        return [f"<sql>{sql}</sql>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the words of questions and SQL."""
        yield from super().texts(tasks)
        yield from (f" {gold_sql(task)}" for task in [*self.tasks("train")[:2000], *self.tasks("eval")])


class SqlEnv(TextEnv):
    """Shows examples, and runs the SQL of one turn."""

    stop = ("</sql>",)

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt and the retriever of the examples."""
        self._settings, self._context = settings, context

    async def reset(self, task: Task) -> list[Message]:
        """Return the nearest example and the question."""
        self._task = task
        (found,) = await self._context.retriever.search([task.question], 1)
        shown = "".join(f"{self._context.defuse(one.text)}\n" for one in found)
        self._call = ToolCall("examples", {"query": task.question, "k": 1}, records=tuple(found))
        return [Message("user", shown + self._settings.prompt.replace("{question}", task.question))]

    async def act(self, turn: Completion) -> StepResult:
        """Run the SQL; the answer is what it returns."""
        written = _SQL.search(turn.text)
        try:
            rows = execute(written[1]) if written else None
        except sqlite3.Error:
            rows = None
        is_right = rows is not None and rows == execute(gold_sql(self._task))
        calls = (self._call,)
        if rows is None:
            return StepResult(terminated=True, action=MALFORMED, calls=calls)
        return StepResult(terminated=True, action="answer", answer=", ".join(rows), reward=float(is_right), calls=calls)
