"""One trajectory, from question to reward. Pure asyncio, without Ray and without an engine.

::

    reset ──► prompt ids ──► generate ──► act ──► append observation ids ──┐
                               ▲  │ text so far                            │
                               │  └──► peek: an environment may begin      │
                               └───────────────────────────────────────────┘

Each trajectory is one coroutine. It waits only for its own tokens and its own calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from envs.base import Measured, StepResult, TextEnv, check_prompt, check_result, measure
from envs.rewards import RewardResult, rewarded
from ragr1_actors.core.content import text_of
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError, RetrievalError, ServiceError
from ragr1_actors.core.process.users_code import contained
from ragr1_actors.core.resolve import raised_at
from ragr1_actors.core.types import Completion, OnText, StopReason, Task, Trajectory, Turn
from ragr1_actors.rollout.recorder import Fork, Reading, Recorder

RewardCall = Callable[[Trajectory], Awaitable[RewardResult]]
"""Function that computes the reward of an ended trajectory."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Callbacks that show a growing trajectory to a person; see ``ragr1 ask``. Both must return quickly."""

    on_text: OnText
    """Callback with the text of the turn so far, open tag included, as the engine produces it."""
    on_turn: Callable[[Turn], None]
    """Callback for a turn that has ended and whose calls are answered."""


class Attempt(Protocol):
    """Attempt at a task: an environment in which the policy acts, or an agent that asks it."""

    @property
    def source(self) -> Measured:
        """Source of the measures and the errors: an environment or an agent."""

    async def run(self, task: Task, fork: Fork | None) -> StopReason:
        """Take turns until the attempt ends, and return the reason; a ``fork`` begins as another trajectory."""

    def trajectory(self, task: Task, stop_reason: StopReason, error: str = "") -> Trajectory:
        """Return the recorded trajectory so far."""


async def run_trajectory(
    attempt: Attempt, task: Task, *, reward: RewardCall | None = None, fork: Fork | None = None
) -> Trajectory:
    """Let the policy act, until it answers, reaches a limit, or the machinery fails.

    A failure of retrieval, engine or environment is not raised: the trajectory ends with a ``StopReason`` that names
    it, keeps its tokens, and has no reward. Only the death of the engine is raised.

    ``reward`` is called with the trajectory at its end; its result is added to the environment's rewards.

    Raises:
        EngineDeadError: no trajectory of this engine can continue.
    """
    error = ""
    try:
        ended = attempt.trajectory(task, await attempt.run(task, fork))
        if reward is not None:
            ended = rewarded(ended, await reward(ended))
        ended.metrics.update(measure(attempt.source, ended))
        return ended
    except RetrievalError as failure:
        stop_reason, error = StopReason.RETRIEVAL_FAILED, str(failure)
    except ServiceError as failure:
        stop_reason, error = StopReason.SERVICE_FAILED, str(failure)
    except EngineDeadError:
        raise
    except EngineError as failure:
        stop_reason, error = StopReason.ENGINE_ERROR, str(failure)
    except Exception as failure:  # a user's environment or reward may raise anything; only its trajectory ends
        stop_reason, error = StopReason.ENV_ERROR, raised_at(failure, type(attempt.source))
    return attempt.trajectory(task, stop_reason, error)


class EnvAttempt:
    """Environment that acts, with values that the recorder does not keep."""

    def __init__(self, env: TextEnv, recorder: Recorder, watch: Watch | None = None) -> None:
        """Take a new environment and a new recorder; ``watch`` gets the growing trajectory, and changes nothing."""
        self.source, self._recorder, self._watch = env, recorder, watch
        watchers: list[OnText] = [env.peek] if type(env).peek is not TextEnv.peek else []
        self._watchers = tuple(watchers) if watch is None else (*watchers, watch.on_text)
        self._answer = ""
        self._metrics: dict[str, float] = {}

    async def run(self, task: Task, fork: Fork | None) -> StopReason:
        """Take turns until the trajectory ends, and return the reason; the environment acts on a fork's first turns."""
        try:
            return await self._run(replace(task, question=self._recorder.defuse(task.question)), fork)
        finally:  # also after a cancellation
            self.source.close()

    async def _run(self, task: Task, fork: Fork | None) -> StopReason:
        recorder, messages = self._recorder, check_prompt(await contained(self.source.reset(task)), self.source.reset)
        if fork is None:
            recorder.restart(messages, self._reading())
        else:
            await self._act_again(recorder.fork(*fork, messages, self._reading()))
        while recorder.room > 0:
            turn = await recorder.generate(self._reading())
            result = check_result(await contained(self.source.act(turn)), self.source.act)
            self._record(result)
            if result.terminated:
                return StopReason.ANSWERED
            if result.truncated:
                return StopReason.MAX_TURNS
            if result.restart:
                recorder.restart(result.restart, self._reading())
            elif not recorder.add(result.messages, self._reading()):
                break  # the policy cannot read it, and the row would be longer than the context
        return StopReason.CONTEXT_FULL

    async def _act_again(self, turns: Sequence[tuple[Completion, str]]) -> None:
        """Bring the environment to the parent's state after the copied turns; ``ConfigError`` if it ends before."""
        for number, (turn, whole) in enumerate(turns, start=1):
            result = check_result(await contained(self.source.act(turn)), self.source.act)
            if result.terminated or result.truncated:
                raise ConfigError(f"a fork ended at turn {number} of its parent, where that went on; fork it before")
            own = replace(self._recorder.turns[number - 1], reward=float(result.reward))
            self._recorder.turns[number - 1] = own  # the parent's also has the reward function's part of that turn
            self._recorder.copied(whole, result.messages, self._reading())

    def trajectory(self, task: Task, stop_reason: StopReason, error: str = "") -> Trajectory:
        """Return the recorded trajectory so far."""
        return self._recorder.trajectory(task, stop_reason, answer=self._answer, error=error, metrics=self._metrics)

    def _reading(self) -> Reading:
        env = self.source
        return Reading(env.stop, env.tools, env.left_open, self._watchers)  # a class may change stop between turns

    def _record(self, result: StepResult) -> None:
        reply = "\n".join(map(text_of, result.results or (result.observation,))) + result.notice
        turn = self._recorder.end_turn(result.action, result.calls, reply, float(result.reward))
        if self._watch is not None:
            self._watch.on_turn(turn)
        self._answer = result.answer
        for name, value in result.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
