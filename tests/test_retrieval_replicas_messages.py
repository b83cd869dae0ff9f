"""What travels between actors and clients: packing and unpacking, and the merge of shards."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.rpc import decode, encode
from ragr1_actors.core.errors import RetrievalError
from retrieval.base import Hits, Passage
from retrieval.replicas.batching import Batcher, ClientLoad, PoolArguments, PooledRetriever
from retrieval.replicas.client import _RemoteReplica, unpack
from retrieval.replicas.replica_set import PackedHits, RpcActor, pack

DEPTH = 4


def passage(row: int, score: float) -> Passage:
    return Passage(f"p{row}", f"title {row}", "text " * row, score)


def hits(*ranked: tuple[int, float]) -> tuple[Hits, list[int]]:
    rows = [row for row, _ in ranked]
    return Hits((passage(*r) for r in ranked), index_version="v1"), rows + [-1] * (DEPTH - len(rows))


scores = st.floats(-4, 4, width=32)
rankings = st.lists(st.tuples(st.integers(0, 30), scores), max_size=DEPTH, unique_by=lambda pair: pair[0])


@given(st.lists(rankings, max_size=6))
def test_what_is_packed_comes_out_again(found: list[list[tuple[int, float]]]) -> None:
    made = [hits(*ranked) for ranked in found]
    packed = pack([h for h, _ in made], "v1", np.array([rows for _, rows in made], np.int64).reshape(-1, DEPTH))
    answers = unpack([PackedHits(*decode(encode(packed)))], DEPTH)
    assert answers == [h for h, _ in made]
    assert all(answer.index_version == "v1" and not answer.is_cached for answer in answers)


@given(st.lists(st.tuples(scores, st.booleans()), min_size=1, max_size=12), st.integers(1, DEPTH))
def test_shards_merge_to_what_one_index_would_answer(rows: list[tuple[float, bool]], k: int) -> None:
    def answer(members: list[int]) -> tuple[Hits, list[int]]:
        return hits(*sorted(((row, rows[row][0]) for row in members), key=lambda r: (-r[1], r[0]))[:DEPTH])

    everything = list(range(len(rows)))
    left, right = [r for r in everything if rows[r][1]], [r for r in everything if not rows[r][1]]
    parts = [
        pack([found], "v1", np.array([found_rows], np.int64)) for found, found_rows in (answer(left), answer(right))
    ]
    assert unpack(parts, k) == [answer(everything)[0][:k]]


def test_shards_of_two_indexes_are_not_merged() -> None:
    parts = [
        pack([hits((row, 1.0))[0]], version, np.array([hits((row, 1.0))[1]], np.int64))
        for row, version in ((1, "a"), (2, "b"))
    ]
    with pytest.raises(RetrievalError, match="the shards have the indexes a and b; start the run again"):
        unpack(parts, 1)


def test_a_passage_that_many_queries_found_hardly_adds_to_a_message_and_text_is_compressed() -> None:
    def packed(rows: NDArray[np.int64]) -> PackedHits:
        found = [[Passage(f"p{row}", "title", f"{row} some words " * 40, 0.5) for row in ranked] for ranked in rows]
        return pack(found, "v1", rows)

    distinct, repeated = packed(np.arange(300).reshape(100, 3)), packed(np.tile(np.arange(3), (100, 1)))
    assert len(distinct.data) > 5 * len(repeated.data)
    assert len(distinct.data) < distinct.num_bytes / 4


class _BrokenEncoder:
    num_calls = 0

    async def answer_batch(self, queries: list[str], k: int) -> list[NDArray[np.float32]]:
        self.num_calls += 1
        raise RetrievalError("CUDA out of memory")

    async def ping(self) -> None:
        pass


def test_encoders_that_fail_are_named_and_asked_as_often_as_the_settings_say() -> None:
    encoder, settings = _BrokenEncoder(), PoolArguments(max_retries=2)
    replica = _RemoteReplica(["retriever-0.0"], Batcher({"encoder-0": encoder}, settings), None)
    retriever = PooledRetriever({"retriever-0": replica}, settings)
    with pytest.raises(RetrievalError, match=r"encoders: search failed after 3 attempts .*: CUDA out of memory"):
        asyncio.run(retriever.search(["a"], 3))
    assert encoder.num_calls == 3
    assert retriever.load().failed_attempts == 0


class _Eager(str):
    """A client's name that lets another client report while it is put into the answer."""

    actor: ClassVar[RpcActor | None] = None

    def __hash__(self) -> int:
        if self.actor is not None:
            self.actor.report("another", ClientLoad(1, 0, 0, 0, 0))
        return super().__hash__()


def test_a_client_may_report_while_the_load_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    actor = RpcActor()
    actor.report(_Eager("one"), ClientLoad(5, 1, 0, 2, 2))
    _Eager.actor = actor
    try:
        (found,) = actor.load().clients.values()
    finally:
        _Eager.actor = None
        actor.drain()
    assert found[1].queries == 5
    assert len(actor.load().clients) == 2
