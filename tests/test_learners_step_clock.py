"""StepClock: what is a hang of a learner rank, and what only takes long. The clock is the test's."""

from __future__ import annotations

import itertools

import pytest

from learners.ranks.call_history import FIRST_STEP_S, STEPS, StepClock

TIMEOUT_S = 20.0


class Rank:
    """Tells its progress once a second."""

    def __init__(self) -> None:
        self.now, self.progress = 100.0, 0
        self.steps = StepClock(TIMEOUT_S, lambda: self.now)
        self.steps.begin_work()

    def after(self, seconds: float) -> list[str]:
        """Look once a second, and return what was said."""
        found = []
        for _ in range(round(seconds)):
            self.now += 1
            found.append(self.steps.look(self.progress))
        return found

    def step(self, seconds: float) -> list[str]:
        found = self.after(seconds)
        self.progress += 1
        return [*found, *self.after(1)]

    def call(self) -> None:
        assert set(self.step(1)) == {""}
        self.steps.end_work()
        self.now += 10 * FIRST_STEP_S  # the driver does something else
        self.steps.begin_work()


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_a_long_step_is_no_hang(rank: Rank) -> None:
    assert set(itertools.chain(*(rank.step(60) for _ in range(3)))) == {""}
    rank.steps.end_work()
    rank.steps.begin_work()
    assert set(rank.after(STEPS * 60)) == {""}
    assert rank.after(5)[-1].startswith("it has made no progress for")


def test_a_step_may_take_twice_the_time_of_an_answer(rank: Rank) -> None:
    rank.call()
    assert set(rank.after(2 * TIMEOUT_S)) == {""}
    assert rank.after(1) == [f"it has made no progress for {2 * TIMEOUT_S + 1:.0f} s"]


def test_the_first_step_may_take_longer(rank: Rank) -> None:
    assert set(rank.after(FIRST_STEP_S)) == {""}
    assert rank.after(2)[-1] == f"it has made no progress for {FIRST_STEP_S + 2:.0f} s"


def test_quick_steps_of_the_first_call_say_nothing_about_the_rest_of_it(rank: Rank) -> None:
    """The old log-probs are scored in seconds, and then the reference model is loaded."""
    assert set(itertools.chain(*(rank.step(1) for _ in range(5)))) == {""}
    assert set(rank.after(FIRST_STEP_S - 2)) == {""}


def test_a_driver_that_stood_still_blames_no_rank(rank: Rank) -> None:
    rank.call()
    assert set(rank.after(3)) == {""}
    rank.now += 10 * TIMEOUT_S  # Ctrl-Z, and fg
    assert set(rank.after(5)) == {""}
    assert rank.after(3 * TIMEOUT_S)[-1].startswith("it has made no progress for"), "a real hang is still noticed"


def test_a_rank_that_has_not_answered_yet_has_made_no_progress(rank: Rank) -> None:
    rank.steps.look(None)
    assert set(rank.step(FIRST_STEP_S - 5)) == {""}, "its first answer is no step"
