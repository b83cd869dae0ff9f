"""Tools: they answer the calls of a turn. A function with type hints and a docstring is a tool.

::

    def add(a: int, b: int) -> int:                     # environment.tools: [search, my_tools:add, my_tools:Browse]
        '''Add two whole numbers.

        Args:
            a: The first one.
            b: The second one.
        '''
        return a + b

    class Browse(Tool):                                 # one instance per trajectory, with what it remembers
        schema = schema_of(open_page)
        async def call(self, calls): ...                # all calls of a turn to this tool, at once

The policy reads a ``ToolError`` as the result of its call, and likewise why arguments do not fit the schema. A
``ServiceError`` says that a service does not answer: the attempt is made again. Any other exception ends the trajectory
as a failure of the data.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar, get_type_hints

from envs.base import EnvContext
from envs.grammars.calls import ToolSchema, own_types
from envs.observations import MAX_TOKEN_CHARS, cut_text
from envs.options import ToolOptions
from ragr1_actors.core.content import Content, Image, changed, text_of
from ragr1_actors.core.errors import ConfigError, ToolError, one_line, shortened, valid_unicode
from ragr1_actors.core.process.users_code import contained, in_thread
from ragr1_actors.core.resolve import load_object, named
from ragr1_actors.core.types import CallRequest, EncodeFn, ToolCall

Arguments = Mapping[str, Any]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Answer of a tool to one call."""

    text: Content
    """Text for the policy, or texts and images."""
    calls: tuple[ToolCall, ...]
    """Calls for the record: this one, or the calls of which it was made, such as one per query of a search."""
    is_error: bool = False
    """Whether the call was wrong, or the tool raised a ``ToolError``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Counts, such as ``{"duplicate_queries": 1.0}``."""


async def all_or_none(*calls: Coroutine[Any, Any, T]) -> list[T]:
    """Return the results of calls that run at the same time; if one raises, the others are ended first.

    ``asyncio.TaskGroup`` does the same, but raises an ``ExceptionGroup``, and callers expect the error itself.
    """
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise


class Tool(ABC):
    """A tool of one trajectory; subclasses take ``(context: EnvContext, options: ToolOptions)``."""

    schema: ClassVar[ToolSchema]
    """Description of the tool for the policy; ``schema_of`` makes one of a function."""
    needs: ClassVar[type[Any] | None] = None
    """A protocol of ``retrieval.base`` that the environment's retriever must have, such as ``PageRetriever``."""
    needs_headings: ClassVar[bool] = False
    """Whether the titles of the corpus must have headings."""

    def __init__(self, context: EnvContext, options: ToolOptions) -> None:
        """Keep ``context``, such as the retriever, the models and a seed, and the options of the environment."""
        self.context, self.options = context, options

    @property
    def name(self) -> str:
        """Name by which the policy calls the tool."""
        return str(self.schema["function"]["name"])

    def begin(self, arguments: Arguments) -> None:  # noqa: B027 - few tools can begin early
        """Begin the work of a call that is complete, while the rest of the turn is being sampled.

        It must not change what ``call`` returns, only the time that ``call`` takes.
        """

    def abandon(self) -> None:  # noqa: B027 - only a tool that begins early has something to abandon
        """Give up what ``begin`` began, because the turn has ended without a call to this tool."""

    @abstractmethod
    async def call(self, calls: Sequence[Arguments]) -> list[ToolResult]:
        """Answer all calls of a turn to this tool: ``[len(calls)]``. Their arguments fit the schema.

        Raises:
            ToolError: none of these calls can be answered; the policy reads the message.
            ServiceError: a service does not answer.
        """

    def close(self) -> None:  # noqa: B027 - most tools leave nothing under way
        """End running work. It is called once, after the trajectory has ended in any way."""

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for

        parameters = self.schema["function"].get("parameters", {})
        return validator_for(parameters, Draft202012Validator)(parameters)

    def check_schema(self) -> None:
        """Raise if the schema of the arguments is no JSON schema."""
        self._validator.check_schema(self._validator.schema)

    def problem_of(self, arguments: Arguments) -> str:
        """Return what is wrong with the arguments of a call, in one sentence; empty if nothing is."""
        from jsonschema.exceptions import best_match

        error = best_match(self._validator.iter_errors(dict(arguments)))
        if error is None:
            return ""
        where = ".".join(map(str, error.absolute_path))
        return f"{where}: {shortened(error.message)}" if where else shortened(error.message)


class FunctionTool(Tool):
    """Function as a tool. Plain functions run in threads, at the same time as others."""

    def __init__(
        self,
        function: Callable[..., Any],
        context: EnvContext,
        options: ToolOptions,
        schema: ToolSchema | None = None,
    ) -> None:
        """Take a function that ``schema_of`` accepts, or any function and its ``schema``."""
        super().__init__(context, options)
        self._function = function
        self.schema = schema or schema_of(function)  # type: ignore[misc]  # of a class, where a class is a tool
        kinds = [one.kind for one in inspect.signature(function).parameters.values()]
        self._takes_any = inspect.Parameter.VAR_KEYWORD in kinds

    def problem_of(self, arguments: Arguments) -> str:
        """Return what is wrong with the arguments of a call: an unknown one, or what the schema says; empty if none."""
        known = self.schema["function"].get("parameters", {}).get("properties", {})
        if not self._takes_any and (unknown := [name for name in arguments if name not in known]):
            return f"there is no argument {shortened(unknown[0])}; the arguments are: {', '.join(known) or 'none'}"
        return super().problem_of(arguments)

    async def call(self, calls: Sequence[Arguments]) -> list[ToolResult]:
        """Call the function once per call, all at the same time."""
        return await all_or_none(*map(self._call, calls))

    async def _call(self, arguments: Arguments) -> ToolResult:
        started_s = time.monotonic()
        is_error, limit = False, self.options.max_observation_tokens
        given = _whole(arguments, self.schema["function"].get("parameters", {}))
        try:
            if inspect.iscoroutinefunction(self._function):
                returned = await contained(self._function(**given))
            else:
                returned = await contained(in_thread(self._function, **given))
            content = as_content(returned, self._function)
        except ToolError as error:
            content, is_error = valid_unicode(str(error)), True
        content = changed(content, partial(cut_result, encode=self.context.encode, max_tokens=limit))
        latency_s = time.monotonic() - started_s
        made = ToolCall(self.name, dict(arguments), text_of(content), latency_s=latency_s, waited_s=latency_s)
        return ToolResult(content, (made,), is_error)


def cut_result(text: str, encode: EncodeFn, max_tokens: int) -> str:
    """Return a result in at most ``max_tokens`` tokens of ``encode``; a cut result ends with a note that says so."""
    if len(text) <= max_tokens * MAX_TOKEN_CHARS and len(encode(text)) <= max_tokens:
        return text

    def size(part: str) -> int:
        return len(encode(part))

    note = "\n(The rest of the result is cut.)"
    room = max(max_tokens - size(note), 0)
    return cut_text(text[: room * MAX_TOKEN_CHARS], room, size) + note


def _whole(value: Any, schema: Any) -> Any:
    """Return a value with an ``int`` for each number such as 2.0 for which a schema asks a whole number."""
    if not isinstance(schema, Mapping):  # the schema is ``true``, or a list of schemas
        return value
    match value:
        case float() if "integer" in own_types(schema) and value.is_integer():
            return int(value)
        case list():
            return [_whole(one, schema.get("items", {})) for one in value]
        case Mapping():
            known = schema.get("properties", {})
            return {name: _whole(one, known.get(name, {})) for name, one in value.items()}
    return value


def as_content(returned: object, function: Callable[..., Any]) -> Content:
    """Return what a tool returned as ``as_text``, or an image, or a tuple of texts and images as it is."""
    if isinstance(returned, Image):
        return (returned,)
    if isinstance(returned, tuple) and any(isinstance(part, Image) for part in returned):
        parts = (part if isinstance(part, Image) else as_text(part, function) for part in returned)
        return tuple(parts)
    return as_text(returned, function)


def as_text(returned: object, function: Callable[..., Any]) -> str:
    """Return what a tool returned as the text that the policy reads: a text as it is, anything else as JSON.

    Raises:
        ConfigError: it is neither; the message names the function's file and line.
    """
    if isinstance(returned, str):
        return valid_unicode(returned)
    try:
        return valid_unicode(json.dumps(returned, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{named(function)} returned {shortened(repr(returned))}, expected text or what JSON can hold: "
            f"{one_line(error)}"
        ) from error


def schema_of(function: Callable[..., Any]) -> ToolSchema:
    """Return the schema of a function from its type hints and the ``Args:`` of its docstring, as transformers reads it.

    Raises:
        ConfigError: an argument has no type hint or no description, or there is no docstring; it names file and line.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        found: dict[str, Any] = get_json_schema(function)
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{named(function)}: {one_line(error)}; a tool needs a docstring, and for each argument a type hint and a "
            "line under Args:"
        ) from error
    for one in parameters:
        if one.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{named(function)}: got {one}, expected arguments that can be given by name")
        if isinstance(kind := hints.get(one.name), type) and not issubclass(kind, _JSON_TYPES):
            expected = "expected text, a number, bool, list, dict, Literal or TypedDict"
            raise ConfigError(f"{named(function)}: {one.name} has the type {kind.__name__}, {expected}")
    found["function"].pop("return", None)
    return _with_null(found)  # type: ignore[no-any-return]


_JSON_TYPES = (str, int, float, list, tuple, dict, type(None))
"""The types of arguments; ``bool`` is an ``int``."""


def _with_null(value: Any) -> Any:
    """Return a schema of transformers as plain JSON schema: null is a type, and not a property ``nullable``."""
    if isinstance(value, list):
        return [_with_null(one) for one in value]
    if not isinstance(value, dict):
        return value
    made = {name: _with_null(one) for name, one in value.items()}
    if made.get("nullable") is True and "type" in made:
        del made["nullable"]
        made["type"] = [*own_types(made), "null"]
        if "enum" in made and None not in made["enum"]:
            made["enum"] = [*made["enum"], None]
    return made


TOOLS: dict[str, Any] = {
    "search": "envs.tools.search:SearchTool",
    "open_page": "envs.tools.search:OpenPageTool",
    "read_section": "envs.tools.search:ReadSectionTool",
    "crop": "envs.tools.search:CropTool",
    "zoom": "envs.tools.search:ZoomTool",
}
"""Known names of ``environment.tools``; any other is a function or a class, ``my_module:my_tool``."""


def check_retriever(names: Sequence[str], retriever_class: type) -> None:
    """Raise a ``ConfigError`` if a retriever lacks a method that one of the tools needs."""
    for name, tool in _classes(names):
        if tool.needs is not None and not issubclass(retriever_class, tool.needs):
            raise ConfigError(
                f"environment.tools: {name} needs a {tool.needs.__name__}, and retrieval.type makes a "
                f"{retriever_class.__name__}, which is none; leave the tool out, or search an index, or set "
                "retrieval.type to web or replay"
            )


def check_headings(names: Sequence[str], has_headings: Callable[[], bool]) -> None:
    """Raise a ``ConfigError`` if one of the tools needs headings and the corpus has none."""
    if (needing := [name for name, tool in _classes(names) if tool.needs_headings]) and not has_headings():
        raise ConfigError(
            f"environment.tools: {needing[0]} needs a corpus with headings, and no title of the index has one; "
            "leave the tool out, or build the index of records with the key heading"
        )


def _classes(names: Sequence[str]) -> Iterator[tuple[str, type[Tool]]]:
    for name in names:
        found = load_object(name, TOOLS)
        if isinstance(found, type) and issubclass(found, Tool):
            yield name, found


def make_tools(names: Sequence[str], context: EnvContext, options: ToolOptions) -> dict[str, Tool]:
    """Make the tools of one trajectory, by name; ``ConfigError`` if a name is unknown or two tools share one."""
    check_retriever(names, type(context.retriever))
    found: dict[str, Tool] = {}
    for name in names:
        loaded = load_object(name, TOOLS)
        if isinstance(loaded, type) and issubclass(loaded, Tool):
            tool = loaded(context, options)
        elif inspect.isroutine(loaded):
            tool = FunctionTool(loaded, context, options)
        else:
            raise ConfigError(f"environment.tools: {named(loaded)} is neither a function nor a subclass of Tool")
        if tool.name in found:
            raise ConfigError(f"environment.tools: two tools are named {tool.name}; name one of them otherwise")
        found[tool.name] = tool
    return found


def wrong_call(request: CallRequest, problem: str) -> ToolResult:
    """Return the result of a call that was not made."""
    return ToolResult(problem, (ToolCall(request.name, dict(request.arguments), problem),), is_error=True)
