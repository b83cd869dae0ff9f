"""Images from an environment to token ids and to a chat endpoint, and policies and engines that take none."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fakes import ByteTokenizer, OnePassage
from http_stub import stub_server
from vision_world import TEXTS, page

from envs.base import EnvContext, StepResult, TextEnv
from ragr1_actors.core.config import EnvironmentSettings, ModelSettings, SamplerConfig
from ragr1_actors.core.content import Image
from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.types import Completion, Message, Sampling, StopReason, Task, TokenKind, Trajectory
from ragr1_actors.planning.tiny_policy import make_tiny_policy, make_tiny_vision_policy
from ragr1_actors.rollout.chat_format import ChatFormat, TagsFormat, Template, TemplateFormat
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.engines.chat_client import as_sent, open_models
from ragr1_actors.rollout.engines.endpoint_engine import EndpointEngine, EndpointTokenizer
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.rollout.recorder import EnvAttempt, Fork, Reading, Recorder, run_trajectory

PAGE, OTHER = page(), page(40, 8, seed=1)
TASK = Task("t/0", "What <|image_pad|>?", ("Riga",))
IMAGE = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
SPELLED = "a <|vision_start|><|image_pad|> b"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    directory = tmp_path_factory.mktemp("seeing")
    make_tiny_vision_policy(directory, TEXTS, seed=0, hidden_size=32, num_layers=1, vision_layers=1)
    return PolicyTokenizer(directory)


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    directory = tmp_path_factory.mktemp("blind")
    make_tiny_policy(directory, TEXTS, seed=0, vocab_size=400, hidden_size=32, num_layers=1, num_heads=2)
    return PolicyTokenizer(directory)


class Pages(TextEnv):
    """Shows a page at the beginning, more after the first turn, and rewrites the conversation after the second."""

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        self._turns = 0

    async def reset(self, task: Task) -> list[Message]:
        return [Message("user", (SPELLED, PAGE, task.question))]

    async def act(self, turn: Completion) -> StepResult:
        self._turns += 1
        match self._turns:
            case 1:
                return StepResult((SPELLED, OTHER, PAGE), notice="!", action="look")
            case 2:
                return StepResult(restart=(Message("user", (OTHER, "?")),), action="look")
        return StepResult(terminated=True, action="answer", answer=turn.text)


def recorder_of(tokenizer: Any, chat: ChatFormat, turns: list[str]) -> Recorder:
    engine = ScriptedEngine({"x": turns}, tokenizer.encode)

    async def generate(*arguments: Any, images: Any = (), **options: Any) -> Completion:
        shown.append(images)
        return await engine.generate(*arguments, **options)

    shown: list[Any] = []
    recorder = Recorder("x", generate, tokenizer, Sampling(99), 400, 0, chat=chat)
    recorder.shown = shown  # type: ignore[attr-defined]
    return recorder


async def play(tokenizer: PolicyTokenizer, chat: ChatFormat, fork: Fork | None = None) -> tuple[Trajectory, list[Any]]:
    recorder = recorder_of(tokenizer, chat, ["one", "two", "three"][1 if fork else 0 :])
    env = Pages(EnvironmentSettings(), EnvContext(OnePassage(), tokenizer.encode))
    return await run_trajectory(EnvAttempt(env, recorder), TASK, fork=fork), recorder.shown  # type: ignore[attr-defined]


def check_places(tokenizer: PolicyTokenizer, found: Trajectory) -> None:
    placeholder = tokenizer.image_ids(PAGE)[1]
    places = {position for one in found.images for position in range(one.start, one.start + one.num_tokens)}
    assert places == set((found.token_ids == placeholder).nonzero()[0].tolist())
    assert {found.kinds[position] for position in places} <= {TokenKind.PROMPT, TokenKind.OBSERVATION}


@pytest.mark.engine
@pytest.mark.parametrize("name", ["tags", "template"])
async def test_images_of_a_conversation_are_placeholders_that_no_text_makes(seeing: PolicyTokenizer, name: str) -> None:
    chat = TagsFormat(seeing) if name == "tags" else TemplateFormat(seeing, "hermes")
    found, shown = await play(seeing, chat)
    assert found.stop_reason is StopReason.ANSWERED, found.error
    check_places(seeing, found)
    assert [one.image for one in found.images] == [PAGE, OTHER, PAGE, OTHER]
    assert [(one.rows, one.cols) for one in found.images] == [(2, 3), (1, 5), (2, 3), (1, 5)]
    start = found.images[3].start
    assert found.rows[1].start < start
    assert found.kinds[found.images[1].start] == TokenKind.OBSERVATION and found.kinds[start] == TokenKind.PROMPT
    text = seeing.decode(found.token_ids.tolist())
    assert text.count(IMAGE) == 2 and text.count("<|image_pad|>") > 22  # what was spelled is still there
    # an engine gets the images of its row, at their positions in it
    assert [[one.image for one in images] for images in shown] == [[PAGE], [PAGE, OTHER, PAGE], [OTHER]]
    assert shown[2][0].start == start - found.rows[1].start
    forked, _ = await play(seeing, chat, (found, 1, ""))
    assert forked.images == found.images and (forked.token_ids == found.token_ids).all()


@pytest.mark.engine
def test_a_template_that_drops_an_image_is_refused(seeing: PolicyTokenizer) -> None:
    with pytest.raises(ConfigError, match="writes 0 of 1 images, expected all of them once"):
        seeing.place(seeing.encode("a page"), [PAGE])
    with pytest.raises(DataError, match="got an image of 900 x 4 pixels, expected at most 200 to 1; crop it"):
        seeing.image_ids(page(900, 4))
    assert seeing.image_ids(page(800, 4))


@pytest.mark.engine
def test_an_image_after_a_blank_keeps_its_first_token(tmp_path: Path) -> None:
    make_tiny_vision_policy(tmp_path, ["look <b> there"] * 9, seed=0, hidden_size=32, num_layers=1, vision_layers=1)
    tokenizer = PolicyTokenizer(tmp_path)
    assert len(tokenizer.encode(" <")) == 1
    ids = tokenizer.prompt_ids([Message("user", ("page ", PAGE, PAGE, " ", OTHER, " there"))])
    assert [one.image for one in tokenizer.place(ids, [PAGE, PAGE, OTHER])] == [PAGE, PAGE, OTHER]
    assert f"page {IMAGE}{IMAGE} <|vision_start|>" in tokenizer.decode(ids)


@pytest.mark.engine
def test_messages_whose_images_are_refused_leave_the_row_as_it_was(
    seeing: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recorder_of(seeing, TagsFormat(seeing), ["one"])
    recorder.restart([Message("user", "Look.")], Reading())
    monkeypatch.setattr(seeing, "image_ids", lambda image: 2 * PolicyTokenizer.image_ids(seeing, image))
    num_tokens = recorder.num_tokens
    with pytest.raises(ConfigError, match="writes 2 of 1 images, expected all of them once"):
        recorder.add([Message("user", (PAGE,))], Reading())
    assert recorder.num_tokens == num_tokens


class TextsOnly(ScriptedEngine):
    """An engine without the method for images."""

    show = None  # type: ignore[assignment]


@pytest.mark.engine
async def test_a_policy_or_engine_without_vision_ends_only_the_attempt(
    seeing: PolicyTokenizer, blind: PolicyTokenizer
) -> None:
    found, _ = await play(blind, TagsFormat(blind))
    assert found.stop_reason is StopReason.ENV_ERROR
    assert "of the type qwen2 reads none here; take a model of the types qwen2_5_vl, qwen3_vl" in found.error
    config = SamplerConfig(environment=EnvironmentSettings(env=f"{__name__}:Pages"))
    runner = EnvRunner(config, seeing, OnePassage(), TextsOnly({"t/0#0": ["one"]}, seeing.encode))
    (found,) = (await runner.sample_group(GroupRequest("t/0", TASK, 1, 0.0))).trajectories
    assert found.stop_reason is StopReason.ENV_ERROR and "TextsOnly takes texts only" in found.error


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["seeing", "endpoint"])
async def test_an_image_that_cannot_be_decoded_ends_only_its_attempt(seeing: PolicyTokenizer, kind: str) -> None:
    tokenizer = seeing if kind == "seeing" else EndpointTokenizer()
    broken = Image(PAGE.data[:-40], "image/png")

    class Broken(Odd):
        async def act(self, turn: Completion) -> StepResult:
            return StepResult((broken,), action="look")

    recorder = recorder_of(tokenizer, TagsFormat(tokenizer), ["one"])
    found = await run_trajectory(EnvAttempt(Broken(), recorder), TASK)
    assert found.stop_reason is StopReason.ENV_ERROR and "cannot be read as an image in PNG" in found.error
    assert "Broken.act (" in found.error and "test_rollout_images.py, line" in found.error

    class BrokenPrompt(Odd):
        async def reset(self, task: Task) -> list[Message]:
            return [Message("user", ("Look:", broken))]

    found = await run_trajectory(EnvAttempt(BrokenPrompt(), recorder), TASK)
    assert found.stop_reason is StopReason.ENV_ERROR and "BrokenPrompt.reset (" in found.error


def url_of(image: Any) -> dict[str, Any]:
    (part,) = as_sent((image,))
    assert b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,")) == image.data
    return dict(part)


async def test_an_endpoint_gets_images_as_parts() -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(json.loads(await request.text())["messages"])
        return web.json_response({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]})

    async with stub_server(answer) as url:
        model = open_models({"judge": ModelSettings(url=url, model="m", max_retries=0)})["judge"]
        assert await model.chat([Message("user", ("Which?", PAGE, ""))], Sampling(8)) == "yes"
        tokenizer = EndpointTokenizer()
        engine = EndpointEngine("", tokenizer, EngineArguments(1, 400, options={"url": url, "model": "m"}))
        config = SamplerConfig(environment=EnvironmentSettings(env=f"{__name__}:Pages"))
        runner = EnvRunner(config, tokenizer, OnePassage(), engine)
        (found,) = (await runner.sample_group(GroupRequest("t/0", TASK, 1, 0.0))).trajectories
    assert found.stop_reason is StopReason.ANSWERED, found.error
    text = {"type": "text", "text": "Which?"}
    assert asked[0] == [{"role": "user", "content": [text, url_of(PAGE)]}]
    (first, *_), (_, turn, second), (third,) = asked[1:]
    assert [part["type"] for part in first["content"]] == ["text", "image_url", "text"]
    assert first["content"][1] == url_of(PAGE) and turn == {"role": "assistant", "content": "yes"}
    assert second["content"][1:3] == [url_of(OTHER), url_of(PAGE)] and second["content"][3]["text"] == "!"
    assert third["content"] == [url_of(OTHER), {"type": "text", "text": "?"}]
    assert [one.num_tokens for one in found.images] == [1, 1, 1, 1]
    assert not tokenizer.kept(found.token_ids.tolist())  # turns and images of an attempt that ended


async def test_an_agent_that_left_an_endpoint_goes_on_with_its_turns_and_images() -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if len(json.loads(await request.text())["messages"]) > 1 and not asked.is_set():
            asked.set()
            await left.wait()
        return web.json_response({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]})

    async with stub_server(answer) as url:
        tokenizer = EndpointTokenizer()
        engine = EndpointEngine("", tokenizer, EngineArguments(1, 400, options={"url": url, "model": "m"}))
        ids = tokenizer.prompt_ids([Message("user", ("Which?", PAGE, ""))])
        ids += (await engine.generate(ids, Sampling(8), request_id="a")).token_ids
        request = asyncio.create_task(engine.generate(ids, Sampling(8), request_id="a"))
        await asked.wait()
        request.cancel()
        await asyncio.wait({request})
        engine.release("a")
        left.set()
        assert len(tokenizer.kept(ids)) == 2
        ids += (await engine.generate(ids, Sampling(8), request_id="a")).token_ids
        assert len(tokenizer.kept(ids)) == 3
        engine.release("a")
        assert not tokenizer.kept(ids)


class Odd(TextEnv):
    """Shows wrong contents."""

    def __init__(self, prompt: Any = "?", result: StepResult | None = None) -> None:
        self._prompt, self._result = prompt, result or StepResult()

    async def reset(self, task: Task) -> list[Message]:
        return [Message("user", self._prompt)]

    async def act(self, turn: Completion) -> StepResult:
        return self._result


ODD: Any = (PAGE, 7)
CUT = Image(PAGE.data[:-40], "image/png")
ODD_CONTENTS: dict[str, tuple[Any, StepResult, str]] = {
    "prompt": (ODD, StepResult(), "Odd.reset .* as content, expected text, or texts and images"),
    "no prompt": (None, StepResult(), "Odd.reset .* gave None as content, expected text"),
    "observation": ("?", StepResult(observation=ODD), "Odd.act .* as observation or result, expected text, or texts"),
    "restart": ("?", StepResult(restart=(Message("user", ODD),)), "Odd.act .* as content, expected text, or texts"),
    "cut": ("?", StepResult(restart=(Message("user", (CUT,)),)), "Odd.act .* gave image .* cannot be read as an image"),
    "thin": ((page(900, 4),), StepResult(), "Odd.reset .* gave image .* 900 x 4 pixels, expected at most 200 to 1"),
}


@pytest.mark.parametrize("name", ODD_CONTENTS)
async def test_contents_are_texts_and_images_that_can_be_read(name: str) -> None:
    prompt, result, expected = ODD_CONTENTS[name]
    tokenizer = ByteTokenizer()
    recorder = Recorder("x", ScriptedEngine({"x": ["a"]}, tokenizer.encode).generate, tokenizer, Sampling(9), 400, 0)
    found = await run_trajectory(EnvAttempt(Odd(prompt, result), recorder), TASK)
    assert found.stop_reason is StopReason.ENV_ERROR and re.search(expected, found.error), found.error


@pytest.mark.engine
def test_images_of_a_prompt_are_in_their_order(seeing: PolicyTokenizer) -> None:
    messages = [Message("system", ("s", OTHER)), Message("user", ("u", PAGE), notice="!")]
    ids = [token for piece, _ in Template(seeing).prompt(messages, []) for token in piece]
    assert [one.image for one in seeing.place(ids, [OTHER, PAGE])] == [OTHER, PAGE]
