"""UR2's summaries and its curriculum; the rewards are those of ``tests/recipes/ur2*.yaml``."""

from __future__ import annotations

from collections.abc import Sequence

from ragr1_actors.core.types import Message, Sampling, Task
from ragr1_actors.recipes.ur2.ur2 import REFUSAL, OnlyLevels, Summarised

TITLES = "ragr1_actors.recipes.worlds.titles"


class Summariser:
    """Refuses what is to be computed, and tells the first line of the passages otherwise."""

    async def chat(self, messages: Sequence[Message], sampling: Sampling) -> str:
        asked = messages[0].content.splitlines()
        return REFUSAL if "sum of" in asked[0] else f" Short: {asked[2]}\n"


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


def test_the_first_stage_trains_the_hardest_tasks_alone() -> None:
    curriculum = OnlyLevels({"levels": ["very_hard"]})
    hard, easy = (Task(level, "?", ("Riga",), meta={"level": level}) for level in ("very_hard", "easy"))
    assert [curriculum.skip(task, {}) for task in (hard, easy)] == [False, True]
