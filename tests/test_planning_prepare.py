"""What a run is prepared from: absolute paths, held-out tasks, and the demonstrations that can be learned from."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

import pytest
from learners_common import make_groups
from small_world import PLACES, THINGS, make_config, make_files

from envs.tasks.curriculum import Shuffle
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError, DataError, FleetError, RunDirectoryError
from ragr1_actors.core.types import FinishReason, StopReason, Task, Turn
from ragr1_actors.evaluation.evaluate import evaluation_tasks
from ragr1_actors.planning.prepare import draw_demonstrations, learnable, prepare, prepare_index, split_tasks
from ragr1_actors.planning.tiny_policy import train_tokenizer
from ragr1_actors.rollout.runners.rollout_fleets import RolloutFleets
from ragr1_actors.training.batches import TaskLedger


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run over eight tasks, one of which it holds out."""
    config = make_config(make_files(tmp_path_factory.mktemp("files")))
    return config.model_copy(update={"environment": config.environment.model_copy(update={"eval_tasks": ""})})


@pytest.mark.engine
def test_actors_in_another_working_directory_find_the_policy(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = prepare(config, Path("run"))
    assert Path(workspace.policy_dir) == tmp_path / "run" / "policy"
    assert (tmp_path / "run" / "policy" / "config.json").is_file()


def test_a_start_with_another_policy_reads_neither_passages_nor_vectors(config: RunConfig, tmp_path: Path) -> None:
    """The retrievers open the index; the driver of a run over 21 million passages does not."""
    files = tmp_path / "files"
    shutil.copytree(Path(config.retrieval.index).parent, files)
    tasks = json.loads((files / "tasks.json").read_text())
    (files / "tasks.json").write_text(json.dumps([{**task, "supporting_ids": [task["id"]]} for task in tasks]))
    for name in ("corpus.arrow", "shard-0000.faiss"):
        (files / "index" / name).unlink()
    changed = make_config(files).model_copy(
        update={
            "policy": config.policy.model_copy(update={"model": "org/name"}),
            "sft": config.sft.model_copy(update={"num_steps": 0}),  # demonstrations need the titles of the evidence
            "environment": config.environment.model_copy(update={"tasks": str(files / "tasks.json")}),
        }
    )
    assert prepare(changed, tmp_path / "run").policy_dir == "org/name"


def test_tasks_that_the_curriculum_cannot_order_are_refused_before_the_rest_is_made(
    config: RunConfig, tmp_path: Path
) -> None:
    environment = config.environment.model_copy(update={"curriculum": "difficulty"})
    with pytest.raises(ConfigError, match=r"environment\.curriculum: got no pass_rate in task tasks/"):
        prepare(config.model_copy(update={"environment": environment}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_task_to_demonstrate_is_refused(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stored:  # what was sampled before, of other questions
        def __init__(self, folder: Path) -> None:
            self.tasks = (Task("other/0", "What else?", ("a",)),)

    monkeypatch.setattr("ragr1_actors.planning.prepare.StoredGroups", Stored)
    sections = config.model_dump()
    sections["environment"]["eval_tasks"] = config.environment.tasks  # no question of it is trained on
    sections["training"]["from_trajectories"] = str(tmp_path)
    sections["sft"]["num_steps"] = 3
    with pytest.raises(DataError, match=r"sft\.num_steps: got 3, and \S+ has no training task to demonstrate"):
        prepare(RunConfig.model_validate(sections), tmp_path / "run")


@pytest.mark.engine
def test_recall_is_measured_by_the_retrievers(config: RunConfig, tmp_path: Path) -> None:
    workspace = prepare(config, tmp_path)
    tasks = [replace(task, supporting_ids=(task.question.split()[3],)) for task in workspace.train_tasks]
    with RolloutFleets(config, workspace.policy_dir, workspace.index_dir) as fleets:
        assert fleets.measure_recall(tasks)["recall@2"] == 1
        assert fleets.measure_recall([replace(task, supporting_ids=()) for task in tasks]) == {}


@pytest.mark.engine
def test_a_task_that_is_demonstrated_twice_keeps_its_id(config: RunConfig, tmp_path: Path) -> None:
    workspace = prepare(config, tmp_path)
    count = 2 * len(workspace.demonstrated_tasks)
    drawn = draw_demonstrations(workspace, count, 0)
    known = [task.task_id for task in workspace.demonstrated_tasks]
    assert sorted(task.task_id for task, _ in drawn) == sorted(2 * known)
    with RolloutFleets(config, workspace.policy_dir, workspace.index_dir) as fleets:
        played = fleets.play_scripts(drawn)
    assert [group.task for group in played] == [task for task, _ in drawn]
    assert len({one.trajectory_id for group in played for one in group.trajectories}) == count
    answers = [group.trajectories[0].turns[-1].completion_text for group in played]
    assert answers == [turns[-1] for _, turns in drawn]


@pytest.mark.engine
def test_the_words_of_a_tiny_policy_are_counted_as_a_stream() -> None:
    class Text(str):
        pass

    alive, most = WeakSet[Text](), []

    def texts() -> Iterator[str]:
        for number in range(1000):
            text = Text(f" Riga lies in Latvia {number}")
            alive.add(text)
            yield text
            most.append(len(alive))

    train_tokenizer(texts(), 400)
    assert max(most) < 5


def test_held_out_tasks_are_not_trained_on_and_are_the_same_again(config: RunConfig) -> None:
    train, evaluation, notes = split_tasks(config, 8)
    assert (len(train), len(evaluation)) == (7, 1)
    assert evaluation[0] not in train
    assert notes[-1] == "1 tasks held out for evaluation"
    assert evaluation_tasks(config, None, None) == evaluation_tasks(config, None, 1) == evaluation
    first = evaluation_tasks(config, Path(config.environment.tasks), 3)
    assert [task.question for task in first] == [f"Where is the {thing} ?" for thing in THINGS[:3]]
    with pytest.raises(DataError, match="the rest it was trained on"):
        evaluation_tasks(config, None, 9)


def test_shards_are_one_set_of_tasks_and_a_resumed_run_knows_them(config: RunConfig, tmp_path: Path) -> None:
    records = json.loads(Path(config.environment.tasks).read_text())
    (tmp_path / "shards").mkdir()
    for number in range(4):
        (tmp_path / "shards" / f"{number}.json").write_text(json.dumps(records[2 * number : 2 * number + 2]))

    def split(*names: str) -> tuple[tuple[Task, ...], tuple[Task, ...], tuple[str, ...]]:
        environment = config.environment.model_copy(update={"tasks": [str(tmp_path / name) for name in names]})
        return split_tasks(config.model_copy(update={"environment": environment}), 8)

    train, (held_out,), notes = split("shards")
    assert {(task.task_id, task.question, task.golden_answers) for task in (*train, held_out)} == {
        (f"{number // 2}/{thing}", f"Where is the {thing} ?", (PLACES[number % 4],))
        for number, thing in enumerate(THINGS)
    }
    assert notes[0] == (
        f"{tmp_path / 'shards'}, 4 files: 8 tasks of 8 records; 4 of question and answer (0, 1, 2, ...)"
    )
    state = TaskLedger(train, 0, Shuffle({})).get_state()
    the_same, *_ = split("shards/[01].json", "shards/[23].json")
    TaskLedger(the_same, 0, Shuffle({})).set_state(state)
    (tmp_path / "shards" / "4.json").write_text(json.dumps([{"question": "Where is the bird ?", "answer": "Riga"}]))
    with pytest.raises(
        RunDirectoryError, match="is of a run over other tasks than these 8 training tasks; put the task"
    ):
        TaskLedger(split("shards")[0], 0, Shuffle({})).set_state(state)


def test_an_evaluation_file_is_used_whole(config: RunConfig, tmp_path: Path) -> None:
    dev = tmp_path / "dev.json"
    dev.write_text(json.dumps([{"question": "Which band?", "answer": "The The"}] * 12), encoding="utf-8")
    environment = config.environment.model_copy(update={"eval_tasks": str(dev)})
    _, evaluation, _ = split_tasks(config.model_copy(update={"environment": environment}), 100)
    assert evaluation == evaluation_tasks(config, dev, None)
    assert len(evaluation) == 12 > config.evaluation.num_tasks
    assert {task.golden_answers for task in evaluation} == {("The The",)}


def test_questions_of_an_evaluation_file_are_not_trained_on(config: RunConfig, tmp_path: Path) -> None:
    train = json.loads(Path(config.environment.tasks).read_text())
    dev = tmp_path / "dev.json"
    dev.write_text(json.dumps([{"question": train[2]["question"].upper(), "answer": "Riga"}] * 2), encoding="utf-8")
    environment = config.environment.model_copy(update={"eval_tasks": str(dev)})
    left, evaluation, notes = split_tasks(config.model_copy(update={"environment": environment}), 100)
    assert [task.question for task in left] == [task["question"] for task in train if task is not train[2]]
    assert len(evaluation) == 2
    assert any(note.startswith("2 evaluation questions are also training tasks; they are left out") for note in notes)


@pytest.mark.engine
def test_prompts_that_fill_the_context_are_counted_and_if_all_do_it_is_an_error(
    config: RunConfig, tmp_path: Path
) -> None:
    records = json.loads(Path(config.environment.tasks).read_text())

    def notes(*long: int) -> tuple[str, ...]:
        tasks = tmp_path / f"tasks{len(long)}.json"
        for number in long:
            records[number]["question"] += " lamp" * 300
        tasks.write_text(json.dumps(records))
        environment = config.environment.model_copy(update={"tasks": str(tasks)})
        return prepare(config.model_copy(update={"environment": environment}), tmp_path / "run").notes

    assert not any("prompt" in note for note in notes())
    held_out = split_tasks(config, config.evaluation.num_tasks)[1]
    long = [number for number, r in enumerate(records) if r["question"] not in {task.question for task in held_out}]
    (note,) = [note for note in notes(*long[:2]) if "prompt" in note]
    assert note.startswith("2 of 7 tasks have a prompt of 160 tokens or more, up to 3")
    with pytest.raises(
        DataError, match=r"the prompt of every task fills the context: 3\d\d tokens or more of 160; raise"
    ):
        notes(*long[2:])


def test_failed_demonstrations_are_left_out_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    whole, failed = make_groups(0, num_groups=2)
    broken = tuple(replace(t, stop_reason=StopReason.ENV_ERROR, error="reward boom") for t in failed.trajectories)
    kept, num_decisions = learnable([whole, replace(failed, trajectories=broken)], only_correct=False)
    assert kept == [whole]
    assert num_decisions == learnable([whole], only_correct=False)[1]
    assert "1 of 2 demonstrations failed and are not learned from; the last one with: reward boom" in caplog.text


@pytest.mark.parametrize(
    ("stop_reason", "advice"),
    [
        (StopReason.CONTEXT_FULL, "their prompts fill env_runners.max_context_tokens: raise it"),
        (StopReason.MAX_TURNS, "cut before an action ended: raise env_runners.max_new_tokens_per_turn"),
        (StopReason.ANSWERED, "the environment reads none of their turns as an action"),
    ],
)
def test_demonstrations_without_a_decision_say_what_to_raise(stop_reason: StopReason, advice: str) -> None:
    (group,) = make_groups(0, num_groups=1)
    reason = FinishReason.LENGTH if stop_reason is StopReason.MAX_TURNS else FinishReason.STOP
    turns = (Turn("<search>", 0, "malformed", finish_reason=reason),)
    empty = tuple(replace(t, turns=turns, kinds=t.kinds * 0, stop_reason=stop_reason) for t in group.trajectories)
    with pytest.raises(FleetError, match=f"all 1 demonstrations failed; .*{re.escape(advice)}"):
        learnable([replace(group, trajectories=empty)], only_correct=False)


def test_demonstrations_that_end_wrong_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    groups = make_groups(0, num_groups=2)
    right, wrong = (
        replace(group, trajectories=tuple(replace(t, answer=answer) for t in group.trajectories))
        for group, answer in zip(groups, (" riga.", "Oslo"), strict=True)
    )
    assert learnable([right, wrong], only_correct=True) == learnable([right], only_correct=False)
    assert "1 of 2 demonstrations end without a right answer" in caplog.text
    assert learnable([right, wrong], only_correct=False)[0] == [right, wrong]
    with pytest.raises(DataError, match=r'none of 1 .* is answered with "Oslo", and its gold answers are Riga; '):
        learnable([wrong], only_correct=True)


def test_a_teachers_file_is_demonstrated_without_evaluation_questions(config: RunConfig, tmp_path: Path) -> None:
    _, (held_out,), _ = split_tasks(config, 8)
    written = [
        {"question": question, "output": "<think> a</think><answer> Riga</answer>", "instruction": question}
        for question in ("Where is the bird ?", held_out.question, "Where is the fish ?")
    ]
    (tmp_path / "teacher.json").write_text(json.dumps(written))
    sft = config.sft.model_copy(update={"demonstrations": str(tmp_path / "teacher.json")})
    policy = config.policy.model_copy(update={"model": "org/name"})
    workspace = prepare(config.model_copy(update={"sft": sft, "policy": policy}), tmp_path)
    drawn = draw_demonstrations(workspace, 100, 0)
    assert sorted(task.question for task, _ in drawn) == ["Where is the bird ?", "Where is the fish ?"]
    assert {turns for _, turns in drawn} == {("<think> a</think><answer> Riga</answer>",)}
    assert "teacher.json: 3 tasks of 3 records" in workspace.notes[-1]
    assert "1 of evaluation questions left out" in workspace.notes[-1]


@pytest.mark.engine
@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_index_that_is_built_on_the_way_has_a_bar_on_a_terminal(
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    retrieval = config.retrieval.model_copy(update={"index": "", "corpus": "world", "type": "flat"})
    assert prepare_index(config.model_copy(update={"retrieval": retrieval}), tmp_path, print) == tmp_path / "index"
    assert ("encoding passages" in capsys.readouterr().out) is is_terminal
