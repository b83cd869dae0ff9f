"""DeepResearcher's web: pages with a reader, and what was recorded of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import ByteTokenizer

from envs.base import EnvContext
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import RetrievalError
from ragr1_actors.core.types import Completion, FinishReason, Message, Sampling, Task
from ragr1_actors.recipes.deep_researcher.deep_researcher import Recorded, ResearchEnv
from ragr1_actors.recipes.worlds.web import ToyWeb
from retrieval.base import Passage

TASK = Task("t", "Who directed Silent River?", ("Felix Nolan",))
WEB = {"type": "ragr1_actors.recipes.worlds.web:ToyWeb"}
BROWSE = "<think> open</think><browse> Silent River\n Nowhere</browse>"


class Reader:
    """Reads on until it has seen a year."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        self.asked.append(messages[0].content)
        return "A year.\nstop" if "1988" in messages[0].content else "\nmore"


async def read(env: ResearchEnv, text: str) -> str:
    await env.reset(TASK)
    return (await env.act(Completion([], [], [], text, FinishReason.STOP))).observation


def env_of(web: ToyWeb | Recorded, **more: object) -> ResearchEnv:
    settings = EnvironmentSettings(prompt="{question}", options=more.pop("options", {}))  # type: ignore[arg-type]
    return ResearchEnv(settings, EnvContext(web, ByteTokenizer().encode, **more))  # type: ignore[arg-type]


async def test_a_page_is_read_until_the_fact() -> None:
    web = ToyWeb({})
    assert "Felix Nolan" not in await read(env_of(web), "<think> find</think><search> Silent River</search>")
    assert await read(env_of(web), BROWSE) == "\nSilent River was filmed by Felix Nolan in the year 1988.\n\n"
    assert "Felix Nolan" not in await read(env_of(web, options={"can_browse": False}), BROWSE)


async def test_a_reader_of_the_recipe_decides_how_far_it_reads() -> None:
    reader = Reader()
    assert await read(env_of(ToyWeb({}), models={"reader": reader}), BROWSE) == "\nA year.\n\n"
    assert len(reader.asked) == 2 and all(TASK.question in asked for asked in reader.asked)


async def test_a_replay_knows_what_was_recorded_and_asks_nothing(tmp_path: Path) -> None:
    file = str(tmp_path / "web.jsonl")
    recording = Recorded({"inner": WEB, "file": file})
    found = await recording.search(["Silent River", "Ana Bell"], 2)
    pages = await recording.open_pages(["Silent River", "Nowhere"])
    replay = Recorded({"file": file})
    assert await replay.search(["Ana Bell"], 2) == found[1:]
    assert [list(page) for page in await replay.open_pages(["Nowhere", "Silent River"])] == [[], list(pages[0])]
    for unknown in (replay.search(["Bo Cole"], 2), replay.search(["Ana Bell"], 3)):
        with pytest.raises(
            RetrievalError, match=r"web\.jsonl has no record of 'search \d .*'; record it with an inner"
        ):
            await unknown
    assert await read(env_of(replay), BROWSE) == "\nSilent River was filmed by Felix Nolan in the year 1988.\n\n"


async def test_a_recording_asks_once(tmp_path: Path) -> None:
    file = tmp_path / "web.jsonl"
    recording = Recorded({"inner": WEB, "file": str(file)})
    first = await recording.search(["Ana Bell"], 1)
    assert await recording.search(["Ana Bell"], 1) == first
    assert isinstance(first[0][0], Passage) and len(file.read_text().splitlines()) == 1
