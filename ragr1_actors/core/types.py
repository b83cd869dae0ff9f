"""The nouns of the system. Read this file first.

One trajectory, from question to gradient::

    Task ──► Message(s) ──► prompt token ids
                                │
              ┌─────────────────┴── one Turn ───────────────────────┐
              │ Sampling ──► Completion ──► action of the environment
              │                               │
              │                    ToolCall(s) ──► observation
              └──────────────────────────────────────────────────────┘
                                │  (repeat; the ids only ever grow)
                                ▼
                           Trajectory  ── siblings of one Task ──►  TrajectoryGroup

Token ids are only ever appended. Nothing here is decoded and encoded again, so the ids a learner sees are the ids
the engine sampled.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MALFORMED = "malformed"
"""The action of a turn that is none: it is not learned from in SFT."""
HISTOGRAM_PREFIX = "histogram/"
"""A learner's metric ``histogram/ratio/0.9/0.95`` counts the ratios from 0.9 to 0.95."""
Bucket = tuple[float, float, float]
"""One bucket of a histogram: left edge, right edge, number of values."""


class TokenKind(IntEnum):
    """Who wrote a token. Every loss, KL, entropy, whitening and value mask is ``kind == MODEL`` and nothing else."""

    PROMPT = 0
    """The question and its instructions, from the chat template."""
    MODEL = 1
    """Sampled by the policy, its end-of-sequence token included. The only kind that is trained on."""
    OBSERVATION = 2
    """Retrieved text and the tags around it."""
    NOTICE = 3
    """The environment's own words: a malformed turn, the last turn."""
    INJECTED = 4
    """Written into the policy's turn by code, such as a forced prefix."""


class Failure(StrEnum):
    """Why a trajectory failed that the policy did not fail. A malformed or over-long answer is no failure."""

    INFRASTRUCTURE = "infrastructure"
    """Engine or retrieval: the task is sampled again, on any runner, and it does not count against the task."""
    DATA = "data"
    """The environment raised on the task: it counts against the task, which is quarantined after some tries."""


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    """The policy submitted an answer."""
    MAX_TURNS = "max_turns"
    """The turn budget was used up without an answer (gymnasium's truncated)."""
    CONTEXT_FULL = "context_full"
    """No room was left in the context for another turn."""
    RETRIEVAL_FAILED = "retrieval_failed"
    """A search failed on every replica: a failure of the infrastructure."""
    SERVICE_FAILED = "service_failed"
    """Another service did not answer: a failure of the infrastructure."""
    ENV_ERROR = "env_error"
    """The environment or the reward raised: a failure of the data."""
    AGENT_FAILED = "agent_failed"
    """The agent raised, or ended with an error, after the policy had acted."""
    AGENT_DEADLINE = "agent_deadline"
    """The agent took too long, after the policy had acted."""
    ENGINE_ERROR = "engine_error"
    """The engine failed or returned a log-prob that is not finite: a failure of the infrastructure."""

    @property
    def failure(self) -> Failure | None:
        """What failed; None if the policy or its agent ended the trajectory, or used up the turns or the context."""
        match self:
            case StopReason.RETRIEVAL_FAILED | StopReason.SERVICE_FAILED | StopReason.ENGINE_ERROR:
                return Failure.INFRASTRUCTURE
            case StopReason.ENV_ERROR:
                return Failure.DATA
        return None

    @property
    def is_failure(self) -> bool:
        """Whether the trajectory carries no reward and no gradient, and is in no baseline."""
        return self.failure is not None


@dataclass(frozen=True, slots=True)
class Task:
    """A question to answer.

    ``Task("hotpotqa/5a7a06935542990198eaf050", "Which magazine was started first, ...?", ("Arthur's Magazine",))``
    """

    task_id: str
    """Unique over all sources, ``source/local id``; the group of a trajectory is its task."""
    question: str
    golden_answers: tuple[str, ...]
    """Any one of them counts; an answer is compared with them after ``normalize_answer``."""
    category: str = ""
    """What sort of question (``comparison``, ``two_hop``), for metrics only."""
    supporting_ids: tuple[str, ...] = ()
    """Ids or titles of the passages that hold the evidence, where known; recall is measured against them."""
    plan: tuple[tuple[str, ...], ...] = ()
    """The queries a perfect searcher asks, a tuple per round, where known: ``(("Ana Bell", "Bo Cole"),)``."""
    source: str = ""
    """Which of several sources it is from, for metrics; empty if there is one source."""
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The other fields of its record, such as ``{"pass_rate": 0.3}``, for rewards, curricula and environments."""


@dataclass(frozen=True, slots=True)
class FailedTask:
    """A training task that was given up in one epoch: ``FailedTask("nq/7", 0, Failure.DATA, 4, "KeyError: 'a'")``."""

    task_id: str
    epoch: int
    failure: Failure
    """With ``DATA`` the task is in quarantine: no later epoch of the run issues it."""
    num_tries: int
    """Groups in which a trajectory failed."""
    error: str
    """Of the last try."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A tool call as a turn writes it: ``CallRequest("search", {"queries": ["Ana Bell"]})``."""

    name: str
    arguments: Mapping[str, Any]
    """Values of JSON by name."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, as a chat template takes it."""

    role: str
    content: str
    calls: tuple[CallRequest, ...] = ()
    """Tool calls of an assistant's message; each is answered by a message of the role ``tool`` behind it."""
    notice: str = ""
    """Words of the environment behind the content."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples one completion."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Generation ends with the token that completes one of these; that token is kept."""
    seed: int | None = None
    """Same seed, same prompt, same policy version: same tokens."""


class FinishReason(StrEnum):
    """Why an engine stopped generating."""

    STOP = "stop"
    """A stop string was completed, or the end-of-sequence token was sampled."""
    LENGTH = "length"
    """``max_new_tokens`` or the context was used up."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one turn.

    ``Completion([27, 301, 28], [-0.1, -0.7, -0.0], [3, 3, 3], "<answer> Riga</answer>", FinishReason.STOP)``
    """

    token_ids: list[int]  # [num_new_tokens]
    logprobs: list[float]  # [num_new_tokens], under the sampling temperature
    policy_versions: list[int]  # [num_new_tokens], the weights that sampled each
    text: str
    """``token_ids`` decoded; read by ``TextEnv.parse``, never encoded again."""
    finish_reason: FinishReason

    def __add__(self, part: Completion) -> Completion:
        """Return a turn with the part that was sampled behind it."""
        return Completion(
            self.token_ids + part.token_ids,
            self.logprobs + part.logprobs,
            self.policy_versions + part.policy_versions,
            self.text + part.text,
            part.finish_reason,
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that a call brought back: ``Record("w/7", "Ana Bell", "Ana Bell was born in Riga.", 0.91)``."""

    id: str
    title: str
    text: str
    score: float = 0.0
    """How well it matches the call; higher is better."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a turn made, with what came back."""

    tool: str
    """Its name, such as ``search``."""
    arguments: Mapping[str, Any]
    """As the tool got them, values of JSON: ``{"query": "Ana Bell", "k": 3}``."""
    result: str = ""
    """What it said beside its records, where the turn's observation is made of several calls' results."""
    records: tuple[Record, ...] = ()
    """Best first."""
    latency_s: float = 0.0
    """From the call to its result."""
    waited_s: float = 0.0
    """The part of it in which the trajectory waited after its turn ended; 0 if the call began early enough."""
    is_cached: bool = False
    """Answered from the calling process's cache."""
    version: str = ""
    """Version of the service that answered, such as an index's from its manifest; empty if it has none."""

    @property
    def asked(self) -> str:
        """The arguments in one line for people: the text of the only text, such as a query, else JSON."""
        texts = [value for value in self.arguments.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(dict(self.arguments), ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion and the environment's reply to it."""

    completion_text: str
    num_model_tokens: int
    action: str
    """``answer``, ``malformed``, or what else the environment calls it."""
    calls: tuple[ToolCall, ...] = ()
    """As executed."""
    observation: str = ""
    reward: float = 0.0
    """Reward of this turn; the rest of ``Trajectory.reward`` belongs to the whole attempt."""
    finish_reason: FinishReason = FinishReason.STOP
    """Why the engine stopped."""


@dataclass(frozen=True)
class Trajectory:
    """One attempt at a task.

    The four arrays have one entry per token of prompt and response together. For a two-turn attempt::

        token_ids        [ 1 40 41  2 | 7 90 91  8 | 5 90 33 17  6 | 9 33 10 ]
        kinds            [ P  P  P  P | M  M  M  M | O  O  O  O  O | M  M  M ]
        logprobs         [ 0  0  0  0 |-.1-.4-.2  0| 0  0  0  0  0 |-.3-.1 0 ]
        policy_versions  [-1 -1 -1 -1 | 3  3  3  3 |-1 -1 -1 -1 -1 | 4  4  4 ]
    """

    trajectory_id: str
    task: Task
    token_ids: NDArray[np.int32]  # [num_tokens]
    kinds: NDArray[np.uint8]  # [num_tokens], TokenKind
    logprobs: NDArray[np.float32]  # [num_tokens], 0 where the kind is not MODEL
    policy_versions: NDArray[np.int32]  # [num_tokens], -1 where the kind is not MODEL
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    reward: float
    answer: str = ""
    """The submitted answer; empty where there is none."""
    error: str = ""
    """What went wrong, where ``stop_reason.is_failure``; kept for people, never shown to the policy."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of the environment, such as ``duplicate_queries``, and its measures, such as ``em``; averaged into the
    iteration's metrics. Empty but for the former where it failed."""
    variant: str = ""
    """What a rollout strategy gave the environment; empty: nothing special."""
    parent: str = ""
    """The id of the trajectory that it is a fork of; empty: none."""
    num_copied_tokens: int = 0
    """MODEL tokens of the parent with which a fork begins. They are learned from with the fork's own advantage."""
    behaviour_logprobs: NDArray[np.float32] | None = None  # [num_tokens]
    """Log-probs of the policy that acted, where a strategy knows that they are not the engine's: the denominator of the
    policy ratio. NaN for a token, or None for all: the engine's."""
    row_lengths: tuple[int, ...] = ()
    """Number of tokens of each row, where the conversation was rewritten, and the arrays hold several rows one behind
    the other: each is a sequence on its own, with a prompt. Empty: all is one row."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response, over all rows."""
        return len(self.token_ids)

    @property
    def rows(self) -> list[slice]:
        """Where the rows are in the arrays."""
        ends = list(accumulate(self.row_lengths or (self.num_tokens,)))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def num_model_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(np.count_nonzero(self.kinds == TokenKind.MODEL))

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """Number of MODEL tokens per turn."""
        return tuple(turn.num_model_tokens for turn in self.turns)

    @property
    def turn_positions(self) -> list[NDArray[np.int64]]:
        """Where the MODEL tokens of every turn are in the arrays."""
        sampled = np.flatnonzero(self.kinds == TokenKind.MODEL)
        return np.split(sampled, list(accumulate(self.turn_lengths)))[: len(self.turns)]

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """``Turn.reward`` of each."""
        return tuple(turn.reward for turn in self.turns)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of all turns."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def is_well_formed(self) -> bool:
        """Whether it ended with an answer, and every turn had a valid action."""
        is_answered = self.stop_reason is StopReason.ANSWERED
        return is_answered and all(turn.action != MALFORMED for turn in self.turns)


@dataclass(frozen=True)
class TrajectoryGroup:
    """The attempts at one task that share a baseline."""

    task: Task
    trajectories: tuple[Trajectory, ...]


OnText = Callable[[str], None]
"""Called while a turn is sampled, with its whole text so far: ``"<search>Ana"``, ``"<search>Ana Bell\\n"``."""


class GenerateFn(Protocol):
    """What a trajectory needs of an engine."""

    def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, request_id: str, on_text: OnText | None = None
    ) -> Awaitable[Completion]:
        """Continue ``prompt_token_ids``; ``request_id`` is that of the trajectory, whose prefix stays cached."""
        ...


class ChatModel(Protocol):
    """A language model that answers messages, such as a judge: one of ``environment.models``."""

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """Return the answer to a conversation; ``ServiceError`` if there is none."""
        ...


EncodeFn = Callable[[str], list[int]]
"""Text to token ids, without special tokens added."""

DefuseFn = Callable[[str], str]
"""A document or a question to what no template or tokenizer reads as a tag or control token: ``"(/ Answer)"``."""
