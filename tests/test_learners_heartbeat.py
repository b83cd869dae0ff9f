"""Heartbeat: what is a hang, and what only takes long. The clock is the test's."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from learners.heartbeat import BLOCKED_S, FIRST_STEP_S, INTERVAL_S, STEPS, VERDICT_TIMEOUT_S, Heartbeat

pytestmark = pytest.mark.ray

TIMEOUT_S = 20.0


class Actor:
    """Answers with its progress, unless it is silent."""

    def __init__(self, ray: ModuleType) -> None:
        self.ray = ray
        self.now = 100.0
        self.progress: int | None = 0
        self.heartbeat = Heartbeat(self.ask, TIMEOUT_S, lambda: self.now)

    def ask(self) -> Any:
        if self.progress is not None:
            return self.ray.put(self.progress)

        @self.ray.remote(num_cpus=1_000)  # finds no place
        def never() -> None: ...

        return never.remote()

    def after(self, seconds: float, *, is_working: bool = True, is_blocked: bool = False) -> list[str]:
        """Look once a second, and return what was said."""
        found = []
        for _ in range(round(seconds)):
            self.now += 1
            found.append(self.heartbeat.look(is_working=is_working, is_blocked=is_blocked))
        return found

    def step(self, seconds: float) -> list[str]:
        assert self.progress is not None
        found = self.after(seconds)
        self.progress += 1
        return [*found, *self.after(2 * INTERVAL_S)]


@pytest.fixture
def actor(ray_local: ModuleType) -> Actor:
    return Actor(ray_local)


def test_an_actor_that_starts_may_take_any_time(actor: Actor) -> None:
    actor.progress = None
    assert set(actor.after(10 * TIMEOUT_S, is_working=False)) == {""}


def test_an_actor_that_does_not_answer_hangs(actor: Actor) -> None:
    actor.heartbeat.begin_work()
    assert set(actor.after(5)) == {""}
    actor.progress = None
    said = actor.after(TIMEOUT_S + 2 * INTERVAL_S, is_working=False)
    assert set(said[: round(TIMEOUT_S)]) == {""}
    assert "it has not answered for 21 s" in said


def test_a_long_step_is_no_hang(actor: Actor) -> None:
    actor.heartbeat.begin_work()
    assert set(itertools.chain(*(actor.step(60) for _ in range(3)))) == {""}
    actor.heartbeat.end_work()
    actor.heartbeat.begin_work()
    assert set(actor.after(STEPS * 60)) == {""}
    assert any(said.startswith("it has made no progress for") for said in actor.after(30))


def test_the_first_step_may_take_longer(actor: Actor) -> None:
    actor.heartbeat.begin_work()
    assert set(actor.after(FIRST_STEP_S)) == {""}
    assert actor.after(2)[-1] == f"it has made no progress for {FIRST_STEP_S + 2:.0f} s"


def test_quick_steps_of_the_first_call_say_nothing_about_the_rest_of_it(actor: Actor) -> None:
    """The old log-probs are scored in seconds, and then the reference model is loaded."""
    actor.heartbeat.begin_work()
    assert set(itertools.chain(*(actor.step(1) for _ in range(5)))) == {""}
    assert set(actor.after(FIRST_STEP_S - 2 * INTERVAL_S)) == {""}


def test_another_learner_has_a_first_call_again(actor: Actor) -> None:
    actor.heartbeat.begin_work()
    assert set(actor.step(1)) == {""}
    actor.heartbeat.end_work()
    actor.heartbeat.forget_steps()
    actor.progress = 0  # the new one counts from the start
    actor.heartbeat.begin_work()
    assert set(actor.after(FIRST_STEP_S)) == {""}


def test_an_actor_that_is_stopped_once_it_was_built_hangs(actor: Actor) -> None:
    actor.heartbeat.begin_work()
    assert set(actor.step(1)) == {""}
    actor.heartbeat.end_work()
    actor.heartbeat.forget_steps()
    actor.progress = None
    actor.heartbeat.begin_work()
    assert any(said.startswith("it has not answered for") for said in actor.after(TIMEOUT_S + 2 * INTERVAL_S))


def test_a_driver_that_stood_still_blames_no_actor(actor: Actor) -> None:
    actor.heartbeat.begin_work()
    assert set(actor.step(1)) == {""}
    actor.heartbeat.end_work()
    actor.heartbeat.begin_work()
    assert set(actor.after(3)) == {""}
    actor.now += 10 * TIMEOUT_S  # Ctrl-Z, and fg
    assert set(actor.after(5)) == {""}
    actor.progress = None
    said = actor.after(TIMEOUT_S + 2 * INTERVAL_S)
    assert any(one.startswith("it has not answered for") for one in said), "a real hang is still noticed"


def test_a_call_that_keeps_all_threads_from_answering_has_more_time(actor: Actor) -> None:
    actor.heartbeat.begin_work()
    assert set(actor.after(5)) == {""}
    actor.progress = None
    assert set(actor.after(BLOCKED_S, is_blocked=True)) == {""}
    assert "it has not answered for" in actor.after(2 * INTERVAL_S, is_blocked=True)[-1]


def test_an_actor_without_work_makes_no_progress(actor: Actor) -> None:
    actor.heartbeat.begin_work()
    assert set(actor.step(1)) == {""}
    assert set(actor.after(20 * TIMEOUT_S, is_working=False)) == {""}


@pytest.mark.parametrize("verdict", ["it answers", "it is dead", "none"])
def test_a_verdict_is_waited_for_while_an_actor_is_unavailable(
    ray_local: ModuleType, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def ask() -> Any:
        nonlocal asked
        asked += 1
        return (verdict != "none" and asked == 4, verdict)

    def get(answer: tuple[bool, str], timeout: float) -> int:
        is_known, what = answer
        if not is_known:
            raise ActorUnavailableError("its node does not answer", None)
        if what == "it is dead":
            raise ActorDiedError
        return 0

    monkeypatch.setattr("learners.heartbeat.time.sleep", sleep)
    monkeypatch.setattr("learners.heartbeat.ray.get", get)
    Heartbeat(ask, TIMEOUT_S, lambda: now).wait_for_verdict()
    assert asked == 4 if verdict != "none" else now == VERDICT_TIMEOUT_S
