import json
from base64 import b64decode, b64encode
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragr1_actors.core.errors import FleetError, RunDirectoryError
from ragr1_actors.core.types import FailedTask, Failure, Task
from ragr1_actors.rollout.task_sampler import Issue, TaskSampler
from ragr1_actors.runs.checkpoint import Books

TASKS = [Task(f"t/{index}", f"q{index}", ("a",)) for index in range(7)]


def test_an_epoch_hands_out_every_task_once_in_a_seeded_order() -> None:
    first = [TaskSampler(TASKS, seed=3).next().task.task_id for _ in range(1)]
    sampler = TaskSampler(TASKS, seed=3)
    epoch = [sampler.next() for _ in TASKS]
    assert sorted(issue.task.task_id for issue in epoch) == sorted(task.task_id for task in TASKS)
    assert epoch[0].task.task_id == first[0]
    second = [sampler.next() for _ in TASKS]
    assert {issue.epoch for issue in second} == {1}
    assert [i.task.task_id for i in epoch] != [i.task.task_id for i in second]


def test_tasks_of_two_sources_with_one_local_id_are_two_tasks() -> None:
    sampler = TaskSampler([Task("nq/0", "q", ("a",)), Task("hotpotqa/0", "r", ("b",))], seed=0)
    issues = [sampler.next(), sampler.next()]
    assert len({issue.group_id for issue in issues}) == 2
    for issue in issues:
        sampler.trained(issue)
    assert sampler.counts() == {"issued": 2, "trained": 2, "failed": 0, "lost": 0, "doubled": 0}


@given(st.lists(st.sampled_from(["next", "trained", "again", "give_up", "crash"]), max_size=120), st.integers(0, 5))
def test_no_task_is_lost_or_doubled_whatever_happens(actions: list[str], seed: int) -> None:
    sampler = TaskSampler(TASKS, seed)
    saved = json.dumps(sampler.get_state())
    out: list[Issue] = []
    trained: Counter[str] = Counter()
    given_up: set[str] = set()
    for action in actions:
        if action == "next":
            out.append(sampler.next())
        elif action == "crash":  # what happened since the last save is undone, as a checkpoint undoes the learner
            sampler = TaskSampler(TASKS, seed)
            sampler.set_state(json.loads(saved))
            out = []
        elif out:
            issue = out.pop(0)
            if action == "trained":
                sampler.trained(issue)
                trained[issue.issue_id] += 1
                saved = json.dumps(sampler.get_state())
            elif action == "again":
                sampler.again(issue)
            else:
                sampler.give_up(issue, Failure.INFRASTRUCTURE, "no replica answered")
                given_up.add(issue.issue_id)
                saved = json.dumps(sampler.get_state())
        counts = sampler.counts()
        assert counts["lost"] == counts["doubled"] == 0
    assert all(count == 1 for count in trained.values())
    num_handed_out = 2 * len(TASKS)
    while sampler.num_trained + sampler.num_failed < num_handed_out:
        issue = sampler.next()
        sampler.trained(issue)
        trained[issue.issue_id] += 1
    assert all(count == 1 for count in trained.values())
    assert not given_up & trained.keys()


def half_an_epoch() -> tuple[dict[str, Any], list[str]]:
    """Return the state after four tasks, of which the last is outstanding, and the three that were trained."""
    sampler = TaskSampler(TASKS, seed=3)
    issues = [sampler.next() for _ in range(4)]
    for issue in issues[:3]:
        sampler.trained(issue)
    return json.loads(json.dumps(sampler.get_state())), [issue.task.task_id for issue in issues[:3]]


def finish(sampler: TaskSampler) -> list[str]:
    """Train the rest of the epoch, and one task of the next."""
    trained = []
    while not trained or trained[-1].epoch == 0:
        trained.append(sampler.next())
        sampler.trained(trained[-1])
    return [issue.task.task_id for issue in trained[:-1]]


def test_an_order_that_would_be_another_one_after_a_resume_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    state, trained = half_an_epoch()
    monkeypatch.setattr(TaskSampler, "_shuffle", lambda self, epoch: list(range(len(TASKS))))
    resumed = TaskSampler(TASKS, seed=3)
    resumed.set_state(state)
    assert sorted(trained + finish(resumed)) == [task.task_id for task in TASKS]
    assert resumed.counts() == {"issued": 8, "trained": 8, "failed": 0, "lost": 0, "doubled": 0}


def test_the_counts_see_a_task_that_comes_again_and_one_that_never_comes() -> None:
    state, trained = half_an_epoch()
    order = np.frombuffer(b64decode(state["order"]), "<i4").copy()
    order[0] = next(at for at, task in enumerate(TASKS) if task.task_id == trained[0])
    state["order"] = b64encode(order.tobytes()).decode()
    resumed = TaskSampler(TASKS, seed=3)
    resumed.set_state(state)
    finish(resumed)
    assert resumed.counts() == {"issued": 7, "trained": 7, "failed": 0, "lost": 1, "doubled": 1}
    again = TaskSampler(TASKS, seed=3)
    again.set_state(json.loads(json.dumps(resumed.get_state())))
    assert again.counts() == resumed.counts()


def test_a_state_of_an_older_version_has_the_place_in_the_order() -> None:
    state, trained = half_an_epoch()
    del state["order"], state["issued"], state["never_issued"]
    resumed = TaskSampler(TASKS, seed=3)
    resumed.set_state(Books.model_validate(state).model_dump())
    assert sorted(trained + finish(resumed)) == [task.task_id for task in TASKS]
    assert resumed.counts() == {"issued": 8, "trained": 8, "failed": 0, "lost": 0, "doubled": 0}


def test_training_an_issue_twice_is_counted() -> None:
    sampler = TaskSampler(TASKS, 0)
    issue = sampler.next()
    sampler.trained(issue)
    sampler.trained(issue)
    assert sampler.counts()["doubled"] == 1


def test_a_second_attempt_has_other_seeds() -> None:
    sampler = TaskSampler(TASKS[:1], 0)
    issue = sampler.next()
    sampler.again(issue)
    again = sampler.next()
    assert again.issue_id == issue.issue_id
    assert again.group_id != issue.group_id


def test_a_task_that_fails_on_its_data_is_issued_in_no_later_epoch() -> None:
    sampler = TaskSampler(TASKS, 0)
    for number, issue in enumerate([sampler.next() for _ in TASKS]):
        if number == 0:
            sampler.give_up(issue.failed(Failure.DATA), Failure.DATA, "KeyError:\n  'gold'")
            bad = issue.task.task_id
        elif number == 1:
            sampler.give_up(issue.failed(Failure.INFRASTRUCTURE), Failure.INFRASTRUCTURE, "no replica answered")
            unlucky = issue.task.task_id
        else:
            sampler.trained(issue)
    expected = [
        FailedTask(bad, 0, Failure.DATA, 1, "KeyError: 'gold'"),
        FailedTask(unlucky, 0, Failure.INFRASTRUCTURE, 1, "no replica answered"),
    ]
    resumed = TaskSampler(TASKS, 0)
    resumed.set_state(json.loads(json.dumps(sampler.get_state())))
    for each in sampler, resumed:
        assert each.failed_tasks == expected
        second = [each.next() for _ in TASKS[1:]]
        assert {issue.task.task_id for issue in second} == {task.task_id for task in TASKS} - {bad}
        assert each.next().epoch == 2
        assert each.counts()["lost"] == 0


def test_the_state_has_the_failures_of_a_task_that_waits_for_its_next_try() -> None:
    sampler = TaskSampler(TASKS[:1], 0)
    sampler.again(sampler.next().failed(Failure.DATA).failed(Failure.INFRASTRUCTURE))
    resumed = TaskSampler(TASKS[:1], 0)
    resumed.set_state(json.loads(json.dumps(sampler.get_state())))
    issue = resumed.next()
    assert (issue.attempt, issue.num_failures, issue.num_outages) == (1, 1, 1)


def test_no_task_is_left_once_all_are_in_quarantine() -> None:
    sampler = TaskSampler(TASKS[:2], 0)
    for _ in range(2):
        sampler.give_up(sampler.next(), Failure.DATA, "KeyError: 'gold'")
    with pytest.raises(FleetError, match=r"all of 2 tasks failed; the last one with: KeyError: 'gold'"):
        sampler.next()


@pytest.mark.parametrize(
    "changed",
    [
        [*TASKS, Task("t/new", "new", ())],
        TASKS[1:],
        [replace(TASKS[0], question="another"), *TASKS[1:]],
        [TASKS[1], TASKS[0], *TASKS[2:]],
    ],
)
def test_a_state_continues_over_the_same_tasks_only(changed: list[Task]) -> None:
    state = TaskSampler(TASKS, 0).get_state()
    TaskSampler(TASKS, 0).set_state(state)
    with pytest.raises(RunDirectoryError, match="put the task files back"):
        TaskSampler(changed, 0).set_state(state)
