"""Training on stored trajectories: each request is answered with a stored group, and the books are right."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learners_common import make_groups
from rich.console import Console
from small_world import make_config, make_files

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.process.driver_loop import DriverLoop
from ragr1_actors.core.schema import groups_from_record_batch, groups_to_record_batch, write_trajectories
from ragr1_actors.core.types import StopReason, TokenKind, Trajectory, TrajectoryGroup
from ragr1_actors.rollout.runners.stored_groups import StoredGroups, problem_of_arrays
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.telemetry.metrics import is_iteration, read_metrics
from ragr1_actors.training.batches import BatchCollector
from ragr1_actors.training.training_run import TrainingRun


def store(folder: Path, **files: list[TrajectoryGroup]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, groups in files.items():
        write_trajectories(folder / f"{name}.arrow", [groups_to_record_batch(groups)])
    return folder


def two_files(folder: Path) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
    """Four tasks in each file; one trajectory failed, and all of one group."""
    first, second = make_groups(0), make_groups(1)
    failed = [replace(t, stop_reason=StopReason.ENGINE_ERROR) for t in first[0].trajectories]
    first[0] = replace(first[0], trajectories=(failed[0], *first[0].trajectories[1:]))
    second[3] = replace(second[3], trajectories=tuple(failed))
    store(folder, iteration_00001=first, iteration_00002=second, eval_rl=make_groups(2, num_groups=6))
    return first, second


def test_groups_come_by_task_and_epoch(tmp_path: Path) -> None:
    first, second = two_files(tmp_path / "trajectories")
    stored = StoredGroups(tmp_path)
    assert [task.task_id for task in stored.tasks] == [f"made/{number}" for number in range(4)]  # no evaluation's
    ids = [one.trajectory_id for one in stored.group("made/0", 0).trajectories]
    assert ids == [t.trajectory_id for t in first[0].trajectories[1:]]
    assert stored.group("made/1", 0).trajectories[0].trajectory_id == first[1].trajectories[0].trajectory_id
    assert stored.group("made/1", 1).trajectories[0].trajectory_id == second[1].trajectories[0].trajectory_id
    assert stored.group("made/1", 2).task == stored.group("made/1", 0).task
    assert stored.group("made/3", 5).trajectories[0].trajectory_id == first[3].trajectories[0].trajectory_id
    assert len(StoredGroups(tmp_path / "trajectories").tasks) == 4  # the same of the folder itself


def test_of_a_plain_folder_what_was_evaluated_or_demonstrated_is_left_out(tmp_path: Path) -> None:
    store(tmp_path, eval_rl=make_groups(0, num_groups=6), demonstrations=make_groups(1, num_groups=7))
    (tmp_path / ".writing_1a2b3c4d_mine.arrow").write_text("half")
    with pytest.raises(DataError, match=r"has no trajectories to train on; .* beside demonstrations\.arrow and eval_"):
        StoredGroups(tmp_path)
    store(tmp_path, mine=make_groups(2, num_groups=2), demonstrations_of_others=make_groups(3, num_groups=3))
    assert len(StoredGroups(tmp_path).tasks) == 3
    store(tmp_path, iteration_00001=make_groups(4, num_groups=1))
    assert len(StoredGroups(tmp_path).tasks) == 1
    store(tmp_path / "trajectories", eval_start=make_groups(5))  # a run that trained nothing yet
    with pytest.raises(DataError, match="has no trajectories to train on"):
        StoredGroups(tmp_path)


@pytest.mark.parametrize("lag", [0, 1])
def test_every_task_is_trained_once_per_epoch(tmp_path: Path, lag: int, loop: DriverLoop) -> None:
    two_files(tmp_path / "trajectories")
    keys = {"train_batch_size": 2, "max_policy_lag": lag, "from_trajectories": str(tmp_path)}
    config = RunConfig.model_validate({"training": keys})
    stored = StoredGroups(tmp_path)
    collector = BatchCollector(config, stored.tasks, stored.sample)
    trained: Counter[str] = Counter()
    for version in range(8):
        batch = loop.run(collector.next_batch(version))
        assert collector.num_stale == 0
        for group in batch:
            (read,) = groups_from_record_batch(group.batch)
            assert read.task.task_id == group.request.task.task_id
            assert group.summary.num_sampled_tokens == 0 and group.summary.num_failed == 0
            trained[read.task.task_id] += 1
        collector.trained(batch)
    assert trained == Counter({f"made/{number}": 4 for number in range(4)})
    counts = collector.tasks.counts()
    assert counts["lost"] == counts["doubled"] == 0


def test_what_was_asked_for_before_a_roll_back_is_dropped(tmp_path: Path, loop: DriverLoop) -> None:
    """The ledger of the checkpoint issues those tasks again: each is trained once."""
    two_files(tmp_path / "trajectories")
    keys = {"train_batch_size": 2, "max_policy_lag": 1, "from_trajectories": str(tmp_path)}
    config = RunConfig.model_validate({"training": keys})
    stored = StoredGroups(tmp_path)
    collector = BatchCollector(config, stored.tasks, stored.sample)
    state = collector.tasks.get_state()
    for version in range(2):
        loop.run(collector.next_batch(version))
        loop.run(collector.feed(while_learning=True))
    loop.run(collector.drop_in_flight())
    assert collector.num_finished_batches() == 0.0
    collector = BatchCollector(config, stored.tasks, stored.sample)
    collector.tasks.set_state(state)
    for version in range(2, 6):
        collector.trained(loop.run(collector.next_batch(version)))
    counts = collector.tasks.counts()
    assert (counts["trained"], counts["lost"], counts["doubled"]) == (8, 0, 0)


def test_one_that_is_left_of_several_is_not_trained_alone(tmp_path: Path) -> None:
    (group, alone), (member, *_) = make_groups(0)[:2], make_groups(0)[1].trajectories
    failed = [replace(t, stop_reason=StopReason.ENGINE_ERROR) for t in group.trajectories[1:]]
    shrunk = replace(group, trajectories=(group.trajectories[0], *failed))
    store(tmp_path, found=[shrunk, replace(alone, trajectories=(member,))])
    assert [task.task_id for task in StoredGroups(tmp_path).tasks] == [alone.task.task_id]
    lost = replace(member, stop_reason=StopReason.ENGINE_ERROR)
    store(tmp_path, found=[TrajectoryGroup(lost.task, (lost,)), group])
    assert [task.task_id for task in StoredGroups(tmp_path).tasks] == [group.task.task_id]


def _with(one: Trajectory, name: str, at: int, value: float) -> Trajectory:
    """A trajectory with another number at its model token ``at``."""
    array = getattr(one, name).copy()
    array[np.flatnonzero(one.kinds == TokenKind.MODEL)[at]] = value
    return replace(one, **{name: array})


def _with_turn_reward(one: Trajectory, reward: float) -> Trajectory:
    return replace(one, turns=(*one.turns[:-1], replace(one.turns[-1], reward=reward)))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (lambda one: replace(one, logprobs=one.logprobs[:-1]), r"has \d+ token_ids, but \d+ logprobs; leave it out"),
        (lambda one: replace(one, token_ids=one.token_ids[:-1]), r"but \d+ kinds, \d+ logprobs, \d+ policy_versions"),
        (lambda one: replace(one, behaviour_logprobs=one.logprobs[:-1]), r"token_ids, but \d+ behaviour_logprobs"),
        (lambda one: replace(one, row_lengths=(one.num_tokens, 1)), r"has \d+ tokens in rows of \(\d+, 1\)"),
        (lambda one: replace(one, row_lengths=(-1, one.num_tokens + 1)), r"has \d+ tokens in rows of \(-1, \d+\)"),
        (lambda one: replace(one, reward=math.nan), r"has the reward nan and \(.*\) of its turns, expected finite"),
        (lambda one: _with_turn_reward(one, math.inf), r"has the reward \S+ and \(.*inf.*\) of its turns"),
        (lambda one: _with(one, "logprobs", 0, math.nan), r"has the log-prob nan of a sampled token, expected finite"),
        (lambda one: _with(one, "logprobs", -1, -math.inf), "has the log-prob -inf of a sampled token"),
        (lambda one: _with(one, "logprobs", -1, 0.01), r"has the log-prob 0\.01 of a sampled token"),
        (lambda one: _with(one, "token_ids", 0, -3), "has the token id -3, expected ids from 0"),
        (lambda one: _with(one, "policy_versions", 0, -1), "has the policy version -1 of a sampled token, expected"),
    ],
)
def test_a_trajectory_that_cannot_be_trained_on_is_named(
    tmp_path: Path, broken: Callable[[Trajectory], Trajectory], problem: str
) -> None:
    first, *others = make_groups(0)
    bad = broken(first.trajectories[2])
    store(tmp_path, fine=others, mine=[replace(first, trajectories=(*first.trajectories[:2], bad))])
    found = rf"^training\.from_trajectories: \S*/mine\.arrow: {bad.trajectory_id} .*{problem}"
    with pytest.raises(DataError, match=found) as caught:
        StoredGroups(tmp_path)
    assert "\n" not in str(caught.value)
    failed = replace(bad, stop_reason=StopReason.ENGINE_ERROR)  # and is left out
    store(tmp_path, mine=[replace(first, trajectories=(*first.trajectories[:2], failed))])
    assert len(StoredGroups(tmp_path).tasks) == 4


def test_odd_numbers_that_can_be_trained_on_are_taken(tmp_path: Path) -> None:
    one = make_groups(0)[0].trajectories[0]
    logprobs = np.where(one.kinds == TokenKind.MODEL, 5e-4, math.nan).astype(np.float32)
    assert problem_of_arrays(replace(one, logprobs=logprobs, behaviour_logprobs=logprobs)) == ""
    assert problem_of_arrays(replace(one, row_lengths=(1, one.num_tokens - 1))) == ""


def test_token_ids_of_another_tokenizer_are_found(tmp_path: Path) -> None:
    store(tmp_path, found=make_groups(0))
    stored = StoredGroups(tmp_path)
    texts = {t.turns[0].completion_text for group in make_groups(0) for t in group.trajectories}
    assert len(texts) == 1
    stored.check_tokens(lambda ids: texts.copy().pop())
    once = iter(texts)
    stored.check_tokens(lambda ids: next(once, "other"))  # one that is read as it was sampled is enough
    store(tmp_path, other=make_groups(1))
    once = iter(texts)  # but one in each file
    with pytest.raises(DataError, match=r"^training\.from_trajectories: \S*/other\.arrow: the tokenizer of policy"):
        StoredGroups(tmp_path).check_tokens(lambda ids: next(once, "other"))
    with pytest.raises(
        DataError, match=r"the tokenizer of policy\.model reads 'other' where '.*' was sampled; name the"
    ):
        stored.check_tokens(lambda ids: "other")


@pytest.mark.engine
def test_a_run_learns_from_the_trajectories_of_another_as_that_one_did(tmp_path: Path) -> None:
    """Policy and groups are the same, so the first update is; the second, of the same groups, is off-policy."""

    def train(name: str, num_iterations: int, **training: Any) -> list[dict[str, Any]]:
        config = make_config(files, {"num_steps": 30}, num_iterations=num_iterations, num_minibatches=1, **training)
        create_run_directory(config, tmp_path / name)
        report = TrainingRun(config, tmp_path / name, Console(quiet=True)).execute()
        assert report.tasks.trained == report.tasks.issued == 8 * num_iterations
        return [row for row in read_metrics(tmp_path / name) if is_iteration(row) and row["stage"] == "rl"]

    files = make_files(tmp_path)
    (sampled,) = train("sampled", 1)
    first, second = train("stored", 2, from_trajectories=str(tmp_path / "sampled"))
    assert sampled["rollout/reward"] == first["rollout/reward"] == second["rollout/reward"]
    for name in ("learner/loss", "learner/grad_norm", "learner/logprob_gap_mean"):
        assert first[name] == pytest.approx(sampled[name], rel=1e-3, abs=1e-6), name
    assert second["learner/logprob_gap_mean"] > 100 * first["learner/logprob_gap_mean"]


def test_a_folder_without_trajectories_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"training\.from_trajectories: .*none is no folder; give a run directory"):
        StoredGroups(tmp_path / "none")
    with pytest.raises(DataError, match=r"has no trajectories to train on; give a run with checkpointing"):
        StoredGroups(tmp_path)
    failed = [replace(t, stop_reason=StopReason.ENV_ERROR) for t in make_groups(0)[0].trajectories]
    store(tmp_path, all_failed=[TrajectoryGroup(failed[0].task, tuple(failed))])
    with pytest.raises(DataError, match="has no trajectories to train on"):
        StoredGroups(tmp_path)
