"""The interface of environments and rewards, and the known ones: what a recipe names, and what users write themselves.

One environment instance runs one trajectory. The loop that drives it, as pseudo-code::

    messages = await env.reset(task)                 # the prompt
    while True:
        completion = await generate(token ids so far)    # env.peek(text so far) meanwhile; on if env.left_open(text)
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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real

from envs.observations import defuse
from ragr1_actors.core.types import DefuseFn, EncodeFn, Message, RetrievalRecord, Task, normalize_answer
from retrieval.base import Retriever


@dataclass(frozen=True, slots=True)
class Search:
    """The policy searches: ``Search(("Ana Bell", "Bo Cole"))``."""

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
    """A message of the environment, after the observation; its tokens become ``TokenKind.NOTICE``."""
    reward: float = 0.0
    """Summed over the steps of the trajectory."""
    terminated: bool = False
    truncated: bool = False
    retrievals: tuple[RetrievalRecord, ...] = ()
    info: dict[str, float] = field(default_factory=dict)
    """Counts, summed over the trajectory and averaged into the iteration's metrics; ``time/...`` holds seconds."""


def check_result(result: object, method: str) -> StepResult:
    """Check and return the result of ``method``; a NaN is refused, as it would make the mean of the whole batch NaN.

    Raises:
        TypeError: the result is not a ``StepResult`` with texts.
        ValueError: the reward, or a value of ``info``, is not a finite number.
    """
    if not isinstance(result, StepResult):
        raise TypeError(f"{method} returned {result!r}, expected a StepResult")
    for text in (result.observation, result.notice):
        if not isinstance(text, str):
            raise TypeError(f"{method} gave {text!r} as observation or notice, expected text")
    for name, value in result.info.items():
        if not isinstance(name, str) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{method} gave info {{{name!r}: {value!r}}}, expected names with finite numbers")
    if not isinstance(result.reward, Real) or not math.isfinite(result.reward):
        raise ValueError(
            f"{method} gave a reward of {result.reward!r}, expected a finite number; fix environment.reward or "
            "environment.env"
        )
    return result


@dataclass(frozen=True, slots=True)
class EnvContext:
    """What the constructor of an environment gets besides its settings."""

    retriever: Retriever
    encode: EncodeFn
    """The policy's tokenizer, for token budgets."""
    defuse: DefuseFn = defuse
    """For a document before it is put into a prompt: no tag and no control token of the policy's is left in it."""


class TextEnv(ABC):
    """A text environment that runs one trajectory.

    Subclasses take ``(settings: EnvironmentSettings, context: EnvContext)`` and are named in a recipe as
    ``environment.env: my_module:MyEnv``.
    """

    stop: tuple[str, ...] = ()
    """Strings that end a turn in the engine, such as ``</search>``."""

    @abstractmethod
    async def reset(self, task: Task) -> list[Message]:
        """Start with ``task`` and return the prompt."""

    @abstractmethod
    def parse(self, completion: str) -> Action:
        """Return the action of a turn.

        ``completion`` is the text that the policy sampled in this turn, behind what was open when it began: see
        ``left_open``.
        """

    def left_open(self, text: str) -> str:
        """Return the tag that ``text`` leaves open, such as ``<think>``; by default none is.

        ``text`` is a turn that has ended or stopped at one of ``stop``, or what the chat template begins the first turn
        with. While a tag is open, a stop string does not end the turn. The next turn begins with the tag, for ``parse``
        and ``peek``.
        """
        return ""

    def peek(self, partial: str) -> None:  # noqa: B027 - looking is optional
        """Look at the text of a turn that is still being sampled, to start searches early; it begins as ``parse``'s.

        Called from the event loop as the text grows, and only if a class overrides it. It must not change the result
        of ``step``, only the time that ``step`` takes.
        """

    @abstractmethod
    async def step(self, queries: list[str]) -> StepResult:
        """Answer a list of queries. Raises ``RetrievalError`` if no replica answers."""

    @abstractmethod
    async def submit(self, answer: str) -> StepResult:
        """Take the final answer; the result is terminated and carries the reward."""

    async def malformed(self, reason: str) -> StepResult:
        """Reply to a turn without an action; by default the trajectory ends without a reward."""
        return StepResult(truncated=True, info={"malformed": 1.0})

    def close(self) -> None:  # noqa: B027 - most environments leave nothing under way
        """Cancel what is still running. Called once, after the trajectory has ended in any way."""


ENVS: dict[str, type[TextEnv] | str] = {
    "search": "envs.search:SearchEnv",
    "direct": "envs.baselines:DirectEnv",
    "rag": "envs.baselines:RagEnv",
}
"""Known values of ``environment.env``, imported when they are used; any other is ``my_module:MyEnv``."""

RewardFn = Callable[[Task, str], float]
"""``(task, answer) -> reward``; ``answer`` is empty if the policy gave none."""


_WHOLE_ANSWERS = {"yes", "no", "noanswer"}


def exact_match(answer: str, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if there is an answer that, normalised, equals a normalised gold answer, else 0.0."""
    prediction = normalize_answer(answer)
    return float(bool(answer.strip()) and any(prediction == normalize_answer(gold) for gold in golden_answers))


def token_f1(answer: str, golden_answers: Sequence[str], normalize: Callable[[str], str] = normalize_answer) -> float:
    """Return the F1 of HotpotQA's official script in [0, 1], for the closest gold answer.

    It is SQuAD's harmonic mean of token precision and recall, but an answer or gold answer yes, no or noanswer counts
    only if both are equal: "yes no" gets nothing for "yes". An answer without tokens ("The The", "A") gets 0.
    ``normalize`` is SQuAD's, or another paper's.
    """
    prediction = normalize(answer)
    return max((_f1(prediction, normalize(gold)) for gold in golden_answers), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and {prediction, gold} & _WHOLE_ANSWERS:
        return 0.0
    tokens, gold_tokens = prediction.split(), gold.split()
    common = sum((Counter(tokens) & Counter(gold_tokens)).values())
    if not common:
        return 0.0
    # 2 * common / (sum of lengths) is the same number but for its last digit, and figures are compared to that
    precision, recall = common / len(tokens), common / len(gold_tokens)
    return (2 * precision * recall) / (precision + recall)


def exact_match_reward(task: Task, answer: str) -> float:
    """Return RAG-R1's reward: exact match."""
    return exact_match(answer, task.golden_answers)


def token_f1_reward(task: Task, answer: str) -> float:
    """Return token F1 against the closest gold answer."""
    return token_f1(answer, task.golden_answers)


REWARDS: dict[str, RewardFn] = {"exact_match": exact_match_reward, "token_f1": token_f1_reward}
"""Known values of ``environment.reward``; any other is ``my_module:my_function``."""
