"""Images in the requests of agents: recorded as placeholders, compared by their bytes, and refused with a sentence."""

from __future__ import annotations

import io
import json
import random
import threading
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from fakes import OnePassage
from gateway_world import TOOL, Client
from gateway_world import play as play_in
from openai import BadRequestError
from test_evaluation_serving import ask, serving
from vision_world import TEXTS, page

from ragr1_actors.core.content import Image
from ragr1_actors.core.images import data_url, size_of
from ragr1_actors.core.types import Message, Record, StopReason, Task, TokenKind, Trajectory
from ragr1_actors.planning.tiny_policy import make_tiny_policy, make_tiny_vision_policy
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.rollout.gateway import server
from ragr1_actors.rollout.gateway.agents import AgentSession
from ragr1_actors.rollout.gateway.messages import MAX_TEXT_BYTES, ApiError, ChatRequest, in_front, read_request

HERE = __name__
PAGE, OTHER = page(), page(40, 8, seed=1)
SPELLED = "<|vision_start|><|image_pad|>"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    directory = tmp_path_factory.mktemp("seeing")
    make_tiny_vision_policy(directory, TEXTS, seed=0, hidden_size=32, num_layers=1, vision_layers=1)
    return PolicyTokenizer(directory)


async def play(tokenizer: PolicyTokenizer, agent: Any, scripts: dict[str, list[str]], **more: Any) -> Trajectory:
    """The attempt of an agent; its policy's template knows no tools, so the prompt explains them."""
    (found,) = await play_in(tokenizer, f"{HERE}:{agent.__name__}", scripts, policy={"chat_format": "hermes"}, **more)
    return found


def shown(*parts: str | Image) -> list[dict[str, Any]]:
    """The content of a request, as OpenAI's clients write it."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part), "detail": "auto"}}
        for part in parts
    ]


def seen(found: Trajectory) -> list[tuple[Image, TokenKind, str]]:
    """Each image with the kind of its placeholders and the row that it is in."""
    rows = [next(number for number, row in enumerate(found.rows) if one.start < row.stop) for one in found.images]
    kinds = [set(found.kinds[one.start : one.start + one.num_tokens].tolist()) for one in found.images]
    return [(one.image, *map(TokenKind, kind), row) for one, kind, row in zip(found.images, kinds, rows, strict=True)]


def check_places(tokenizer: PolicyTokenizer, found: Trajectory) -> None:
    """Each image has its own placeholders in the row, between the tokens that begin and end an image."""
    for one in found.images:
        expected = tokenizer.image_ids(one.image)
        assert found.token_ids[one.start - 1 : one.start + one.num_tokens + 1].tolist() == expected


async def looks(task: Task, session: AgentSession) -> str:
    client = Client(session)
    client.messages = [{"role": "user", "content": shown(f"{SPELLED} Read ", "this:", PAGE, task.question)}]
    await client.ask(tools=[TOOL])
    client.messages.append({"role": "user", "content": shown(OTHER, "closer")})
    await client.ask(tools=[TOOL])
    client.messages = [{"role": "user", "content": shown(PAGE)}]
    await client.ask(tools=[TOOL])
    return "Riga"


async def test_images_of_requests_are_placeholders_in_their_rows(seeing: PolicyTokenizer) -> None:
    found = await play(seeing, looks, {"t/0": ["one", "two"], "t/0~1": ["three"]})
    assert (found.stop_reason, found.error) == (StopReason.ANSWERED, "")
    assert seen(found) == [(PAGE, TokenKind.PROMPT, 0), (OTHER, TokenKind.OBSERVATION, 0), (PAGE, TokenKind.PROMPT, 1)]
    check_places(seeing, found)
    placeholder = seeing.image_ids(PAGE)[1]
    assert (found.token_ids == placeholder).sum() == sum(one.num_tokens for one in found.images)


async def exchanges(task: Task, session: AgentSession) -> str:
    client = Client(session)
    client.messages = [{"role": "user", "content": shown("Read", PAGE)}]
    await client.ask()
    client.messages[0]["content"] = shown("Re", "ad", PAGE, "")  # the same content in other parts
    client.messages.append({"role": "user", "content": "Again."})
    await client.ask()
    client.messages[0]["content"] = shown("Read", OTHER)  # another history, though its texts are the same
    client.messages.append({"role": "user", "content": "Again."})
    await client.ask()
    return "Riga"


async def test_histories_with_other_images_are_other_conversations(seeing: PolicyTokenizer) -> None:
    found = await play(seeing, exchanges, {"t/0": ["one", "two"], "t/0~1": ["three"]})
    assert (found.stop_reason, len(found.rows)) == (StopReason.ANSWERED, 2), found.error
    assert seen(found) == [(PAGE, TokenKind.PROMPT, 0), (OTHER, TokenKind.PROMPT, 1)]


def test_images_of_systems_messages_stay_when_they_are_joined() -> None:
    messages = [Message("system", ("See", PAGE)), Message("system", "Be brief."), Message("user", "?")]
    assert in_front(messages) == [Message("system", ("See", PAGE, "\n\n", "Be brief.")), Message("user", "?")]


# -- refused -----------------------------------------------------------------------------------------------------------


def _file(mode: str = "RGB", kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.new(mode, (24, 16)).save(file, kind, **options)
    return file.getvalue()


FRAMES = {"save_all": True, "append_images": [PIL.Image.new("RGB", (24, 16), "red")]}
REFUSED = [
    ("https://example.org/page.png", "got 'https://example.org/page.png', expected data:image/png;base64,"),
    ("data:image/png;base64,AAA", "got a data: URL that is no base64: Incorrect padding"),
    ("data:image/png;base64,Um*lnYQ==", "got a data: URL that is no base64: Only base64 data is allowed"),
    ("data:text/plain;base64,UmlnYQ==", "expected data:image/png;base64,"),
    ("data:image/png;base64,\u00e9", "got a data: URL that is no base64: string argument should contain only ASCII"),
    ("", 'expected {"url": "data:image/png;base64,.."}'),
    (data_url(Image(b"Riga", "image/png")), "cannot be read as an image in PNG, JPEG or WebP; save it as one"),
    (data_url(Image(b"Riga" * 3_000_000, "image/png")), "cannot be read as an image"),  # 15 MiB in base64
    (data_url(Image(PAGE.data[:-40], "image/png")), "cannot be read as an image in PNG, JPEG or WebP: "),
    (data_url(Image(_file("CMYK", "JPEG"), "image/jpeg")), "got an image in the colours CMYK, expected grey or RGB"),
    (data_url(Image(_file("RGB", "WEBP", **FRAMES), "image/webp")), "got an animation of 2 frames"),
]


async def is_refused(task: Task, session: AgentSession) -> str:
    client = Client(session)
    told = []
    for url, _ in REFUSED:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        told.append(await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}))
    for role, content in (("user", [{"type": "image_url"}]), ("assistant", shown(PAGE)), ("user", [{"type": "audio"}])):
        messages = [{"role": "user", "content": "?"}, {"role": role, "content": content}, *client.messages]
        told.append(await client.post("/v1/chat/completions", {"messages": messages}))
    await client.ask()
    return "\n".join(f"{status} {found['error']['message']}" for status, found in told)


async def test_images_that_cannot_be_read_are_refused_and_the_attempt_continues(seeing: PolicyTokenizer) -> None:
    found = await play(seeing, is_refused, {"t/0": ["Riga"]})
    assert found.stop_reason is StopReason.ANSWERED, found.error
    lines = found.answer.splitlines()
    for line, (_, problem) in zip(lines, REFUSED, strict=False):
        assert line.startswith("400 messages: image_url: ") and problem in line
    assert [line.partition(", expected")[0] for line in lines[len(REFUSED) :]] == [
        "400 messages: image_url: got None",
        "400 messages: got a part of type image_url of the assistant",
        "400 messages: got a part of type audio",
    ]
    assert len(found.turns) == 1 and not found.images


async def asks_on(task: Task, session: AgentSession) -> str:
    client = Client(session)
    await client.ask()
    body = {"messages": [*client.messages, {"role": "user", "content": shown(PAGE)}]}
    _, found = await client.post("/v1/chat/completions", body)
    client.messages = [{"role": "user", "content": "Then without."}]
    await client.ask()
    return str(found["error"]["message"])


async def test_a_policy_without_vision_refuses_images_and_records_none(tmp_path: Path) -> None:
    make_tiny_policy(tmp_path, TEXTS, seed=0, vocab_size=400, hidden_size=32, num_layers=1, num_heads=2)
    found = await play(PolicyTokenizer(tmp_path), asks_on, {"t/0": ["one"], "t/0~1": ["two"]})
    assert "reads none here; take a model of the types qwen2_5_vl, qwen3_vl" in found.answer
    assert [turn.completion_text for turn in found.turns] == ["one", "two"] and not found.images
    assert TokenKind.OBSERVATION not in found.kinds


# -- searches ----------------------------------------------------------------------------------------------------------


class OnePage(OnePassage):
    """Finds a page for each query."""

    async def search(self, queries: list[str], k: int) -> list[list[Record]]:
        return [[Record("7", "Ana", "A caption.", 0.5, image=PAGE)] for _ in queries]


async def searches(task: Task, session: AgentSession) -> str:
    client = Client(session)
    _, found = await client.post("/retrieve", {"queries": ["Ana"], "topk": 1})
    ((document,),) = found["result"]
    client.messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": document["image"]}}]}]
    await client.ask()
    return str(document["text"])


async def test_an_agent_shows_the_policy_a_page_that_it_found(seeing: PolicyTokenizer) -> None:
    found = await play(seeing, searches, {"t/0": ["Riga"]}, retriever=OnePage())
    assert (found.answer, seen(found)) == ("A caption.", [(PAGE, TokenKind.PROMPT, 0)])
    assert found.calls[0].records[0].image == PAGE


async def test_a_small_file_of_many_pixels_is_not_decoded_in_the_event_loop(
    seeing: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noting(body: bytes) -> ChatRequest:
        threads.append(threading.current_thread())
        return read_request(body)

    monkeypatch.setattr(server, "read_request", noting)
    await play(seeing, looks, {"t/0": ["one", "two"], "t/0~1": ["three"]})
    assert len(threads) == 3 and threading.main_thread() not in threads


def test_a_plain_address_and_too_much_text_are_refused_with_a_sentence() -> None:
    part = {"type": "image_url", "image_url": data_url(PAGE)}
    with pytest.raises(ApiError, match=r"image_url: got 'data:image/png;base64,.*, expected \{\"url\": \"data:image"):
        read_request(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
    too_much = "bytes without images, expected at most 8,388,608"
    for text in ("x" * MAX_TEXT_BYTES, data_url(Image(bytes(MAX_TEXT_BYTES), "image/png"))):
        content = [{"type": "text", "text": text}, *shown(PAGE)]
        with pytest.raises(ApiError, match=too_much):
            read_request(json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
    with pytest.raises(ApiError, match=too_much):  # before it is parsed
        read_request(b'{"messages": [' + b"[]," * MAX_TEXT_BYTES)
    large = shown(Image(random.Random(0).randbytes(9 * 2**20), "image/png"))  # some clients write / as \/
    body = json.dumps({"messages": [{"role": "user", "content": large}]}).replace("/", "\\/")
    with pytest.raises(ApiError, match="cannot be read as an image in PNG"):
        read_request(body.encode())


# -- a served policy ---------------------------------------------------------------------------------------------------

CROP = '<tool_call>\n{"name": "crop", "arguments": {"box": [0, 0, 1, 0.5]}}\n</tool_call>'


async def test_a_served_policy_reads_and_crops_the_images_of_a_conversation(seeing: PolicyTokenizer) -> None:
    tools = {"env": "tools", "tools": ["crop"], "max_turns": 3}
    asked = {"role": "user", "content": shown(OTHER, PAGE, "Where was Ana born?")}
    async with serving(seeing, tools, [CROP, "Riga"], policy={"chat_format": "hermes"}) as (client, engine):
        found = [await ask(client, asked), await ask(client, asked)]
    assert [one.choices[0].message.content for one in found] == ["Riga", "Riga"]
    first, second, *again = engine.shown
    assert [one.image for one in first] == [OTHER, PAGE] and [one.image for one in second][:2] == [OTHER, PAGE]
    cut = second[2].image
    assert size_of(cut) == (24, 8)
    assert [[one.image for one in images] for images in again] == [[OTHER, PAGE], [OTHER, PAGE, cut]]


async def test_a_served_policy_that_answers_questions_refuses_images(seeing: PolicyTokenizer) -> None:
    async with serving(seeing, {"env": "search", "max_turns": 2}, ["Riga"]) as (client, _):
        with pytest.raises(BadRequestError, match="the policy answers a question in text; leave images out"):
            await ask(client, {"role": "user", "content": shown(PAGE)})
