"""One attempt at a task, from question to reward, recorded as rows of token ids.

::

    restart(messages)   opens a row         [ P  P  P ]
    generate()          the policy's turn   [ P  P  P | M  M  M ]
    add(messages)       what follows it     [ P  P  P | M  M  M | O  O  N ]

A row only grows, and nothing in it is encoded again. An attempt has one row, unless its conversation is rewritten:
``restart`` then opens another, which is PROMPT as a whole. So every sampled token is MODEL in exactly one row.

The trajectory loop is one coroutine. It waits only for its own tokens and its own calls, and needs neither Ray nor an
engine::

    reset ──► prompt ids ──► generate ──► act ──► append observation ids ──┐
                               ▲  │ text so far                            │
                               │  └──► peek: an environment may begin      │
                               └───────────────────────────────────────────┘
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from envs.base import Measured, StepResult, TextEnv, check_prompt, check_result, measure
from envs.grammars.calls import ToolSchema
from envs.measures import RewardResult, rewarded
from ragr1_actors.core.content import PlacedImage, images_of, shifted, text_of
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError, RetrievalError, ServiceError, one_line
from ragr1_actors.core.process.users_code import contained
from ragr1_actors.core.resolve import raised_at
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
    ToolCall,
    Trajectory,
    Turn,
)
from ragr1_actors.rollout.chat_format import ChatFormat, TagsFormat, Tokenizer

T = TypeVar("T")

Fork = tuple[Trajectory, int, str]
"""Parent, number of its turns that are kept, and text written into the next turn: ``(one, 2, "Wait,")``."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Functions and strings with which the text of a turn is read while it is sampled."""

    stop: tuple[str, ...] = ()
    """Strings that end a turn."""
    tools: Sequence[ToolSchema] = ()
    """Tools that are described to the policy."""
    left_open: Callable[[str], str] = lambda text: ""
    """Function that returns an open tag; see ``TextEnv.left_open``."""
    watchers: tuple[OnText, ...] = ()
    """Callbacks with the turn's text so far, open tag included; without any, an engine decodes no part."""


@dataclass(slots=True)
class _Row:
    ids: list[int] = field(default_factory=list)  # [num_tokens], as the next three
    kinds: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    images: list[PlacedImage] = field(default_factory=list)

    def add(self, ids: Sequence[int], kind: TokenKind) -> None:
        """Append tokens that the policy did not sample."""
        self.ids += ids
        self.kinds += [kind] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def sample(self, completion: Completion) -> None:
        """Append a sampled completion."""
        self.ids += completion.token_ids
        self.kinds += [TokenKind.MODEL] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.versions += completion.policy_versions


class Recorder:
    """Recorder of one attempt. The caller handles failures: what was recorded before one is kept."""

    def __init__(
        self,
        trajectory_id: str,
        generate: GenerateFn,
        tokenizer: Tokenizer,
        sampling: Sampling,
        max_context_tokens: int,
        run_seed: int,
        variant: str = "",
        chat: ChatFormat | None = None,
    ) -> None:
        """Begin without a row; ``sampling`` is for each turn, and its ``stop`` and ``seed`` are set here.

        ``chat`` frames prompts and messages after a turn; the default is ``tags``. ``max_context_tokens`` limits each
        row. ``trajectory_id`` is unique: it is the engine's request id and, like ``run_seed``, a part of the sampling
        seeds.
        """
        self.trajectory_id, self._run_seed, self._variant = trajectory_id, run_seed, variant
        self._parent, self._num_copied = "", 0
        self._generate, self._tokenizer, self._sampling = generate, tokenizer, sampling
        self._chat = chat if chat is not None else TagsFormat(tokenizer)
        self.max_context_tokens = max_context_tokens
        self._rows: list[_Row] = []
        self._messages: list[Message] = []  # the conversation, if a chat format needs it
        self._completion = Completion([], [], [], "", FinishReason.STOP)  # of the last turn, without what was open
        self._opened = ""  # text with which the next turn begins, such as <think>
        self._begun = ""  # the same, with text of code after it
        self.turns: list[Turn] = []

    def defuse(self, text: str) -> str:
        """Return a document or a question without tags and control tokens, for a prompt."""
        return self._tokenizer.defuse(text)

    @property
    def seed(self) -> int:
        """Seed of this attempt, for its environment."""
        return turn_seed(self._run_seed, self.trajectory_id, -1)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the last row."""
        return len(self._rows[-1].ids)

    @property
    def room(self) -> int:
        """Number of tokens for which the last row has room."""
        return self.max_context_tokens - self.num_tokens

    def restart(self, messages: Sequence[Message], reading: Reading) -> None:
        """Open a row with a conversation, up to the policy's turn; a last message of the assistant begins that turn."""
        written = self._converse(messages)
        ids = self._chat.prompt_ids(self._messages, reading.tools)
        row = _Row(images=self._placed(self._messages, ids))
        row.add(ids, TokenKind.PROMPT)
        self._rows.append(row)
        self._opened = self._begun = reading.left_open(self._tokenizer.turn_start(row.ids))
        self._inject(written, reading)

    def _converse(self, messages: Sequence[Message]) -> str:
        """Keep a conversation from now on, and return the text with which its last message begins the next turn."""
        *before, last = messages
        written = last.text if last.role == "assistant" else ""
        self._messages = list(before if written else messages)
        return written

    def fork(
        self, parent: Trajectory, num_turns: int, inject: str, messages: Sequence[Message], reading: Reading
    ) -> list[tuple[Completion, str]]:
        """Begin as the parent before its turn ``num_turns``, with ``inject`` written into the next turn.

        ``messages`` are the conversation before the parent's first turn. It returns the copied turns, on which the
        environment acts, each with all of its text; ``copied`` takes that and the environment's reply.

        Raises:
            ConfigError: the parent failed, or has no such turn.
        """
        check_fork(parent, num_turns)
        self._converse(messages)
        sampled = parent.turn_positions
        cut = int(sampled[num_turns][0])
        copied: list[tuple[Completion, str]] = []
        for part in parent.rows:
            if part.start < cut:
                self._copy(parent, slice(part.start, min(part.stop, cut)))
            while len(copied) < num_turns and sampled[len(copied)][0] < part.stop:
                copied.append(self._copy_turn(parent, sampled[len(copied)], reading))
        self._begin(parent, cut, reading)
        self._parent, self._num_copied = parent.trajectory_id, sum(len(turn.token_ids) for turn, _ in copied)
        self._inject(inject, reading)
        return copied

    def copied(self, turn: str, reply: Sequence[Message], reading: Reading, restart: Sequence[Message] = ()) -> None:
        """Keep the reply to a copied turn, for the conversation; ``restart`` takes the place of all of it."""
        self._note(turn, reading)
        self._messages += reply
        if restart:
            self._converse(restart)

    def _copy(self, parent: Trajectory, part: slice) -> None:
        arrays = (parent.token_ids, parent.kinds, parent.logprobs, parent.policy_versions)
        row = _Row(*(array[part].tolist() for array in arrays))
        row.images += shifted([one for one in parent.images if part.start <= one.start < part.stop], -part.start)
        self._rows.append(row)
        self._opened = self._begun = ""

    def _copy_turn(self, parent: Trajectory, positions: NDArray[np.int64], reading: Reading) -> tuple[Completion, str]:
        turn = parent.turns[len(self.turns)]
        self.turns.append(turn)
        arrays = (parent.token_ids, parent.logprobs, parent.policy_versions)
        ids, logprobs, versions = (array[positions].tolist() for array in arrays)
        self._begin(parent, int(positions[0]), reading)
        text, whole = self._opened + turn.completion_text, self._begun + turn.completion_text
        self._opened = self._begun = reading.left_open(text)
        return Completion(ids, logprobs, versions, text, turn.finish_reason), whole

    def _begin(self, parent: Trajectory, at: int, reading: Reading) -> None:
        """Note the text of template and code before the first sampled token of a turn, which is at position ``at``."""
        start = at
        while parent.kinds[start - 1] == TokenKind.INJECTED:
            start -= 1
        if begun := reading.left_open(self._tokenizer.turn_start(parent.token_ids[:start].tolist())):
            self._opened = self._begun = begun
        self._open(self._tokenizer.decode(parent.token_ids[start:at].tolist()) if start < at else "", reading)

    def _inject(self, text: str, reading: Reading) -> None:
        ids = self._tokenizer.encode(text)
        if ids and len(ids) >= self.room:
            raise ConfigError(
                f"got a text of {len(ids)} tokens to write into a turn, and the context has room for {self.room}; "
                "shorten it, or raise env_runners.max_context_tokens"
            )
        self._rows[-1].add(ids, TokenKind.INJECTED)
        self._open(text, reading)

    def _open(self, text: str, reading: Reading) -> None:
        """Note a text that code writes into a turn, and the tag that it leaves open."""
        if text:
            self._begun += text
            self._opened = reading.left_open(self._opened + text)

    def add(self, messages: Sequence[Message], reading: Reading) -> bool:
        """Append messages after a turn; return False and append nothing if no turn would fit after them.

        If the chat format now frames earlier messages differently, a row with all of them is opened.
        """
        before, self._messages = self._messages, [*self._messages, *messages]
        row = self._rows[-1]
        has_end = row.ids[-1] in self._chat.end_ids
        extension = self._chat.extension_ids(before, messages, reading.tools, has_end=has_end)
        if extension is None:
            self.restart(self._messages, reading)
            return self.room > 0
        if sum(len(ids) for ids, _ in extension.pieces) >= self.room:
            return False
        row.images += shifted(self._placed(messages, _joined([ids for ids, _ in extension.pieces])), len(row.ids))
        for ids, kind in extension.pieces:
            row.add(ids, kind)
        if extension.is_new_message:
            self._opened = self._begun = reading.left_open(self._tokenizer.turn_start(row.ids))
        return True

    def _placed(self, messages: Sequence[Message], ids: Sequence[int]) -> list[PlacedImage]:
        """Return the places of the images of messages among their token ids."""
        images = images_of(*(message.content for message in messages))
        return self._tokenizer.place(ids, images) if images else []

    async def generate(self, reading: Reading, max_tokens: int | None = None) -> Completion:
        """Sample a turn of at most ``max_tokens`` and append it; its text begins with the tag that was open before it.

        An engine ends a part of a turn at any stop string; after one that does not end the turn, such as a tag in a
        thought, the next part begins.

        Raises:
            EngineError: the engine failed, or returned a log-prob that is not finite.
        """
        room = min(self._sampling.max_new_tokens, self.room, max_tokens or self.room)
        turn = part = await self._sample(room, self._opened, 0, reading)
        while (left := room - len(turn.token_ids)) > 0:
            is_stopped = part.finish_reason is FinishReason.STOP and any(text in part.text for text in reading.stop)
            if not is_stopped or not reading.left_open(self._opened + turn.text):
                break
            part = await self._sample(left, self._opened + turn.text, len(turn.token_ids), reading)
            turn = turn + part
        whole = replace(turn, text=self._opened + turn.text)
        self._note(self._begun + turn.text, reading)
        self._completion = turn
        self._opened = self._begun = reading.left_open(whole.text)
        return whole

    def _note(self, turn: str, reading: Reading) -> None:
        """Keep a turn as a message of the conversation, which ``tags`` never reads."""
        if not isinstance(self._chat, TagsFormat):
            parsed = self._chat.parser(reading.tools).end(turn)
            self._messages.append(Message("assistant", parsed.content, parsed.calls))

    def end_turn(self, action: str, calls: tuple[ToolCall, ...], reply: str, reward: float) -> Turn:
        """Record the action of the generated turn, and the text of the reply."""
        one = self._completion
        turn = Turn(one.text, len(one.token_ids), action, calls, reply, reward, one.finish_reason)
        self.turns.append(turn)
        return turn

    def trajectory(
        self,
        task: Task,
        stop_reason: StopReason,
        *,
        answer: str = "",
        error: str = "",
        metrics: dict[str, float] | None = None,
    ) -> Trajectory:
        """Return the recorded trajectory so far, with the rewards of its turns unless it failed."""
        rows = [row for row in self._rows if TokenKind.MODEL in row.kinds] or self._rows[:1]
        starts = accumulate((len(row.ids) for row in rows), initial=0)
        return Trajectory(
            trajectory_id=self.trajectory_id,
            task=task,
            token_ids=np.array(_joined([row.ids for row in rows]), np.int32),
            kinds=np.array(_joined([row.kinds for row in rows]), np.uint8),
            logprobs=np.array(_joined([row.logprobs for row in rows]), np.float32),
            policy_versions=np.array(_joined([row.versions for row in rows]), np.int32),
            turns=tuple(self.turns),
            stop_reason=stop_reason,
            reward=0.0 if stop_reason.is_failure else sum((turn.reward for turn in self.turns), 0.0),
            answer=answer,
            error=error,
            metrics=metrics if metrics is not None else {},
            variant=self._variant,
            parent=self._parent,
            num_copied_tokens=self._num_copied,
            row_lengths=tuple(len(row.ids) for row in rows) if len(rows) > 1 else (),
            images=tuple(one for row, start in zip(rows, starts, strict=False) for one in shifted(row.images, start)),
        )

    async def _sample(self, room: int, before: str, num_sampled: int, reading: Reading) -> Completion:
        """Sample up to a stop string, and append it; the turn so far has the text ``before``."""
        part_id = f"{self.trajectory_id}/{num_sampled}" if num_sampled else self.trajectory_id
        seed = turn_seed(self._run_seed, part_id, len(self.turns))
        sampling = replace(self._sampling, max_new_tokens=room, stop=reading.stop, seed=seed)

        def on_text(text: str) -> None:
            for watcher in reading.watchers:
                watcher(before + text)

        row = self._rows[-1]
        seen = on_text if reading.watchers else None
        shown = {"images": tuple(row.images)} if row.images else {}
        completion = await self._generate(row.ids, sampling, request_id=self.trajectory_id, on_text=seen, **shown)
        if not all(map(math.isfinite, completion.logprobs)):
            raise EngineError("the engine returned a log-prob that is not finite")
        row.sample(completion)
        return completion


def _joined(parts: Sequence[list[T]]) -> list[T]:
    return parts[0] if len(parts) == 1 else [one for part in parts for one in part]


def turn_seed(seed: int, trajectory_id: str, turn: int) -> int:
    """Return a 63-bit sampling seed that depends only on the run, the trajectory and the turn."""
    digest = hashlib.blake2b(f"{seed}/{trajectory_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def can_fork(parent: Trajectory, num_turns: int) -> bool:
    """Return whether the parent did not fail, and has a turn after ``num_turns`` others."""
    return not parent.stop_reason.is_failure and 0 <= num_turns < len(parent.turns)


def check_fork(parent: Trajectory, num_turns: int) -> None:
    """Raise a ``ConfigError`` if the parent cannot be forked there."""
    if not can_fork(parent, num_turns):
        raise ConfigError(
            f"got a fork of {parent.trajectory_id}, which ended as {parent.stop_reason.value} after "
            f"{len(parent.turns)} turns, before its turn {num_turns + 1}; expected a parent that did not fail, and "
            "one of its turns"
        )


# -- the trajectory loop ----------------------------------------------------------------------------------------------

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
        stop_reason, error = StopReason.RETRIEVAL_FAILED, one_line(failure)
    except ServiceError as failure:
        stop_reason, error = StopReason.SERVICE_FAILED, one_line(failure)
    except EngineDeadError:
        raise
    except EngineError as failure:
        stop_reason, error = StopReason.ENGINE_ERROR, one_line(failure)
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
            self._recorder.copied(whole, result.messages, self._reading(), result.restart)

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
