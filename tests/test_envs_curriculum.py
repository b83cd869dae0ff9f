"""The shipped curricula against plain loops, and what a user's curriculum is told that cannot be used."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tasks.curriculum import Curriculum, Stats, TaskStats, make_curriculum
from envs.tasks.files import load_tasks
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.types import Task
from ragr1_actors.planning.preflight import check_names, try_curriculum
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.batches import TaskLedger

RNG_SEEDS = st.integers(0, 2**32 - 1)


def named(name: str, **options: Any) -> Curriculum:
    return make_curriculum(EnvironmentSettings(curriculum=name, curriculum_options=options))


def make_tasks(rates: Sequence[Any], field: str = "pass_rate") -> list[Task]:
    return [Task(f"t/{number}", "", ("a",), meta={field: rate}) for number, rate in enumerate(rates)]


def check_ascending(curriculum: Curriculum, tasks: Sequence[Task], stats: Mapping[str, TaskStats], key: Any) -> None:
    """Check an order against a plain loop; all orders of equal tasks come about."""
    orders = [list(curriculum.order(tasks, stats, 0, np.random.default_rng(seed))) for seed in range(20)]
    for order in orders:
        left = list(range(len(tasks)))
        for at in order:
            assert key(tasks[at]) == min(key(tasks[other]) for other in left)
            left.remove(at)
        assert left == []
    keys = [key(task) for task in tasks]
    if len(set(keys)) < len(keys):
        assert len({tuple(order) for order in orders}) > 1


STATS = st.none() | st.integers(1, 12).flatmap(
    lambda number: st.builds(TaskStats, st.just(number), st.integers(0, number), st.floats(-9, 9))
)


@given(st.lists(STATS, min_size=1, max_size=12))
def test_adaptive_has_the_middle_first(found: list[TaskStats | None]) -> None:
    tasks = make_tasks([0] * len(found))
    stats = {task.task_id: one for task, one in zip(tasks, found, strict=True) if one is not None}

    def distance(task: Task) -> Fraction:
        one = stats.get(task.task_id)
        return Fraction(1, 4) if one is None else abs(Fraction(one.num_passed, one.num_trajectories) - Fraction(1, 2))

    check_ascending(named("adaptive"), tasks, stats, distance)


@given(st.lists(st.floats(0, 1) | st.sampled_from([0, 0.5, 1]), min_size=1, max_size=12))
def test_difficulty_has_easy_tasks_first(rates: list[float]) -> None:
    check_ascending(named("difficulty"), make_tasks(rates), {}, lambda task: -task.meta["pass_rate"])
    renamed = make_tasks(rates, "level")
    check_ascending(named("difficulty", field="level"), renamed, {}, lambda task: -task.meta["level"])


def test_difficulty_reads_what_select_writes(tmp_path: Path) -> None:
    rates = [0.3, 0.9, 0.1, 0.5]
    lines = [
        {"id": str(number), "question": f"q{number}?", "golden_answers": ["Riga"], "pass_rate": rate, "num_samples": 10}
        for number, rate in enumerate(rates)
    ]
    path = tmp_path / "selected.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    tasks = load_tasks(str(path)).tasks
    assert [task.meta for task in tasks] == [{"pass_rate": rate, "num_samples": 10} for rate in rates]
    ledger = TaskLedger(tasks, 0, named("difficulty"))
    assert [ledger.next().task.question for _ in tasks] == ["q1?", "q3?", "q0?", "q2?"]


@pytest.mark.parametrize(("rate", "got"), [("0.5", "pass_rate '0.5'"), (True, "pass_rate True"), (math.nan, "nan")])
def test_difficulty_names_a_task_without_a_pass_rate(rate: object, got: str) -> None:
    tasks = [*make_tasks([0.5]), Task("t/9", "", ("a",), meta={"pass_rate": rate})]
    with pytest.raises(ConfigError, match=rf"^environment\.curriculum: got .*{got} in task t/9, expected a number"):
        TaskLedger(tasks, 0, named("difficulty")).next()
    with pytest.raises(ConfigError, match=r"got no pass_rate in task t/9, .* `ragr1 select` .*curriculum_options="):
        TaskLedger([Task("t/9", "", ("a",))], 0, named("difficulty")).next()


def test_the_options_are_those_of_the_curriculum() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key environment\.curriculum_options\.feild; did you mean 'field'\?"
    ):
        named("difficulty", feild="level")
    for name in "shuffle", "adaptive":
        with pytest.raises(ConfigError, match=r"it has no keys: leave environment\.curriculum_options empty"):
            named(name, field="level")


# -- a user's curriculum -----------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Write a module with a class ``Mine`` and return the class's name for a recipe."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"mine_{abs(hash(request.node.nodeid))}"

    def write_module(text: str) -> str:
        (tmp_path / f"{name}.py").write_text(
            "from envs.tasks.curriculum import Curriculum\n\n\n" + text.replace("; ", "\n        ")
        )
        return f"{name}:Mine"

    return write_module


MINE = "class Mine(Curriculum):\n"  # in line 4
ORDER = "    def order(self, rest, stats, epoch, rng):; "  # in line 5
SKIP = f"{ORDER}return range(len(rest))\n    def skip(self, task, stats):; "  # in line 7


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("Mine = 3", "is a int, expected a subclass of Curriculum", 0),
        ("def Mine(options):; pass", "is a function, expected a subclass of Curriculum", 4),
        ("class Mine:; pass", "is the class Mine, expected a subclass of Curriculum", 4),
        (f"{MINE}    pass", "lacks the methods order; write them", 4),
        (f"{MINE}    def __init__(self):; pass\n{ORDER}pass", r"cannot be called with \(options\): too many", 4),
        (
            f"{MINE}    def order(self, rest):; pass",
            r"order cannot be called with \(rest, stats, epoch, rng\): too m",
            5,
        ),
        (f"{ORDER}pass\n    def skip(self):; pass", r"skip cannot be called with \(task, stats\): too many", 7),
        (f"{ORDER}pass\n    def __init__(self, options):; options['a']", "Mine failed at .*: KeyError: 'a'; mend", 8),
    ],
)
def test_an_unusable_class_is_named_before_the_run(
    write: Callable[[str], str], tmp_path: Path, text: str, message: str, line: int
) -> None:
    name = write(text if "Mine" in text else MINE + text)
    with pytest.raises(ConfigError, match=rf"^environment\.curriculum: .*{message}") as caught:
        check_names(AlgorithmConfig().environment(curriculum=name).freeze())
    place = f"{tmp_path / name.partition(':')[0]}.py, line {line}"
    assert "\n" not in str(caught.value)
    assert (place in str(caught.value)) == bool(line), caught.value


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        (f"{ORDER}return [0, 1, 2, 2]", "order returned position 2 2 times, expected each of the 4 positions", 5),
        (f"{ORDER}return [0, 1, 2, 4]", "order returned position 4, expected each of the 4 positions from 0 to 3", 5),
        (f"{ORDER}return [0, 1, 2, -1]", "order returned position -1, expected", 5),
        (f"{ORDER}return [0, 1, 2]", "order returned 3 positions, expected", 5),
        (f"{ORDER}return [0, 1, 2, 3.0]", r"order returned \[0, 1, 2, 3\.0\], expected", 5),
        (f"{ORDER}return [[0, 1], [2], 3]", r"order returned \[\[0, 1\], \[2\], 3\], expected", 5),
        (f"{ORDER}return rest", r"order returned \[Task\(.*, expected", 5),
        (f"{ORDER}return None", "order returned None, expected", 5),
        (f"{ORDER}del rest[3:]; return range(len(rest))", "order returned 3 positions, expected each of the 4 p", 5),
        (f"{ORDER}rest.clear(); return []", r"order returned \[\], expected each of the 4 positions", 5),
        (f"{ORDER}stats['t/0'] = 1; return [0, 1, 2, 3]", "order failed at .*: TypeError: 'mappingproxy'", 6),
        (f"{ORDER}return 1 / epoch", "order failed at .*: ZeroDivisionError: division by zero; mend", 6),
        (f"{ORDER}int('a'); return []", "order failed at .*: ValueError: invalid literal", 6),
        (f"{ORDER}import json; return json.loads('[')", "order failed at .*: JSONDecodeError: ", 7),
        (f"{SKIP}return 1", "skip returned 1, expected True or False", 7),
        (f"{SKIP}return None", "skip returned None, expected True or False", 7),
        (f"{SKIP}return stats['t/0']", "skip failed at .*: KeyError: 't/0'; mend it", 8),
        (f"{SKIP}return rest.sort()", "skip failed at .*: NameError: ", 8),
        (f"{SKIP}return True", "skip returned True for all of 4 tasks of epoch 0, expected False for some", 7),
    ],
)
def test_what_a_curriculum_does_wrong_is_named_with_its_line(
    write: Callable[[str], str], tmp_path: Path, text: str, message: str, line: int
) -> None:
    name = write(MINE + text)
    check_names(AlgorithmConfig().environment(curriculum=name).freeze())
    with pytest.raises(ConfigError, match=rf"^environment\.curriculum: Mine\.{message}") as caught:
        TaskLedger(make_tasks([0] * 4), 0, named(name)).next()
    place = f"{tmp_path / name.partition(':')[0]}.py, line {line}"
    assert "\n" not in str(caught.value)
    assert re.search(rf"{re.escape(place)}(:|$)", str(caught.value)), caught.value


def test_a_curriculum_may_return_an_array_and_take_what_options_it_likes(write: Callable[[str], str]) -> None:
    name = write(
        f"{MINE}{ORDER}import numpy; return numpy.argsort([self.options['up'] * len(t.task_id) for t in rest])"
    )
    check_names(AlgorithmConfig().environment(curriculum=name, curriculum_options={"up": -1}).freeze())
    tasks = make_tasks([0] * 11)
    assert TaskLedger(tasks, 0, named(name, up=-1)).next().task is tasks[10]


@pytest.mark.parametrize("change", ["del rest[3:]", "rest.clear()", "rest.sort(key=id); rest.pop()"])
def test_a_curriculum_may_change_the_list_that_it_is_given(write: Callable[[str], str], change: str) -> None:
    """And its tasks come once each: none is lost."""
    name = write(f"{MINE}{ORDER}order = [*range(len(rest))][::-1]; {change}; return order")
    tasks = make_tasks([0] * 20)
    ledger = TaskLedger(tasks, 0, named(name))
    for _ in tasks:
        ledger.trained(ledger.next(), [1.0])
    ledger.next()
    counts = ledger.counts()
    assert (counts["trained"], counts["lost"], counts["doubled"]) == (20, 0, 0)
    assert [check.problem for check in try_curriculum(named(name))] == ["", ""]


@pytest.mark.parametrize(
    "text", [f"{ORDER}stats['t/0'] = 1; return range(len(rest))", f"{SKIP}stats.clear(); return False"]
)
def test_a_check_gives_stats_that_cannot_be_changed_as_a_run_does(write: Callable[[str], str], text: str) -> None:
    for check in try_curriculum(named(write(MINE + text))):
        assert "mappingproxy" in check.problem, check


class Never(Curriculum):
    """Skips every task, at once or once it was trained."""

    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        return range(len(rest))

    def skip(self, task: Task, stats: Stats) -> bool:
        return self.options["at_once"] or task.task_id in stats


def test_a_curriculum_that_skips_every_task_of_a_new_run_is_found_before_it() -> None:
    problems = [check.problem for check in try_curriculum(Never({"at_once": True}))]
    assert re.search(r"Never\.skip returned True for all of 5 tasks of epoch 0, .*, line \d+$", problems[0])
    assert problems[1] == ""
    assert [check.problem for check in try_curriculum(Never({"at_once": False}))] == ["", ""]
