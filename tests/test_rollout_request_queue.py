"""Requests that wait for runners: who gets which, and what is counted."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace

import pytest
from fleet_world import request

from ragr1_actors.core.process.driver_loop import DriverLoop
from ragr1_actors.rollout.groups import GroupRequest, RequestQueue


class World:
    """Runners by name, each with room for two groups of two; a call is the name of its runner."""

    def __init__(self, *ready: str) -> None:
        self.ready, self.now_s = list(ready), 0.0
        self.calls: list[tuple[int, str]] = []
        self.queue = RequestQueue[str, str](lambda: self.ready, self.call, 4, lambda: self.now_s, nullcontext())

    def call(self, asked: GroupRequest, runner: str) -> str:
        self.queue.begin(runner, asked.num_trajectories)
        self.calls.append((int(asked.task.task_id.removeprefix("t/")), runner))
        return runner

    def ask(self, loop: DriverLoop, *numbers: int, is_urgent: bool = False) -> list[asyncio.Task[str]]:
        tasks = [loop.begin(self.queue.place(request(number), is_urgent=is_urgent)) for number in numbers]
        loop.run(asyncio.sleep(0))
        return tasks


def test_the_runner_with_the_least_to_do_is_called_until_all_are_full(loop: DriverLoop) -> None:
    world = World("a", "b")
    tasks = world.ask(loop, 0, 1, 2, 3, 4)
    assert [runner for _, runner in world.calls] == ["a", "b", "a", "b"]
    assert ([task.done() for task in tasks], len(world.queue)) == ([True] * 4 + [False], 1)
    world.queue.end("b", 2)
    world.queue.dispatch()
    assert world.calls[-1] == (4, "b")
    assert (len(world.queue), world.queue.num_in_flight) == (0, {"a": 4, "b": 4})


def test_an_urgent_request_comes_first_and_a_cancelled_one_never(loop: DriverLoop) -> None:
    world = World()
    first, second = world.ask(loop, 0, 1)
    world.ask(loop, 2, is_urgent=True)
    first.cancel()
    loop.run(asyncio.sleep(0))
    world.ready.append("a")
    world.queue.dispatch()
    loop.run(asyncio.sleep(0))
    assert world.calls == [(2, "a"), (1, "a")]
    assert second.result() == "a"


def test_a_request_whose_runners_died_shares_a_runner_with_fewer_and_then_with_none(loop: DriverLoop) -> None:
    calls: list[tuple[str, str]] = []
    queue: RequestQueue[str, None]

    def call(asked: GroupRequest, runner: str) -> None:
        queue.begin(runner, queue.size(asked))
        calls.append((asked.task.task_id.removeprefix("t/"), runner))

    queue = RequestQueue[str, None](lambda: ["a"], call, 32, lambda: 0.0, nullcontext())
    for number, num_deaths in enumerate([0, 1, *[1] * 8, 2, 0]):
        loop.begin(queue.place(replace(request(number), num_deaths=num_deaths)))
    loop.run(asyncio.sleep(0))
    # two trajectories, then seven groups that count as four each
    assert [name for name, _ in calls] == [str(number) for number in range(8)]
    queue.end("a", 2)
    for _ in range(8):  # the ninth, the tenth, then the one that died twice, once the runner is empty
        queue.end("a", 4)
        queue.dispatch()
    assert [name for name, _ in calls[8:]] == ["8", "9"]
    queue.end("a", 4)
    queue.dispatch()
    assert calls[-1] == ("10", "a") and queue.num_in_flight == {"a": 32}
    queue.end("a", 32)
    queue.dispatch()
    assert calls[-1] == ("11", "a")


def test_what_is_held_waits(loop: DriverLoop) -> None:
    world = World("a")
    world.queue.is_held = True
    world.ask(loop, 0)
    assert (world.calls, len(world.queue)) == ([], 1)
    world.queue.is_held = False
    world.queue.dispatch()
    assert world.calls == [(0, "a")]


def test_without_a_runner_all_that_wait_fail(loop: DriverLoop) -> None:
    world = World()
    tasks = world.ask(loop, 0, 1)
    world.queue.fail(ValueError("none is left"))
    loop.run(asyncio.sleep(0))
    for task in tasks:
        with pytest.raises(ValueError, match="none is left"):
            task.result()
    assert len(world.queue) == 0


def test_the_time_with_work_is_counted_per_runner(loop: DriverLoop) -> None:
    world = World("a", "b")
    world.ask(loop, 0, 1, 2)  # two for a, one for b
    world.now_s = 2.0
    world.queue.end("b", 2)
    world.now_s = 5.0
    world.queue.end("a", 2)
    world.now_s = 6.0
    found = world.queue.state(num_starting=3)
    assert (found.time_s, found.num_running, found.num_starting) == (6.0, 2, 3)
    assert (found.busy_s, found.ongoing, found.queued) == (2.0 + 6.0, 2.0, 0.0)


def test_the_load_is_averaged_over_the_groups_that_ended(loop: DriverLoop) -> None:
    world = World("a")
    world.ask(loop, 0, 1, 2, 3)
    assert world.queue.take_load() == (0.0, 0.0)
    world.queue.end("a", 2)  # four trajectories in flight, two groups wait
    world.queue.dispatch()
    world.queue.end("a", 2)  # four, one waits
    assert world.queue.take_load() == (4.0, 1.5)
    assert world.queue.take_load() == (0.0, 0.0)
