import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragr1_actors.core.errors import RunDirectoryError
from ragr1_actors.core.types import Task
from ragr1_actors.rollout.task_sampler import Issue, TaskSampler

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
@settings(max_examples=200, deadline=None)
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
                sampler.give_up(issue)
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
