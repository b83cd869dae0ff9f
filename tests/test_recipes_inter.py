"""InteR's retriever: a query grows by what was read."""

from __future__ import annotations

from collections.abc import Sequence

from ragr1_actors.core.types import Message, Sampling
from ragr1_actors.recipes.inter.inter import InterRetriever

TITLES = {"type": "ragr1_actors.recipes.worlds.titles:TitleRetriever"}
RULE = "ragr1_actors.recipes.inter.inter:names"
QUESTION = "Where was the director of Silent River born?"


class Knows:
    """Knows who directed the film, once it has read about it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        self.asked.append(messages[0].content)
        return "Felix Nolan directed it."


async def titles(retriever: InterRetriever, k: int = 3) -> list[str]:
    ((*found,),) = await retriever.search([QUESTION], k)
    return [passage.title for passage in found]


async def test_each_round_reads_and_expands() -> None:
    plain, once = (
        InterRetriever({"inner": TITLES, "rule": RULE, "num_rounds": rounds, "num_read": 1}) for rounds in (0, 1)
    )
    assert "Silent River" in await titles(plain) and "Felix Nolan" not in await titles(plain)
    assert {"Silent River", "Felix Nolan"} <= set(await titles(once))
    assert len(await titles(once, k=2)) == 2


async def test_a_model_of_the_recipe_is_asked_with_what_was_found() -> None:
    model, retriever = Knows(), InterRetriever({"inner": TITLES, "model": "writer", "num_rounds": 2, "num_read": 1})
    retriever.use_models({"writer": model})
    assert {"Silent River", "Felix Nolan"} <= set(await titles(retriever))
    assert len(model.asked) == 2
    assert all(QUESTION in asked for asked in model.asked)
    assert "Silent River was filmed by Felix Nolan" in model.asked[0]
