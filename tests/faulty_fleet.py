"""Faults for the simulated fleets: runners that die or hang, slow engines, searches and tasks that fail."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from envs.base import StepResult
from envs.search import SearchEnv
from ragr1_actors.core.errors import RetrievalError
from ragr1_actors.core.types import Message, Task
from ragr1_actors.lab.simulation.fleet import SimulatedRunners
from ragr1_actors.lab.simulation.workload import Attempt, TurnShape
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest

RESTART_S, HANG_TIMEOUT_S = 2.0, 3.0


@dataclass
class Weather:
    """What goes wrong; all of it is drawn from one generator."""

    rng: random.Random
    gap_s: float
    """Mean time between two faults of runners."""
    faults_left: int
    """Of runners: with faults for ever, a run could be without progress for ever."""
    search_failures: float
    """Share of the searches that no replica answers."""
    flaws: float
    """Share of the searches in which the environment raises."""
    slow_searches: float
    broken_tasks: frozenset[str]
    """Tasks on which the environment always raises."""
    seen: Counter[str] = field(default_factory=Counter)

    def happens(self, name: str, share: float) -> bool:
        happened = self.rng.random() < share
        self.seen[name] += happened
        return happened

    def load_at(self, time_s: float) -> float:
        """Return 1, or 10 in every third stretch of five seconds: engines are slower."""
        return 10.0 if self.slow_searches and int(time_s / 5) % 3 == 2 else 1.0


class FaultyEnv(SearchEnv):
    """``SearchEnv`` in the weather of the schedule under way."""

    weather: ClassVar[Weather]

    async def reset(self, task: Task) -> list[Message]:
        if task.task_id in self.weather.broken_tasks:
            raise KeyError(f"{task.task_id} has no gold")
        return await super().reset(task)

    async def step(self, queries: list[str]) -> StepResult:
        if self.weather.happens("search failures", self.weather.search_failures):
            raise RetrievalError("no replica answered")
        if self.weather.happens("flaws", self.weather.flaws):
            raise ValueError("a flaw")
        if self.weather.happens("slow searches", self.weather.slow_searches):
            await asyncio.sleep(self.weather.rng.uniform(1, 20))
        return await super().step(queries)


class ShortAttempts:
    """A few short turns; some are malformed, and some attempts never answer."""

    passage_tokens = 20.0

    def attempts(self, rng: random.Random, count: int) -> Sequence[Attempt]:
        return [self._attempt(rng) for _ in range(count)]

    def _attempt(self, rng: random.Random) -> Attempt:
        turns = [TurnShape(rng.randint(5, 60), rng.choice((0, 1, 2, 2))) for _ in range(rng.randint(0, 3))]
        return Attempt((*turns, TurnShape(rng.randint(5, 60))), rng.random() < 0.5)


class FaultyRunners(SimulatedRunners):
    """Runners that die and hang. As in ``EnvRunnerGroup``, their requests go back to those that wait."""

    weather: Weather
    on_step: Callable[[], None] = staticmethod(lambda: None)
    """Called when a group was sampled."""
    on_submit: Callable[[GroupRequest], None] = staticmethod(lambda request: None)
    """Called when a group is asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hung: set[Any] = set()

    def sample(self, request: GroupRequest) -> Coroutine[Any, Any, FinishedGroup]:
        self.on_submit(request)
        return self._sample_watched(request)

    async def _sample_watched(self, request: GroupRequest) -> FinishedGroup:
        group = await super().sample(request)
        self.on_step()
        return group

    def resume(self) -> None:
        super().resume()
        for runner in self._hung:
            runner.engine.pause()

    async def storm(self) -> None:
        """Let runners die and hang, now and then."""
        rng = self.weather.rng
        while self.weather.faults_left:
            self.weather.faults_left -= 1
            await asyncio.sleep(rng.expovariate(1 / self.weather.gap_s))
            runner = rng.choice(self._runners)
            if self.weather.happens("runner kills", 0.5):
                self._kill(runner)
            elif runner not in self._hung:
                self._hang(runner, rng.uniform(0, 2 * HANG_TIMEOUT_S))

    def _kill(self, runner: Any) -> None:
        if runner not in self._runners:
            return
        for task, owner in self._runner_of.items():
            if owner is runner:
                task.cancel()
        self._hung.discard(runner)
        self._runners.remove(runner)
        self._retrievers.forget(runner.index)
        self._start(RESTART_S)

    def _hang(self, runner: Any, seconds: float) -> None:
        """Stand still for some seconds; a runner that does so for ``HANG_TIMEOUT_S`` is killed."""
        self.weather.seen["hangs"] += 1
        self._hung.add(runner)
        runner.engine.pause()
        if seconds < HANG_TIMEOUT_S:
            self._loop.call_later(seconds, self._go_on, runner)
        else:
            self._loop.call_later(HANG_TIMEOUT_S, self._kill, runner)

    def _go_on(self, runner: Any) -> None:
        if runner in self._hung:
            self._hung.discard(runner)
            runner.engine.resume()
