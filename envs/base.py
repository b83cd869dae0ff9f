"""The multi-turn text environment: what a custom environment subclasses.

One instance is one trajectory, and is thrown away after it. The loop that drives it, as pseudo-code::

    messages = await env.reset(task)                 # the prompt
    while True:
        completion = await generate(token ids so far)    # env.peek(text so far) meanwhile
        match env.parse(completion.text):
            case Search(queries):   result = await env.step(queries)
            case Answer(text):      result = await env.submit(text)
            case Malformed(reason): result = await env.malformed(reason)
        if result.terminated or result.truncated: break
        append result.observation and result.notice
    env.close()
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from numbers import Real

from ragr1_actors.core.types import EncodeFn, Message, RetrievalRecord, Task
from retrieval.base import Retriever


@dataclass(frozen=True, slots=True)
class Search:
    """The policy asks: ``Search(("Ana Bell", "Bo Cole"))``."""

    queries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy answers: ``Answer("Riga")``."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """The turn holds no action that the environment understands."""

    reason: str


Action = Search | Answer | Malformed


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's reply to one turn; ``terminated`` and ``truncated`` mean what they mean in gymnasium."""

    observation: str = ""
    """Retrieved text with its tags; its tokens become ``TokenKind.OBSERVATION``."""
    notice: str = ""
    """The environment's own words, after the observation; ``TokenKind.NOTICE``."""
    reward: float = 0.0
    """Added up over the steps of the trajectory."""
    terminated: bool = False
    truncated: bool = False
    retrievals: tuple[RetrievalRecord, ...] = ()
    info: dict[str, float] = field(default_factory=dict)
    """Counts, added up over the trajectory and averaged into the iteration's metrics; ``time/what`` holds seconds."""


def check_result(result: object, method: str) -> StepResult:
    """Return what ``method`` of an environment returned, if it is what it should be.

    NaN is stopped here, at the door: in the mean of a batch it would make all of the batch NaN.

    Raises:
        TypeError: it is no ``StepResult``.
        ValueError: its reward is no finite number.
    """
    if not isinstance(result, StepResult):
        raise TypeError(f"{method} returned {result!r}, expected a StepResult")
    if not isinstance(result.reward, Real) or not math.isfinite(result.reward):
        raise ValueError(
            f"{method} gave a reward of {result.reward!r}, expected a finite number; mend environment.reward or "
            "environment.env"
        )
    return result


@dataclass(frozen=True, slots=True)
class EnvContext:
    """What an environment is given when it is made, beside its own settings."""

    retriever: Retriever
    encode: EncodeFn
    """The policy's tokenizer, for token budgets."""


class TextEnv(ABC):
    """A text environment that holds one trajectory.

    Subclasses take ``(settings: EnvironmentSettings, context: EnvContext)`` and are named in a recipe as
    ``environment.env: my_module:MyEnv``.
    """

    stop: tuple[str, ...] = ()
    """Strings that end a turn in the engine, such as ``</search>``."""

    @abstractmethod
    async def reset(self, task: Task) -> list[Message]:
        """Start on ``task`` and return the prompt."""

    @abstractmethod
    def parse(self, completion: str) -> Action:
        """Read what the policy did in this turn. ``completion`` is the policy's own text of this turn only."""

    def peek(self, partial: str) -> None:  # noqa: B027 - looking is optional
        """See the turn that is being sampled, as far as it has come; searches may be started early.

        Called from the event loop as the text grows, and not at all where a class does not override it. It must not
        change what ``step`` returns, only how long that takes.
        """

    @abstractmethod
    async def step(self, queries: list[str]) -> StepResult:
        """Answer a list of queries. Raises ``RetrievalError`` where no replica answers."""

    @abstractmethod
    async def submit(self, answer: str) -> StepResult:
        """Take the final answer; the result is terminated and carries the reward."""

    async def malformed(self, reason: str) -> StepResult:
        """Reply to a turn without an action; by default the trajectory ends there with no reward."""
        return StepResult(truncated=True, info={"malformed": 1.0})

    def close(self) -> None:  # noqa: B027 - most environments leave nothing under way
        """End what is still under way. Called once, however the trajectory ended."""
