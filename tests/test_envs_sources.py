"""Task sources: one or several, weights, clashes, a class of the user's, and what a corpus is made of."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from envs.checker import check_source
from envs.sources import FileSource, Split, TaskSource, TaskSources, TeacherSource, WorldSource
from envs.tasks.world import make_world
from ragr1_actors.cli import main as cli
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import ConfigError, DataError, UserError
from ragr1_actors.core.types import Task
from ragr1_actors.planning.plan import corpus_of
from ragr1_actors.planning.preflight import check_names
from ragr1_actors.planning.prepare import in_turn, split_tasks
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.base import Passage

HERE = "test_envs_sources"


class Lamps(TaskSource):
    """A user's source."""

    def tasks(self, split: Split) -> Sequence[Task]:
        count = {"train": 6, "eval": 2}[split]
        return [Task(f"lamps/{split}{n}", f"Where is the {split} lamp {n}?", ("Riga",)) for n in range(count)]

    def passages(self) -> Sequence[Passage]:
        return [Passage("lamp", "lamp", "The lamp lies in Riga.")]


class NoSource:
    """Not a source."""


class Raising(Lamps):
    def tasks(self, split: Split) -> Sequence[Task]:
        raise KeyError("lamp")


class Texts(Lamps):
    def tasks(self, split: Split) -> Sequence[Any]:
        return ["Where?"]


class Twice(Lamps):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task("lamps/0", "Where?", ("Riga",))] * 2


class Drawn(Lamps):
    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"lamps/{random.random()}", "Where?", ("Riga",))]


class Silent(Lamps):
    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        return ["<search>lamp</search>"]


class Pages(Lamps):
    def passages(self) -> Sequence[Any]:
        return [{"text": "The lamp lies in Riga."}]


class Absent(Lamps):
    def tasks(self, split: Split) -> Any:
        return None


class Letters(Lamps):
    def tasks(self, split: Split) -> Sequence[Task]:
        answers: Any = "Riga"
        return [Task("lamps/0", "Where?", answers)]


class Copies(Lamps):
    def passages(self) -> Sequence[Passage]:
        return [Passage("p", "lamp", "The lamp lies in Riga.")] * 2


class Elsewhere(Lamps):
    def tasks(self, split: Split) -> Any:
        return json.loads("{")


class NoSplit(Lamps):
    def tasks(self) -> Any:  # type: ignore[override]
        return ()


class Optional(Lamps):
    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        super().__init__(environment, {})
        self.count = options["count"]


WRONG = [
    (Absent, "tasks has training tasks", "Absent.tasks ({}) returned None, expected a sequence of Task"),
    (Letters, "tasks has training tasks", "expected a tuple of texts as golden_answers"),
    (Copies, "passages returns passages", "Copies.passages ({}): 1 ids occur twice, such as p; expected each once"),
    (Elsewhere, "tasks has training tasks", "Elsewhere.tasks failed at {}: JSONDecodeError"),
    (NoSplit, "tasks has training tasks", "NoSplit.tasks failed at {}: TypeError: NoSplit.tasks() takes 1"),
    (Raising, "tasks has training tasks", "Raising.tasks failed at "),
    (Texts, "tasks has training tasks", "returned 'Where?', expected a sequence of Task"),
    (Twice, "tasks has training tasks", "Twice.tasks ({}): 1 ids occur twice, such as lamps/0; expected each once"),
    (Drawn, "tasks returns the same", "returned others the second time"),
    (
        Silent,
        "demonstrate ends",
        "Silent.demonstrate ({}) returned ['<search>lamp</search>'] for lamps/train0, expected an answer in the last",
    ),
    (
        Pages,
        "passages returns passages",
        "returned {'text': 'The lamp lies in Riga.'}, expected a sequence of Passage",
    ),
]


def settings(tasks: Any, **keys: Any) -> EnvironmentSettings:
    return AlgorithmConfig().environment(tasks=tasks, **keys).freeze().environment


def opened(tasks: Any) -> TaskSources:
    environment = settings(tasks)
    return TaskSources.open(environment.tasks, environment)


def task_file(folder: Path, name: str, count: int, **fields: Any) -> str:
    records = [{"id": n, "question": f"{name} {n}?", "answer": "Riga", **fields} for n in range(count)]
    (folder / f"{name}.json").write_text(json.dumps(records))
    return str(folder / f"{name}.json")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"shares": {"one_hop": 0.5, "two_hop": 0.4}}, "the shares sum to 0.9, expected 1"),
        ({"shares": {"one_hops": 1.0}}, "there is no category one_hops; did you mean 'one_hop'"),
        ({"habits": {"two_hops": {"good": 1.0}}}, "there is no category two_hops; did you mean 'two_hop'"),
        ({"habits": {"two_hop": {"god": 1.0}}}, "god"),
        ({"habits": {"one_hop": {"stop_early": 1}}}, "one_hop: got stop_early, expected habits of good, guess"),
        ({"habits": {"two_hop": {"good": 1, "first_only": 0}}}, "two_hop: got first_only, expected habits of good"),
        ({"habits": {"comparison_2": {"needless": 1}}}, "comparison_2: got needless"),
        ({"habits": {"one_hop": {"good": 0}}}, "one_hop: the probabilities sum to 0, expected more"),
        ({"habits": {"one_hop": {}}}, "one_hop: the probabilities sum to 0, expected more"),
    ],
)
def test_wrong_shares_and_habits_of_the_world_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        opened({"source": "world", "options": options})


def test_the_world_has_tasks_passages_and_demonstrations() -> None:
    sources = opened({"source": "world", "options": {"seed": 7}})
    world = make_world(7)
    assert sources.tasks("train", 0) == world.train_tasks
    assert sources.tasks("eval", 0) == world.eval_tasks
    assert sources.passages() == list(world.passages)
    task = world.train_tasks[0]
    turns = sources.source_of(task).demonstrate(task, random.Random(0))
    assert turns[-1].endswith("</answer>")
    assert isinstance(sources.source_of(task), WorldSource)
    assert make_world(0).train_tasks[0] != task


def test_a_world_of_one_category_has_no_more_tasks_than_there_are_questions() -> None:
    world = make_world(0, {"three_hop": 1.0})
    assert len(world.eval_tasks) == 300
    assert 4000 < len(world.train_tasks) == len({task.question for task in world.train_tasks}) < 4640


def test_files_are_one_source_and_have_the_split_that_named_them(tmp_path: Path) -> None:
    named = [task_file(tmp_path, "a", 3, level="hard"), task_file(tmp_path, "b", 2)]
    train, evaluation = opened(named), TaskSources.open(named, settings("world"), whole=True)
    assert [task.task_id for task in train.tasks("train", 0)] == ["a/0", "a/1", "a/2", "b/0", "b/1"]
    assert {task.source for task in train.tasks("train", 0)} == {""}
    assert train.tasks("train", 0)[0].meta == {"level": "hard"}
    assert train.tasks("eval", 0) == evaluation.tasks("train", 0) == ()
    assert len(evaluation.tasks("eval", 0)) == 5
    assert "5 tasks of 5 records" in train.reports()[0]


def test_several_sources_keep_their_names(tmp_path: Path) -> None:
    path = task_file(tmp_path, "hotpotqa", 4)
    sources = opened([path, {"source": f"{HERE}:Lamps"}, "world"])
    assert sources.names() == ["hotpotqa", "Lamps", "world"]
    tasks = sources.tasks("train", 0)
    assert Counter(task.source for task in tasks) == {"hotpotqa": 4, "Lamps": 6, "world": 12_000}
    assert type(sources.source_of(tasks[5])).__name__ == "Lamps"
    assert isinstance(sources.source_of(tasks[0]), FileSource)
    assert Counter(task.source for task in sources.tasks("eval", 0)) == {"Lamps": 2, "world": 300}
    assert {passage.id for passage in sources.passages()} > {"lamp", "person0"}


def test_two_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    first, second = task_file(tmp_path / "x", "train", 1), task_file(tmp_path / "y", "train", 1)
    sources = opened([{"source": first}, {"source": second}])
    assert sources.names() == ["train", "train#2"]
    assert opened([{"source": one} for one in (first, second, first)]).names() == ["train", "train#2", "train#3"]
    with pytest.raises(DataError, match=r"1 tasks are in two sources, such as train/0; give them other ids"):
        sources.tasks("train", 0)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    seed=st.integers(0, 9),
)
def test_weights_are_the_shares_of_the_training_tasks(sizes: list[int], weights: list[float], seed: int) -> None:
    class Sized(TaskSource):
        def tasks(self, split: Split) -> Sequence[Task]:
            return [Task(f"{self.number}/{n}", "?", ("a",)) for n in range(self.size)]

    environment = settings("world")
    entries = settings([{"source": "world", "weight": weight} for weight in weights[: len(sizes)]]).tasks
    made = []
    for number, size in enumerate(sizes):
        source = Sized(environment, {})
        source.number, source.size = number, size  # type: ignore[attr-defined]
        made.append(source)
    sources = TaskSources(tuple(zip(entries, made, strict=True)))  # type: ignore[arg-type]
    kept = Counter(int(task.task_id.partition("/")[0]) for task in sources.tasks("train", seed))
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=False))
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=False)):
        assert kept[number] == min(size, max(1, round(scale * weight)))
    assert sources.tasks("train", seed) == sources.tasks("train", seed)
    assert len(sources.tasks("eval", seed)) == sum(sizes)


def test_evaluation_questions_of_any_source_leave_the_training(tmp_path: Path) -> None:
    asked = {"id": 9, "question": "Where is the eval lamp 1?", "answer": "Riga"}
    (tmp_path / "more.json").write_text(json.dumps([asked, {"id": 1, "question": "Who?", "answer": "Ana"}]))
    config = AlgorithmConfig().environment(tasks=[f"{HERE}:Lamps", str(tmp_path / "more.json")]).freeze()
    train, evaluation, notes = split_tasks(config, 5)
    assert [task.task_id for task in evaluation] == ["lamps/eval0", "lamps/eval1"]
    assert [task.task_id for task in train][-1:] == ["more/1"]
    assert any("1 evaluation questions are also training tasks" in note for note in notes)


def test_the_corpus_is_that_of_the_sources_or_of_a_source_that_is_named(tmp_path: Path) -> None:
    path = task_file(tmp_path, "questions", 6)
    mine = AlgorithmConfig().environment(tasks=f"{HERE}:Lamps")
    assert [passage.id for passage in corpus_of(mine.freeze())] == ["lamp"]
    seeded = AlgorithmConfig().environment(tasks=[path, {"source": "world", "options": {"seed": 3}}])
    assert tuple(corpus_of(seeded.retrieval(corpus="world").freeze())) == make_world(3).passages
    files = AlgorithmConfig().environment(tasks=path)
    assert tuple(corpus_of(files.retrieval(corpus="world").freeze())) == make_world(0).passages
    with pytest.raises(ConfigError, match=r"retrieval\.corpus: got nothing, and .*questions\.json has no passages"):
        corpus_of(files.retrieval(corpus="").freeze())


def test_passages_of_one_id_are_refused() -> None:
    sources = opened([f"{HERE}:Lamps", {"source": f"{HERE}:Lamps"}])
    with pytest.raises(DataError, match="1 passages of the task sources have the id of another one, such as lamp"):
        sources.passages()


def test_a_teachers_file_demonstrates_its_own_tasks(tmp_path: Path) -> None:
    record = {
        "question": "Where is the lamp?",
        "golden_answers": ["Riga"],
        "messages": [
            {"role": "user", "content": "Where is the lamp?"},
            {"role": "assistant", "content": "<search>lamp</search>"},
            {"role": "user", "content": "<information>Riga</information>"},
            {"role": "assistant", "content": "<answer>Riga</answer>"},
        ],
    }
    (tmp_path / "teacher.jsonl").write_text(json.dumps(record))
    source = TeacherSource(settings("world"), tmp_path / "teacher.jsonl")
    (task,) = source.tasks("train")
    assert source.demonstrate(task, random.Random(0)) == ["<search>lamp</search>", "<answer>Riga</answer>"]
    assert source.tasks("eval") == ()


@pytest.mark.parametrize(("source", "check", "problem"), WRONG, ids=[source.__name__ for source, *_ in WRONG])
def test_what_is_wrong_with_a_source_is_said_before_a_run(source: type[Lamps], check: str, problem: str) -> None:
    found = {one.name: one.problem for one in check_source(f"{HERE}:{source.__name__}", settings("world"))}
    (name,) = [name for name in found if name.startswith(check)]
    place = r"[^()]*test_envs_sources\.py, line \d+"
    assert re.search(re.escape(problem).replace(r"\{\}", place), found[name]), found[name]


def test_a_source_is_checked_with_its_options() -> None:
    named = settings({"source": f"{HERE}:Optional", "options": {"count": 2}})
    assert [one.problem for one in check_source(f"{HERE}:Optional", named)] == [""] * 5
    with pytest.raises(ConfigError, match=r"Optional failed at .*test_envs_sources\.py, line \d+: KeyError: 'count'"):
        check_source(f"{HERE}:Optional", settings("world"))


class Unevaluated(Lamps):
    def tasks(self, split: Split) -> Sequence[Task]:
        return {"train": super().tasks(split)}[split]


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        (f"{HERE}:Raising", r"Raising\.tasks failed at .*test_envs_sources\.py, line \d+: KeyError: 'lamp'"),
        (f"{HERE}:Unevaluated", r"Unevaluated\.tasks failed at .*, line \d+: KeyError: 'eval'"),
        ([{"source": f"{HERE}:Lamps"}, {"source": f"{HERE}:Lamps"}], "6 tasks are in two sources"),
    ],
)
def test_what_a_source_does_wrong_is_said_before_anything_starts(tasks: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        check_names(AlgorithmConfig().environment(tasks=tasks).freeze())


def test_a_raise_in_a_run_names_the_file_and_the_line() -> None:
    with pytest.raises(
        DataError, match=r"Raising\.tasks failed at .*test_envs_sources\.py, line \d+: KeyError: 'lamp'"
    ):
        opened(f"{HERE}:Raising").tasks("train", 0)
    with pytest.raises(DataError, match="expected a sequence of Passage"):
        opened(f"{HERE}:Pages").passages()


def test_a_source_that_works_has_no_fault() -> None:
    assert [one.problem for one in check_source("world", settings("world"))] == [""] * 5
    good = CliRunner().invoke(cli.app, ["check", "source", f"{HERE}:Lamps", "environment.options.query_format=json"])
    assert (good.exit_code, good.stdout.count("ok")) == (0, 5)
    bad = CliRunner().invoke(cli.app, ["check", "source", f"{HERE}:Twice"])
    assert bad.exit_code == 1
    assert "ids occur twice" in " ".join(bad.stdout.split())


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        (f"{HERE}:NoSource", "expected a subclass of envs.sources.TaskSource"),
        (f"{HERE}:Optional", "KeyError: 'count'; mend it"),
        (f"{HERE}:Missing", "has no 'Missing'"),
        ("nowhere_at_all:Source", "put nowhere_at_all.py beside the recipe or into the folder"),
        ({"source": "world", "options": {"sead": 1}}, "unknown key environment.tasks: options.sead"),
        ({"source": f"{HERE}:Lamps", "options": {"size": 1}}, "the options size of a task source that takes none"),
        ({"source": "a.json", "options": {"size": 1}}, "got options of the files a.json, which take none"),
    ],
)
def test_a_wrong_source_is_refused(tasks: Any, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        opened(tasks)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        ([], "expected the path of a task file, a source"),
        (3, "expected the path of a task file, a source"),
        ({"source": "world", "weight": 0}, "greater than 0"),
        ({"sauce": "world"}, "sauce"),
    ],
)
def test_wrong_settings_of_tasks_are_refused(tasks: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(tasks)
    assert problem in str(caught.value)


class Odd(Lamps):
    """Has one task, or one passage, with a field that is none."""

    task: ClassVar[Any] = Task("odd", "Where?", ("Riga",))
    passage: ClassVar[Any] = Passage("p", "lamp", "text")

    def tasks(self, split: Split) -> Sequence[Task]:
        return [self.task]

    def passages(self) -> Sequence[Passage]:
        return [self.passage]


LOOP: dict[str, Any] = {}
LOOP["itself"] = LOOP


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"task_id": 1}, "expected texts as task_id, question, category and source"),
        ({"question": "a \ud800"}, "expected texts as task_id, question, category and source"),
        ({"category": None}, "expected texts as task_id, question, category and source"),
        ({"golden_answers": "Riga"}, "expected a tuple of texts as golden_answers"),
        ({"supporting_ids": "abc"}, "expected a tuple of texts as supporting_ids"),
        ({"supporting_ids": None}, "expected a tuple of texts as supporting_ids"),
        ({"plan": ("ab",)}, "expected as plan a tuple with a tuple of texts for each round"),
        ({"meta": None}, "expected as meta what JSON can hold"),
        ({"meta": LOOP}, "expected as meta what JSON can hold"),
    ],
)
def test_fields_of_another_type_are_refused(
    changed: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(f"{HERE}:Odd").tasks("train", 0)
    monkeypatch.setattr(Odd, "task", replace(Odd.task, **changed))
    with pytest.raises(DataError, match=rf"Odd\.tasks .*line \d+\) returned Task\(.*{problem}"):
        opened(f"{HERE}:Odd").tasks("train", 0)


@pytest.mark.parametrize("passage", [Passage("p", None, "x"), Passage(1, "t", "x"), Passage("p", "t", "\ud800")])  # type: ignore[arg-type]
def test_fields_of_a_passage_are_texts(passage: Passage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "passage", passage)
    with pytest.raises(DataError, match="expected texts as id, title and text"):
        opened(f"{HERE}:Odd").passages()


def test_a_single_source_may_name_the_source_of_its_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Odd, "task", replace(Odd.task, source="other"))
    sources = opened(f"{HERE}:Odd")
    (task,) = sources.tasks("train", 0)
    assert isinstance(sources.source_of(task), Odd)


def test_weights_without_a_ratio_are_refused() -> None:
    named = [{"source": one, "weight": 1e-320} for one in ("world", f"{HERE}:Lamps")]
    with pytest.raises(ConfigError, match="give larger ones"):
        opened(named).tasks("train", 0)


def test_a_source_of_a_small_weight_gives_one_task() -> None:
    named = [{"source": "world", "weight": 1.0}, {"source": f"{HERE}:Lamps", "weight": 1e6}]
    assert Counter(task.source for task in opened(named).tasks("train", 0)) == {"world": 1, "Lamps": 6}


class HeldOut(Lamps):
    def tasks(self, split: Split) -> Sequence[Task]:
        return super().tasks(split) if split == "eval" else []


def test_a_source_without_training_tasks_counts_in_no_ratio() -> None:
    alone = [{"source": f"{HERE}:Lamps", "weight": 2.0}]
    beside = [*alone, {"source": f"{HERE}:HeldOut"}]
    found = [[task.task_id for task in opened(named).tasks("train", 0)] for named in (alone, beside)]
    assert found[0] == found[1] and len(found[0]) > 1


class Unheld(Lamps):
    def tasks(self, split: Split) -> Sequence[Task]:
        return super().tasks(split) if split == "train" else []


def test_a_source_of_evaluation_tasks_without_any_is_refused() -> None:
    config = AlgorithmConfig().environment(tasks=f"{HERE}:Lamps", eval_tasks=f"{HERE}:Unheld").freeze()
    with pytest.raises(DataError, match=r"environment\.eval_tasks: .*Unheld has no tasks; name another source"):
        split_tasks(config, 2)


def test_held_out_tasks_are_of_all_sources_in_turn() -> None:
    counts = {"a": 5, "b": 2, "c": 1}
    tasks = [Task(f"{name}{n}", "?", ("a",), source=name) for name, count in counts.items() for n in range(count)]
    assert [task.task_id for task in in_turn(tasks)] == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]
