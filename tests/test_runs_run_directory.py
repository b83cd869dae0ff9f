"""A run is found by its directory, a checkpoint or a policy's folder in it, and another run begins with its policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectLostError

from envs.tasks.curriculum import Shuffle
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError, RunDirectoryError
from ragr1_actors.core.types import Task
from ragr1_actors.runs.checkpoint import STATE_FILE, RunState, TaskLedgerState
from ragr1_actors.runs.run_directory import (
    change_learners,
    create_run_directory,
    fetch_batches,
    find_checkpoint,
    run_of_policy,
    start_again,
    steps_in_sft,
    with_newest_policy,
)
from ragr1_actors.runs.storage.store import find_store
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.batches import TaskLedger

CONFIG = AlgorithmConfig().sft(num_steps=300).freeze()


def make_policy(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def add_checkpoint(run: Path, step: int, sft_step: int) -> Path:
    """Write what of a checkpoint is read here, and return the folder of its policy."""
    books = TaskLedgerState.model_validate(TaskLedger([Task("t", "?", ("a",))], 0, Shuffle({})).get_state())
    state = RunState(sft_step=sft_step, iteration=step, policy_version=0, learner="sft", task_ledger=books, extra={})
    policy = make_policy(run / "checkpoints" / f"step_{step}" / "policy")
    (policy.parent / STATE_FILE).write_text(state.model_dump_json())
    return policy


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the policies of its start, of SFT, and of two checkpoints, the first of which is the best."""
    run = tmp_path / "run"
    create_run_directory(CONFIG, run)
    for name in ("policy", "policy_sft"):
        make_policy(run / name)
    add_checkpoint(run, 10, 300)
    add_checkpoint(run, 20, 300)
    (run / "checkpoints" / "best").symlink_to("step_10")
    return run


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("", "checkpoints/step_20/policy"),
        ("checkpoints/step_10", "checkpoints/step_10/policy"),
        ("checkpoints/best", "checkpoints/step_10/policy"),
        ("checkpoints/step_10/policy", "checkpoints/step_10/policy"),
        ("checkpoints/best/policy", "checkpoints/step_10/policy"),
        ("policy_sft", "policy_sft"),
        ("policy", "policy"),
    ],
)
def test_a_policy_is_found_by_any_path_of_its_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, policy: str
) -> None:
    place, found = find_checkpoint(run / name)
    assert (place.path, found) == (run, run / policy)
    monkeypatch.chdir(run)
    place, found = find_checkpoint(Path(name))
    assert (place.path.absolute(), found.absolute()) == (run, run / policy)


def test_folders_that_are_in_no_run_are_refused(run: Path, tmp_path: Path) -> None:
    for path in (make_policy(tmp_path / "model"), run / "checkpoints", make_policy(run / "index" / "encoder")):
        with pytest.raises(RunDirectoryError, match="neither the directory of a run nor a checkpoint of one"):
            find_checkpoint(path)
    assert run_of_policy(tmp_path / "model") is None
    assert run_of_policy(run / "policy_sft") == run_of_policy(run / "checkpoints/step_10/policy") == run


def test_a_policy_from_the_middle_of_sft_is_told(run: Path) -> None:
    for name in ("", "checkpoints/step_10", "checkpoints/step_10/policy", "policy_sft", "policy"):
        assert steps_in_sft(run / name) is None
    middle = add_checkpoint(run, 30, 12)
    assert steps_in_sft(run) == steps_in_sft(middle) == steps_in_sft(middle.parent) == (12, 300)
    assert steps_in_sft(run / "checkpoints" / "best") is None
    (middle.parent / STATE_FILE).write_text("{")
    assert steps_in_sft(run) is None  # it can be asked all the same


def beginning_with(model: Path | str) -> RunConfig:
    return CONFIG.model_copy(update={"policy": CONFIG.policy.model_copy(update={"model": str(model)})})


def test_a_run_begins_with_the_newest_policy_of_another(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    newest = str(run / "checkpoints" / "step_20" / "policy")
    assert (
        with_newest_policy(beginning_with("run")) == with_newest_policy(beginning_with(run)) == beginning_with(newest)
    )
    older = run / "checkpoints" / "step_10"
    assert with_newest_policy(beginning_with(older)) == beginning_with(older / "policy")
    make_policy(tmp_path / "model")
    for model in ("tiny", "model", "org/name", "run/policy_sft", "x" * 5000):
        assert with_newest_policy(beginning_with(model)) == beginning_with(model)
    create_run_directory(CONFIG, tmp_path / "young")
    with pytest.raises(RunDirectoryError, match="young has no checkpoint yet; let the run continue"):
        with_newest_policy(beginning_with("young"))


def test_a_run_that_began_with_the_policy_of_another_goes_on_by_the_same_words(run: Path, tmp_path: Path) -> None:
    stored = with_newest_policy(beginning_with(run))
    create_run_directory(stored, tmp_path / "second")
    place = find_store(tmp_path / "second")
    add_checkpoint(run, 30, 300)  # the first run has gone on since
    assert start_again(place, stored, beginning_with(run)) == stored
    assert change_learners(place, stored, [f"policy.model={run}", "learners.zero_stage=2"]).policy == stored.policy
    create_run_directory(CONFIG, tmp_path / "other")
    add_checkpoint(tmp_path / "other", 1, 300)
    (run / "config.yaml").unlink()  # or the first run is gone
    assert start_again(place, stored, beginning_with(run)) == stored
    for model in (tmp_path / "other", run / "checkpoints" / "step_30" / "policy", "tiny"):
        with pytest.raises(ConfigError, match=r"holds a run with another policy\.model; give the recipe and overrides"):
            start_again(place, stored, beginning_with(model))


def test_what_a_lost_node_held_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def get(asked: str | list[str]) -> Any:
        if "lost" in asked:
            raise ObjectLostError("00", None, "")
        return [f"batch of {one}" for one in asked] if isinstance(asked, list) else f"batch of {asked}"

    monkeypatch.setattr("ray.get", get)
    assert fetch_batches(["a", "b"]) == ["batch of a", "batch of b"]  # type: ignore[list-item]
    assert fetch_batches(["a", "lost", "b"]) == ["batch of a", "batch of b"]  # type: ignore[list-item]
    assert "a lost node held trajectories" in caplog.text
    assert fetch_batches(["lost"]) == []  # type: ignore[list-item]
