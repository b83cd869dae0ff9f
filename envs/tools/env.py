"""ToolEnv: the policy calls tools in the form of its chat template; a turn without a call is the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from envs.base import EnvContext, StepResult, TextEnv
from envs.grammars.calls import unclosed_thought
from envs.grammars.tags import Malformed, read_answer
from envs.measures import Measure
from envs.options import ToolOptions
from envs.search import search_metrics
from envs.tools.base import Tool, ToolResult, all_or_none, wrong_call
from envs.tools.mcp import all_tools
from ragr1_actors.core.config import DEFAULT_PROMPT, EnvironmentSettings
from ragr1_actors.core.content import images_of
from ragr1_actors.core.errors import ConfigError, ToolError
from ragr1_actors.core.types import MALFORMED, CallRequest, Completion, Message, Task
from retrieval.base import OPEN_PAGE, SEARCH

PROMPT = (
    "Answer the question below. Reason inside <think> and </think>. If a fact is missing, use the tools, as often as "
    "you need. Once you know, write only the short answer.\nQuestion: {question}"
)
"""The user message, unless the recipe sets ``environment.prompt``."""
LAST_TURN_NOTICE = "\nNo tool calls are left. Answer now."
MALFORMED_NOTICE = "This call could not be read. Call a tool in the form that was described, or answer."
NO_ANSWER_NOTICE = "This turn has neither a call of a tool nor an answer."


class ToolEnv(TextEnv):
    """Call tools, then answer. One instance is one trajectory."""

    options_class = ToolOptions
    chat_format = "auto"
    measures: ClassVar[Mapping[str, Measure]] = MappingProxyType({"rows": lambda ended: float(len(ended.rows))})

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Make the tools of ``environment.tools`` and ``environment.mcp``."""
        if context.parser is None:
            raise ConfigError("environment.env: tools needs a chat format that writes calls; set policy.chat_format")
        self._options = ToolOptions.read(settings.options, "environment.options")
        self._prompt = PROMPT if settings.prompt == DEFAULT_PROMPT else settings.prompt
        self._turns_left = settings.max_turns
        self._seen = context.seen
        self._tools = all_tools(settings, context, self._options)
        self.tools = [tool.schema for tool in self._tools.values()]
        self._make_parser = context.parser
        self._parser = self._make_parser(self.tools)

    async def reset(self, task: Task) -> list[Message]:
        """Return one user message: the recipe's prompt with the question in it."""
        prompt = self._prompt.replace("{max_queries}", str(self._options.max_queries_per_turn))
        return [Message("user", prompt.replace("{question}", task.question))]

    def left_open(self, text: str) -> str:
        """Return ``<think>`` if the turn ends inside a thought; a chat template may begin one."""
        return unclosed_thought(text)

    def peek(self, partial: str) -> None:
        """Let the tools begin the complete calls of this turn."""
        if self._turns_left > 1:  # calls of the last turn are not answered
            for request in self._parser.feed(partial):
                if not self._problem_of(request):
                    self._tools[request.name].begin(request.arguments)

    async def act(self, turn: Completion) -> StepResult:
        """Answer the calls of a turn, or take its text as the answer if it has none."""
        parsed = self._parser.end(turn.text)
        self._parser = self._make_parser(self.tools)
        self._turns_left -= 1
        if parsed.problem or parsed.is_thinking:
            return self._malformed(MALFORMED_NOTICE)
        if not parsed.calls:
            answer = read_answer(parsed.text)
            if isinstance(answer, Malformed):
                return self._malformed(NO_ANSWER_NOTICE)
            return StepResult(terminated=True, action="answer", answer=answer.text)
        if self._turns_left == 0:
            return StepResult(truncated=True, action="call", metrics={"unanswered_call": 1.0})
        return self._reply(await self._answer(parsed.calls))

    def _malformed(self, notice: str) -> StepResult:
        for tool in self._tools.values():
            tool.abandon()
        metrics = {"malformed": 1.0}
        if self._turns_left == 0:
            return StepResult(truncated=True, action=MALFORMED, metrics=metrics)
        return StepResult(notice=notice + self._notice(), action=MALFORMED, metrics=metrics)

    async def _answer(self, requests: Sequence[CallRequest]) -> list[ToolResult]:
        """Answer the calls of a turn: all calls to one tool together, and all tools at the same time."""
        found: dict[int, ToolResult] = {}
        by_tool: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            if number >= self._options.max_calls_per_turn:
                problem = f"At most {self._options.max_calls_per_turn} calls of one turn are answered."
            else:
                problem = self._problem_of(request)
            if problem:
                found[number] = wrong_call(request, problem)
            else:
                by_tool.setdefault(request.name, []).append(number)
        for name in self._tools.keys() - by_tool.keys():
            self._tools[name].abandon()
        answers = [self._call(self._tools[name], [requests[n] for n in numbers]) for name, numbers in by_tool.items()]
        for numbers, results in zip(by_tool.values(), await all_or_none(*answers), strict=True):
            found |= dict(zip(numbers, results, strict=True))
        return [found[number] for number in range(len(requests))]

    async def _call(self, tool: Tool, requests: Sequence[CallRequest]) -> list[ToolResult]:
        try:
            return await tool.call([request.arguments for request in requests])
        except ToolError as error:
            return [wrong_call(request, str(error)) for request in requests]

    def _problem_of(self, request: CallRequest) -> str:
        """Return why a call cannot be made, as a text for the policy; empty if it can."""
        tool = self._tools.get(request.name)
        if tool is None:
            return f"There is no tool named {request.name}. The tools are: {', '.join(self._tools)}."
        problem = tool.problem_of(request.arguments)
        return f"The arguments of {request.name} are wrong: {problem}" if problem else ""

    def _reply(self, results: Sequence[ToolResult]) -> StepResult:
        calls = tuple(call for result in results for call in result.calls)
        metrics: dict[str, float] = {"tool_errors": float(sum(result.is_error for result in results))}
        for result in results:
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
        if searched := [call for call in calls if call.tool in (SEARCH, OPEN_PAGE) and call.was_made]:
            metrics |= search_metrics(searched)
        contents = tuple(result.text for result in results)
        self._seen.extend(images_of(*contents))
        return StepResult(results=contents, notice=self._notice(), action="call", calls=calls, metrics=metrics)

    def _notice(self) -> str:
        return LAST_TURN_NOTICE if self._turns_left == 1 else ""

    def close(self) -> None:
        """Close the tools."""
        for tool in self._tools.values():
            tool.close()
