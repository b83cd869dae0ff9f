"""DeepResearcher's web: pages, and who reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fakes import ByteTokenizer

from envs.base import EnvContext
from ragr1_actors import Passage
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Completion, FinishReason, Message, Sampling, Task
from ragr1_actors.recipes.deep_researcher.deep_researcher import ResearchEnv, ToyWeb, WebWorld

TASK = Task("t", "Who directed Silent River?", ("Felix Nolan",))
BROWSE = "<think> open</think><browse> Silent River\n Nowhere</browse>"


class Reader:
    """Reads on until it has seen a year."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.note = "A year.\nstop"

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        self.asked.append(messages[0].content)
        return self.note if "1988" in messages[0].content else "\nMore."


class Hits(ToyWeb):
    """Finds the same for every query."""

    def __init__(self, hits: list[Passage]) -> None:
        self.hits = hits

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [self.hits for _ in queries]


async def told_to(env: ResearchEnv, text: str) -> str:
    return (await env.act(Completion([], [], [], text, FinishReason.STOP))).observation


async def read(env: ResearchEnv, text: str) -> str:
    await env.reset(TASK)
    return await told_to(env, text)


def env_of(web: ToyWeb, **more: object) -> ResearchEnv:
    settings = EnvironmentSettings(prompt="{question}", options=more.pop("options", {}))  # type: ignore[arg-type]
    return ResearchEnv(settings, EnvContext(web, ByteTokenizer().encode, **more))  # type: ignore[arg-type]


async def test_a_page_is_read_until_the_fact() -> None:
    web = ToyWeb({})
    assert "Felix Nolan" not in await read(env_of(web), "<think> find</think><search> Silent River</search>")
    assert await read(env_of(web), BROWSE) == "\nSilent River was filmed by Felix Nolan in the year 1988.\n\n"
    assert "Felix Nolan" not in await read(env_of(web, options={"can_browse": False}), BROWSE)


async def test_an_observation_keeps_its_limits() -> None:
    hit = Passage("a", "Riga", "a word " * 100)
    env = env_of(Hits([hit]), options={"max_observation_tokens_per_query": 40, "max_observation_tokens": 70})
    told = await read(env, "<think> find</think><search> Riga\n Riga</search>")
    assert [len(part) for part in told.strip("\n").split("\n")] == [40, 28] and told.startswith("\nRiga: a word")


async def test_demonstrations_find_on_pages_what_they_answer() -> None:
    env, options = env_of(ToyWeb({})), {"shares": {"two_hop": 1.0}, "habits": {"two_hop": {"good": 1.0}}}
    world = WebWorld(EnvironmentSettings(options={"top_k": 1}), options)
    task = world.tasks("train")[0]
    *turns, last = world.demonstrate(task, random.Random(0))
    told = [await told_to(env, turn) for turn in turns]
    assert [text.endswith(": a page\n") for text in told] == [True, False, False]
    assert task.golden_answers[0] in told[-1] and task.golden_answers[0] in last


async def test_a_reader_of_the_recipe_decides_how_far_it_reads() -> None:
    reader = Reader()
    assert await read(env_of(ToyWeb({}), models={"reader": reader}), BROWSE) == "\nA year.\n\n"
    assert len(reader.asked) == 2 and all(TASK.question in asked for asked in reader.asked)


async def test_a_note_of_a_reader_that_does_not_say_more_or_stop_is_kept() -> None:
    reader = Reader()
    reader.note = "Felix Nolan\nfilmed it."
    assert await read(env_of(ToyWeb({}), models={"reader": reader}), BROWSE) == "\nFelix Nolan\nfilmed it.\n\n"
