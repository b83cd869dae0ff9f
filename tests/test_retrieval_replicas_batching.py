"""Batcher and PooledRetriever over fake replicas: batching, coalescing, retries, recovery and cache, without Ray."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable

import pytest
from waits import until

from ragr1_actors.core.errors import RetrievalError
from retrieval.base import Hits, Passage
from retrieval.replicas.batching import MAX_BATCH, ROOM, PoolArguments, PooledRetriever


def answer(query: str, k: int) -> Hits:
    return Hits((Passage(f"{query}/{rank}", query, query) for rank in range(k)), index_version="v1")


class FakeReplica:
    """Answers after ``delay_s``, once its ``gate`` is open, while ``works``; keeps what it was asked."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.works = True
        self.hangs = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches: list[list[str]] = []
        self.pings = 0
        self.out = self.most_out = 0
        self.on_search: Callable[[], None] = lambda: None

    async def answer_batch(self, queries: list[str], k: int) -> list[Hits]:
        self.batches.append(queries)
        self.out += 1
        self.most_out = max(self.most_out, self.out)
        try:
            self.on_search()
            await asyncio.sleep(3600 if self.hangs else self.delay_s)
            await self.gate.wait()
            if not self.works:
                raise RetrievalError("replica died")
            return [answer(query, k) for query in queries]
        finally:
            self.out -= 1

    async def ping(self) -> None:
        self.pings += 1
        await asyncio.sleep(3600 if self.hangs else 0)
        if not self.works:
            raise RetrievalError("replica died")


def batcher(
    *replicas: FakeReplica, timeout_s: float = 5.0, max_retries: int = 2, cache_size: int = 0
) -> PooledRetriever:
    named = {f"replica {number}": replica for number, replica in enumerate(replicas)}
    return PooledRetriever(named, PoolArguments(timeout_s, max_retries, cache_size))


async def test_callers_of_one_turn_share_a_batch_and_each_gets_its_own() -> None:
    replica = FakeReplica()
    search = batcher(replica).search
    found = await asyncio.gather(*[search([f"q{i}", f"r{i}"], 2) for i in range(20)])
    assert found == [[answer(f"q{i}", 2), answer(f"r{i}", 2)] for i in range(20)]
    assert len(replica.batches) == 1
    assert await search([], 3) == []


async def test_what_queues_while_replicas_are_full_goes_out_together() -> None:
    replica = FakeReplica()
    replica.gate.clear()
    pool = batcher(replica)
    first = asyncio.create_task(pool.search(["first"], 1))
    await until(lambda: replica.batches)
    later = asyncio.gather(*[pool.search([f"q{number}"], 1) for number in range(30)])
    await until(lambda: pool.load().waiting == 30)
    replica.gate.set()
    await asyncio.gather(first, later)
    assert [len(batch) for batch in replica.batches] == [1, 30]
    assert replica.most_out == 1


async def test_identical_queries_in_flight_are_asked_once_but_share_no_list() -> None:
    replica = FakeReplica(delay_s=0.01)
    shared = batcher(replica)
    search = shared.search
    found = await asyncio.gather(*[search(["same", "same"], 2) for _ in range(10)], search(["same"], 3))
    assert Counter(query for batch in replica.batches for query in batch) == {"same": 2}  # once for each k
    found[0][0].clear()
    assert found[0][1] == found[1][0] == answer("same", 2)
    assert found[-1] == [answer("same", 3)]
    await search(["same"], 2)  # nothing is in flight any more
    assert len(replica.batches) == 3


async def test_large_queues_are_cut_and_spread_over_idle_replicas() -> None:
    replicas = [FakeReplica(delay_s=0.01) for _ in range(4)]
    queries = [f"q{i}" for i in range(64)]
    assert await batcher(*replicas).search(queries, 1) == [answer(query, 1) for query in queries]
    assert sorted(len(replica.batches[0]) for replica in replicas) == [16, 16, 16, 16]
    replica = FakeReplica()
    await batcher(replica).search([f"q{i}" for i in range(MAX_BATCH + 1)], 1)
    assert max(map(len, replica.batches)) <= MAX_BATCH


@pytest.mark.parametrize(("has_stages", "sizes"), [(False, [96]), (True, [48, 48])])
async def test_a_large_batch_is_halved_for_replicas_of_two_stages_alone(has_stages: bool, sizes: list[int]) -> None:
    replica = FakeReplica(delay_s=0.01)
    search = PooledRetriever({"one": replica}, PoolArguments(), has_stages=has_stages).search
    await asyncio.gather(*[search([f"q{i}", f"r{i}", f"s{i}"], 2) for i in range(32)])
    assert [len(batch) for batch in replica.batches] == sizes
    assert replica.most_out == len(sizes)  # each stage has one


async def test_a_failed_batch_goes_to_another_replica() -> None:
    replicas = [FakeReplica(0.001) for _ in range(3)]
    replicas[0].works = False
    search = batcher(*replicas, max_retries=1).search
    for number in range(20):
        assert await search([f"q{number}"], 1) == [answer(f"q{number}", 1)]
    assert len(replicas[0].batches) <= 1  # found dead once, then left out
    assert all(replica.batches for replica in replicas[1:])


async def test_a_failed_batch_comes_before_what_has_waited_less() -> None:
    dead, alive = FakeReplica(), FakeReplica()
    dead.works = False
    pool = batcher(dead, alive)
    for replica in (dead, alive):
        replica.gate.clear()
    first = asyncio.gather(*[pool.search([f"{k}x{i}" for i in range(8)], k) for k in (1, 2)])
    await until(lambda: dead.batches and alive.batches)
    later = asyncio.gather(*[pool.search([f"{k}x"], k) for k in range(3, 9)])
    await until(lambda: pool.load().waiting)
    dead.gate.set()
    await until(lambda: pool.load().failed_attempts)
    alive.gate.set()
    await asyncio.gather(first, later)
    assert len(dead.batches) == 1
    assert alive.batches[1] == dead.batches[0]


async def test_a_dead_replica_is_probed_and_used_again() -> None:
    replicas = [FakeReplica(0.001), FakeReplica(0.001)]
    replicas[0].works = False
    search = batcher(*replicas).search
    await asyncio.gather(*[search([f"a{i}"], 1) for i in range(50)])
    await until(lambda: replicas[0].pings)
    dead_batches = len(replicas[0].batches)
    replicas[0].works = True
    async with asyncio.timeout(60):
        while len(replicas[0].batches) == dead_batches:
            await search(["b"], 1)


async def test_a_hanging_replica_costs_one_timeout() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    replicas[0].hangs = True
    search = batcher(*replicas, timeout_s=0.1).search
    queries = [f"q{i}" for i in range(40)]
    async with asyncio.timeout(60):
        assert await search(queries, 1) == [answer(query, 1) for query in queries]
        assert await search(["later"], 1) == [answer("later", 1)]


async def test_a_restarting_single_replica_is_waited_for() -> None:
    replica = FakeReplica()
    replica.works = False
    searching = asyncio.create_task(batcher(replica, max_retries=1).search(["q"], 1))
    await until(lambda: replica.pings)
    replica.works = True
    assert await searching == [answer("q", 1)]


async def test_the_last_failure_has_the_attempts_and_the_cause() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    for replica in replicas:
        replica.works = False
    search = batcher(*replicas, timeout_s=0.2, max_retries=2).search
    with pytest.raises(
        RetrievalError, match=r"failed after 2 attempts on 2 of 2 replicas: replica died; then no replica"
    ):
        await search(["q"], 1)
    with pytest.raises(
        RetrievalError, match=r"failed after 0 attempts .* no replica was up for 0\.2 s; the last error: replica died$"
    ):
        await search(["q"], 1)
    num_pings = replicas[0].pings
    for replica in replicas:
        replica.works = True
    await until(lambda: replicas[0].pings > num_pings)
    assert await search(["q"], 1) == [answer("q", 1)]


async def test_a_fleet_that_is_down_is_given_up_in_time_while_its_list_is_read_again() -> None:
    replica = FakeReplica()
    replica.hangs = True
    pool = batcher(replica, timeout_s=0.3, max_retries=0)
    with pytest.raises(RetrievalError, match=r"replica 0: no answer within 0\.3 s"):
        await pool.search(["first"], 1)

    async def read_again() -> None:
        while True:
            pool.batcher.set_replicas({"replica 0": replica})
            await asyncio.sleep(0.05)

    reader = asyncio.create_task(read_again())
    try:
        async with asyncio.timeout(20):
            with pytest.raises(
                RetrievalError, match=r"no replica was up for 0\.3 s; the last error: replica 0: no answer"
            ):
                await pool.search(["second"], 1)
    finally:
        reader.cancel()


async def test_queries_of_other_depths_between_do_not_split_a_batch() -> None:
    replica = FakeReplica()
    pool = batcher(replica)
    found = await asyncio.gather(*[pool.search([f"q{number}"], 1 + number % 2) for number in range(200)])
    assert found == [[answer(f"q{number}", 1 + number % 2)] for number in range(200)]
    evens, odds = ([f"q{number}" for number in range(first, 200, 2)] for first in (0, 1))
    assert replica.batches == [evens, odds]  # each in the order of its calls


async def test_what_is_asked_while_a_fleet_is_down_is_given_up_together() -> None:
    replica = FakeReplica()
    replica.works = False
    timeout_s = 2.0
    pool = batcher(replica, timeout_s=timeout_s, max_retries=0)
    with pytest.raises(RetrievalError, match="replica died"):
        await pool.search(["first"], 1)
    given_up: list[float]

    async def ask(k: int) -> None:
        with pytest.raises(RetrievalError, match="no replica was up"):
            await pool.search(["q"], k)
        given_up.append(asyncio.get_running_loop().time())

    for _ in range(2):  # the second time, the fleet was down before: that does not shorten the wait
        given_up, asked_at = [], asyncio.get_running_loop().time()
        await asyncio.gather(*map(ask, range(1, 6)))
        assert min(given_up) - asked_at >= timeout_s
        assert max(given_up) - min(given_up) < timeout_s  # one wait for all, and not five


async def test_no_retry_when_none_is_asked_for() -> None:
    replicas = [FakeReplica(), FakeReplica()]
    for replica in replicas:
        replica.works = False
    with pytest.raises(RetrievalError, match="after 1 attempts on 1 of 2"):
        await batcher(*replicas, max_retries=0).search(["q"], 1)
    assert sum(len(replica.batches) for replica in replicas) == 1


async def test_wrong_number_of_answers_is_a_failure_not_a_mixup() -> None:
    class Short(FakeReplica):
        async def answer_batch(self, queries: list[str], k: int) -> list[Hits]:
            return (await super().answer_batch(queries, k))[:-1]

    with pytest.raises(RetrievalError, match="1 answers to 2 queries"):
        await batcher(Short(), timeout_s=0.5, max_retries=0).search(["a", "b"], 1)


async def test_a_bug_in_a_replica_leaves_no_caller_waiting() -> None:
    replica = FakeReplica()

    def bug() -> None:
        raise ZeroDivisionError

    replica.on_search = bug
    unraised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unraised.append(context))
    async with asyncio.timeout(60):
        with pytest.raises(RetrievalError, match=r"failed after 3 attempts on 1 of 1 replicas: .*ZeroDivisionError"):
            await batcher(replica).search(["q"], 1)
        assert (await batcher(replica, FakeReplica()).search(["q"], 1))[0] == answer("q", 1)


async def test_an_answer_is_of_one_index_where_a_server_changes_it() -> None:
    class Server(FakeReplica):
        version = "old"

        async def answer_batch(self, queries: list[str], k: int) -> list[Hits]:
            return [Hits([Passage(self.version, query, query)], index_version=self.version) for query in queries]

    server = Server()
    pool = batcher(server, cache_size=9)
    await pool.search(["x"], 1)
    server.version = "new"
    found = await pool.search(["x", "z"], 1)
    assert [(hits[0].id, hits.index_version, hits.is_cached) for hits in found if isinstance(hits, Hits)] == [
        ("new", "new", False)
    ] * 2


async def test_a_cancelled_caller_takes_no_other_with_it() -> None:
    replica = FakeReplica()
    replica.gate.clear()
    search = batcher(replica).search
    first = asyncio.create_task(search(["q"], 1))
    second = asyncio.create_task(search(["q"], 1))
    await until(lambda: replica.batches)
    first.cancel()
    replica.gate.set()
    assert await second == [answer("q", 1)]
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_failure_without_a_caller_is_not_logged() -> None:
    replica = FakeReplica()
    replica.works = False
    replica.gate.clear()
    pool = batcher(replica, max_retries=0)
    unretrieved: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context["message"]))
    caller = asyncio.create_task(pool.search(["early"], 1))
    await until(lambda: replica.batches)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    replica.gate.set()
    await until(lambda: not pool.load().outstanding)
    gc.collect()  # asyncio reports an error that was not retrieved when its future is collected
    assert replica.batches == [["early"]]
    assert unretrieved == []


async def test_k_must_be_positive() -> None:
    with pytest.raises(ValueError, match="k=0"):
        await batcher(FakeReplica()).search(["q"], 0)


def test_it_survives_one_event_loop_after_another() -> None:
    replica = FakeReplica(delay_s=0.01)
    shared = batcher(replica)

    async def abandon() -> None:
        asyncio.create_task(shared.search(["left behind"], 1))  # noqa: RUF006
        await until(lambda: replica.batches)

    asyncio.run(abandon())
    for number in range(3):
        assert asyncio.run(shared.search([f"q{number}", "left behind"], 1))[0] == answer(f"q{number}", 1)


@pytest.mark.parametrize("seed", range(5))
async def test_random_failures_lose_and_mix_up_nothing(seed: int) -> None:
    chance = random.Random(seed)
    replicas = [FakeReplica(0.001) for _ in range(4)]

    def flip(replica: FakeReplica) -> Callable[[], None]:
        def maybe() -> None:
            replica.works = chance.random() > 0.1

        return maybe

    for replica in replicas[1:]:  # one always works
        replica.on_search = flip(replica)
    search = batcher(*replicas, max_retries=8).search

    async def caller(number: int) -> None:
        for turn in range(20):
            queries = [f"{chance.randrange(50)}" for _ in range(3)] + [f"{number}.{turn}"]
            k = chance.randint(1, 3)
            assert await search(queries, k) == [answer(query, k) for query in queries]

    async with asyncio.timeout(60):
        await asyncio.gather(*[caller(number) for number in range(16)])


async def test_what_was_answered_is_remembered_and_says_so() -> None:
    replica = FakeReplica()
    pool = batcher(replica, cache_size=2)
    first = await pool.search(["a", " a\n"], 1)
    again = await pool.search(["a  "], 1)
    assert first == [answer("a", 1)] * 2 and again == [answer("a", 1)]
    assert replica.batches == [["a"]] and pool.load().cached == 1
    hits = [hits for hits in (*first, *again) if isinstance(hits, Hits)]
    assert [(h.is_cached, h.index_version) for h in hits] == [(False, "v1"), (False, "v1"), (True, "v1")]
    again[0].clear()
    await pool.search(["b", "c"], 1)  # "a" was used last before them and goes
    assert (await pool.search(["a"], 1), len(replica.batches)) == ([answer("a", 1)], 3)
    await pool.search(["a"], 2)
    assert replica.batches[-1] == ["a"]  # another k is another question
    assert (pool.load().queries, len(replica.batches)) == (6, 4)


async def test_a_new_index_version_empties_the_cache() -> None:
    class Versioned(FakeReplica):
        version = "v1"

        async def answer_batch(self, queries: list[str], k: int) -> list[Hits]:
            return [Hits(hits, index_version=self.version) for hits in await super().answer_batch(queries, k)]

    replica = Versioned()
    pool = batcher(replica, cache_size=10)
    await pool.search(["a", "b"], 1)
    replica.version = "v2"
    await pool.search(["c"], 1)
    await pool.search(["a"], 1)
    assert replica.batches == [["a", "b"], ["c"], ["a"]]


async def test_a_replica_that_joins_is_probed_first_and_one_that_leaves_loses_nothing() -> None:
    old, new = FakeReplica(0.01), FakeReplica(0.01)
    new.works = False
    pool = batcher(old)
    assert await pool.search(["a"], 1) == [answer("a", 1)]
    pool.batcher.set_replicas({"replica 0": old, "new": new})
    assert await pool.search([f"b{i}" for i in range(32)], 1) == [answer(f"b{i}", 1) for i in range(32)]
    assert new.pings and not new.batches
    new.works = True
    num_pings, num_old = new.pings, len(old.batches)
    await until(lambda: new.pings > num_pings)
    old.gate.clear()
    searching = asyncio.gather(*[pool.search([f"c{i}"], 1) for i in range(64)])
    await until(lambda: len(old.batches) > num_old)
    old.works = False  # it leaves while it has a batch
    pool.batcher.set_replicas({"new": new})
    old.gate.set()
    assert await searching == [[answer(f"c{i}", 1)] for i in range(64)]
    assert new.batches
    num_old = len(old.batches)
    await pool.search([f"d{i}" for i in range(32)], 1)
    assert len(old.batches) == num_old


async def test_there_is_room_until_too_many_wait() -> None:
    replica = FakeReplica()
    replica.gate.clear()
    pool = batcher(replica)
    await asyncio.wait_for(pool.batcher.wait_for_room(), 20)
    asked = asyncio.gather(*[pool.search([f"q{i}"], 1) for i in range(ROOM + 2 * MAX_BATCH)])
    await until(lambda: pool.load().waiting == ROOM + MAX_BATCH)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pool.batcher.wait_for_room(), 0.1)
    replica.gate.set()
    await asyncio.wait_for(pool.batcher.wait_for_room(), 20)
    await asked
