"""Session: the requests of one agent to the policy, recorded as rows of one attempt.

::

    request 1   system, user                       row 0   [ P  P | M  M ]
    request 2   .. what was said .., tool          row 0   [ P  P | M  M | O  O | M  M ]
    request 3   another conversation               row 1                                  [ P  P  P | M  M ]

A request continues the longest conversation that it repeats; the tokens of that are never encoded again. If it repeats
none, because the agent began another one or rewrote the history, it begins a conversation, whose prompt is a new row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from envs.grammars.calls import ToolSchema, unclosed_thought
from ragr1_actors.core.content import shifted, text_of
from ragr1_actors.core.errors import ConfigError, one_line
from ragr1_actors.core.types import (
    MALFORMED,
    Completion,
    FinishReason,
    OnText,
    Record,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
)
from ragr1_actors.rollout.chat_format import ChatFormat
from ragr1_actors.rollout.gateway.messages import (
    ApiError,
    ChatRequest,
    Reply,
    Said,
    before_stop,
    behind,
    call_ids,
    context_is_full,
    in_front,
    said,
    session_has_ended,
    visible,
)
from ragr1_actors.rollout.recorder import Reading, Recorder
from retrieval.base import RETRIEVE

MAX_REFUSED = 64
"""Limit of requests in a row that are refused or left by the agent, after which the session ends."""
MAX_QUERIES = 1000
"""Limit of the queries with which an agent may search in one attempt."""


class FloodError(Exception):
    """An agent does not stop asking beyond a limit."""


@dataclass(slots=True)
class _Conversation:
    """Conversation of a session; its rows only grow."""

    recorder: Recorder
    tools: tuple[ToolSchema, ...]
    said: tuple[Said, ...] = ()
    """Messages as the agent knows them; empty before the first turn."""
    is_busy: bool = False
    is_full: bool = False
    turn: tuple[str, tuple[ToolCall, ...]] | None = None
    """Action and calls of a turn whose results have not come yet."""
    call_ids: tuple[str, ...] = ()
    """Ids of the calls of ``turn``."""
    searched: list[ToolCall] = field(default_factory=list)
    """Searches of the agent since its newest turn."""

    def is_continued_by(self, request: ChatRequest) -> bool:
        """Return whether a request repeats the whole conversation, and adds no turn of the policy.

        If the last request was cancelled, a turn is missing: only the same request continues.
        """
        is_free = not (self.is_busy or self.is_full) and self.tools == request.tools
        added = request.said[len(self.said) :]
        if added and self.said and self.said[-1][0] != "assistant":
            return False
        return (
            is_free and request.said[: len(self.said)] == self.said and all(role != "assistant" for role, *_ in added)
        )

    def end_turn(self, added: Sequence[Said] = (), answered_ids: Sequence[str] = ()) -> None:
        """Record the last turn with the messages after it, and the id of the call that each of them answers.

        A result without the id of a call belongs to the first call that no other result names.
        """
        if self.turn is not None:
            action, calls = self.turn
            results = [
                (name, text_of(content))
                for name, (role, content, _) in zip(answered_ids, added, strict=True)
                if role == "tool"
            ]
            named = {name: text for name, text in results if name in self.call_ids}
            others = iter([text for name, text in results if name not in self.call_ids])
            texts = [named[name] if name in named else next(others, "") for name in self.call_ids]
            answered = [replace(call, result=text) for call, text in zip(calls, texts, strict=True)]
            reply = "\n".join(text_of(content) for _, content, _ in added)
            self.recorder.end_turn(action, (*answered, *self.searched), reply, 0.0)
            self.searched.clear()
            self.turn = None


@dataclass(slots=True)
class Session:
    """State of an agent's requests so far."""

    new_recorder: Callable[..., Recorder]
    """Function that returns a new recorder, whose id is the attempt's, followed by its argument ``part``."""
    release: Callable[[str], None]
    """Callback with the id of a recorder at the end, and after a cancelled request."""
    chat: ChatFormat
    max_turns: int
    answer: str | None = None
    """Answer from ``POST /v1/answer``, else the agent's at its end."""
    reward: float = 0.0
    """Reward from ``POST /v1/reward``."""
    limit: StopReason | None = None
    """Limit that the last request exceeded."""
    failed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Future with an exception if the session cannot go on: of engine, search or ``FloodError``. Done at the end."""
    counts: dict[str, float] = field(default_factory=dict)
    """Metrics of the attempt: the number of requests with a field that has no effect."""
    refusal: str = ""
    """Reason why the last request was refused; empty if it was answered."""
    _conversations: list[_Conversation] = field(default_factory=list)
    _num_turns: int = 0
    _num_refused: int = 0
    _searched: list[ToolCall] = field(default_factory=list)
    """Searches of the conversation with the newest turn, or of the first one before that."""
    _newest: _Conversation | None = None
    """Conversation with the newest turn."""
    _num_queries: int = 0
    _running: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def seed(self) -> int:
        """Seed of the attempt."""
        return self.new_recorder().seed

    @property
    def is_waited_for(self) -> bool:
        """Whether a request is being answered."""
        return bool(self._running)

    @property
    def has_turns(self) -> bool:
        """Whether the policy has acted."""
        return any(one.turn is not None or one.recorder.turns for one in self._conversations)

    async def complete(self, request: ChatRequest, on_text: OnText | None = None) -> Reply:
        """Sample the policy's next turn of a conversation; ``on_text`` gets the turn's text as it grows.

        Raises:
            ApiError: 400 beyond the turns or the context, or if the chat template refuses the messages; 410 after the
                end; 503 if the engine failed, which ends the session.
        """
        if self.failed.done():  # ended while the body was read
            raise session_has_ended()
        if self._num_turns >= self.max_turns:
            self.limit = StopReason.MAX_TURNS
            raise context_is_full("all turns of the session are used")
        self.limit = None
        for name in request.overridden:
            self.counts[f"overridden_{name}"] = self.counts.get(f"overridden_{name}", 0.0) + 1
        conversation, running = self._find(request), asyncio.current_task()
        assert running is not None
        self._num_turns += 1
        conversation.is_busy = True
        self._running.add(running)
        try:
            reply = await self._sample(conversation, request, on_text)
            self._num_refused, self.refusal = 0, ""
            return reply
        except ApiError:
            self._num_turns -= 1
            raise
        except asyncio.CancelledError:  # the client left, and may ask the same again
            self._num_turns -= 1
            self.release(conversation.recorder.trajectory_id)
            self.note_refused("the agent left before the answer")
            raise
        except Exception as error:  # of the engine, or of a user's chat format; only this trajectory ends
            self.fail(error)
            raise ApiError(503, "the policy's engine failed; the attempt ends") from error
        finally:
            conversation.is_busy = False
            self._running.discard(running)

    def _find(self, request: ChatRequest) -> _Conversation:
        """Return the longest conversation that a request continues, or a new one."""
        known = [one for one in self._conversations if one.is_continued_by(request)]
        if known:
            return max(known, key=lambda one: len(one.said))
        number = len(self._conversations)
        made = _Conversation(self.new_recorder(part=f"~{number}" if number else ""), request.tools)
        if not self._conversations:
            made.searched = self._searched
        self._conversations.append(made)
        return made

    async def _sample(self, conversation: _Conversation, request: ChatRequest, on_text: OnText | None) -> Reply:
        recorder = conversation.recorder
        reading = Reading(
            request.stop,
            request.tools,
            lambda text: "" if any(one in text for one in request.stop) else unclosed_thought(text),
            (on_text,) if on_text is not None else (),
        )
        num_said = len(conversation.said)
        try:
            if request.tools:
                self.chat.parser(request.tools)  # before a token is sampled
        except (TypeError, AttributeError) as error:  # of a schema such as {"properties": null}
            raise ApiError(400, f"tools: {one_line(error)}; expected JSON schemas as parameters") from None
        try:
            if not num_said:
                recorder.restart(in_front(request.messages), reading)
                has_room = recorder.room > 0
            else:
                conversation.end_turn(request.said[num_said:], request.answered_ids[num_said:])
                added = behind(request.messages[num_said:])
                has_room = not added or recorder.add(added, reading)
        except ConfigError as error:  # the chat template refuses the messages
            conversation.is_full = True
            raise ApiError(400, f"messages: {error}") from None
        conversation.said = request.said
        if not has_room:
            conversation.is_full, self.limit = True, StopReason.CONTEXT_FULL
            raise context_is_full("shorten the messages")
        num_prompt_tokens = recorder.num_tokens
        turn = await recorder.generate(reading, request.max_tokens)
        reply, action = self._read(turn, request, num_prompt_tokens)
        calls = tuple(ToolCall(call.name, dict(call.arguments)) for call in reply.calls)
        conversation.turn, conversation.call_ids = (action, calls), reply.call_ids
        self._searched, self._newest = conversation.searched, conversation
        conversation.said = (*request.said, said("assistant", reply.content, reply.calls))
        return reply

    def _read(self, turn: Completion, request: ChatRequest, num_prompt_tokens: int) -> tuple[Reply, str]:
        """Return a turn in the form for the agent, and the name of its action."""
        is_read = bool(request.tools) and request.takes_calls
        parsed = self.chat.parser(request.tools).end(before_stop(turn.text, request.stop)) if is_read else None
        is_cut = turn.finish_reason is FinishReason.LENGTH
        counts = (num_prompt_tokens, len(turn.token_ids))
        if parsed is None or not parsed.calls:
            thought, content = visible(turn.text, request.stop)
            is_malformed = parsed is not None and bool(parsed.problem)
            return Reply(content, thought, (), "length" if is_cut else "stop", *counts), (
                MALFORMED if is_malformed else "answer"
            )
        thought, _ = visible(parsed.content)
        ids = call_ids(len(parsed.calls))
        return Reply(parsed.text, thought, parsed.calls, "tool_calls", *counts, call_ids=ids), "call"

    def note_refused(self, reason: str) -> None:
        """Count a request that was refused or left, and keep the reason; too many in a row end the session."""
        self._num_refused += 1
        self.refusal = reason
        if self._num_refused > MAX_REFUSED:
            self.fail(FloodError(f"got {self._num_refused} requests in a row that were refused; end at the first ones"))

    def take_queries(self, number: int) -> None:
        """Count queries of the agent before their search; raises ``ApiError`` 429 beyond ``MAX_QUERIES``."""
        if self._num_queries + number > MAX_QUERIES:
            raise ApiError(429, f"an attempt may search with {MAX_QUERIES} queries; {self._num_queries} are used")
        self._num_queries += number

    def note_searches(self, queries: Sequence[str], k: int, found: Sequence[Sequence[Record]], took_s: float) -> None:
        """Record searches of the agent with its newest turn, or with the first one if there is none yet."""
        for query, records in zip(queries, found, strict=True):
            call = ToolCall(RETRIEVE, {"query": query, "k": k}, "", tuple(records), latency_s=took_s, waited_s=took_s)
            self._searched.append(call)
        times = {"time/retrieval_s": took_s * len(queries), "time/retrieval_waited_s": took_s}
        for name, seconds in times.items() if queries else ():
            self.counts[name] = self.counts.get(name, 0.0) + seconds

    def fail(self, error: Exception) -> None:
        """End the session with an error of the infrastructure, or of an agent that floods."""
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # else asyncio logs that it was not read

    def end(self) -> None:
        """Cancel the requests in flight, for which an ended agent does not wait, and free the engine."""
        self.failed.cancel()
        for request in self._running:
            request.cancel()
        for conversation in self._conversations:
            self.release(conversation.recorder.trajectory_id)

    def trajectory(self, task: Task, stop_reason: StopReason, error: str = "", output: str = "") -> Trajectory:
        """Return the recorded trajectory: the rows of all conversations, that with the newest turn last.

        ``output`` is the agent's output, or its error: it is kept as the result of a call ``agent`` in the last turn.
        """
        for conversation in self._conversations:
            conversation.end_turn()
        left = tuple(call for one in self._conversations for call in one.searched)
        conversations = sorted(self._conversations, key=lambda one: one is self._newest)
        recorders = [one.recorder for one in conversations] or [self.new_recorder()]
        recorders = [one for one in recorders if one.turns] or recorders[:1]
        ended = _joined([one.trajectory(task, stop_reason, answer=self.answer or "", error=error) for one in recorders])
        if ended.turns:
            *before, last = ended.turns
            said_by_agent = (ToolCall("agent", {}, output),) if output else ()
            last = replace(last, calls=last.calls + left + said_by_agent, reward=last.reward + self.reward)
            reward = ended.reward if stop_reason.is_failure else ended.reward + self.reward
            ended = replace(ended, turns=(*before, last), reward=reward)
        return replace(ended, trajectory_id=self.new_recorder().trajectory_id, metrics=dict(self.counts))


def _joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Return several trajectories of one attempt as one, row by row."""
    first, *others = parts
    if not others:
        return first
    starts = accumulate((part.num_tokens for part in parts), initial=0)
    return replace(
        first,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        kinds=np.concatenate([part.kinds for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        policy_versions=np.concatenate([part.policy_versions for part in parts]),
        turns=tuple(turn for part in parts for turn in part.turns),
        reward=sum(part.reward for part in parts),
        row_lengths=tuple(row.stop - row.start for part in parts for row in part.rows),
        images=tuple(one for part, start in zip(parts, starts, strict=False) for one in shifted(part.images, start)),
    )
