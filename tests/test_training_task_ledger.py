import json
import re
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.tasks.curriculum import Adaptive, Curriculum, Shuffle, Stats, TaskStats
from ragr1_actors.core.errors import ConfigError, FleetError, RunDirectoryError
from ragr1_actors.core.types import FailedTask, Failure, Task
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.runs.checkpoint import TaskLedgerState
from ragr1_actors.training.batches import TaskLedger

TASKS = [Task(f"t/{index}", f"q{index}", ("a",)) for index in range(7)]


def make_ledger(tasks: Sequence[Task], seed: int, curriculum: Curriculum | None = None) -> TaskLedger:
    return TaskLedger(tasks, seed, curriculum or Shuffle({}))


def test_an_epoch_hands_out_every_task_once_in_a_seeded_order() -> None:
    first = [make_ledger(TASKS, seed=3).next().task.task_id for _ in range(1)]
    ledger = make_ledger(TASKS, seed=3)
    epoch = [ledger.next() for _ in TASKS]
    assert sorted(issue.task.task_id for issue in epoch) == sorted(task.task_id for task in TASKS)
    assert epoch[0].task.task_id == first[0]
    second = [ledger.next() for _ in TASKS]
    assert {issue.epoch for issue in second} == {1}
    assert [i.task.task_id for i in epoch] != [i.task.task_id for i in second]


def test_tasks_of_two_sources_with_one_local_id_are_two_tasks() -> None:
    ledger = make_ledger([Task("nq/0", "q", ("a",)), Task("hotpotqa/0", "r", ("b",))], seed=0)
    issues = [ledger.next(), ledger.next()]
    assert len({issue.group_id for issue in issues}) == 2
    for issue in issues:
        ledger.trained(issue, [1.0, 0.0])
    assert ledger.counts() == {"issued": 2, "trained": 2, "failed": 0, "skipped": 0, "lost": 0, "doubled": 0}


class Drawn(Curriculum):
    """Draws every order, and skips some tasks at some times: what it skips depends on what was trained."""

    is_fixed = False

    def __init__(self, skipped: Collection[str], on_skip: Callable[[str], None] = lambda task_id: None) -> None:
        super().__init__({})
        self.skipped, self.on_skip = skipped, on_skip

    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        return rng.permutation(len(rest)).tolist()[::-1]

    def skip(self, task: Task, stats: Stats) -> bool:
        is_skipped = task.task_id in self.skipped and sum(one.num_trajectories for one in stats.values()) % 3 > 0
        if is_skipped:
            self.on_skip(task.task_id)
        return is_skipped


class DrawnOnce(Drawn):
    is_fixed = True


def rewards_of(issue: GroupRequest) -> list[float]:
    """Return the rewards of two or three trajectories, the same ones for the same issue."""
    number = crc32(issue.issue_id.encode())
    return [float(number % 2), float(number % 5 - 1), 0.5][: 2 + number % 2]


class Played:
    """A ledger, what was seen of it, and its newest checkpoint."""

    def __init__(self, seed: int, kind: type[Drawn], skipped: Collection[str]) -> None:
        self.make: Callable[[], TaskLedger] = lambda: make_ledger(TASKS, seed, kind(skipped, self.on_skip))
        self.ledger = self.make()
        self.out: list[GroupRequest] = []
        self.ends: Counter[tuple[str, int]] = Counter()
        """By task and epoch, how often it was trained, skipped or given up."""
        self.saved = self.save()

    def on_skip(self, task_id: str) -> None:
        self.ends[task_id, self.ledger.get_state()["epoch"]] += 1

    def save(self) -> tuple[str, Counter[tuple[str, int]]]:
        return json.dumps(self.ledger.get_state()), self.ends.copy()

    def next(self) -> None:
        self.out.append(self.ledger.next())

    def crash(self) -> None:
        """Go on from the checkpoint: what happened since is undone, as a checkpoint undoes the learner."""
        self.ledger, self.out = self.make(), []
        self.ledger.set_state(json.loads(self.saved[0]))
        self.ends = self.saved[1].copy()

    def end(self, how: str) -> None:
        """End the issue that is out for longest."""
        if not self.out:
            return
        issue = self.out.pop(0)
        if how == "again":
            self.ledger.again(issue)
        else:
            self.ends[issue.task.task_id, issue.epoch] += 1
            if how == "trained":
                self.ledger.trained(issue, rewards_of(issue))
            else:
                is_data = how == "quarantine" and issue.task is not TASKS[0]  # one task is always left
                self.ledger.give_up(issue, Failure.DATA if is_data else Failure.INFRASTRUCTURE, "an error")
        self.saved = self.save()

    def check(self) -> None:
        counts, state = self.ledger.counts(), self.ledger.get_state()
        assert counts["lost"] == counts["doubled"] == 0
        assert counts["issued"] == counts["trained"] + counts["failed"] + len(state["outstanding"])
        assert counts["trained"] + counts["failed"] + counts["skipped"] == self.ends.total()


@given(
    st.lists(st.sampled_from(["next", "next", "trained", "again", "give_up", "quarantine", "crash"]), max_size=120),
    st.integers(0, 5),
    st.sampled_from([Drawn, DrawnOnce]),
    st.sets(st.sampled_from([task.task_id for task in TASKS[1:]])),
)
def test_every_task_of_an_epoch_is_trained_or_skipped_or_given_up_once(
    actions: list[str], seed: int, kind: type[Drawn], skipped: set[str]
) -> None:
    played = Played(seed, kind, skipped)
    deeds = {"next": played.next, "crash": played.crash}
    for action in actions:
        deeds.get(action, partial(played.end, action))()
        played.check()
    num_epochs = played.ledger.get_state()["epoch"] + 2
    while not played.out or played.out[-1].epoch < num_epochs:
        played.end("trained")
        played.next()
        played.check()
    while len(played.out) > 1:
        played.end("trained")
    ends = {end for end in played.ends if end[1] < num_epochs}
    assert set(played.ends.values()) == {1}
    expected = {(task.task_id, epoch) for task in TASKS for epoch in range(num_epochs)}
    quarantined = {failed.task_id for failed in played.ledger.failed_tasks if failed.failure is Failure.DATA}
    assert {task_id for task_id, _ in expected - ends} <= quarantined


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 4))
def test_a_shuffled_epoch_has_the_order_of_its_seed(seed: int, num_tasks: int, num_epochs: int) -> None:
    """Bit for bit, so that a run can be repeated with another version."""
    tasks = [Task(f"t/{number}", "", ("a",)) for number in range(num_tasks)]
    ledger = make_ledger(tasks, seed)
    for epoch in range(num_epochs):
        for at in np.random.default_rng([seed, epoch]).permutation(num_tasks):
            issue = ledger.next()
            assert issue.task is tasks[at]
            ledger.trained(issue, rewards_of(issue))


@given(
    st.sampled_from([Shuffle({}), Adaptive({}), Drawn(["t/1", "t/4", "t/6"]), DrawnOnce(["t/0", "t/3"])]),
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=8),
    st.integers(0, 3),
)
def test_a_resumed_run_goes_on_in_the_same_order(
    curriculum: Curriculum, seed: int, batches: list[tuple[int, int]], num_more: int
) -> None:
    ledger, out = make_ledger(TASKS, seed, curriculum), list[GroupRequest]()
    for num_issued, num_trained in batches:  # with a lag, some of a batch are trained later
        out += [ledger.next() for _ in range(num_issued)]
        for issue in out[:num_trained]:
            ledger.trained(issue, rewards_of(issue))
        out = out[num_trained:]
    resumed = make_ledger(TASKS, seed, curriculum)
    resumed.set_state(TaskLedgerState.model_validate_json(json.dumps(ledger.get_state())).model_dump())
    assert [resumed.next() for _ in out] == out
    for num_before_training in (num_more, 2, 3):
        issues = [ledger.next() for _ in range(num_before_training)]
        assert [resumed.next() for _ in issues] == issues
        for issue in out:
            ledger.trained(issue, rewards_of(issue))
            resumed.trained(issue, rewards_of(issue))
        out = issues
    assert resumed.get_state() == ledger.get_state()


class Lazy(Curriculum):
    """Skips what it is told to, and keeps what it was asked with."""

    def __init__(self, skipped: Collection[str] = ()) -> None:
        super().__init__({})
        self.skipped: Any = skipped
        self.asked: list[tuple[list[str], dict[str, TaskStats], int]] = []
        self.drawn: list[float] = []

    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        self.asked.append(([task.task_id for task in rest], dict(stats), epoch))
        self.drawn.append(rng.random())
        return range(len(rest))

    def skip(self, task: Task, stats: Stats) -> bool:
        return task.task_id in self.skipped


def test_the_rest_is_ordered_again_once_something_was_trained() -> None:
    curriculum = Lazy(["t/2"])
    ledger = make_ledger(TASKS, 0, curriculum)
    first = [ledger.next(), ledger.next()]
    ids = [task.task_id for task in TASKS]
    assert curriculum.asked == [(ids, {}, 0)]
    ledger.trained(first[0], [1.0, -0.5, 0.0])
    ledger.trained(first[1], [])
    assert [ledger.next().task.task_id, ledger.next().task.task_id] == ["t/3", "t/4"]
    stats = {"t/0": TaskStats(3, 1, 0.5)}
    assert curriculum.asked[1:] == [(ids[2:], stats, 0)]
    assert ledger.counts() == {"issued": 4, "trained": 2, "failed": 0, "skipped": 1, "lost": 0, "doubled": 0}
    second = [ledger.next() for _ in range(3)][-1]
    assert (second.issue_id, curriculum.asked[2:]) == ("t/0#1", [(ids, stats, 1)])
    assert len(set(curriculum.drawn)) == 3, "each order draws other numbers"


def test_a_resumed_run_knows_what_its_epoch_has_skipped() -> None:
    ledger = make_ledger(TASKS, 0, Lazy(["t/0"]))
    ledger.trained(ledger.next(), [])
    resumed = make_ledger(TASKS, 0, Lazy())
    resumed.set_state(json.loads(json.dumps(ledger.get_state())))
    assert resumed.get_state() == ledger.get_state()
    assert finish(resumed) == [task.task_id for task in TASKS[2:]]
    assert resumed.counts() == {"issued": 7, "trained": 7, "failed": 0, "skipped": 1, "lost": 0, "doubled": 0}


class Backwards(Lazy):
    def order(self, rest: Sequence[Task], stats: Stats, epoch: int, rng: np.random.Generator) -> Sequence[int]:
        return super().order(rest, stats, epoch, rng)[::-1]


def test_the_rest_is_in_the_order_of_the_files() -> None:
    curriculum = Backwards()
    ledger = make_ledger(TASKS, 0, curriculum)
    for number in range(1, 4):
        issue = ledger.next()
        assert issue.task is TASKS[-number]
        ledger.trained(issue, rewards_of(issue))
    ids = [task.task_id for task in TASKS]
    assert [rest for rest, *_ in curriculum.asked] == [ids, ids[:-1], ids[:-2]]


@pytest.mark.parametrize("num_failed", [0, 3])
def test_an_epoch_in_which_every_task_is_skipped_ends_the_run(num_failed: int) -> None:
    curriculum = Lazy()
    ledger = make_ledger(TASKS, 0, curriculum)
    for issue in [ledger.next() for _ in TASKS]:
        if num_failed:
            ledger.give_up(issue, Failure.DATA, "KeyError: 'gold'")
            num_failed -= 1
        else:
            ledger.trained(issue, rewards_of(issue))
    curriculum.skipped = [task.task_id for task in TASKS]
    left = len(TASKS) - len(ledger.failed_tasks)
    with pytest.raises(
        ConfigError, match=rf"Lazy\.skip returned True for all of {left} tasks of epoch 1, .*, line \d+$"
    ):
        ledger.next()


def test_a_skip_that_fails_leaves_the_books_as_they_were() -> None:
    curriculum = Lazy()
    ledger = make_ledger(TASKS, 0, curriculum)
    ledger.next()
    state, curriculum.skipped = ledger.get_state(), None
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"Lazy\.skip failed at {re.escape(__file__)}, line \d+: TypeError: "):
            ledger.next()
    assert ledger.get_state() == state
    curriculum.skipped = ()
    assert [ledger.next().task for _ in TASKS[1:]] == TASKS[1:]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), max_size=len(TASKS)))
def test_the_state_has_the_stats(rewards: list[list[float]]) -> None:
    curriculum = Lazy()
    ledger = make_ledger(TASKS, 0, curriculum)
    for some in rewards:
        ledger.trained(ledger.next(), some)
    resumed = make_ledger(TASKS, 0, curriculum)
    resumed.set_state(json.loads(json.dumps(ledger.get_state())))
    resumed.next()
    expected = {
        task.task_id: TaskStats(len(some), len([r for r in some if r > 0]), sum(some, 0.0))
        for task, some in zip(TASKS, rewards, strict=False)
    }
    assert curriculum.asked[-1][1] == expected
    for task, some in zip(TASKS, rewards, strict=False):
        stats = expected[task.task_id]
        assert stats.mean_reward == pytest.approx(np.mean(some), abs=1e-9)
        assert stats.pass_rate == np.mean([reward > 0 for reward in some])


def half_an_epoch() -> tuple[dict[str, Any], list[str]]:
    """Return the state after four tasks, of which the last is outstanding, and the three that were trained."""
    ledger = make_ledger(TASKS, seed=3)
    issues = [ledger.next() for _ in range(4)]
    for issue in issues[:3]:
        ledger.trained(issue, [1.0, 0.0])
    return json.loads(json.dumps(ledger.get_state())), [issue.task.task_id for issue in issues[:3]]


def finish(ledger: TaskLedger) -> list[str]:
    """Train the rest of the epoch, and one task of the next."""
    trained = []
    while not trained or trained[-1].epoch == 0:
        trained.append(ledger.next())
        ledger.trained(trained[-1], [1.0, 0.0])
    return [issue.task.task_id for issue in trained[:-1]]


class Fixed(Lazy):
    is_fixed = True


def test_an_order_that_would_be_another_one_after_a_resume_is_kept() -> None:
    state, trained = half_an_epoch()
    resumed = make_ledger(TASKS, 3, Fixed())
    resumed.set_state(state)
    assert sorted(trained + finish(resumed)) == [task.task_id for task in TASKS]
    assert resumed.counts() == {"issued": 8, "trained": 8, "failed": 0, "skipped": 0, "lost": 0, "doubled": 0}


def test_the_counts_see_a_task_that_comes_again_and_one_that_never_comes() -> None:
    state, trained = half_an_epoch()
    order = np.frombuffer(b64decode(state["order"]), "<i4").copy()
    order[0] = next(at for at, task in enumerate(TASKS) if task.task_id == trained[0])
    state["order"] = b64encode(order.tobytes()).decode()
    resumed = make_ledger(TASKS, seed=3)
    resumed.set_state(state)
    finish(resumed)
    assert resumed.counts() == {"issued": 7, "trained": 7, "failed": 0, "skipped": 0, "lost": 1, "doubled": 1}
    again = make_ledger(TASKS, seed=3)
    again.set_state(json.loads(json.dumps(resumed.get_state())))
    assert again.counts() == resumed.counts()


def test_training_an_issue_twice_is_counted() -> None:
    ledger = make_ledger(TASKS, 0)
    issue = ledger.next()
    ledger.trained(issue, [1.0, 0.0])
    ledger.trained(issue, [1.0, 0.0])
    assert ledger.counts()["doubled"] == 1


def test_a_second_attempt_has_other_seeds() -> None:
    ledger = make_ledger(TASKS[:1], 0)
    issue = ledger.next()
    ledger.again(issue)
    again = ledger.next()
    assert again.issue_id == issue.issue_id
    assert again.group_id != issue.group_id


def test_a_task_that_fails_on_its_data_is_issued_in_no_later_epoch() -> None:
    ledger = make_ledger(TASKS, 0)
    for number, issue in enumerate([ledger.next() for _ in TASKS]):
        if number == 0:
            ledger.give_up(issue.failed(Failure.DATA), Failure.DATA, "KeyError:\n  'gold'")
            bad = issue.task.task_id
        elif number == 1:
            ledger.give_up(issue.failed(Failure.INFRASTRUCTURE), Failure.INFRASTRUCTURE, "no replica answered")
            unlucky = issue.task.task_id
        else:
            ledger.trained(issue, [1.0, 0.0])
    expected = [
        FailedTask(bad, 0, Failure.DATA, 1, "KeyError: 'gold'"),
        FailedTask(unlucky, 0, Failure.INFRASTRUCTURE, 1, "no replica answered"),
    ]
    resumed = make_ledger(TASKS, 0)
    resumed.set_state(json.loads(json.dumps(ledger.get_state())))
    for each in ledger, resumed:
        assert each.failed_tasks == expected
        second = [each.next() for _ in TASKS[1:]]
        assert {issue.task.task_id for issue in second} == {task.task_id for task in TASKS} - {bad}
        assert each.next().epoch == 2
        assert each.counts()["lost"] == 0


def test_the_state_has_the_failures_of_a_task_that_waits_for_its_next_try() -> None:
    ledger = make_ledger(TASKS[:1], 0)
    ledger.again(ledger.next().failed(Failure.DATA).failed(Failure.INFRASTRUCTURE))
    resumed = make_ledger(TASKS[:1], 0)
    resumed.set_state(json.loads(json.dumps(ledger.get_state())))
    issue = resumed.next()
    assert (issue.attempt, issue.num_failures, issue.num_outages) == (1, 1, 1)


def test_no_task_is_left_once_all_are_in_quarantine() -> None:
    ledger = make_ledger(TASKS[:2], 0)
    for _ in range(2):
        ledger.give_up(ledger.next(), Failure.DATA, "KeyError: 'gold'")
    with pytest.raises(FleetError, match=r"all of 2 tasks failed; the last one with: KeyError: 'gold'"):
        ledger.next()


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
    state = make_ledger(TASKS, 0).get_state()
    make_ledger(TASKS, 0).set_state(state)
    with pytest.raises(RunDirectoryError, match="put the task files back"):
        make_ledger(changed, 0).set_state(state)
