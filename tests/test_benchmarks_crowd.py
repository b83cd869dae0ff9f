"""The benchmark of many callers: what counts as failed, and a small run with a replica that is killed."""

from __future__ import annotations

import asyncio
import math

import pytest

from benchmarks.retrieval import crowd

pytestmark = [pytest.mark.ray, pytest.mark.engine]


async def test_callers_ask_until_the_time_is_over_and_what_fails_is_counted() -> None:
    asked: list[str] = []
    killed_at: list[int] = []

    async def ask(query: str) -> bool:
        asked.append(query)
        await asyncio.sleep(0.01)
        return len(asked) % 4 != 0

    found = await crowd.crowd(ask, 3, 0.4, lambda: killed_at.append(len(asked)))
    assert found.num_asked == len(asked) == len(set(asked)) > 6
    assert found.num_failed > 0
    assert found.mean_s >= 0.01
    assert len(killed_at) == 1 and 0 < killed_at[0] < len(asked)


async def test_the_mean_is_unknown_if_all_fails() -> None:
    async def ask(query: str) -> bool:
        await asyncio.sleep(0.01)
        return False

    found = await crowd.crowd(ask, 2, 0.05, lambda: None)
    assert found.num_failed == found.num_asked and math.isnan(found.mean_s)


@pytest.mark.slow
def test_no_query_fails_while_a_replica_dies() -> None:
    found = {row.metric: row for row in crowd.run(quick=True)}
    assert found.keys() == {"door_50", "fleet_50", "door_mean_s", "door_memory"}
    assert all(found[metric].met and found[metric].theirs > 50 for metric in ("door_50", "fleet_50"))
    assert found["door_memory"].ours > 0
