"""Interface of environments, and the table of known ones; a recipe names one of them or a user's class.

One environment instance runs one trajectory. The loop that drives it, as pseudo-code::

    messages = await env.reset(task)                 # the prompt
    while True:
        completion = await generate(token ids so far)    # env.peek(text so far) meanwhile; on if env.left_open(text)
        result = await env.act(completion)
        if result.terminated or result.truncated: break
        append result.observation and result.notice
    env.close()
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from envs.grammars.calls import ToolSchema, TurnParser
from envs.measures import MEASURES, Measure
from envs.observations import defuse
from envs.options import SearchOptions, TopKOptions
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.content import Content, Image, images_of
from ragr1_actors.core.errors import ConfigError, DataError, shortened
from ragr1_actors.core.images import size_of
from ragr1_actors.core.resolve import load_object, named, part_options
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import ChatModel, Completion, DefuseFn, EncodeFn, Message, Task, ToolCall, Trajectory
from retrieval.base import Retriever

if TYPE_CHECKING:  # it imports this module
    from envs.tools.mcp import McpClient


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's reply to one turn; ``terminated`` and ``truncated`` mean what they mean in gymnasium."""

    observation: Content = ""
    """Retrieved text with its tags, and images; its tokens become ``TokenKind.OBSERVATION``."""
    results: tuple[Content, ...] = ()
    """Result of each tool call of the turn, in their order; given instead of an observation."""
    notice: str = ""
    """Message of the environment, after the observation or the results; its tokens become ``TokenKind.NOTICE``."""
    reward: float = 0.0
    """Reward of this turn. The reward of a trajectory is the sum over its turns, plus ``environment.reward``."""
    terminated: bool = False
    truncated: bool = False
    action: str = ""
    """Name of the turn's action, kept in the record: ``"search"``, ``"answer"``, or a name that the environment
    chooses; SFT does not learn from ``"malformed"``."""
    answer: str = ""
    """Submitted answer, if the turn ends with one."""
    calls: tuple[ToolCall, ...] = ()
    """Executed calls of the turn, with their results."""
    restart: tuple[Message, ...] = ()
    """Conversation that the next turn continues instead of the present one, for example a summary. The turns before it
    stay as they were sampled. Observation and notice are then kept for the record only."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts, summed over the trajectory and averaged into the iteration's metrics; ``time/...`` holds seconds."""

    @property
    def messages(self) -> list[Message]:
        """Reply to the turn: one message for each tool call, or else one message of the environment."""
        if not self.results:
            return [Message("user", self.observation, notice=self.notice)]
        *first, last = self.results
        return [*(Message("tool", one) for one in first), Message("tool", last, notice=self.notice)]


def check_result(result: object, method: Callable[..., Any]) -> StepResult:
    """Check and return the result of ``method``; a NaN is refused, as it would make the mean of the whole batch NaN.

    Raises:
        ConfigError: it is not a ``StepResult`` with the right types, or the reward or one of the ``metrics`` is not a
            finite number; the message names the file and the line of ``method``.
    """
    if not isinstance(result, StepResult):
        raise ConfigError(f"{named(method)} returned {shortened(repr(result))}, expected a StepResult")
    for text in (result.notice, result.action, result.answer):
        if not isinstance(text, str):
            raise ConfigError(f"{named(method)} gave {text!r} as notice, action or answer, expected text")
    for content in (result.observation, *(result.results if isinstance(result.results, tuple) else ())):
        _check_content(content, "observation or result", method)
    _check_tuple(result.calls, "calls", ToolCall, method)
    _check_tuple(result.restart, "restart", Message, method)
    for message in result.restart:
        _check_content(message.content, "content", method)
    _check_tuple(result.results, "results", object, method)
    if not isinstance(result.metrics, Mapping) or not all(isinstance(name, str) for name in result.metrics):
        raise ConfigError(f"{named(method)} gave metrics={result.metrics!r}, expected numbers by name")
    if not is_finite(result.reward):
        raise ConfigError(f"{named(method)} gave a reward of {result.reward!r}, expected a finite number")
    for name, value in result.metrics.items():
        if not is_finite(value):
            raise ConfigError(f"{named(method)} gave a metric {name} of {value!r}, expected a finite number")
    return result


def _check_content(content: object, name: str, method: Callable[..., Any]) -> None:
    parts = (content,) if isinstance(content, str) else content
    if not isinstance(parts, tuple) or not all(isinstance(part, str | Image) for part in parts):
        got = shortened(repr(content))
        raise ConfigError(f"{named(method)} gave {got} as {name}, expected text, or texts and images")
    for image in images_of(parts):
        try:
            size_of(image)
        except DataError as error:
            raise DataError(f"{named(method)} gave {error}") from error


def _check_tuple(given: object, name: str, kind: type, method: Callable[..., Any]) -> None:
    if not isinstance(given, tuple) or not all(isinstance(one, kind) for one in given):
        got = shortened(repr(given))
        raise ConfigError(f"{named(method)} gave {name}={got}, expected a tuple of {kind.__name__}")


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number."""
    # an instance check of Real takes as long as the rest of the check of a turn
    return (type(value) is float or isinstance(value, Real)) and math.isfinite(value)


def check_prompt(messages: object, reset: Callable[..., Any]) -> list[Message]:
    """Check and return the prompt from ``reset``; ``ConfigError``, with its file and line, if it is not a prompt."""
    if not isinstance(messages, list) or not messages or not all(isinstance(one, Message) for one in messages):
        got = shortened(repr(messages))
        raise ConfigError(f"{named(reset)} returned {got}, expected a list of at least one Message")
    for one in messages:
        _check_content(one.content, "content", reset)
    return messages


@dataclass(frozen=True, slots=True)
class EnvContext:
    """Second argument of an environment's constructor: the services and values that it needs besides its settings."""

    retriever: Retriever
    encode: EncodeFn
    """Tokenizer of the policy, for token budgets."""
    defuse: DefuseFn = defuse
    """Makes a document safe for a prompt: removes the tags and control tokens of the policy from it."""
    models: Mapping[str, ChatModel] = field(default_factory=dict)
    """Models of ``environment.models``, by name."""
    variant: str = ""
    """Name that a rollout strategy gives this trajectory, such as one for another prompt; empty: nothing special."""
    seed: int = 0
    """Seed of the environment's random draws; it differs between trajectories."""
    parser: Callable[[Sequence[ToolSchema]], TurnParser] | None = None
    """Makes the parser of a turn's tool calls; None where ``policy.chat_format`` is ``tags``."""
    seen: list[Image] = field(default_factory=list)
    """Images that the policy of this trajectory has seen, in their order; its environment adds them."""
    mcp: dict[str, McpClient] = field(default_factory=dict)
    """Clients of ``environment.mcp`` that the trajectories of an env runner share, by name; made when first used."""


class TextEnv(ABC):
    """A text environment that runs one trajectory.

    Subclasses take ``(settings: EnvironmentSettings, context: EnvContext)`` and are named in a recipe as
    ``environment.env: my_module:MyEnv``.
    """

    options_class: type[Section] | None = None
    """Class that reads ``settings.options`` and checks them before a run; None: the environment reads them itself."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn in the engine, such as ``</search>``."""
    chat_format: str = "tags"
    """Meaning of ``policy.chat_format: auto`` here: ``tags``, or ``auto`` for the format of the chat template."""
    tools: Sequence[ToolSchema] = ()
    """Tools that the chat template describes to the policy; used if the chat format is not ``tags``."""
    measures: ClassVar[Mapping[str, Measure]] = {}
    """Functions that compute numbers of an ended trajectory, by name of metric; added to ``envs/measures.py``."""

    @abstractmethod
    async def reset(self, task: Task) -> list[Message]:
        """Start with ``task`` and return the prompt."""

    @abstractmethod
    async def act(self, turn: Completion) -> StepResult:
        """Reply to a turn of the policy.

        ``turn.text`` is the text sampled in this turn, after the tag that was open when it began: see ``left_open``.
        Raises ``RetrievalError`` if a service does not answer.
        """

    def left_open(self, text: str) -> str:
        """Return the tag that ``text`` leaves open, such as ``<think>``; by default none is.

        ``text`` is a turn that has ended or stopped at one of ``stop``, or what the chat template begins the first turn
        with. While a tag is open, a stop string does not end the turn. The next turn begins with the tag, for ``act``
        and ``peek``.
        """
        return ""

    def peek(self, partial: str) -> None:  # noqa: B027 - looking is optional
        """Look at the text of a turn that is still being sampled, to start searches early; it begins as ``act``'s.

        The event loop calls it as the text grows, if a class overrides it. It must not change the result of ``act``,
        only the time that ``act`` takes.
        """

    def close(self) -> None:  # noqa: B027 - most environments leave nothing under way
        """Cancel running work. It is called once, after the trajectory has ended in any way."""


class Measured(Protocol):
    """Object that has measures of its trajectories, such as an environment."""

    @property
    def measures(self) -> Mapping[str, Measure]: ...  # noqa: D102


def measure(env: Measured, ended: Trajectory) -> dict[str, float]:
    """Return the measures of an ended trajectory, by name; raises ``ConfigError`` if one is not a finite number."""
    if not isinstance(env.measures, Mapping):
        raise ConfigError(f"measures of {named(env)} is {env.measures!r}, expected functions by name")
    found = {name: one(ended) for name, one in {**MEASURES, **env.measures}.items()}
    for name, value in found.items():
        if not is_finite(value):
            raise ConfigError(f"the measure {name} of {named(env)} gave {value!r}, expected a finite number")
    return {name: float(value) for name, value in found.items()}


ENVS: dict[str, type[TextEnv] | str] = {"search": "envs.search:SearchEnv", "tools": "envs.tools.env:ToolEnv"}
"""Known values of ``environment.env``, imported at first use; any other value is ``my_module:MyEnv``."""


def reads_calls(settings: EnvironmentSettings) -> bool:
    """Return whether the turns of an environment have tool calls, and not tags."""
    found = load_object(settings.env, ENVS)
    return isinstance(found, type) and issubclass(found, TextEnv) and found.chat_format != "tags"


def read_options(settings: EnvironmentSettings) -> Section | None:
    """Return ``environment.options`` as read by its class; None if the environment reads them itself.

    Raises:
        ConfigError: there is no such class, or an option is unknown or has a wrong value.
    """
    return part_options(load_object(settings.env, ENVS), settings.options, "environment.env", "environment.options")


def search_options(settings: EnvironmentSettings) -> SearchOptions:
    """Return the options of an environment that searches; the defaults if it has others. Raises ``ConfigError``."""
    options = read_options(settings)
    if isinstance(options, TopKOptions) and not isinstance(options, SearchOptions):
        return SearchOptions(**options.model_dump(include=set(SearchOptions.model_fields)))
    return options if isinstance(options, SearchOptions) else SearchOptions()
