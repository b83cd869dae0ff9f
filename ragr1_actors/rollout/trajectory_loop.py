"""One trajectory, from question to reward. Pure asyncio, without Ray and without an engine.

::

    reset ──► prompt ids ──► generate ──► parse ──► step / submit / malformed ──► append observation ids ──┐
                               ▲  │ text so far                                                            │
                               │  └──► peek: searches begin                                                │
                               └───────────────────────────────────────────────────────────────────────────┘

Each trajectory is one coroutine. It waits only for its own tokens and its own passages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from envs.base import Action, Answer, Malformed, Search, StepResult, TextEnv, check_result
from ragr1_actors.core.errors import EngineDeadError, EngineError, RetrievalError
from ragr1_actors.core.types import (
    Completion,
    GenerateFn,
    Message,
    Sampling,
    StopReason,
    Task,
    TokenKind,
    Trajectory,
    Turn,
)


class Tokenizer(Protocol):
    """The methods of the policy's tokenizer that a trajectory needs."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; nothing is added."""
        ...

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat up to the assistant's turn."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Limits of one trajectory."""

    sampling: Sampling
    """For each turn; ``stop`` and ``seed`` are set by the loop."""
    max_context_tokens: int
    """Prompt, model turns and observations together."""


@dataclass(slots=True)
class _Tokens:
    """The growing context, one entry per token in every list."""

    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], kind: TokenKind) -> None:
        self.ids.extend(ids)
        self.kinds.extend([kind] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        self.versions.extend([-1] * len(ids))

    def add_completion(self, completion: Completion) -> None:
        self.ids.extend(completion.token_ids)
        self.kinds.extend([TokenKind.MODEL] * len(completion.token_ids))
        self.logprobs.extend(completion.logprobs)
        self.versions.extend(completion.policy_versions)


@dataclass(slots=True)
class _Progress:
    """The trajectory so far; a failure keeps it."""

    tokens: _Tokens = field(default_factory=_Tokens)
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    answer: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


async def run_trajectory(
    env: TextEnv,
    task: Task,
    generate: GenerateFn,
    tokenizer: Tokenizer,
    settings: RolloutSettings,
    *,
    trajectory_id: str,
    seed: int,
) -> Trajectory:
    """Let the policy act in ``env``, a new one, until it answers, reaches a limit, or the machinery fails.

    A failure of retrieval, engine or environment is not raised: the trajectory ends with a ``StopReason`` that names
    it, keeps its tokens, and has no reward. Only a dead engine is raised. ``trajectory_id`` is unique: it is the
    engine's request id and, as is the run's ``seed``, a part of the sampling seeds.

    Raises:
        EngineDeadError: no trajectory of this engine can continue.
    """
    rollout = _Rollout(env, task, generate, tokenizer, settings, trajectory_id, seed)
    progress = rollout.progress
    error = ""
    try:
        try:
            stop_reason = await rollout.run()
        finally:  # also after a cancellation
            env.close()
    except RetrievalError as failure:
        stop_reason, error = StopReason.RETRIEVAL_FAILED, str(failure)
    except EngineDeadError:
        raise
    except EngineError as failure:
        stop_reason, error = StopReason.ENGINE_ERROR, str(failure)
    except Exception as failure:  # a user's environment may raise anything; only its own trajectory ends
        stop_reason, error = StopReason.ENV_ERROR, f"{type(failure).__name__}: {failure}"
    tokens = progress.tokens
    return Trajectory(
        trajectory_id=trajectory_id,
        task=task,
        token_ids=np.array(tokens.ids, dtype=np.int32),
        kinds=np.array(tokens.kinds, dtype=np.uint8),
        logprobs=np.array(tokens.logprobs, dtype=np.float32),
        policy_versions=np.array(tokens.versions, dtype=np.int32),
        turns=tuple(progress.turns),
        stop_reason=stop_reason,
        reward=0.0 if stop_reason.is_failure else progress.reward,
        answer=progress.answer,
        error=error,
        metrics=progress.metrics,
    )


@dataclass(frozen=True, slots=True)
class _Rollout:
    """One call of ``run_trajectory``: its arguments and its progress."""

    env: TextEnv
    task: Task
    generate: GenerateFn
    tokenizer: Tokenizer
    settings: RolloutSettings
    trajectory_id: str
    seed: int
    progress: _Progress = field(default_factory=_Progress)

    async def run(self) -> StopReason:
        """Take turns until the trajectory ends, and return the reason."""
        tokens = self.progress.tokens
        tokens.add(self.tokenizer.prompt_ids(await self.env.reset(self.task)), TokenKind.PROMPT)
        while (room := self.settings.max_context_tokens - len(tokens.ids)) > 0:
            completion = await self._generate(room)
            action = self.env.parse(completion.text)
            result = await _act(self.env, action)
            _record(self.progress, completion, action, result)
            if result.terminated:
                return StopReason.ANSWERED
            if result.truncated:
                return StopReason.MAX_TURNS
            tokens.add(self.tokenizer.encode(result.observation), TokenKind.OBSERVATION)
            tokens.add(self.tokenizer.encode(result.notice), TokenKind.NOTICE)
        return StopReason.CONTEXT_FULL

    async def _generate(self, room: int) -> Completion:
        """Sample the next turn, of at most ``room`` tokens, and add it to the context."""
        sampling = replace(
            self.settings.sampling,
            max_new_tokens=min(self.settings.sampling.max_new_tokens, room),
            stop=self.env.stop,
            seed=turn_seed(self.seed, self.trajectory_id, len(self.progress.turns)),
        )
        # the engine decodes no partial text for an environment without ``peek``
        on_text = None if type(self.env).peek is TextEnv.peek else self.env.peek
        tokens = self.progress.tokens
        completion = await self.generate(tokens.ids, sampling, request_id=self.trajectory_id, on_text=on_text)
        if not all(map(math.isfinite, completion.logprobs)):
            raise EngineError("the engine returned a log-prob that is not finite")
        tokens.add_completion(completion)
        return completion


async def _act(env: TextEnv, action: Action) -> StepResult:
    name = type(env).__name__
    match action:
        case Search(queries):
            return check_result(await env.step(list(queries)), f"{name}.step")
        case Answer(text):
            return check_result(await env.submit(text), f"{name}.submit")
        case Malformed(reason):
            return check_result(await env.malformed(reason), f"{name}.malformed")
    raise TypeError(f"{name}.parse returned {action!r}, expected Search, Answer or Malformed")


def _record(progress: _Progress, completion: Completion, action: Action, result: StepResult) -> None:
    names = {Search: "search", Answer: "answer", Malformed: "malformed"}
    progress.turns.append(
        Turn(
            completion_text=completion.text,
            num_model_tokens=len(completion.token_ids),
            action=names[type(action)],
            queries=tuple(record.query for record in result.retrievals),
            retrievals=result.retrievals,
            observation=result.observation + result.notice,
        )
    )
    progress.reward += float(result.reward)
    if isinstance(action, Answer):
        progress.answer = action.text
    for name, value in result.info.items():
        progress.metrics[name] = progress.metrics.get(name, 0.0) + value


def turn_seed(seed: int, trajectory_id: str, turn: int) -> int:
    """Return a 63-bit sampling seed that depends only on the run, the trajectory and the turn."""
    digest = hashlib.blake2b(f"{seed}/{trajectory_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
