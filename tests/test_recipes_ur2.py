"""UR2's summaries and its curriculum; the rewards are those of ``tests/recipes/ur2*.yaml``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from fakes import ByteTokenizer

from envs.base import EnvContext
from ragr1_actors import Passage
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Message, Sampling, Task
from ragr1_actors.recipes.ur2.ur2 import REFUSAL, OnlyLevels, Summarised, UR2Env

TITLES = "ragr1_actors.recipes.worlds.titles"


class Summariser:
    """Refuses what is to be computed, and tells the first line of the passages otherwise."""

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        asked = messages[0].content.splitlines()
        return REFUSAL if "sum of" in asked[0] else f" Short: {asked[2]}\n"


class Asked:
    """Keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        self.asked.append(queries)
        return [[] for _ in queries]


async def test_a_model_summarises_what_another_retriever_finds() -> None:
    retriever = Summarised({"inner": {"type": f"{TITLES}:TitleRetriever"}, "model": "summariser"})
    retriever.use_models({"summariser": Summariser()})
    known, computed, unknown = await retriever.search(["Riga", "the sum of Riga", "?"], 3)
    assert [(one.title, one.text) for one in known] == [("Riga", "Short: Riga: Riga is a city in Latvia.")]
    assert [one.text for one in computed] == [REFUSAL]
    assert unknown == []


async def test_a_rule_summarises_in_the_place_of_a_model() -> None:
    retriever = Summarised({"inner": {"type": f"{TITLES}:TitleRetriever"}, "rule": f"{TITLES}:short"})
    ((found,),) = await retriever.search(["Riga"], 3)
    assert (found.title, found.text) == ("Riga", "Latvia")


@pytest.mark.parametrize(("variant", "asked"), [("", [["two plus two"]]), ("Answer. {question}", [])])
async def test_nothing_is_searched_early_where_no_search_is_offered(variant: str, asked: list[list[str]]) -> None:
    web = Asked()
    settings = EnvironmentSettings(prompt="{question}", options={"query_format": "single"})
    env = UR2Env(settings, EnvContext(web, ByteTokenizer().encode, variant=variant))
    await env.reset(Task("t", "?", ("4",)))
    env.peek("<search> two plus two</search>")
    await asyncio.sleep(0.01)
    assert web.asked == asked
    env.close()


def test_the_first_stage_trains_the_hardest_tasks_alone() -> None:
    curriculum = OnlyLevels({"levels": ["very_hard"]})
    hard, easy = (Task(level, "?", ("Riga",), meta={"level": level}) for level in ("very_hard", "easy"))
    assert [curriculum.skip(task, {}) for task in (hard, easy)] == [False, True]
