"""The sides of ``bench retrieval``: loads over the fleet and over the HTTP server, and what is measured of files."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np

from benchmarks.measurement import Sample, quotient
from benchmarks.retrieval import evidence
from cluster.session.ray_session import ray_session
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import RetrievalError
from retrieval.base import Passage
from retrieval.indexes.manifest import Manifest

NUM_CALLERS = 64
TOP_K = 3
WARM_S = 2.0
SERVICE_S = 0.01
"""Time that a stub takes per query. With half of it, eight stubs and their client need more than two cores."""
CALLERS_PER_REPLICA = 32
SCORE_ROUNDING = 1e-6
"""Largest difference of two scores of the same answer. Scores are between -1 and 1, in float32."""
NUM_ENCODED, NUM_ENCODED_QUICK = 2048, 256
"""Passages that are encoded for ``index_build``."""

Ask = Callable[[list[str]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Load:
    """What callers saw."""

    queries_per_s: float
    p50_s: float

    def __str__(self) -> str:
        return f"{self.queries_per_s:.1f} queries/s, p50 {self.p50_s * 1e3:.0f} ms"


class World:
    """The indexes, made when they are first asked for."""

    def __init__(self, directory: Path, quick: bool) -> None:
        self._directory = directory
        self._quick = quick
        self._num_passages = evidence.NUM_PASSAGES_QUICK if quick else evidence.NUM_PASSAGES
        self._made: dict[str, Path] = {}

    def stub_index(self) -> Path:
        """The index directory that stubs find in."""
        from benchmarks.retrieval.stubs import make_stub_index

        if "stub" not in self._made:
            self._made["stub"] = make_stub_index(self._directory)
        return self._made["stub"]

    @cached_property
    def encoder(self) -> Path:
        """The folder of the encoder."""
        return evidence.make_encoder(self._directory)

    def index_build(self, number: int) -> Sample:
        """Passages/s of a whole build, from reading to the manifest, against the model alone over ready tokens."""
        from retrieval.build import build_index
        from retrieval.encoders.encoder import Encoder

        passages = list(evidence.passages(NUM_ENCODED_QUICK if self._quick else NUM_ENCODED))
        encoder = Encoder.load(self.encoder)
        tokens = [encoder.tokenize_passages(passages[start : start + 1024]) for start in range(0, len(passages), 1024)]
        encoder.embed(encoder.tokenize_passages(passages[:8]))  # what is set up at the first use
        started = time.perf_counter()
        for block in tokens:
            encoder.embed(block)
        alone_s = time.perf_counter() - started
        started = time.perf_counter()
        build_index(passages, self._directory / f"built-{number}", encoder=str(self.encoder), progress=False)
        return quotient(len(passages) / (time.perf_counter() - started), len(passages) / alone_s)

    def index(self, index_type: str) -> Path:
        """The index directory of a type."""
        if index_type not in self._made:
            self._made[index_type] = evidence.make_index(self._directory, self.encoder, index_type, self._num_passages)
        return self._made[index_type]


def local_ray() -> AbstractContextManager[None]:
    """A private local Ray, with more logical CPUs than actors ask for, at the priority of the other side."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    return ray_session(16)


async def load(ask: Ask, queries_per_call: int, duration_s: float, seed: int) -> Load:
    """Let ``NUM_CALLERS`` callers ask one call after another; what ends within the time counts."""
    known = iter(evidence.queries(200_000, seed))
    latencies: list[float] = []
    end = time.perf_counter() + WARM_S + duration_s

    async def caller() -> None:
        while time.perf_counter() < end:
            asked = [next(known) for _ in range(queries_per_call)]
            started = time.perf_counter()
            await ask(asked)
            ended = time.perf_counter()
            if end - duration_s <= ended <= end:
                latencies.append(ended - started)

    await asyncio.gather(*[caller() for _ in range(NUM_CALLERS)])
    return Load(len(latencies) * queries_per_call / duration_s, median(latencies))


def run_http(index_dir: Path, queries_per_call: int, quick: bool, seed: int) -> Load:
    """The load over the HTTP server."""

    async def run(url: str) -> Load:
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask(queries: list[str]) -> Any:
                async with session.post(url, json={"queries": queries, "topk": TOP_K, "return_scores": True}) as reply:
                    found = (await reply.json())["result"]
                    assert len(found) == len(queries)
                    return found

            # its latency is seconds: a shorter time would hold too few answers
            return await load(ask, queries_per_call, 6 if quick else 30, seed)

    with http_server(str(index_dir)) as url:
        return asyncio.run(run(url))


def run_fleet(index_dir: Path, queries_per_call: int, quick: bool, seed: int) -> Load:
    """The load over a fleet of two retrievers of one thread, each of which encodes its own queries."""
    settings = RetrievalSettings(
        num_retrievers=2, num_cpus_per_retriever=1, requests={"cache_size": 0, "timeout_s": 60}
    )

    async def run(retriever: Any) -> Load:
        return await load(lambda queries: retriever.search(queries, TOP_K), queries_per_call, 3 if quick else 10, seed)

    with fleet(index_dir, settings) as group:
        return asyncio.run(run(group.retriever()))


@contextmanager
def fleet(index_dir: Path, settings: RetrievalSettings) -> Iterator[Any]:
    """The product's own fleet."""
    from retrieval.replicas.retriever_group import RetrieverGroup

    group = RetrieverGroup(index_dir, settings)
    try:
        group.wait_until_ready()
        yield group
    finally:
        group.stop()


@contextmanager
def http_server(index_dir: str) -> Iterator[str]:
    """A server process; yields its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.retrieval.http_server", index_dir, str(port)], env=env
    )
    try:
        end = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < end, "the HTTP server did not start"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/retrieve"
    finally:
        process.kill()
        process.wait()


def recall(exact_dir: Path, other_dir: Path, ks: tuple[int, ...]) -> dict[int, float]:
    """The share of the exact index's best k that the other one finds, over 1,000 queries drawn as the vectors are."""
    drawn = evidence.vectors(1000, seed=99)
    texts = [""] * len(drawn)
    exact, other = (_open(directory).rank(texts, max(ks), drawn).rows for directory in (exact_dir, other_dir))
    return {
        k: float(np.mean([len(set(a[:k]) & set(b[:k])) / k for a, b in zip(exact, other, strict=True)])) for k in ks
    }


def vector_bytes(exact_dir: Path, other_dir: Path) -> Sample:
    """Bytes per vector on disk, against four per dimension."""
    manifest = Manifest.read(other_dir)
    return quotient(
        sum(shard.file.num_bytes for shard in manifest.shards) / manifest.count,
        4.0 * Manifest.read(exact_dir).dimension,
    )


_READ_ALL = """
import random, sys
from pathlib import Path
from retrieval.corpora.corpus import Corpus
def private():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
warm = Corpus.open(sys.argv[1])  # allocators and modules: private, but the same for any corpus
for _ in range(2000):
    warm.take(list(range(64)))
before = private()
corpus = Corpus.open(sys.argv[1])
rng = random.Random(0)
for _ in range(2000):
    corpus.take([rng.randrange(len(corpus)) for _ in range(64)])
print(max(0, private() - before) / len(corpus))
"""


def text_private_bytes(index_dir: Path) -> Sample:
    """Private bytes per passage of a process that opened the corpus and read 128,000 passages at random."""
    command = [sys.executable, "-c", _READ_ALL, str(index_dir)]
    found = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Sample(found, found, 1.0)


async def transport(index_dir: Path, num_queries: int, quick: bool) -> Sample:
    """Median time of a batch there and back: an actor and an HTTP server that both find at once."""
    import requests

    from benchmarks.retrieval.stubs import start_stubs
    from retrieval.replicas.batching import PoolArguments
    from retrieval.replicas.client import RetrieverClient

    asked = evidence.queries(num_queries)
    stubs = start_stubs(index_dir, 1, 0.0)
    try:
        client = RetrieverClient(stubs.name, 1, "", PoolArguments(), str(index_dir))
        ours = await _median_s(lambda: client.search(asked, TOP_K), quick)
    finally:
        stubs.stop()
    with http_server("stub") as url:

        async def ask() -> Any:  # as the rollout of Search-R1 does: a connection per call, and no other caller
            return requests.post(url, json={"queries": asked, "topk": TOP_K, "return_scores": True}).json()["result"]

        theirs = await _median_s(ask, quick)
    return quotient(ours, theirs)


async def router(index_dir: Path, quick: bool) -> Sample:
    """Median latency of one query through the client, against the bare actor call, taken in turns."""
    import ray

    from benchmarks.retrieval.stubs import start_stubs
    from retrieval.corpora.corpus import Corpus
    from retrieval.indexes.ranking import Ranking, to_hits
    from retrieval.replicas.batching import PoolArguments
    from retrieval.replicas.client import RetrieverClient

    stubs = start_stubs(index_dir, 1, 0.0)
    try:
        client = RetrieverClient(stubs.name, 1, "", PoolArguments(), str(index_dir))
        (handle,) = (ray.get_actor(name) for name in stubs.handles)
        asked, corpus = evidence.queries(1), Corpus.open(index_dir)

        async def bare() -> Any:
            found = await handle.call.remote("rank_batch", asked, TOP_K, None)
            return to_hits(Ranking(found.scores, found.rows), corpus.fields, found.index_version)

        ours, theirs = [], []
        for _ in range(3 if quick else 10):
            ours.append(await _median_s(lambda: client.search(asked, TOP_K), quick))
            theirs.append(await _median_s(bare, quick))
    finally:
        stubs.stop()
    return quotient(median(ours), median(theirs))


async def scaling(index_dir: Path, num_replicas: int, quick: bool) -> Sample:
    """Queries/s of a few replicas that take ``SERVICE_S`` per query, against as many times one's."""
    from benchmarks.retrieval.stubs import start_stubs
    from retrieval.replicas.batching import PoolArguments
    from retrieval.replicas.client import RetrieverClient

    async def measure(num_actors: int) -> float:
        stubs = start_stubs(index_dir, num_actors, SERVICE_S)
        try:
            client = RetrieverClient(stubs.name, 1, "", PoolArguments(), str(index_dir))
            return await _queries_per_s(client, num_actors * CALLERS_PER_REPLICA, 2 if quick else 6)
        finally:
            stubs.stop()

    one = await measure(1)
    return quotient(await measure(num_replicas), num_replicas * one)


async def _queries_per_s(client: Any, num_callers: int, duration_s: float) -> float:
    known = iter(evidence.queries(50_000, seed=7))
    done = 0
    started = time.perf_counter()

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() - started < duration_s:
            await client.search([next(known)], TOP_K)
            done += 1

    await asyncio.gather(*[caller() for _ in range(num_callers)])
    return done / (time.perf_counter() - started)


async def kill(index_dir: Path, quick: bool) -> tuple[Sample, Sample]:
    """``kill -9`` one of two replicas under full load; answers are compared with those of before.

    Returns:
        Wrong or missing answers of all that were asked, and the p99 of the 5 s after the kill against before.
    """
    settings = RetrievalSettings(
        num_retrievers=2, num_cpus_per_retriever=1, requests={"cache_size": 0, "timeout_s": 20, "max_retries": 4}
    )
    known = evidence.queries(500, seed=5)
    latencies: list[tuple[float, float]] = []  # end, seconds
    wrong = asked = 0
    with fleet(index_dir, settings) as group:
        client = group.retriever()
        expected = dict(zip(known, await client.search(known, TOP_K), strict=True))
        stop = asyncio.Event()

        async def caller(number: int) -> None:
            nonlocal wrong, asked
            turn = 0
            while not stop.is_set():
                query = known[(number * 31 + turn) % len(known)]
                started = time.perf_counter()
                asked += 1
                turn += 1
                try:
                    (found,) = await client.search([query], TOP_K)
                except RetrievalError:
                    continue  # missing
                wrong += not same_answer(found, expected[query])
                latencies.append((time.perf_counter(), time.perf_counter() - started))

        callers = asyncio.gather(*[caller(number) for number in range(NUM_CALLERS)])
        await asyncio.sleep(3 if quick else 8)
        pid = int(await group.handles[0].__ray_call__.remote(lambda _: os.getpid()))
        before = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(5)
        stop.set()
        await callers
    first = [seconds for end, seconds in latencies if end <= before][NUM_CALLERS:]
    after = [seconds for end, seconds in latencies if end > before]
    missing = asked - len(latencies)
    return Sample(float(wrong + missing), float(wrong + missing), float(asked)), quotient(_p99(after), _p99(first))


def same_answer(found: Sequence[Passage], expected: Sequence[Passage]) -> bool:
    """Whether two answers have the same passages in the same order, and scores that differ by rounding only.

    The rounding of a query's vector depends on the size of the batch that it is encoded in.
    """
    scores = [[passage.score for passage in passages] for passages in (found, expected)]
    same_passages = [replace(passage, score=0.0) for passage in found] == [replace(p, score=0.0) for p in expected]
    return same_passages and bool(np.allclose(*scores, atol=SCORE_ROUNDING, rtol=0))


async def second_replica(index_dir: Path) -> Sample:
    """Seconds from ``scale_to(2)`` until the second replica has answered a search; encoders are separate actors."""
    settings = RetrievalSettings(
        num_retrievers=1, encoders={"num_encoders": 1}, num_cpus_per_retriever=1, requests={"cache_size": 0}
    )
    known = iter(evidence.queries(100_000, seed=8))
    with fleet(index_dir, settings) as group:
        client = group.retriever()
        await client.search([next(known)], TOP_K)
        started = time.perf_counter()
        group.scale_to(2)
        searched = asyncio.create_task(_until_searched(group.handles[1]))
        while not searched.done():
            await asyncio.gather(*[client.search([next(known)], TOP_K) for _ in range(4)])
        seconds = time.perf_counter() - started
    return Sample(seconds, seconds, 1.0)


async def _until_searched(handle: Any) -> None:
    while not (await handle.load.remote()).queries:
        await asyncio.sleep(0.02)


async def _median_s(ask: Callable[[], Awaitable[Any]], quick: bool) -> float:
    found = []
    for _ in range(20):
        await ask()
    for _ in range(30 if quick else 100):
        started = time.perf_counter()
        await ask()
        found.append(time.perf_counter() - started)
    return median(found)


def _p99(seconds: list[float]) -> float:
    return quantiles(seconds, n=100)[98]


def _open(directory: Path) -> Any:
    from retrieval.indexes.vector_index import DenseRanker

    return DenseRanker(directory, Manifest.read(directory), num_threads=2, load_encoder=False)
