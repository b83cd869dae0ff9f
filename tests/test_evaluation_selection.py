"""``ragr1 select``: which tasks are kept, and that what is written can be trained on."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small_world import THINGS, invoke, make_config, make_files

from envs.tasks.files import load_tasks
from ragr1_actors.core.types import Task
from ragr1_actors.evaluation.selection import SelectionArguments, _record, choose
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, ScriptedEngine
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.training.training_run import TrainingRun

NUM_SAMPLES = 8
RIGHT = {"lamp": 0, "coin": 1, "shoe": 4, "book": 5, "ring": 8, "cup": 8, "fork": 8}
"""Of eight samples; the engine fails on the key."""
PLACES = dict(zip(THINGS, ["Riga", "Oslo", "Bonn", "Lyon"] * 2, strict=True))


class SometimesRight(ScriptedEngine):
    """An engine that answers each question right as often as ``RIGHT`` says."""

    def __init__(self, policy_dir: str | Path, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        scripts = {
            f"tasks/{thing}/{index}": (f"<answer> {PLACES[thing] if index < right else 'nowhere'}</answer>",)
            for thing, right in RIGHT.items()
            for index in range(NUM_SAMPLES)
        }
        super().__init__(scripts, tokenizer.encode)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


def make_recipe(path: Path, files: Path, *, max_task_retries: int = 3, **env_runners: Any) -> str:
    settings = make_config(files).model_dump()
    settings["env_runners"] |= {"engine": f"{__name__}:SometimesRight", **env_runners}
    settings["debugging"]["fault_tolerance"] = {"max_task_retries": max_task_retries}
    path.write_text(json.dumps(settings))
    return str(path)


def arguments(recipe: str, files: Path, out: Path, *more: str) -> list[str]:
    common = ["--num-samples", str(NUM_SAMPLES), "--easy-share", "0.5"]
    return ["select", recipe, "--tasks", str(files / "tasks.json"), "--out", str(out), *common, *more]


def check_selection(printed: str, out: Path) -> None:
    classes = {"never": 1, "hard": 2, "easy": 1, "always": 3, "failed": 1}
    assert json.loads(printed.splitlines()[-1]) == {"tasks": 8, **classes, "kept_easy": 2, "kept": 4}
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {"coin", "shoe"} < {record["id"] for record in records} < {"coin", "shoe", "book", "ring", "cup", "fork"}
    assert [THINGS.index(record["id"]) for record in records] == sorted(THINGS.index(r["id"]) for r in records)
    assert all(record["pass_rate"] == RIGHT[record["id"]] / NUM_SAMPLES for record in records)
    tasks = load_tasks(out).tasks
    assert [task.golden_answers for task in tasks] == [(PLACES[record["id"]],) for record in records]
    assert {task.task_id for task in tasks} == {f"{out.stem}/{record['id']}" for record in records}


@pytest.mark.engine
def test_what_is_kept_can_be_trained_on_and_is_the_same_for_a_seed(files: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", files, max_task_retries=1)
    out = tmp_path / "kept.jsonl"
    check_selection(invoke(*arguments(recipe, files, out, "--json")), out)
    again = tmp_path / "again.jsonl"
    printed = invoke(*arguments(recipe, files, again))
    assert again.read_text() == out.read_text()
    assert "never  1" in printed and "hard  2" in printed and "kept  4" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.jsonl", "kept.jsonl", "recipe.yaml"]


@pytest.mark.engine
def test_what_is_kept_of_several_files_says_of_which(
    files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", files, max_task_retries=0)
    more = tmp_path / "more.json"
    more.write_text(json.dumps([{"id": "lamp", "question": "Who?", "answer": "Ana"}]))
    out = tmp_path / "kept.jsonl"
    printed = invoke(*arguments(recipe, files, out, "--tasks", str(more), "--json"))
    assert json.loads(printed.splitlines()[-1])["tasks"] == 9
    assert {"tasks/coin", "tasks/shoe"} < {json.loads(line)["id"] for line in out.read_text().splitlines()}
    assert "2 files: 9 tasks of 9 records; 2 of question and answer (tasks, more)" in caplog.text


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.engine
def test_the_fleet_samples_them(ray_local: ModuleType, files: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", files, num_env_runners=2, num_cpus_per_env_runner=0.5)
    out = tmp_path / "kept.jsonl"
    check_selection(invoke(*arguments(recipe, files, out, "--json")), out)


@pytest.mark.slow
@pytest.mark.engine
def test_a_checkpoint_samples_with_its_own_policy(files: Path, tmp_path: Path) -> None:
    from rich.console import Console

    config = make_config(files, {"num_steps": 0}, num_iterations=1)
    environment = config.environment.model_copy(update={"eval_tasks": ""})
    create_run_directory(config.model_copy(update={"environment": environment}), tmp_path / "run")
    TrainingRun(config.model_copy(update={"environment": environment}), tmp_path / "run", Console(quiet=True)).execute()
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_1"):
        refused = invoke(*arguments(str(source), files, tmp_path / "kept.jsonl", "--max-turns", "2"))
        assert "none of the 8 tasks" in refused and "(8 never answered, 0 always)" in refused
        assert not (tmp_path / "kept.jsonl").exists()
    engine = f"env_runners.engine={__name__}:SometimesRight"
    out = tmp_path / "kept.jsonl"
    check_selection(invoke(*arguments(str(tmp_path / "run"), files, out, "--json"), engine), out)


@pytest.mark.engine
def test_what_cannot_be_selected_is_one_sentence(files: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", files)
    out = tmp_path / "kept.jsonl"
    assert "exists already; choose another --out" in invoke(*arguments(recipe, files, files / "tasks.json"))
    assert "there is no folder" in invoke(*arguments(recipe, files, tmp_path / "none" / "kept.jsonl"))
    assert "did you mean 'quickstart'" in invoke(*arguments("quickstar", files, out))
    assert "neither the directory of a run nor a checkpoint" in invoke(*arguments(str(tmp_path), files, out))
    assert "unknown key training.lrr" in invoke(*arguments(recipe, files, out), "training.lrr=1")
    assert f"there is no file {tmp_path}/tasks.json, expected" in invoke(*arguments(recipe, tmp_path, out))


def test_classes_and_shares() -> None:
    tasks = [Task(f"t/{number}", "?", ("a",)) for number in range(100)]
    successes = {task.task_id: number // 10 for number, task in enumerate(tasks)}  # ten tasks each of 0 to 9 in 9
    settings = SelectionArguments(num_samples=9, max_pass_rate=0.5)
    kept, counts = choose(tasks, successes, settings, seed=0)
    assert (counts.never, counts.hard, counts.easy, counts.always, counts.failed) == (10, 40, 40, 10, 0)
    assert (counts.kept_easy, counts.kept) == (12, 52)  # a quarter of fifty
    assert [task for task in kept if successes[task.task_id] <= 4] == tasks[10:50]
    assert choose(tasks, successes, settings, seed=0)[0] == kept != choose(tasks, successes, settings, seed=1)[0]
    assert choose(tasks, {}, settings, seed=0)[1].failed == 100


def test_a_selected_task_keeps_its_rounds_and_other_fields(tmp_path: Path) -> None:
    evidence = {"supporting_facts": [["Riga", 0], ["Ana Bell", 0]], "search_rounds": [["Riga"], ["Ana Bell"]]}
    record = {"question": "When was its director born?", "answer": "1901", "level": 3, "kept": {"a": [1]}, **evidence}
    (tmp_path / "all.jsonl").write_text(json.dumps(record))
    (task,) = load_tasks(tmp_path / "all.jsonl").tasks
    assert (task.plan, task.meta) == ((("Riga",), ("Ana Bell",)), {"level": 3, "kept": {"a": [1]}})
    (tmp_path / "kept.jsonl").write_text(json.dumps(_record(task, 1, 4, "all/")))
    (again,) = load_tasks(tmp_path / "kept.jsonl").tasks
    assert again.meta == task.meta | {"pass_rate": 0.25, "num_samples": 4}
    assert (again.plan, again.supporting_ids) == (task.plan, task.supporting_ids)


@pytest.mark.engine
def test_what_select_takes_by_options_is_no_override(files: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", files)
    for override, option in (
        ("environment.max_turns=3", "--max-turns"),
        ("env_runners.temperature=1", "--temperature"),
    ):
        printed = invoke(*arguments(recipe, files, tmp_path / "out.jsonl"), override)
        assert printed.startswith(f"error: got {override.partition('=')[0]}, which select takes as {option}"), printed


def test_a_pass_rate_at_the_threshold_is_hard() -> None:
    task = Task("a", "?", ("b",))
    for num_right in range(1, 100):
        settings = SelectionArguments(num_samples=100, max_pass_rate=num_right / 100)
        assert choose([task], {"a": num_right}, settings, 0)[1].hard == 1
