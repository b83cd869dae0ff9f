"""The measures of Rank-R1's environment, for a set of several candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.base import EnvContext
from ragr1_actors import Passage, RewardContext
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Record, StopReason, Task, ToolCall, Trajectory, Turn
from ragr1_actors.recipes.rank_r1.rank_r1 import RankEnv, best_first, shown

TASK = Task("t", "Who was born in Riga in the fifties?", ("1",), supporting_ids=("c",))
FOUND = ("a", "b", "c", "d")


class Hits:
    """Finds two passages."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [[Passage(one, one, one) for one in FOUND[:2]] for _ in queries]


def attempt(label: str) -> Trajectory:
    call = ToolCall("search", {}, records=tuple(Record(one, one, one) for one in FOUND))
    none = np.zeros(0, np.int32)
    turns = (Turn("", 0, "rank", (call,)),)
    return Trajectory("t/0", TASK, none, none.astype(np.uint8), none.astype(np.float32), none, turns,
                      StopReason.ANSWERED, 0.0, label)  # fmt: skip


@pytest.mark.parametrize(("one", "ndcg"), [("c", 1.0), ("a", 0.5), ("b", 0.5), ("d", 1 / np.log2(5))])
async def test_the_chosen_candidate_comes_first(one: str, ndcg: float) -> None:
    label = str(shown(TASK, FOUND).index(one) + 1)
    found = {name: measure(attempt(label)) for name, measure in RankEnv.measures.items()}
    assert found == pytest.approx({"ndcg": ndcg, "retriever_ndcg": 0.5, "ndcg_gain": ndcg - 0.5})
    assert await best_first(attempt(label), RewardContext("train")) == float(one == "c")


@pytest.mark.parametrize("label", ["", "0", "5", "01"])
async def test_a_label_of_no_candidate_changes_nothing(label: str) -> None:
    assert RankEnv.measures["ndcg_gain"](attempt(label)) == 0
    assert await best_first(attempt(label), RewardContext("train")) == 0


async def test_a_listed_candidate_that_is_not_found_is_named() -> None:
    env = RankEnv(EnvironmentSettings(), EnvContext(Hits(), str.split))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"candidates \['z'\] are not among the 2000 passages found"):
        await env.reset(replace(TASK, meta={"candidates": ["a", "z"]}))


def test_a_task_without_a_relevant_candidate_has_an_ndcg_of_0() -> None:
    assert RankEnv.measures["ndcg"](replace(attempt("1"), task=replace(TASK, supporting_ids=()))) == 0


def test_the_order_of_the_labels_does_not_depend_on_the_retriever() -> None:
    assert shown(TASK, FOUND) == shown(TASK, FOUND[::-1]) != sorted(FOUND)
