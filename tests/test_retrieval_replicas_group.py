"""The fleet on Ray: answers, kills in the middle of a load, recovery, and no fleet at all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small_world import wait_for

from cluster.storage import Storage, StoredFolder
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import ConfigError, DataError, FleetError, RetrievalError
from retrieval.base import Hits, Passage
from retrieval.build import build_index
from retrieval.corpora.corpus import Corpus
from retrieval.encoders.families import make_static_encoder
from retrieval.indexes.manifest import Manifest
from retrieval.local import LocalRetriever
from retrieval.replicas.batching import PoolArguments
from retrieval.replicas.client import RetrieverClient
from retrieval.replicas.replica_set import find_actors
from retrieval.replicas.retriever_group import RetrieverGroup

NAMES = [f"Person{i} Family{i % 7}" for i in range(200)]
PASSAGES = [Passage(f"p{i}", name, f"{name} was born in town{i}.") for i, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_index(PASSAGES, tmp_path_factory.mktemp("fleet") / "index", num_shards=3, progress=False)


@pytest.fixture(scope="module")
def group(ray_local: ModuleType, index_dir: Path) -> Iterator[RetrieverGroup]:
    settings = RetrievalSettings(
        num_retrievers=2, num_cpus_per_retriever=0.5, requests={"timeout_s": 20, "max_retries": 4, "cache_size": 0}
    )
    group = RetrieverGroup(index_dir, settings, hang_timeout_s=300)
    group.wait_until_ready()
    yield group
    group.stop()


def _pid(handle: Any) -> int:
    """The process of an actor, from Ray's own state; waits for a restart to be over."""
    import ray

    for _ in range(300):
        try:
            return int(ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=5))
        except ray.exceptions.RayError:
            time.sleep(0.1)
    raise AssertionError("the replica did not come back")


def _fleet_name(group: RetrieverGroup) -> str:
    """The name by which clients find the retrievers: that of an actor without its two numbers."""
    import ray

    name = ray.get(group.handles[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_actor_name()))
    return str(name).rpartition("-")[0]


@pytest.mark.ray
async def test_the_fleet_answers_as_the_local_retriever_does(group: RetrieverGroup, index_dir: Path) -> None:
    assert group.metrics()["retrieval/retriever_actors"] == len(group.handles) == 2
    client = group.retriever()
    queries = [*NAMES[:30], "nonsense", "", "\x00\ud800", "Pérson3"]
    assert await client.search(queries, 3) == LocalRetriever(index_dir).search_batch(queries, 3)
    assert await client.search([], 3) == []
    titles = ["Person7 Family0", "person8 FAMILY1", "Person7 Famili", "", "Person9 Family2"]
    pages = await client.open_pages(titles)
    local = LocalRetriever(index_dir).open_batch(titles)
    assert (pages, [page.near for page in pages]) == (local, [page.near for page in local])
    assert [page.index_version for page in pages] == [Manifest.read(index_dir).version] * len(titles)
    assert [len(page) for page in pages] == [1, 1, 0, 0, 1]
    assert len((await client.search(["Person1"], 1000))[0]) == len(PASSAGES)


@pytest.mark.ray
async def test_a_client_reads_the_passages_itself_where_its_node_has_the_index(
    group: RetrieverGroup, index_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = build_index(PASSAGES[::-1], tmp_path / "other", index_type="bm25", progress=False)
    expected = LocalRetriever(index_dir).search_batch(NAMES[:5], 3)
    num_read = 0
    read = Corpus.fields

    def count(self: Corpus, rows: Sequence[int]) -> list[list[str]]:
        nonlocal num_read
        num_read += len(rows)
        return read(self, rows)

    monkeypatch.setattr(Corpus, "fields", count)
    assert await group.retriever().search(NAMES[:5], 3) == expected
    num_read_here = num_read
    assert num_read_here
    name = _fleet_name(group)
    for place in ("", str(tmp_path / "nowhere"), str(other)):
        client = RetrieverClient(name, 1, "", PoolArguments(), place)
        assert await client.search(NAMES[:5], 3) == expected
    assert num_read == num_read_here


@pytest.mark.slow
@pytest.mark.ray
async def test_a_client_travels_to_other_actors(ray_local: ModuleType, group: RetrieverGroup) -> None:
    class Asker:
        def __init__(self, retriever: Any) -> None:
            self._retriever = retriever

        async def ask(self, query: str) -> str:
            return str((await self._retriever.search([query], 1))[0][0].id)

    asker = ray_local.remote(Asker).options(num_cpus=0).remote(group.retriever())
    assert await asyncio.gather(*[asker.ask.remote(NAMES[i]) for i in range(5)]) == [f"p{i}" for i in range(5)]
    ray_local.kill(asker)


@pytest.mark.ray
@pytest.mark.slow
async def test_kill_9_in_the_middle_of_a_load_loses_nothing(group: RetrieverGroup, index_dir: Path) -> None:
    client = group.retriever()
    expected = dict(zip(NAMES, LocalRetriever(index_dir).search_batch(NAMES, 3), strict=True))
    answered = 0
    killed = asyncio.Event()
    stop = asyncio.Event()

    async def caller(number: int) -> None:
        nonlocal answered
        turn = 0
        while not stop.is_set():
            queries = [NAMES[(number * 37 + turn * 3 + i) % len(NAMES)] for i in range(3)]
            assert await client.search(queries, 3) == [expected[query] for query in queries]
            answered += 1
            turn += 1

    async def killer() -> None:
        for round_number in range(2):
            handle = group.handles[round_number]
            pid = await asyncio.to_thread(_pid, handle)
            before = answered
            while answered < before + 100:
                await asyncio.sleep(0.005)
            os.kill(pid, signal.SIGKILL)
            killed.set()
            assert await asyncio.to_thread(_pid, handle) != pid  # Ray brought it back
        stop.set()

    async with asyncio.timeout(600):
        await asyncio.gather(killer(), *[caller(number) for number in range(16)])
    assert killed.is_set()
    assert group.metrics()["retrieval/retriever_actors"] == 2


@pytest.mark.ray
@pytest.mark.slow
async def test_a_stopped_process_times_out_and_the_other_replica_answers(group: RetrieverGroup) -> None:
    # a replica that a test before has killed is used once the fleet has seen it again
    assert await asyncio.to_thread(wait_for, lambda: group.fleets[0].state().num_running == 2, 600)
    client = RetrieverClient(_fleet_name(group), 1, "", PoolArguments(timeout_s=4.0, max_retries=2))
    pid = await asyncio.to_thread(_pid, group.handles[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        for name in NAMES[:10]:
            assert (await client.search([name], 1))[0][0].title == name
            assert (await client.open_pages([name]))[0][0].title == name
    finally:
        os.kill(pid, signal.SIGCONT)
    assert group.metrics()["retrieval/retriever_actors"] == 2


@pytest.mark.ray
async def test_searches_use_ray_calls_where_no_client_can_connect(
    group: RetrieverGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.rpc._CONNECT_TIMEOUT_S", 0.0)
    client = RetrieverClient(_fleet_name(group), 1, "", PoolArguments())
    for name in NAMES[:10]:
        assert (await client.search([name], 1))[0][0].title == name
        assert (await client.open_pages([name]))[0][0].title == name
    assert "searches use Ray calls, which take longer: cannot connect to" in caplog.text
    assert 1 <= len(caplog.records) <= 2  # once per replica


@pytest.mark.ray
@pytest.mark.slow
async def test_a_stopped_fleet_is_a_retrieval_error(ray_local: ModuleType, index_dir: Path) -> None:
    group = RetrieverGroup(
        index_dir, RetrievalSettings(num_cpus_per_retriever=0.1, requests={"timeout_s": 4, "max_retries": 1})
    )
    group.wait_until_ready()
    client = group.retriever()
    assert (await client.search([NAMES[0]], 1))[0][0].id == "p0"
    group.stop()
    assert group.handles == []
    with pytest.raises(
        RetrievalError, match=r"after 1 attempts on 1 of 1 replicas: (lost the connection|cannot connect)"
    ):
        for name in NAMES[1:]:  # Ray ends them some time later
            await client.search([name], 1)
            await asyncio.sleep(0.1)
    assert (await client.search([NAMES[0]], 1))[0][0].id == "p0"  # remembered


@pytest.mark.ray
@pytest.mark.slow
def test_a_replica_that_cannot_open_the_index_is_one_sentence(
    ray_local: ModuleType, index_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="no index in"):
        RetrieverGroup(tmp_path, RetrievalSettings())
    (tmp_path / "manifest.json").write_bytes((index_dir / "manifest.json").read_bytes())
    with pytest.raises(FleetError, match="corpus") as caught:
        RetrieverGroup(tmp_path, RetrievalSettings(num_cpus_per_retriever=0.1)).wait_until_ready()
    assert "\n" not in str(caught.value)


async def test_no_retrievers_means_this_process(index_dir: Path) -> None:
    group = RetrieverGroup(index_dir, RetrievalSettings(num_retrievers=0))
    retriever = group.retriever()
    assert isinstance(retriever, LocalRetriever)
    assert (await retriever.search([NAMES[3]], 1))[0][0].id == "p3"
    assert (await retriever.open_pages([NAMES[3]]))[0][0].id == "p3"
    assert group.handles == []
    group.stop()


@pytest.mark.ray
@pytest.mark.slow
async def test_shards_and_encoders_on_separate_actors_answer_the_same(ray_local: ModuleType, index_dir: Path) -> None:
    settings = RetrievalSettings(
        num_retrievers=1, num_shards=3, num_cpus_per_retriever=0.1, encoders={"num_encoders": 1, "num_cpus": 0.1}
    )
    group = RetrieverGroup(index_dir, settings)
    try:
        group.wait_until_ready()
        assert len(group.handles) == 3
        client = group.retriever()
        local = LocalRetriever(index_dir)
        queries = [*NAMES[:40], "nonsense", ""]
        found = await client.search(queries, 4)
        assert found == local.search_batch(queries, 4)
        assert all(isinstance(hits, Hits) and hits.index_version == local.version for hits in found)
        again = await client.search(queries[:1], 4)
        assert isinstance(again[0], Hits) and again[0].is_cached
        assert await client.open_pages(NAMES[:40]) == local.open_batch(NAMES[:40])
        metrics = group.metrics()
        assert metrics["retrieval/retriever_queries"] == 3 * len(queries) + 40  # any shard's actor has all pages
        assert metrics["retrieval/encoder_queries"] == len(queries)
        assert 0 < metrics["retrieval/encoder_busy"] < 1
    finally:
        group.stop()


@pytest.mark.ray
@pytest.mark.slow
async def test_metrics_report_load_cache_hits_lost_actors_and_restarts(ray_local: ModuleType, index_dir: Path) -> None:
    settings = RetrievalSettings(
        num_retrievers=2, num_cpus_per_retriever=0.1, requests={"cache_size": 100, "timeout_s": 10}
    )
    group = RetrieverGroup(index_dir, settings)

    async def until(name: str, value: float) -> dict[str, float]:
        async with asyncio.timeout(600):
            while (metrics := await asyncio.to_thread(group.metrics))[f"retrieval/{name}"] != value:
                await client.search(NAMES[:3], 1)  # a client reports while it searches
                await asyncio.sleep(0.05)
        return metrics

    try:
        group.wait_until_ready()
        client = group.retriever()
        idle = group.metrics()
        assert (idle["retrieval/retriever_actors"], idle["retrieval/cache_hit_rate"]) == (2.0, 0.0)
        await client.search(NAMES[:30], 1)
        await client.search(NAMES[:30], 1)
        async with asyncio.timeout(600):
            while not (metrics := await asyncio.to_thread(group.metrics))["retrieval/cache_hit_rate"]:
                await client.search(NAMES[:3], 1)
                await asyncio.sleep(0.05)
        assert 0.5 <= metrics["retrieval/cache_hit_rate"] < 1
        assert metrics["retrieval/retriever_queries"] == 30
        assert metrics["retrieval/waiting"] == metrics["retrieval/outstanding"] == 0
        assert metrics["retrieval/retriever_restarts"] == metrics["retrieval/retriever_lost"] == 0
        pid = await asyncio.to_thread(_pid, group.handles[1])
        os.kill(pid, signal.SIGSTOP)
        try:
            assert (await until("retriever_lost", 1.0))["retrieval/retriever_actors"] == 1.0
        finally:
            os.kill(pid, signal.SIGKILL)
        assert (await until("retriever_restarts", 1.0))["retrieval/retriever_hangs"] == 0.0
        await until("retriever_lost", 0.0)
    finally:
        group.stop()


@pytest.mark.ray
@pytest.mark.slow
async def test_actors_that_hang_are_ended_and_come_back(
    ray_local: ModuleType, index_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is asked of the fleet meanwhile, as in an evaluation or behind a server."""
    settings = RetrievalSettings(
        num_retrievers=1,
        num_cpus_per_retriever=0.1,
        encoders={"num_encoders": 1, "num_cpus": 0.1},
        requests={"max_retries": 50},
    )
    group = RetrieverGroup(index_dir, settings, hang_timeout_s=10)
    try:
        group.wait_until_ready()
        before = {fleet.kind: _pid(fleet.actors[0]) for fleet in group.fleets}
        assert before.keys() == {"retriever", "encoder"}
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)
        for kind in before:
            assert wait_for(lambda kind=kind: re.search(rf"{kind} \S+ is back after \d+ s", caplog.text), 600)
        for fleet in group.fleets:
            assert _pid(fleet.actors[0]) != before[fleet.kind]
        (found,) = await group.retriever().search([NAMES[0]], 1)
        assert len(found) == 1
        metrics = group.metrics()
        for fleet in group.fleets:
            said = re.findall(rf"{fleet.kind} \S+ hangs: it has not answered for \d+ s", caplog.text)
            # Ray may give up a stopped process before the watchdog does
            assert metrics[f"retrieval/{fleet.kind}_hangs"] == fleet.fleet.num_hangs == len(said)
    finally:
        group.stop()


@pytest.mark.ray
@pytest.mark.slow
def test_a_replica_that_hangs_is_ended_when_it_leaves(
    ray_local: ModuleType, index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrieval.replicas.replica_set.LEAVE_S", 0.1)
    settings = RetrievalSettings(num_retrievers=2, num_cpus_per_retriever=0.1)
    group = RetrieverGroup(index_dir, settings, hang_timeout_s=10)
    try:
        group.wait_until_ready()
        (fleet,) = group.fleets
        assert wait_for(lambda: fleet.state().num_running == 2, 600)
        leaving = _pid(fleet.actors[1])  # the newest leaves first
        group.scale_to(1)
        os.kill(leaving, signal.SIGSTOP)
        assert wait_for(lambda: not Path(f"/proc/{leaving}").exists(), 600)
        assert fleet.state().num_running == 1
    finally:
        group.stop()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("opens", [False, True])
async def test_a_fleet_grows_and_shrinks_under_load_and_loses_nothing(
    ray_local: ModuleType, index_dir: Path, opens: bool
) -> None:
    settings = RetrievalSettings(
        num_retrievers=1, num_cpus_per_retriever=0.1, requests={"cache_size": 0, "max_retries": 4}
    )
    group = RetrieverGroup(index_dir, settings)
    group.wait_until_ready()
    client = group.retriever()
    name = _fleet_name(group)
    expected = dict(zip(NAMES, LocalRetriever(index_dir).search_batch(NAMES, 2), strict=True))
    answered = 0
    stop = asyncio.Event()

    async def caller(number: int) -> None:
        nonlocal answered
        while not stop.is_set():
            name = NAMES[(number * 37 + answered) % len(NAMES)]
            if opens:
                assert [passage.title for passage in (await client.open_pages([name]))[0]] == [name]
            else:
                assert await client.search([name], 2) == [expected[name]]
            answered += 1

    async def scale() -> None:
        group.scale_to(2)
        _, new = group.handles
        while not (await new.load.remote()).queries:
            await asyncio.sleep(0.05)
        group.scale_to(1)
        while len(await asyncio.to_thread(find_actors, name)) != 1:
            await asyncio.sleep(0.05)
        before = answered
        while answered < before + 100:
            await asyncio.sleep(0.005)
        stop.set()

    try:
        async with asyncio.timeout(600):
            await asyncio.gather(scale(), *[caller(number) for number in range(8)])
    finally:
        group.stop()


@pytest.mark.ray
def test_what_an_index_cannot_do_is_said_before_any_actor_starts(ray_local: ModuleType, index_dir: Path) -> None:
    with pytest.raises(ConfigError, match="got 4, but the index has 3"):
        RetrieverGroup(index_dir, RetrievalSettings(num_shards=4))


@pytest.mark.ray
async def test_a_node_without_the_drivers_disk_gets_an_encoder_outside_the_index_and_one_corpus_for_all_shards(
    ray_local: ModuleType, tmp_path: Path
) -> None:
    encoder = make_static_encoder(tmp_path / "encoder-of-mine", [passage.text for passage in PASSAGES])
    index = build_index(PASSAGES, tmp_path / "index", encoder=str(encoder), num_shards=2, progress=False)
    expected = LocalRetriever(index).search_batch(NAMES[:5], 2)
    storage = Storage(f"file://{tmp_path / 'storage'}")

    def share(folder: str | Path) -> StoredFolder:
        stored = storage.put(Path(folder))
        if Path(folder) == index:  # which is shared last
            encoder.rename(tmp_path / "gone")  # as on a node with another disk
        return replace(stored, path="")

    group = RetrieverGroup(index, RetrievalSettings(num_cpus_per_retriever=0.1, num_shards=2), share)
    try:
        group.wait_until_ready()
        assert await group.retriever().search(NAMES[:5], 2) == expected
    finally:
        group.stop()
    version = Manifest.read(index).version
    fetched = [path for path in Path(os.environ["RAGR1_CACHE"]).glob("*/*") if path.name == "manifest.json"]
    (common,) = [path.parent for path in fetched if Manifest.read(path.parent).version == version]
    assert {path.name for path in common.iterdir()} == {"manifest.json", "corpus.arrow", "titles.npy"}


@pytest.mark.ray
async def test_a_fleet_over_words_needs_no_encoder(ray_local: ModuleType, tmp_path: Path) -> None:
    directory = build_index(PASSAGES, tmp_path / "words", index_type="bm25", progress=False)
    group = RetrieverGroup(directory, RetrievalSettings(type="bm25", num_cpus_per_retriever=0.1))
    try:
        group.wait_until_ready()
        found = await group.retriever().search(NAMES[:20], 2)
        assert found == LocalRetriever(directory).search_batch(NAMES[:20], 2)
    finally:
        group.stop()
    with pytest.raises(ConfigError, match="has no vectors; set it to 0"):
        RetrieverGroup(directory, RetrievalSettings(type="bm25", encoders={"num_encoders": 1}))
