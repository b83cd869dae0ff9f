"""Rows of a conversation that is rewritten, and what each turn of it records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes import ByteTokenizer

from envs.base import StepResult, TextEnv
from envs.grammars.calls import TurnParser
from ragr1_actors.core.types import (
    Completion,
    FinishReason,
    Message,
    Sampling,
    StopReason,
    Task,
    TokenKind,
    ToolCall,
    Trajectory,
)
from ragr1_actors.rollout.chat_format import Extension
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.rollout.recorder import EnvAttempt, Fork, Reading, Recorder, run_trajectory

TASK = Task("t/0", "Where?", ("Riga",))
TOKENIZER = ByteTokenizer()


class Notes(TextEnv):
    """After the turns whose text begins with ``note`` the conversation begins again with that note."""

    async def reset(self, task: Task) -> list[Message]:
        return [Message("user", task.question)]

    async def act(self, turn: Completion) -> StepResult:
        if turn.text.startswith("note"):
            summary = (Message("user", f"So far: {turn.text}. Where?"),)
            return StepResult(observation="not shown", action="note", restart=summary, reward=0.25)
        if turn.text.startswith("look"):
            return StepResult(observation="[seen]", notice="(go on)", action="look")
        return StepResult(terminated=True, action="answer", answer=turn.text, reward=1.0)


class Listening(ScriptedEngine):
    """Keeps what each turn was asked with."""

    def __init__(self, script: list[str]) -> None:
        super().__init__({"x": script}, TOKENIZER.encode, version=3)
        self.asked: list[str] = []

    async def generate(self, prompt_token_ids, sampling, *, request_id, on_text=None):  # type: ignore[no-untyped-def]
        self.asked.append(TOKENIZER.decode(list(prompt_token_ids)))
        return await super().generate(prompt_token_ids, sampling, request_id=request_id, on_text=on_text)


async def play(engine: Listening, max_context: int = 400, max_new_tokens: int = 99) -> Trajectory:
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return await run_trajectory(
        EnvAttempt(Notes(), Recorder("x", engine.generate, TOKENIZER, sampling, max_context, 0)), TASK
    )


async def test_a_rewritten_conversation_is_a_row_on_its_own() -> None:
    engine = Listening(["look", "note 1", "look again", "Riga"])
    found = await play(engine)
    assert found.stop_reason is StopReason.ANSWERED
    texts = [TOKENIZER.decode(found.token_ids[row].tolist()) for row in found.rows]
    assert len(texts) == 2 and sum(found.row_lengths) == found.num_tokens
    assert texts[0].endswith("Where?\nlook[seen](go on)note 1")
    assert texts[1].endswith("So far: note 1. Where?\nlook again[seen](go on)Riga")
    assert engine.asked[2] == texts[1][: -len("look again[seen](go on)Riga")]  # the second row alone
    assert "not shown" not in "".join(texts) and found.turns[1].observation == "not shown"
    # what was sampled is MODEL once, in the row in which it was sampled
    is_model = found.kinds == TokenKind.MODEL
    assert TOKENIZER.decode(found.token_ids[is_model].tolist()) == "looknote 1look againRiga"
    second = found.rows[1]
    num_prompt = len(engine.asked[2].encode())
    assert (found.kinds[second][:num_prompt] == TokenKind.PROMPT).all()
    assert set(found.policy_versions[is_model]) == {3} and not (found.policy_versions[~is_model] + 1).any()


def started(*messages: Message) -> Recorder:
    recorder = Recorder("x", Listening(["look"]).generate, TOKENIZER, Sampling(max_new_tokens=99), 60, 0)
    recorder.restart(messages, Reading())
    return recorder


def test_what_follows_a_turn_leaves_room_for_a_token_of_the_next() -> None:
    recorder = started(Message("user", "Where?"))
    room = recorder.room
    assert not recorder.add([Message("user", "o" * (room - 4), notice="goon")], Reading())
    assert recorder.room == room
    assert recorder.add([Message("user", "o" * (room - 5), notice="goon")], Reading())
    assert recorder.room == 1


def test_a_last_message_of_the_assistant_begins_the_turn() -> None:
    question = Message("user", "Where?")
    found = started(question, Message("assistant", "So")).trajectory(TASK, StopReason.MAX_TURNS)
    prompt = TOKENIZER.prompt_ids([question])
    assert found.token_ids.tolist() == [*prompt, *TOKENIZER.encode("So")]
    assert found.kinds.tolist() == [TokenKind.PROMPT] * len(prompt) + [TokenKind.INJECTED] * 2


async def test_a_turn_has_its_reward_and_its_end() -> None:
    found = await play(Listening(["note 1", "look and look", "Riga"]), max_new_tokens=8)
    assert found.turn_rewards == (0.25, 0.0, 1.0) and found.reward == 1.25
    reasons = [turn.finish_reason for turn in found.turns]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    assert [turn.completion_text for turn in found.turns] == ["note 1", "look and", "Riga"]


async def test_the_context_limits_each_row() -> None:
    prompt, summary = (
        len(TOKENIZER.prompt_ids([Message("user", text)])) for text in ("Where?", "So far: note 1. Where?")
    )
    one_row = prompt + len("look" + "[seen](go on)" + "look")
    found = await play(Listening(["look", "look"]), max_context=one_row)
    assert found.stop_reason is StopReason.CONTEXT_FULL and found.row_lengths == ()
    both = await play(Listening(["look", "note 1", "Riga"]), max_context=one_row + 2)
    assert both.stop_reason is StopReason.ANSWERED
    assert both.num_tokens == sum(both.row_lengths) > one_row + 2 >= max(both.row_lengths)
    # a row without room for a turn holds nothing that was sampled, and is left out
    full = await play(Listening(["note 1", "Riga"]), max_context=summary)
    assert full.stop_reason is StopReason.CONTEXT_FULL and full.row_lengths == ()
    assert TOKENIZER.decode(full.token_ids.tolist()).endswith("note 1")


class Framed:
    """``ChatFormat`` that keeps the conversations whose last turn it frames."""

    end_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.before: list[list[str]] = []

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        return TOKENIZER.prompt_ids(messages)

    def extension_ids(
        self, before: Sequence[Message], added: Sequence[Message], tools: Sequence[Any], *, has_end: bool
    ) -> Extension:
        self.before.append([f"{one.role}: {one.text}" for one in before])
        return Extension([(TOKENIZER.encode("\n"), TokenKind.OBSERVATION)], is_new_message=True)

    def parser(self, tools: Sequence[Any]) -> TurnParser:
        return TurnParser()


class Begun(Notes):
    """The first turn and those after a note begin with a word of the environment."""

    async def reset(self, task: Task) -> list[Message]:
        return [*await super().reset(task), Message("assistant", "I ")]

    async def act(self, turn: Completion) -> StepResult:
        result = await super().act(turn)
        return replace(result, restart=(*result.restart, Message("assistant", "I "))) if result.restart else result


@pytest.mark.parametrize(
    ("script", "num_turns"), [(["look", "look", "Riga"], 1), (["note 1", "look", "look", "Riga"], 2)]
)
async def test_a_fork_has_the_conversation_of_its_parent(script: list[str], num_turns: int) -> None:
    """What begins a turn is no message before it, and a rewritten conversation takes the place of the one before."""

    async def run(script: list[str], fork: Fork | None = None) -> tuple[Trajectory, list[str]]:
        engine, chat = Listening(script), Framed()
        recorder = Recorder("x", engine.generate, TOKENIZER, Sampling(99), 400, 0, chat=chat)
        found = await run_trajectory(EnvAttempt(Begun(), recorder), TASK, fork=fork)
        assert found.stop_reason is StopReason.ANSWERED, found.error
        return found, chat.before[-1]

    parent, of_parent = await run(script)
    _, of_fork = await run(script[num_turns:], (parent, num_turns, ""))
    assert of_fork == of_parent
    assert [message for message in of_parent if message.startswith("assistant")] == [
        "assistant: I look",
        "assistant: look",
    ]


@pytest.mark.parametrize("restart", [("text",), (None,)])
async def test_a_restart_that_is_no_conversation_ends_its_trajectory(restart: tuple[object]) -> None:
    class Wrong(Notes):
        async def act(self, turn: Completion) -> StepResult:
            return StepResult(restart=restart)  # type: ignore[arg-type]

    engine = Listening(["a"])
    found = await run_trajectory(
        EnvAttempt(Wrong(), Recorder("x", engine.generate, TOKENIZER, Sampling(9), 99, 0)), TASK
    )
    assert found.stop_reason is StopReason.ENV_ERROR
    assert "Wrong.act (" in found.error and f") gave restart={restart!r}, expected a tuple of Message" in found.error


@pytest.mark.parametrize("prompt", [[], None, ["Where?"]])
async def test_a_prompt_that_is_none_ends_its_trajectory(prompt: object) -> None:
    class Wrong(Notes):
        async def reset(self, task: Task) -> list[Message]:
            return prompt  # type: ignore[return-value]

    engine = Listening(["a"])
    found = await run_trajectory(
        EnvAttempt(Wrong(), Recorder("x", engine.generate, TOKENIZER, Sampling(9), 99, 0)), TASK
    )
    assert found.stop_reason is StopReason.ENV_ERROR
    assert f"Wrong.reset ({__file__}, line " in found.error
    assert f") returned {prompt!r}, expected a list of at least one Message" in found.error


async def test_a_search_of_a_tool_with_other_arguments_is_measured() -> None:
    class Other(Notes):
        async def act(self, turn: Completion) -> StepResult:
            calls = tuple(ToolCall("search", {"text": text}) for text in ("Riga", "riga", "Oslo"))
            return StepResult(terminated=True, calls=calls)

    engine = Listening(["a"])
    found = await run_trajectory(
        EnvAttempt(Other(), Recorder("x", engine.generate, TOKENIZER, Sampling(9), 99, 0)), TASK
    )
    assert (found.metrics["queries"], found.metrics["repeated_queries"]) == (3.0, 1.0)


async def test_measures_of_an_environment_are_metrics_and_must_be_finite() -> None:
    class Measured(Notes):
        measures: ClassVar = {
            "notes": lambda t: float(sum(turn.action == "note" for turn in t.turns)),
            "em": lambda t: 0.5,
        }

    class Broken(Notes):
        measures: ClassVar = {"odd": lambda t: np.nan}

    async def metrics(env: TextEnv) -> Trajectory:
        engine = Listening(["note 1", "Riga"])
        return await run_trajectory(
            EnvAttempt(env, Recorder("x", engine.generate, TOKENIZER, Sampling(9), 99, 0)), TASK
        )

    found = await metrics(Measured())
    assert (found.metrics["notes"], found.metrics["em"], found.metrics["f1"]) == (1.0, 0.5, 1.0)
    broken = await metrics(Broken())
    assert broken.stop_reason is StopReason.ENV_ERROR
    assert re.search(r"the measure odd of .*Broken \(.*line \d+\) gave nan, expected a finite number", broken.error)
