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

from envs.base import StepResult, TextEnv, check_prompt, check_result, measure
from envs.rewards import RewardResult
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError, RetrievalError, ServiceError
from ragr1_actors.core.resolve import raised_at
from ragr1_actors.core.types import Completion, OnText, StopReason, Task, Trajectory, Turn
from ragr1_actors.core.users_code import contained
from ragr1_actors.rollout.forks import Fork
from ragr1_actors.rollout.recorder import Reading, Recorder

RewardCall = Callable[[Trajectory], Awaitable[RewardResult]]
"""The reward of a trajectory that has ended."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What a person sees of one trajectory while it grows; see ``ragr1 ask``. Both must return quickly."""

    on_text: OnText
    """Called with the text of the turn so far, behind what was open when it began, as the engine produces it."""
    on_turn: Callable[[Turn], None]
    """Called when a turn has ended and its calls are answered."""


async def run_trajectory(
    env: TextEnv,
    task: Task,
    recorder: Recorder,
    *,
    reward: RewardCall | None = None,
    fork: Fork | None = None,
    watch: Watch | None = None,
) -> Trajectory:
    """Let the policy act in ``env``, a new one, until it answers, reaches a limit, or the machinery fails.

    A failure of retrieval, engine or environment is not raised: the trajectory ends with a ``StopReason`` that names
    it, keeps its tokens, and has no reward. Only a dead engine is raised.

    ``recorder`` is a new one, too. ``reward`` is asked for the trajectory at its end; what it gives is added to the
    environment's own rewards. A ``fork`` begins as another trajectory: ``env`` acts on its first turns again. ``watch``
    sees the trajectory grow; it changes nothing.

    Raises:
        EngineDeadError: no trajectory of this engine can continue.
    """
    attempt = _Attempt(env, recorder, watch)
    error = ""
    try:
        try:
            stop_reason = await attempt.run(replace(task, question=recorder.defuse(task.question)), fork)
        finally:  # also after a cancellation
            env.close()
        ended = attempt.trajectory(task, stop_reason)
        if reward is not None:
            ended = _rewarded(ended, await reward(ended))
        return replace(ended, metrics=ended.metrics | measure(env, ended))
    except RetrievalError as failure:
        stop_reason, error = StopReason.RETRIEVAL_FAILED, str(failure)
    except ServiceError as failure:
        stop_reason, error = StopReason.SERVICE_FAILED, str(failure)
    except EngineDeadError:
        raise
    except EngineError as failure:
        stop_reason, error = StopReason.ENGINE_ERROR, str(failure)
    except Exception as failure:  # a user's environment or reward may raise anything; only its own trajectory ends
        stop_reason, error = StopReason.ENV_ERROR, raised_at(failure, type(env))
    return attempt.trajectory(task, stop_reason, error)


def _rewarded(ended: Trajectory, result: RewardResult) -> Trajectory:
    """Return the trajectory with its reward on top of the environment's."""
    parts = {f"reward_{name}": value for name, value in result.parts.items()}
    turns = ended.turns
    if result.per_turn:
        turns = tuple(replace(turn, reward=turn.reward + own) for turn, own in zip(turns, result.per_turn, strict=True))
    return replace(ended, turns=turns, reward=ended.reward + result.total, metrics=ended.metrics | parts)


class _Attempt:
    """An environment that acts, and what the recorder does not keep."""

    def __init__(self, env: TextEnv, recorder: Recorder, watch: Watch | None) -> None:
        self._env, self._recorder, self._watch = env, recorder, watch
        watchers: list[OnText] = [env.peek] if type(env).peek is not TextEnv.peek else []
        self._watchers = tuple(watchers) if watch is None else (*watchers, watch.on_text)
        self._answer = ""
        self._metrics: dict[str, float] = {}

    async def run(self, task: Task, fork: Fork | None) -> StopReason:
        """Take turns until the trajectory ends, and return the reason."""
        recorder, messages = self._recorder, check_prompt(await contained(self._env.reset(task)), self._env.reset)
        if fork is None:
            recorder.restart(messages, self._reading())
        else:
            await self._act_again(recorder.fork(*fork, messages, self._reading()))
        while recorder.room > 0:
            turn = await recorder.generate(self._reading())
            result = check_result(await contained(self._env.act(turn)), self._env.act)
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
        """Bring the environment to where its turns had brought the parent's; ``ConfigError`` if it ends before."""
        for number, (turn, whole) in enumerate(turns, start=1):
            result = check_result(await contained(self._env.act(turn)), self._env.act)
            if result.terminated or result.truncated:
                raise ConfigError(f"a fork ended at turn {number} of its parent, where that went on; fork it before")
            own = replace(self._recorder.turns[number - 1], reward=float(result.reward))
            self._recorder.turns[number - 1] = own  # the parent's has what the reward gave that turn, too
            self._recorder.copied(whole, result.messages, self._reading())

    def trajectory(self, task: Task, stop_reason: StopReason, error: str = "") -> Trajectory:
        """Return what has been recorded so far."""
        return self._recorder.trajectory(task, stop_reason, answer=self._answer, error=error, metrics=self._metrics)

    def _reading(self) -> Reading:
        env = self._env
        return Reading(env.stop, env.tools, env.left_open, self._watchers)  # a class may change stop between turns

    def _record(self, result: StepResult) -> None:
        reply = "\n".join(result.results or (result.observation,)) + result.notice
        turn = self._recorder.end_turn(result.action, result.calls, reply, float(result.reward))
        if self._watch is not None:
            self._watch.on_turn(turn)
        self._answer = result.answer
        for name, value in result.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value
