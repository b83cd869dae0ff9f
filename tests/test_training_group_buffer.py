"""Dynamic sampling: groups whose rewards are all equal are replaced, and batches depend on the order of tasks only."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_world import make_config, make_files

from ragr1_actors.core.types import Task
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest, GroupSummary
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.batches import GroupBuffer, max_set_aside


def finished(number: int, is_flat: bool) -> FinishedGroup:
    task_id = f"{number:03}"
    request = GroupRequest(task_id, Task(task_id, "?", ("a",)), 2, 1.0)
    rewards = (1.0, 1.0) if is_flat else (1.0, 0.0)
    return FinishedGroup(request, GroupSummary(rewards, 0, (), 0, {}), None)


def ids(groups: list[FinishedGroup]) -> list[str]:
    return sorted(group.request.issue_id for group in groups)


def sample(are_flat: list[bool], size: int, allowed: int, seed: int) -> tuple[list[str], list[str]]:
    """As the algorithm does at lag 0: issue in order, let groups end in any order, stop when a batch is together."""
    rng = random.Random(seed)
    buffer = GroupBuffer(0, allowed)
    out: list[int] = []
    issued = 0
    while len(buffer) < size:
        while len(out) + len(buffer) < size:
            out.append(issued)
            issued += 1
        for _ in range(rng.randint(1, len(out))):
            number = out.pop(rng.randrange(len(out)))
            buffer.add(finished(number, are_flat[number % len(are_flat)]))
    assert not out
    return ids(buffer.take(size)), ids(buffer.drop_set_aside())


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 6), st.integers(0, 12), st.integers(0, 99))
def test_a_batch_depends_on_the_order_of_tasks_alone(are_flat: list[bool], size: int, allowed: int, seed: int) -> None:
    batch, set_aside = sample(are_flat, size, allowed, seed)
    chosen: list[str] = []
    passed: list[str] = []
    number = 0
    while len(chosen) + max(0, len(passed) - allowed) < size:
        is_flat = are_flat[number % len(are_flat)] and allowed > 0
        (passed if is_flat else chosen).append(f"{number:03}")
        number += 1
    missing = size - len(chosen)
    assert batch == sorted(chosen + passed[:missing])
    assert set_aside == passed[missing:]
    assert len(set_aside) <= allowed


def test_groups_that_are_set_aside_become_stale() -> None:
    buffer = GroupBuffer(1, 4)
    for number, is_flat in enumerate((True, False, True)):
        buffer.add(finished(number, is_flat))
    assert buffer.drop_stale(1) == []
    assert ids(buffer.drop_stale(2)) == ["000", "001", "002"]
    assert len(buffer) == 0
    assert buffer.drop_set_aside() == []


def test_a_group_without_sampled_tokens_does_not_become_stale() -> None:
    buffer = GroupBuffer(0)
    group = finished(0, False)
    buffer.add(replace(group, summary=replace(group.summary, oldest_version=-1)))
    assert buffer.drop_stale(7) == []
    assert ids(buffer.take(1)) == ["000"]


def test_only_dapo_uses_dynamic_sampling_by_default() -> None:
    def allowed(**training: object) -> int:
        return max_set_aside(AlgorithmConfig().training(train_batch_size=4, **training).freeze())

    assert allowed(algorithm="dapo") == 9 * 4
    assert allowed(algorithm="grpo") == allowed(algorithm="ppo") == allowed(algorithm="dpo") == 0
    assert allowed(algorithm="grpo", options={"max_sampled_batches": 3}) == 2 * 4


@pytest.mark.engine
def test_dynamic_sampling_stops_at_its_bound(tmp_path: Path) -> None:
    options = {"max_sampled_batches": 3}
    config = make_config(
        make_files(tmp_path), {"num_steps": 0}, algorithm="dapo", options=options, train_batch_size=4, group_size=2
    )
    algorithm = Algorithm.create(config, tmp_path / "run")
    try:
        for iteration in (1, 2):
            metrics = algorithm.train()
            assert metrics["loop/set_aside_groups"] == 8
            assert metrics["learner/num_steps"] == 0
            counts = algorithm.task_counts()
            assert counts == {
                "issued": 12 * iteration,
                "trained": 12 * iteration,
                "failed": 0,
                "skipped": 0,
                "lost": 0,
                "doubled": 0,
            }
    finally:
        algorithm.stop()
