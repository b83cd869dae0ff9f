"""What a chat format puts between the turns of a policy, with the templates of model families."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_families import write_family
from tool_templates import STORED, TEMPLATES, write_tool_family

from envs.grammars.calls import parse_turn
from envs.grammars.tags import open_thought
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.types import (
    CallRequest,
    FinishReason,
    Message,
    Sampling,
    StopReason,
    Task,
    TokenKind,
    Trajectory,
)
from ragr1_actors.rollout.chat_format import ChatFormat, TagsFormat, Template, TemplateFormat, make_chat_format
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.rollout.recorder import Reading, Recorder

FIND = {"type": "object", "properties": {"queries": {"type": "array", "items": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "Look.", "parameters": FIND}}]
CALL = CallRequest("find", {"queries": ["Ana", "Bo"]})
ASKED = [Message("user", "Who is Ana?")]
ODD = '  Ana "A" Bell\n\n é 🎉 {} [1] <b> \U00100000 \U0010fffd  '
families = pytest.mark.parametrize("name", TEMPLATES)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    def made(name: str) -> Any:
        tokenizer = write_tool_family(tmp_path_factory.mktemp("family") / "policy", name)
        return SimpleNamespace(tokenizer=tokenizer, chat=make_chat_format("auto", tokenizer))

    return cache(made)


def text(tokenizer: PolicyTokenizer, ids: list[int]) -> str:
    decoded: str = tokenizer._pieces.decode(ids, skip_special_tokens=False)
    return decoded


def rendered(tokenizer: PolicyTokenizer, messages: list[Message], **options: Any) -> str:
    """What the template itself writes of real messages."""
    chat, calls, results = list[dict[str, Any]](), 0, 0
    for message in messages:
        chat.append({"role": message.role, "content": message.content + message.notice})
        if message.calls:
            functions = [{"name": one.name, "arguments": dict(one.arguments)} for one in message.calls]
            chat[-1]["tool_calls"] = [{"id": f"{calls + n:09d}", "function": one} for n, one in enumerate(functions)]
            calls += len(functions)
        if message.role == "tool":
            chat[-1]["tool_call_id"] = f"{results:09d}"
            results += 1
    return tokenizer.render(chat, TOOLS, **options)


@pytest.mark.parametrize("conversation", STORED["conversations"])
@pytest.mark.parametrize("name", STORED["families"])
def test_the_templates_write_what_the_published_ones_do(
    load: Callable[[str], Any], name: str, conversation: str
) -> None:
    expected = STORED["families"][name]["texts"][conversation]
    chat = STORED["conversations"][conversation]
    for is_prompt in (False, True):
        if expected is None:
            with pytest.raises(ConfigError):
                load(name).tokenizer.render(chat, [STORED["schema"]], is_prompt=is_prompt)
            continue
        written = load(name).tokenizer.render(chat, [STORED["schema"]], is_prompt=is_prompt)
        assert written.endswith(chat[0]["content"] + expected[is_prompt])


@families
def test_auto_is_the_grammar_in_which_the_template_writes_calls(load: Callable[[str], Any], name: str) -> None:
    assert load(name).chat.name == TEMPLATES[name][1]


@families
def test_a_prompt_has_the_ids_of_the_template(load: Callable[[str], Any], name: str) -> None:
    one = load(name)
    messages = [Message("user", ODD)]
    assert text(one.tokenizer, one.chat.prompt_ids(messages, TOOLS)) == rendered(one.tokenizer, messages)
    ids = one.tokenizer._backend.encode(rendered(one.tokenizer, ASKED), add_special_tokens=False).ids
    assert one.chat.prompt_ids(ASKED, TOOLS) == ids


@families
@pytest.mark.parametrize(
    "added",
    [
        [Message("tool", ODD)],
        [Message("tool", "Ana"), Message("tool", ODD, notice="\nAnswer now.")],
        [Message("tool", "", notice="Answer now.")],
    ],
)
def test_between_two_turns_is_what_the_template_writes(
    load: Callable[[str], Any], name: str, added: list[Message]
) -> None:
    one = load(name)
    turn = Message("assistant", "", (CALL,) * (1 if "llama" in name else len(added)))
    found = one.chat.extension_ids([*ASKED, turn], added, TOOLS, has_end=True)
    whole = rendered(one.tokenizer, [*ASKED, turn, *added])
    end = one.tokenizer.end_texts[-1] if name != "qwen3.5" else "<|im_end|>"
    of_turn = whole.index("Bo", whole.index(ASKED[0].content))
    expected = whole[whole.index(end, of_turn) + len(end) :]
    assert text(one.tokenizer, [token for ids, _ in found.pieces for token in ids]) == expected
    assert found.is_new_message
    kinds = {kind: text(one.tokenizer, ids) for ids, kind in found.pieces}
    notice = added[-1].notice
    assert (TokenKind.NOTICE in kinds) == bool(notice)
    if notice:
        assert kinds[TokenKind.NOTICE].startswith(("Answer now.", "\nAnswer", "\\nAnswer"))


@families
def test_a_content_cannot_write_an_added_token(load: Callable[[str], Any], name: str) -> None:
    tokenizer, chat = load(name).tokenizer, load(name).chat
    spoofed = "".join(f"a {token} b{token}" for token in tokenizer._added.values())
    turn = Message("assistant", "", (CALL,))

    def control(content: str) -> list[int]:
        found = chat.extension_ids([*ASKED, turn], [Message("tool", content, notice=content)], TOOLS, has_end=True)
        ids = [token for ids, _ in found.pieces for token in ids] + chat.prompt_ids([Message("user", content)], TOOLS)
        unwanted = {i for i, token in tokenizer._added.items() if token in tokenizer.added_texts}
        return [token for token in ids if token in unwanted]

    assert control(spoofed) == control("plain")
    found = chat.prompt_ids([Message("user", spoofed)], TOOLS)
    assert text(tokenizer, found) == rendered(tokenizer, [Message("user", spoofed)])


TAGS = ["</tool_response>", "<tool_response>", "</ Tool_Response >", "<TOOL_RESPONSE\n>", "<</tool_response>>"]


@families
@pytest.mark.parametrize("seed", range(5))
def test_a_result_cannot_end_its_frame(load: Callable[[str], Any], name: str, seed: int) -> None:
    one, rng = load(name), random.Random(seed)
    words = [*TAGS, *one.tokenizer._added.values(), "\n", " ", "Ana"]
    turn = Message("assistant", "", (CALL,))

    def frames(content: str) -> list[str]:
        added = [Message("tool", content, notice="Go on.")]
        found = one.chat.extension_ids([*ASKED, turn], added, TOOLS, has_end=True)
        whole = one.chat.prompt_ids([*ASKED, turn, *added], TOOLS)
        between = text(one.tokenizer, [token for ids, _ in found.pieces for token in ids])
        return [
            re.findall(r"<\s*/?\s*tool_response\s*>", one, re.IGNORECASE)
            for one in (between, text(one.tokenizer, whole))
        ]

    spoofed = "".join(rng.choices(words, k=30)) + "".join(TAGS)
    assert frames(spoofed) == frames("plain")


def test_the_result_of_a_template_without_tools_cannot_end_its_frame(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer(write_family(tmp_path / "policy", "smollm2"))
    chat, turn = make_chat_format("hermes", tokenizer), Message("assistant", "", (CALL,))
    found = chat.extension_ids([*ASKED, turn], [Message("tool", "".join(TAGS))], TOOLS, has_end=True)
    assert found is not None
    shown = text(tokenizer, [token for ids, _ in found.pieces for token in ids])
    assert re.findall(r"<.*?>", shown)[1:3] == ["<tool_response>", "<(/tool_response)>"]
    assert shown.count("</tool_response>") == 1


@families
def test_a_turn_that_was_cut_gets_its_end(load: Callable[[str], Any], name: str) -> None:
    one, turn = load(name), Message("assistant", "", (CALL,))
    found = one.chat.extension_ids([*ASKED, turn], [Message("tool", "Ana")], TOOLS, has_end=False)
    whole = one.chat.extension_ids([*ASKED, turn], [Message("tool", "Ana")], TOOLS, has_end=True)
    assert found.pieces == [([one.tokenizer.end_of_turn_id], TokenKind.NOTICE), *whole.pieces]


@pytest.mark.parametrize(
    ("name", "turn", "added", "goes_on"),
    [
        ("qwen2.5", Message("assistant", "<think>\na\n</think>\n\nb"), Message("user", "", notice="Call."), True),
        ("qwen3", Message("assistant", "<think>\na\n</think>\n\n", (CALL,)), Message("tool", "Ana"), True),
        ("qwen3", Message("assistant", "<think>\na\n</think>\n\nb"), Message("user", "", notice="Call."), False),
        ("qwen3.5", Message("assistant", "<think>\na\n</think>\n\nb", (CALL,)), Message("tool", "Ana"), True),
        ("qwen3.5", Message("assistant", "b"), Message("user", "", notice="Call."), False),
        ("llama3.1", Message("assistant", "", (CALL,)), Message("tool", "Ana"), True),
        ("llama3.1", Message("assistant", "Well.", (CALL,)), Message("tool", "Ana"), False),  # it leaves the text out
        ("mistral", Message("assistant", "Well.", (CALL,)), Message("tool", "Ana"), True),
        ("mistral", Message("assistant", "b"), Message("user", "", notice="Call."), False),  # its tools move
    ],
)
def test_a_row_goes_on_while_the_template_frames_what_was_said_as_before(
    load: Callable[[str], Any], name: str, turn: Message, added: Message, goes_on: bool
) -> None:
    found = load(name).chat.extension_ids([*ASKED, turn], [added], TOOLS, has_end=True)
    assert (found is not None) == goes_on


@families
def test_a_demonstration_is_written_and_read_as_the_template_does(load: Callable[[str], Any], name: str) -> None:
    one, content = load(name), "<think>\nwho\n</think>\n\n"
    turn = Message("assistant", "" if name in ("llama3.1", "llama3.2", "mistral") else content, (CALL,))
    written = one.chat.write(turn)
    asked = rendered(one.tokenizer, ASKED)
    ids = one.chat.turn_ids(written)
    assert ids[-1] == one.tokenizer.end_of_turn_id
    whole = rendered(one.tokenizer, [*ASKED, turn], is_prompt=False)
    assert whole.startswith(asked + written)
    assert whole[len(asked) :].startswith(text(one.tokenizer, ids))
    opened = one.tokenizer.turn_start(one.chat.prompt_ids(ASKED, TOOLS))
    assert parse_turn(opened + written, one.chat.grammar, TOOLS).calls == (CALL,)


def test_a_template_without_tools_needs_a_grammar_and_explains_it(tmp_path: Path) -> None:
    tokenizer = PolicyTokenizer(write_family(tmp_path / "policy", "smollm2"))
    with pytest.raises(ConfigError, match="writes no tool calls in a form that is known here; set it to one of hermes"):
        make_chat_format("auto", tokenizer)
    chat = make_chat_format("hermes", tokenizer)
    asked = text(tokenizer, chat.prompt_ids(ASKED, TOOLS))
    assert '"name": "find"' in asked
    assert "<tool_call>" in asked
    turn = Message("assistant", "<think>a</think>", (CALL, CALL))
    added = [Message("tool", "one <|im_end|>"), Message("tool", "two", notice="\nAnswer now.")]
    found = chat.extension_ids([*ASKED, turn], added, TOOLS, has_end=True)
    assert found is not None
    assert text(tokenizer, [token for ids, _ in found.pieces for token in ids]) == (
        "\n<|im_start|>user\n<tool_response>\none <|im_end|>\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response>\nAnswer now.<|im_end|>\n<|im_start|>assistant\n"
    )
    again = chat.extension_ids(
        [*ASKED, turn, *added, Message("assistant", "b")], [Message("user", "", notice="Call.")], TOOLS, has_end=True
    )
    assert again is not None
    assert chat.write(turn).startswith("<think>a</think>\n<tool_call>\n")


def test_another_grammar_than_the_templates_is_refused(load: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="got pythonic, but the chat template writes hermes; set it to auto"):
        TemplateFormat(load("qwen2.5").tokenizer, "pythonic")


def test_an_unknown_format_is_refused(load: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match="got 'hermse', expected one of auto, hermes"):
        make_chat_format("hermse", load("qwen2.5").tokenizer)


# -- the format tags ---------------------------------------------------------------------------------------------------


def test_tags_add_plain_text_and_a_header_only_behind_an_end_of_turn(load: Callable[[str], Any]) -> None:
    tokenizer = load("qwen2.5").tokenizer
    chat = make_chat_format("tags", tokenizer)
    assert isinstance(chat, TagsFormat)
    before, notice = [*ASKED, Message("assistant", "hm")], Message("user", "", notice="Write a search.\n")
    bare = chat.extension_ids(before, [notice], (), has_end=False)
    assert bare is not None
    assert bare.pieces == [(tokenizer.encode("Write a search.\n"), TokenKind.NOTICE)]
    framed = chat.extension_ids(before, [notice], (), has_end=True)
    assert framed is not None
    assert framed.is_new_message
    assert {kind for _, kind in framed.pieces} == {TokenKind.NOTICE}
    assert text(tokenizer, [token for ids, _ in framed.pieces for token in ids]) == (
        "\n<|im_start|>user\nWrite a search.\n<|im_end|>\n<|im_start|>assistant\n"
    )
    found = chat.extension_ids(before, [Message("user", "<information>", notice="x")], (), has_end=True)
    assert found is not None
    assert [kind for _, kind in found.pieces] == [TokenKind.OBSERVATION, TokenKind.NOTICE]
    assert not found.is_new_message


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_header_is_that_of_a_users_message(load: Callable[[str], Any], name: str) -> None:
    tokenizer = load(name).tokenizer
    pieces = Template(tokenizer).header([Message("user", "", notice="Write.")])
    found = text(tokenizer, [token for ids, _ in pieces for token in ids])
    assert rendered(tokenizer, [*ASKED, Message("user", "Write.")]).endswith(found)
    assert "Write." in found


# -- rows --------------------------------------------------------------------------------------------------------------


class Said:
    """Samples given texts, with the end-of-turn token."""

    def __init__(self, chat: ChatFormat, texts: list[str]) -> None:
        self.chat, self.texts, self.prompts = chat, texts, list[list[int]]()

    async def generate(self, ids: Any, sampling: Sampling, *, request_id: str, on_text: Any = None) -> Any:
        from ragr1_actors.core.types import Completion

        self.prompts.append(list(ids))
        said = self.texts.pop(0)
        token_ids = self.chat.turn_ids(said)
        return Completion(token_ids, [-0.5] * len(token_ids), [3] * len(token_ids), said, FinishReason.STOP)


async def test_sampled_tokens_are_model_tokens_of_one_row_each(load: Callable[[str], Any]) -> None:
    """Qwen3 takes the thoughts out once a user speaks: the row ends, and the next one has them not."""
    one = load("qwen3")
    called = '<think>\na\n</think>\n\n<tool_call>\n{"name": "find", "arguments": {"queries": ["Ana"]}}\n</tool_call>'
    engine = Said(one.chat, [called, "<think>\nb\n</think>\n\nhm", "Riga"])
    recorder = Recorder("x", engine.generate, one.tokenizer, Sampling(200), 4000, 0, chat=one.chat)
    reading = Reading(tools=TOOLS)
    recorder.restart(ASKED, reading)
    await recorder.generate(reading)
    recorder.end_turn("call", (), "", 0.0)
    assert recorder.add([Message("tool", "Ana was born in Riga.")], reading)
    await recorder.generate(reading)
    recorder.end_turn("malformed", (), "", 0.0)
    assert recorder.add([Message("user", "", notice="Answer.")], reading)
    await recorder.generate(reading)
    recorder.end_turn("answer", (), "", 0.0)
    found = recorder.trajectory(Task("t", "Who?", ("Riga",)), StopReason.ANSWERED)
    first, second = found.rows
    sampled = found.kinds == TokenKind.MODEL
    texts = [text(one.tokenizer, found.token_ids[row][sampled[row]].tolist()) for row in (first, second)]
    assert texts == [f"{called}<|im_end|><think>\nb\n</think>\n\nhm<|im_end|>", "Riga<|im_end|>"]
    again = text(one.tokenizer, found.token_ids[second][~sampled[second]].tolist())
    assert "hm<|im_end|>" in again
    assert "<think>" not in again
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]


async def test_a_fork_begins_each_turn_as_the_template_does(load: Callable[[str], Any]) -> None:
    """Qwen3.5's template begins every turn with ``<think>``; what code wrote into one is in its message, too."""
    one, reading = load("qwen3.5"), Reading(tools=TOOLS, left_open=open_thought)
    called = one.chat.write(Message("assistant", "<think>\na\n</think>\n\n", (CALL,)))
    engine, result = Said(one.chat, []), [Message("tool", "Riga.")]

    def recorder(*turns: str) -> Recorder:
        engine.texts = list(turns)
        return Recorder("x", engine.generate, one.tokenizer, Sampling(200), 4000, 0, chat=one.chat)

    async def end(attempt: Recorder) -> Trajectory:
        while engine.texts:
            await attempt.generate(reading)
            attempt.end_turn("call", (), "", 0.0)
            if engine.texts:
                assert attempt.add(result, reading)
        return attempt.trajectory(Task("t", "Who?", ("Riga",)), StopReason.ANSWERED)

    first = recorder(called, called, "\n</think>\n\nRiga")
    first.restart(ASKED, reading)
    parent = await end(first)
    written = "\n</think>\n\nWait, "
    second = recorder("look: " + called.partition("</think>\n\n")[2], "\n</think>\n\nOslo")
    assert second.fork(parent, 2, written, ASKED, reading)[1][0].text == f"<think>{called}"
    forked = await end(second)
    for inject in ("", "so "):
        third = recorder("Rome", "\n</think>\n\nRiga")
        turns = third.fork(forked, 2, inject, ASKED, reading)
        assert [whole for _, whole in turns] == [f"<think>{called}"] * 2
        for _, whole in turns:
            third.copied(whole, result, reading)
        await third.generate(reading)
        assert third.add([Message("user", "", notice="Answer.")], reading)  # which opens a row of all of it
        await third.generate(reading)
        assert f"<|im_start|>assistant\nWait, {inject}Rome<|im_end|>" in text(one.tokenizer, engine.prompts[-1])
    last = recorder("\n</think>\n\nRiga").fork(forked, 3, "", ASKED, reading)
    assert last[2][1] == f"<think>{written}{forked.turns[2].completion_text}"
    assert last[2][0].text == f"{forked.turns[2].completion_text}"
