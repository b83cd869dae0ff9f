"""A blocking retriever behind one thread: batches, a free loop, failures that pass."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ragr1_actors.core.errors import RetrievalError
from retrieval.base import Hits, Passage
from retrieval.fleet.pooled import PoolSettings
from retrieval.http.background import BackgroundRetriever


class Blocking:
    """A batch retriever that blocks whatever thread it is called in, until its ``gate`` is opened."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None
        self.gate = threading.Event()

    def search_batch(self, queries: list[str], k: int) -> list[list[Passage]]:
        self.batches.append(queries)
        self.threads.add(threading.get_ident())
        assert self.gate.wait(20), "nobody opened the gate: the loop waits for the search"
        if self.error is not None:
            raise self.error
        return [[Passage(query, query, query)] for query in queries]

    def info(self) -> dict[str, Any]:
        return {"version": "v7"}


async def test_a_blocking_retriever_is_searched_in_batches_while_the_loop_goes_on() -> None:
    blocking = Blocking()
    background = BackgroundRetriever(blocking)
    asking = [asyncio.create_task(background.search([f"q{number}"], 1)) for number in range(30)]
    while not blocking.batches:
        await asyncio.sleep(0.001)
    blocking.gate.set()
    found = [(await task)[0] for task in asking]
    background.close()
    assert [hits[0].id for hits in found] == [f"q{number}" for number in range(30)]
    assert all(isinstance(hits, Hits) and hits.index_version == "v7" for hits in found)
    assert len(blocking.batches) < 10
    assert len(blocking.threads) == 1
    assert threading.get_ident() not in blocking.threads


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), RetrievalError("no vectors")])
async def test_a_blocking_retriever_that_fails_is_a_sentence_and_goes_on(error: Exception) -> None:
    blocking = Blocking()
    blocking.gate.set()
    background = BackgroundRetriever(blocking, PoolSettings(max_retries=1, timeout_s=5))
    blocking.error = error
    with pytest.raises(RetrievalError, match=str(error)):
        await background.search(["a"], 1)
    assert len(blocking.batches) == 2  # tried again, once
    blocking.error = None
    assert (await background.search(["a"], 1))[0][0].id == "a"
    background.close()
