"""The tools ``crop`` and ``zoom``, a search that finds images, and tools that return images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vision_world import TEXTS, page

from envs.base import EnvContext
from envs.grammars.calls import GRAMMARS
from envs.search import SearchEnv
from envs.tools.env import ToolEnv
from ragr1_actors.core.config import EnvironmentSettings, SamplerConfig
from ragr1_actors.core.content import Content, Image, images_of, text_of
from ragr1_actors.core.images import decoded, size_of
from ragr1_actors.core.types import CallRequest, Completion, FinishReason, StopReason, Task, TokenKind
from ragr1_actors.planning.tiny_policy import make_tiny_vision_policy
from ragr1_actors.rollout.engines.base import PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from retrieval.base import Passage

PAGE, OTHER = page(40, 20), page(30, 30, seed=1)
WRITE = GRAMMARS["hermes"].write
TASK = Task("t", "What is on it?", ("Riga",))


class Pages:
    """Finds a passage with a picture and one without."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [[Passage("p", "Page 1", "its caption", 1.0, PAGE), Passage("q", "Text", "no picture", 0.5)]]


def both(count: int) -> object:
    """Return some images.

    Args:
        count: Number of them.
    """
    return ("here:", *[OTHER] * count)


def env_of(seen: list[Image]) -> ToolEnv:
    keys = {"tools": ["search", "crop", "zoom", f"{__name__}:both"], "max_turns": 9}
    context = EnvContext(Pages(), list, parser=GRAMMARS["hermes"].parser, seen=seen)  # type: ignore[arg-type]
    return ToolEnv(EnvironmentSettings.model_validate(keys), context)


async def answer(env: ToolEnv, name: str, **arguments: Any) -> Content:
    text = WRITE([CallRequest(name, arguments)])
    result = await env.act(Completion([], [], [], text, FinishReason.STOP))
    (content,) = result.results
    assert result.calls[0].result == ("" if name == "search" else text_of(content))
    return content


async def test_a_part_of_an_image_that_was_seen_is_the_result_of_a_call() -> None:
    env = env_of([PAGE, OTHER])
    (part,) = images_of(await answer(env, "crop", box=[0.5, 0, 1, 0.5], image=1))
    assert (np.asarray(decoded(part)) == np.asarray(decoded(PAGE))[:10, 20:]).all()
    (newest,) = images_of(await answer(env, "crop", box=[0, 0, 1, 1]))  # of the part
    assert newest == part
    (near,) = images_of(await answer(env, "zoom", x=0.9, y=0.5, factor=4, image=2))
    assert size_of(near) == (30, 30)  # a quarter of each side, as large as the image
    assert images_of(await answer(env, "both", count=2)) == [OTHER, OTHER]


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("crop", {"box": [0, 0, 1.2, 1]}, "is not in the image: expected [left, top, right, bottom]"),
        ("crop", {"box": [0.5, 0, 0.2, 1]}, "is not in the image"),
        ("crop", {"box": [0, 0, 1]}, "The arguments of crop are wrong"),
        ("crop", {"box": [0, 0, 1, 1], "image": 2}, "There is no image 2: 1 were seen."),
        ("crop", {"box": [0, 0, 1, 1], "image": 0}, "There is no image 0"),
        ("zoom", {"x": 2, "y": 0, "factor": 2}, "The point [2, 0] at the factor 2 is not in the image"),
        ("zoom", {"x": 0, "y": 0, "factor": 99}, "1 <= factor <= 16"),
    ],
)
async def test_a_wrong_part_is_a_result_that_the_policy_reads(tool: str, arguments: dict[str, Any], said: str) -> None:
    content = await answer(env_of([PAGE]), tool, **arguments)
    assert isinstance(content, str) and said in content


async def test_a_part_that_cannot_be_shown_does_not_end_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = page(250, 4)
    assert "of 250 x 1 pixels is too thin" in text_of(await answer(env_of([wide]), "crop", box=[0, 0, 1, 0.2]))
    assert images_of(await answer(env_of([wide]), "crop", box=[0, 0, 0.5, 0.2]))
    assert size_of(wide) == (250, 4)  # it was checked when it was seen
    monkeypatch.setattr("ragr1_actors.core.images.MAX_BYTES", 500)  # a part is a PNG, also of a JPEG
    assert "is too large to be shown" in text_of(await answer(env_of([wide]), "zoom", x=0.5, y=0.5, factor=1))


async def test_without_an_image_there_is_nothing_to_cut() -> None:
    assert await answer(env_of([]), "crop", box=[0, 0, 1, 1]) == "There is no image 0: 0 were seen."


async def test_a_search_shows_the_pictures_of_its_passages() -> None:
    env = env_of(seen := [])
    content = await answer(env, "search", queries=["a page"])
    assert images_of(content) == [PAGE] == seen and "its caption" in text_of(content)
    (part,) = images_of(await answer(env, "crop", box=[0, 0, 0.5, 1]))
    assert size_of(part) == (20, 20)


async def test_a_search_in_tags_shows_pictures_behind_its_documents() -> None:
    env = SearchEnv(EnvironmentSettings(), EnvContext(Pages(), list))  # type: ignore[arg-type]
    await env.reset(TASK)
    result = await env.act(Completion([], [], [], "<search>a page</search>", FinishReason.STOP))
    assert result.observation[1:] == (PAGE,) and "its caption" in text_of(result.observation)


@pytest.mark.engine
async def test_an_attempt_searches_and_cuts(tmp_path: Any) -> None:
    make_tiny_vision_policy(tmp_path, TEXTS, seed=0, hidden_size=32, num_layers=1, vision_layers=1)
    tokenizer = PolicyTokenizer(tmp_path)
    turns = [
        WRITE([CallRequest("search", {"queries": ["a page"]})]) + "<|im_end|>",
        WRITE([CallRequest("crop", {"box": [0, 0, 0.5, 1]}), CallRequest("crop", {"box": [0, 0, 2, 1]})]),
        "Riga",
    ]
    scripts = {f"t/{number}": turns for number in range(2)}

    class Seeing(ScriptedEngine):
        def show(self, request_id: str, images: Any) -> None:
            shown[request_id] = [one.image for one in images]

    shown: dict[str, list[Image]] = {}
    keys = {"env": "tools", "tools": ["search", "crop"], "max_turns": 5}
    config = SamplerConfig(environment=EnvironmentSettings.model_validate(keys))
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"chat_format": "hermes"})})
    runner = EnvRunner(config, tokenizer, Pages(), Seeing(scripts, tokenizer.encode))  # type: ignore[arg-type]
    group = await runner.sample_group(GroupRequest("t", TASK, 2, 0.0))
    for found in group.trajectories:
        assert found.stop_reason is StopReason.ANSWERED and found.answer == "Riga", found.error
        assert [size_of(one.image) for one in found.images] == [(40, 20), (20, 20)]
        assert {found.kinds[one.start] for one in found.images} == {TokenKind.OBSERVATION}
        assert [one.image for one in found.images] == shown[found.trajectory_id]
        first, second = found.turns[:2]
        assert first.calls[0].records[0].image == PAGE
        assert "is not in the image" in second.calls[1].result and second.observation.startswith("\n")
