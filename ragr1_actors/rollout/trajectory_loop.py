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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from envs.base import Action, Answer, Malformed, Search, StepResult, TextEnv, check_result
from ragr1_actors.core.errors import EngineDeadError, EngineError, RetrievalError
from ragr1_actors.core.types import (
    Completion,
    FinishReason,
    GenerateFn,
    Message,
    OnText,
    Sampling,
    StopReason,
    Task,
    TokenKind,
    Trajectory,
    Turn,
)


class Tokenizer(Protocol):
    """The methods of the policy's tokenizer that a trajectory needs; ``PolicyTokenizer`` describes them."""

    def encode(self, text: str) -> list[int]: ...  # noqa: D102
    def defuse(self, text: str) -> str: ...  # noqa: D102
    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...  # noqa: D102
    def turn_start(self, prompt_ids: Sequence[int]) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Watch:
    """What a person sees of one trajectory while it grows; see ``ragr1 ask``. Both must return quickly."""

    on_text: OnText
    """Called with the text of the turn so far, behind what was open when it began, as the engine produces it."""
    on_turn: Callable[[Turn], None]
    """Called when a turn has ended and its searches are answered."""


async def run_trajectory(
    env: TextEnv,
    task: Task,
    generate: GenerateFn,
    tokenizer: Tokenizer,
    sampling: Sampling,
    max_context_tokens: int,
    *,
    trajectory_id: str,
    seed: int,
    watch: Watch | None = None,
) -> Trajectory:
    """Let the policy act in ``env``, a new one, until it answers, reaches a limit, or the machinery fails.

    A failure of retrieval, engine or environment is not raised: the trajectory ends with a ``StopReason`` that names
    it, keeps its tokens, and has no reward. Only a dead engine is raised.

    ``sampling`` is for each turn; its ``stop`` and ``seed`` are set here. ``max_context_tokens`` limits prompt, model
    turns and observations together. ``trajectory_id`` is unique: it is the engine's request id and, as is the run's
    ``seed``, a part of the sampling seeds. ``watch`` sees the trajectory grow; it changes nothing.

    Raises:
        EngineDeadError: no trajectory of this engine can continue.
    """
    rollout = _Rollout(env, generate, tokenizer, sampling, max_context_tokens, trajectory_id, seed, watch)
    error = ""
    try:
        try:
            stop_reason = await rollout.run(task)
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
    return Trajectory(
        trajectory_id=trajectory_id,
        task=task,
        token_ids=np.array(rollout.ids, dtype=np.int32),
        kinds=np.array(rollout.kinds, dtype=np.uint8),
        logprobs=np.array(rollout.logprobs, dtype=np.float32),
        policy_versions=np.array(rollout.versions, dtype=np.int32),
        turns=tuple(rollout.turns),
        stop_reason=stop_reason,
        reward=0.0 if stop_reason.is_failure else rollout.reward,
        answer=rollout.answer,
        error=error,
        metrics=rollout.metrics,
    )


@dataclass(slots=True)
class _Rollout:
    """One call of ``run_trajectory``: its arguments, and the trajectory so far, which a failure keeps."""

    env: TextEnv
    generate: GenerateFn
    tokenizer: Tokenizer
    sampling: Sampling
    max_context_tokens: int
    trajectory_id: str
    seed: int
    watch: Watch | None = None
    ids: list[int] = field(default_factory=list)  # [num_tokens], as the next three
    kinds: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    answer: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    async def run(self, task: Task) -> StopReason:
        """Take turns until the trajectory ends, and return the reason."""
        harmless = replace(task, question=self.tokenizer.defuse(task.question))  # a template reads the prompt
        self._add(self.tokenizer.prompt_ids(await self.env.reset(harmless)), TokenKind.PROMPT)
        opened = self.env.left_open(self.tokenizer.turn_start(self.ids))
        while (room := self.max_context_tokens - len(self.ids)) > 0:
            completion = await self._generate(room, opened)
            turn = opened + completion.text
            action, opened = self.env.parse(turn), self.env.left_open(turn)
            result = await _act(self.env, action)
            self._record(completion, action, result)
            if result.terminated:
                return StopReason.ANSWERED
            if result.truncated:
                return StopReason.MAX_TURNS
            observation, notice = map(self.tokenizer.encode, (result.observation, result.notice))
            if len(self.ids) + len(observation) + len(notice) >= self.max_context_tokens:
                break  # the policy cannot read it, and the trajectory would be longer than the context
            self._add(observation, TokenKind.OBSERVATION)
            self._add(notice, TokenKind.NOTICE)
        return StopReason.CONTEXT_FULL

    async def _generate(self, room: int, opened: str) -> Completion:
        """Sample the next turn, of at most ``room`` tokens, and add it to the context.

        An engine ends a part of a turn at any stop string; at one that the turn leaves open, such as a tag that a
        thought mentions, the next part begins.
        """
        room = min(self.sampling.max_new_tokens, room)
        turn = part = await self._generate_part(room, opened, num_sampled=0)
        while (left := room - len(turn.token_ids)) > 0:
            is_stopped = part.finish_reason is FinishReason.STOP and any(text in part.text for text in self.env.stop)
            if not is_stopped or not self.env.left_open(opened + turn.text):
                break
            part = await self._generate_part(left, opened + turn.text, num_sampled=len(turn.token_ids))
            turn = turn + part
        return turn

    async def _generate_part(self, room: int, before: str, num_sampled: int) -> Completion:
        """Sample up to a stop string, and add it to the context; the turn so far has ``before`` and ``num_sampled``."""
        part_id = f"{self.trajectory_id}/{num_sampled}" if num_sampled else self.trajectory_id
        sampling = replace(
            self.sampling,
            max_new_tokens=room,
            stop=self.env.stop,
            seed=turn_seed(self.seed, part_id, len(self.turns)),
        )
        on_text = self._on_text(before)
        completion = await self.generate(self.ids, sampling, request_id=self.trajectory_id, on_text=on_text)
        if not all(map(math.isfinite, completion.logprobs)):
            raise EngineError("the engine returned a log-prob that is not finite")
        self._add(completion.token_ids, TokenKind.MODEL, completion.logprobs, completion.policy_versions)
        return completion

    def _on_text(self, before: str) -> OnText | None:
        """Return what gets the text of a part as it grows; an engine decodes no partial text for none."""
        watchers: list[OnText] = [self.env.peek] if type(self.env).peek is not TextEnv.peek else []
        if self.watch is not None:
            watchers.append(self.watch.on_text)
        if not watchers:
            return None

        def on_text(text: str) -> None:
            for watcher in watchers:
                watcher(before + text)

        return on_text

    def _add(
        self,
        ids: Sequence[int],
        kind: TokenKind,
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Append tokens to the context; by default they are not the policy's."""
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
        self.versions += [-1] * len(ids) if versions is None else versions

    def _record(self, completion: Completion, action: Action, result: StepResult) -> None:
        names = {Search: "search", Answer: "answer", Malformed: "malformed"}
        self.turns.append(
            Turn(
                completion_text=completion.text,
                num_model_tokens=len(completion.token_ids),
                action=names[type(action)],
                queries=tuple(record.query for record in result.retrievals),
                retrievals=result.retrievals,
                observation=result.observation + result.notice,
            )
        )
        if self.watch is not None:
            self.watch.on_turn(self.turns[-1])
        self.reward += float(result.reward)
        if isinstance(action, Answer):
            self.answer = action.text
        for name, value in result.info.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


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


def turn_seed(seed: int, trajectory_id: str, turn: int) -> int:
    """Return a 63-bit sampling seed that depends only on the run, the trajectory and the turn."""
    digest = hashlib.blake2b(f"{seed}/{trajectory_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
