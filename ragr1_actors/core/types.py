"""Types of the system. Read this file first.

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

Token ids are only appended, not decoded and encoded again: the ids of a learner are the ids that the engine sampled.
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

from ragr1_actors.core.content import Content, Image, PlacedImage, text_of

MALFORMED = "malformed"
"""Action of a turn without a valid one; SFT does not learn from it."""
HISTOGRAM_PREFIX = "histogram/"
"""Prefix of histogram metrics: a learner's ``histogram/ratio/0.9/0.95`` counts the ratios from 0.9 to 0.95."""
Bucket = tuple[float, float, float]
"""Bucket of a histogram: left edge, right edge, number of values."""


class TokenKind(IntEnum):
    """Writer of a token. Every loss, KL, entropy, whitening and value mask has MODEL and ``Learner.trained_kinds``."""

    PROMPT = 0
    """Question and instructions, from the chat template."""
    MODEL = 1
    """Sampled by the policy, its end-of-sequence token included. By default the only kind that is trained on."""
    OBSERVATION = 2
    """Retrieved text and the tags around it."""
    NOTICE = 3
    """Message of the environment: a malformed turn, the last turn."""
    INJECTED = 4
    """Written into the policy's turn by code, such as a forced prefix."""


class Failure(StrEnum):
    """Cause of a failure that is not the policy's. A malformed or over-long answer is no failure."""

    INFRASTRUCTURE = "infrastructure"
    """Engine or retrieval failed: the task is sampled again, on any runner, and it does not count against the task."""
    DATA = "data"
    """Environment raised on the task: it counts against the task, which is quarantined after some tries."""


class StopReason(StrEnum):
    """Reason why a trajectory ended."""

    ANSWERED = "answered"
    """Policy submitted an answer."""
    MAX_TURNS = "max_turns"
    """Turn budget was used up without an answer (gymnasium's truncated)."""
    CONTEXT_FULL = "context_full"
    """Context had no room for another turn."""
    RETRIEVAL_FAILED = "retrieval_failed"
    """Search failed on every replica: a failure of the infrastructure."""
    SERVICE_FAILED = "service_failed"
    """Another service did not answer: a failure of the infrastructure."""
    ENV_ERROR = "env_error"
    """Environment or reward raised: a failure of the data."""
    AGENT_FAILED = "agent_failed"
    """Agent raised, or ended with an error, after the policy had acted."""
    AGENT_DEADLINE = "agent_deadline"
    """Agent took too long, after the policy had acted."""
    ENGINE_ERROR = "engine_error"
    """Engine failed or returned a log-prob that is not finite: a failure of the infrastructure."""

    @property
    def failure(self) -> Failure | None:
        """Kind of the failure; None if the policy or its agent ended the trajectory, or a limit was reached."""
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
    """Question to answer.

    ``Task("hotpotqa/5a7a06935542990198eaf050", "Which magazine was started first, ...?", ("Arthur's Magazine",))``
    """

    task_id: str
    """Id, unique over all sources, ``source/local id``; the trajectories of a task form a group."""
    question: str
    golden_answers: tuple[str, ...]
    """Gold answers, any of which counts; an answer is compared with them after ``normalize_answer``."""
    category: str = ""
    """Sort of question (``comparison``, ``two_hop``), for metrics only."""
    supporting_ids: tuple[str, ...] = ()
    """Ids or titles of the passages that hold the evidence, if known; recall is measured against them."""
    plan: tuple[tuple[str, ...], ...] = ()
    """Queries of a perfect searcher, a tuple per round, if known: ``(("Ana Bell", "Bo Cole"),)``."""
    source: str = ""
    """Name of its source, if there are several, for metrics; empty if there is one source."""
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Other fields of its record, such as ``{"pass_rate": 0.3}``, for rewards, curricula and environments."""


@dataclass(frozen=True, slots=True)
class FailedTask:
    """Training task that was given up in one epoch: ``FailedTask("nq/7", 0, Failure.DATA, 4, "KeyError: 'a'")``."""

    task_id: str
    epoch: int
    failure: Failure
    """Kind of the failure; with ``DATA`` the task is in quarantine: no later epoch of the run issues it."""
    num_tries: int
    """Number of groups in which a trajectory failed."""
    error: str
    """Error of the last try."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """Tool call as a turn writes it: ``CallRequest("search", {"queries": ["Ana Bell"]})``."""

    name: str
    arguments: Mapping[str, Any]
    """Arguments by name, values of JSON."""


@dataclass(frozen=True, slots=True)
class Message:
    """Chat message in the form of chat templates."""

    role: str
    content: Content
    calls: tuple[CallRequest, ...] = ()
    """Tool calls of an assistant's message; a message of the role ``tool`` answers each after it."""
    notice: str = ""
    """Message of the environment, placed after the content."""

    @property
    def text(self) -> str:
        """Texts of the content, without its images."""
        return text_of(self.content)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings with which an engine samples one completion."""

    max_new_tokens: int
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Strings that end generation with the token that completes one of them; that token is kept."""
    seed: int | None = None
    """Seed: the same seed, prompt and policy version give the same tokens."""


class FinishReason(StrEnum):
    """Reason why an engine stopped generating."""

    STOP = "stop"
    """Stop string was completed, or the end-of-sequence token was sampled."""
    LENGTH = "length"
    """Limit ``max_new_tokens`` or the context was used up."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that an engine sampled for one turn.

    ``Completion([27, 301, 28], [-0.1, -0.7, -0.0], [3, 3, 3], "<answer> Riga</answer>", FinishReason.STOP)``
    """

    token_ids: list[int]  # [num_new_tokens]
    logprobs: list[float]  # [num_new_tokens], under the sampling temperature
    policy_versions: list[int]  # [num_new_tokens], the weights that sampled each
    text: str
    """Decoded ``token_ids``; ``TextEnv.act`` reads it, and it is not encoded again."""
    finish_reason: FinishReason

    def __add__(self, part: Completion) -> Completion:
        """Return a turn with the part that was sampled after it."""
        return Completion(
            self.token_ids + part.token_ids,
            self.logprobs + part.logprobs,
            self.policy_versions + part.policy_versions,
            self.text + part.text,
            part.finish_reason,
        )


@dataclass(frozen=True, slots=True)
class Record:
    """Result of a call, such as a passage: ``Record("w/7", "Ana Bell", "Ana Bell was born in Riga.", 0.91)``."""

    id: str
    title: str
    text: str
    score: float = 0.0
    """Match with the call; higher is better."""
    image: Image | None = None
    """Picture of the result, such as a page's; ``text`` is then its caption."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a turn, with its result."""

    tool: str
    """Name of the tool, such as ``search``."""
    arguments: Mapping[str, Any]
    """Arguments as the tool got them, values of JSON: ``{"query": "Ana Bell", "k": 3}``."""
    result: str = ""
    """Text of the result besides its records, if the turn's observation is made of the results of several calls."""
    records: tuple[Record, ...] = ()
    """Records, best first."""
    latency_s: float = 0.0
    """Seconds from the call to its result."""
    waited_s: float = 0.0
    """Seconds of it in which the trajectory waited after its turn ended; 0 if the call began early enough."""
    is_cached: bool = False
    """Whether the calling process's cache answered."""
    version: str = ""
    """Version of the service that answered, such as an index's from its manifest; empty if it has none."""

    @property
    def was_made(self) -> bool:
        """Whether the call was made: one that the environment refused has a text as its result, and took no time."""
        return not self.result or bool(self.records) or self.latency_s > 0

    @property
    def asked(self) -> str:
        """Arguments in one line for people: the text if there is only one, such as a query, else JSON."""
        texts = [value for value in self.arguments.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(dict(self.arguments), ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class Turn:
    """Completion with the environment's reply to it."""

    completion_text: str
    num_model_tokens: int
    action: str
    """Name of the action: ``answer``, ``malformed``, or another name of the environment."""
    calls: tuple[ToolCall, ...] = ()
    """Calls as executed."""
    observation: str = ""
    reward: float = 0.0
    """Reward of this turn; the rest of ``Trajectory.reward`` belongs to the whole attempt."""
    finish_reason: FinishReason = FinishReason.STOP
    """Reason why the engine stopped."""


@dataclass(frozen=True)
class Trajectory:
    """Attempt at a task.

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
    """Submitted answer; empty if there is none."""
    error: str = ""
    """Error, if ``stop_reason.is_failure``; kept for people, not shown to the policy."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of the environment, such as ``duplicate_queries``, and its measures, such as ``em``; averaged into the
    iteration's metrics. A failed trajectory has only the former."""
    variant: str = ""
    """Variant that a rollout strategy gave to the environment; empty: none."""
    parent: str = ""
    """Id of the trajectory of which it is a fork; empty: none."""
    num_copied_tokens: int = 0
    """Number of the parent's MODEL tokens with which a fork begins. They are trained with the fork's advantage."""
    behaviour_logprobs: NDArray[np.float32] | None = None  # [num_tokens]
    """Log-probs of the policy that acted, if a strategy knows that they differ from the engine's: the denominator of
    the policy ratio. NaN for a token, or None for all: the engine's."""
    row_lengths: tuple[int, ...] = ()
    """Number of tokens of each row, if the conversation was rewritten: the arrays then hold several rows one after
    another, each a sequence with a prompt. Empty: there is one row."""
    images: tuple[PlacedImage, ...] = ()
    """Images among the tokens, in their order."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and response, over all rows."""
        return len(self.token_ids)

    @property
    def rows(self) -> list[slice]:
        """Positions of the rows in the arrays."""
        ends = list(accumulate(self.row_lengths or (self.num_tokens,)))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def num_model_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.kinds == TokenKind.MODEL))

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """Number of MODEL tokens per turn."""
        return tuple(turn.num_model_tokens for turn in self.turns)

    @property
    def turn_positions(self) -> list[NDArray[np.int64]]:
        """Positions of the MODEL tokens of every turn in the arrays."""
        sampled = np.flatnonzero(self.kinds == TokenKind.MODEL)
        return np.split(sampled, list(accumulate(self.turn_lengths)))[: len(self.turns)]

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Value of ``Turn.reward`` for each turn."""
        return tuple(turn.reward for turn in self.turns)

    @property
    def calls(self) -> list[ToolCall]:
        """Calls of all turns."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def is_well_formed(self) -> bool:
        """Whether the attempt ended with an answer, and every turn had a valid action."""
        is_answered = self.stop_reason is StopReason.ANSWERED
        return is_answered and all(turn.action != MALFORMED for turn in self.turns)


@dataclass(frozen=True)
class TrajectoryGroup:
    """Attempts at one task that share a baseline."""

    task: Task
    trajectories: tuple[Trajectory, ...]


OnText = Callable[[str], None]
"""Callback while a turn is sampled, with its whole text so far: ``"<search>Ana"``, ``"<search>Ana Bell\n"``."""


class GenerateFn(Protocol):
    """Generation interface of an engine for trajectories."""

    def __call__(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        on_text: OnText | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Awaitable[Completion]:
        """Continue ``prompt_token_ids``, with ``images`` among them; the prefix of ``request_id`` stays cached."""


class ChatModel(Protocol):
    """Language model that answers messages, such as a judge: one of ``environment.models``."""

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        """Return the answer to a conversation; ``ServiceError`` if there is none."""


EncodeFn = Callable[[str], list[int]]
"""Function from text to token ids, without special tokens added."""

DefuseFn = Callable[[str], str]
"""Function that returns a document or question without text that reads as a tag or control token: ``"(/ Answer)"``."""
