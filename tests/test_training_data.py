"""What a run is prepared from: absolute paths, held-out tasks, and the demonstrations that can be learned from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from learners_common import make_groups
from small_world import THINGS, make_config, make_files

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import StopReason
from ragr1_actors.training.data import learnable, prepare, split_tasks
from ragr1_actors.training.evaluation import evaluation_tasks


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


def test_an_evaluation_file_is_used_whole(config: RunConfig, tmp_path: Path) -> None:
    dev = tmp_path / "dev.json"
    dev.write_text(json.dumps([{"question": "Which band?", "answer": "The The"}] * 12), encoding="utf-8")
    environment = config.environment.model_copy(update={"eval_tasks": str(dev)})
    _, evaluation, _ = split_tasks(config.model_copy(update={"environment": environment}), 100)
    assert evaluation == evaluation_tasks(config, dev, None)
    assert len(evaluation) == 12 > config.evaluation.num_tasks
    assert {task.golden_answers for task in evaluation} == {("The The",)}


def test_failed_demonstrations_are_left_out_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    whole, failed = make_groups(0, num_groups=2)
    broken = tuple(replace(t, stop_reason=StopReason.ENV_ERROR, error="reward boom") for t in failed.trajectories)
    kept, num_decisions = learnable([whole, replace(failed, trajectories=broken)])
    assert kept == [whole]
    assert num_decisions == learnable([whole])[1]
    assert "1 of 2 demonstrations failed and are not learned from; the last one with: reward boom" in caplog.text
