"""Actors that encode a corpus: the vectors of one process, also when actors die, or else one clear error."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from small_world import descendants, wait_for

from ragr1_actors.core.errors import ConfigError, DataError, FleetError
from retrieval.base import Passage
from retrieval.build import build_index, index_info
from retrieval.corpora.corpus import Corpus, write_corpus
from retrieval.encoders import embedding as embedding_fleet
from retrieval.encoders.embedding import (
    SHARDS_PER_ACTOR,
    EmbeddingActor,
    EmbeddingStore,
    StoredVectors,
    StoreHeader,
    Workers,
    fill_store,
)
from retrieval.encoders.encoder import Encoder
from retrieval.encoders.families import make_static_encoder

pytestmark = pytest.mark.engine

NUM_PASSAGES, ROWS_PER_SHARD, NUM_SHARDS = 3000, 16, 188


class World:
    """A corpus, an encoder made of it, and its vectors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        passages = [Passage(str(i), f"Person{i}", f"Born in town{i % 97}. " * 9) for i in range(NUM_PASSAGES)]
        write_corpus(passages, directory)
        self.encoder_dir = str(make_static_encoder(directory / "encoder", (p.text for p in passages), dimension=16))
        self.encoder = Encoder.load(self.encoder_dir)
        self.vectors = self.encoder.encode_passages(passages)

    def store(self, directory: Path, **changes: Any) -> EmbeddingStore:
        header = StoreHeader("corpus", self.encoder.fingerprint, 16, NUM_PASSAGES, rows_per_shard=ROWS_PER_SHARD)
        return EmbeddingStore.create(directory, replace(header, **changes))

    def check(self, store: EmbeddingStore) -> None:
        """Check that every vector is there and equal to that of this process."""
        assert store.missing() == []
        assert {path.name for path in store.directory.iterdir()} == {
            "store.json", *(f"shard-{number:06d}.npy" for number in range(NUM_SHARDS))
        }  # fmt: skip
        assert np.array_equal(vectors_of(store), self.vectors)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("fleet"))


def vectors_of(store: EmbeddingStore) -> NDArray[np.float32]:
    return np.concatenate(list(StoredVectors(store, 0, store.header.count)))


def actor_processes() -> list[int]:
    """Processes of this test's own cluster that encode."""
    found = []
    for pid in sorted(descendants(os.getpid())):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::EmbeddingActor"):
            found.append(pid)
    return found


def after_three_shards(act: Callable[[], None]) -> Callable[[int], None]:
    """Return an ``advance`` that calls ``act`` when the third shard is reported."""
    calls: list[int] = []

    def advance(num_rows: int) -> None:
        calls.append(num_rows)
        if len(calls) == 3:
            act()

    return advance


def test_it_is_filled_in_this_process_and_continued(world: World, tmp_path: Path) -> None:
    store = world.store(tmp_path)
    fill_store(store, world.directory, world.encoder, Workers())
    world.check(store)
    (tmp_path / "shard-000005.npy").unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    fill_store(store, world.directory, world.encoder, Workers())
    world.check(store)
    assert {path.name for path in tmp_path.iterdir() if path.stat().st_mtime_ns not in kept.values()} == {
        "shard-000005.npy"
    }
    fill_store(store, world.directory, world.encoder, Workers())  # nothing is missing


def test_the_next_block_is_tokenized_while_the_model_works(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of the next shard: the model of each shard but the last waits for the tokens of another one."""
    tokenized = [threading.Event() for _ in range(NUM_SHARDS + 1)]
    tokenized[NUM_SHARDS].set()
    count, embed, tokenize = iter(range(NUM_SHARDS)), Encoder.embed, Encoder.tokenize_passages
    order: list[int] = []

    def tokenize_and_say(encoder: Encoder, passages: list[Passage]) -> Any:
        found = tokenize(encoder, passages)
        tokenized[next(count)].set()
        return found

    def embed_after_the_next(encoder: Encoder, tokens: Any) -> Any:
        order.append(len(order))
        assert tokenized[len(order)].wait(60), f"block {len(order)} is not tokenized while the model works"
        return embed(encoder, tokens)

    monkeypatch.setattr(Encoder, "tokenize_passages", tokenize_and_say)
    monkeypatch.setattr(Encoder, "embed", embed_after_the_next)
    store = world.store(tmp_path)
    fill_store(store, world.directory, world.encoder, Workers())
    world.check(store)


def test_an_actor_tokenizes_one_shard_while_the_model_works_on_another(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = world.store(tmp_path)
    actor = EmbeddingActor(store, world.directory, world.encoder_dir, Workers())
    other_waits, tokenize, embed = threading.Event(), Encoder.tokenize_passages, Encoder.embed

    def tokenize_and_say(encoder: Encoder, passages: list[Passage]) -> Any:
        found = tokenize(encoder, passages)
        if passages[0].id == "16":
            other_waits.set()
        return found

    def embed_after_the_other(encoder: Encoder, tokens: Any) -> Any:
        assert other_waits.wait(60), "the other shard is not tokenized while the model works"
        return embed(encoder, tokens)

    monkeypatch.setattr(Encoder, "tokenize_passages", tokenize_and_say)
    monkeypatch.setattr(Encoder, "embed", embed_after_the_other)
    with ThreadPoolExecutor(SHARDS_PER_ACTOR) as threads:
        list(threads.map(actor.fill, range(2)))
    assert [number for number in range(4) if store.read(number) is not None] == [0, 1]


def test_another_encoder_is_refused(world: World, tmp_path: Path) -> None:
    store = world.store(tmp_path, encoder_fingerprint="0" * 64)
    with pytest.raises(DataError, match="but the vectors so far are of 000000000000; its files differ or changed"):
        fill_store(store, world.directory, world.encoder, Workers())


@pytest.mark.slow
@pytest.mark.ray
def test_actors_write_what_this_process_would(ray_local: ModuleType, world: World, tmp_path: Path) -> None:
    store = world.store(tmp_path)
    store.write(2, world.vectors[32:48])
    before = (tmp_path / "shard-000002.npy").stat().st_mtime_ns
    reported: list[int] = []
    fill_store(store, world.directory, world.encoder, Workers(2, 0.5), reported.append)
    world.check(store)
    assert (tmp_path / "shard-000002.npy").stat().st_mtime_ns == before
    assert sum(reported) == store.header.count - len(store.rows(2))
    assert wait_for(lambda: not actor_processes(), 120)


@pytest.mark.ray
@pytest.mark.slow
def test_an_index_built_by_actors_is_the_same(ray_local: ModuleType, world: World, tmp_path: Path) -> None:
    passages = list(Corpus.open(world.directory))
    for encoder in ("static", world.encoder_dir):
        here = build_index(passages, tmp_path / f"here-{len(encoder)}", encoder=encoder, progress=False)
        there = build_index(
            passages,
            tmp_path / f"there-{len(encoder)}",
            encoder=encoder,
            workers=Workers(2, 0.5),
            progress=False,
        )
        assert index_info(here) == index_info(there)


@pytest.mark.ray
@pytest.mark.slow
def test_the_shards_of_actors_that_die_and_hang_go_to_others(
    ray_local: ModuleType, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_fleet, "HANG_TIMEOUT_S", 10.0)
    store = world.store(tmp_path)
    calls: list[int] = []
    ended: dict[signal.Signals, list[int]] = {}

    def advance(num_rows: int) -> None:
        calls.append(num_rows)
        how = {3: signal.SIGKILL, NUM_SHARDS // 2: signal.SIGSTOP}.get(len(calls))
        if how is not None:
            ended[how] = actor_processes()
            for pid in ended[how]:
                os.kill(pid, how)

    fill_store(store, world.directory, world.encoder, Workers(2, 0.5), advance)
    assert ended[signal.SIGKILL] and ended[signal.SIGSTOP]
    world.check(EmbeddingStore.create(tmp_path, store.header))  # what the dead one was writing is gone


@pytest.mark.ray
@pytest.mark.slow
def test_an_interruption_leaves_whole_shards(ray_local: ModuleType, world: World, tmp_path: Path) -> None:
    store = world.store(tmp_path)
    advance = after_three_shards(lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fill_store(store, world.directory, world.encoder, Workers(2, 0.5), advance)
    assert wait_for(lambda: not actor_processes(), 120)
    again = EmbeddingStore.create(tmp_path, store.header)
    assert 0 < len(again.missing()) < NUM_SHARDS
    fill_store(again, world.directory, world.encoder, Workers())
    world.check(again)


@pytest.mark.ray
@pytest.mark.slow
def test_an_error_of_an_actor_is_raised_as_it_is(ray_local: ModuleType, world: World, tmp_path: Path) -> None:
    other = world.store(tmp_path / "a", encoder_fingerprint="0" * 64)
    with pytest.raises(DataError, match="but the vectors so far are of 000000000000"):
        fill_store(other, world.directory, world.encoder, Workers(1, 0))
    store = world.store(tmp_path / "b")
    with pytest.raises(ConfigError, match="unknown dtype 'fp8'"):
        fill_store(store, world.directory, world.encoder, Workers(1, 0, dtype="fp8"))
    assert len(store.missing()) == NUM_SHARDS


@pytest.mark.ray
def test_actors_that_cannot_start_are_not_waited_for(
    ray_local: ModuleType, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_fleet, "START_TIMEOUT_S", 0.5)
    with pytest.raises(FleetError, match=r"no actor with num_cpus=0, num_gpus=3 started within 0\.5 s"):
        fill_store(world.store(tmp_path), world.directory, world.encoder, Workers(2, 0, 3))  # there are 2 GPUs


@pytest.mark.ray
@pytest.mark.slow
def test_actors_that_die_again_and_again_end_it(ray_local: ModuleType, world: World, tmp_path: Path) -> None:
    stop = threading.Event()

    def kill_all() -> None:
        while not stop.wait(0.02):
            for pid in actor_processes():
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_all)
    thread.start()
    try:
        with pytest.raises(FleetError, match="6 actors that encode the corpus died one after the other"):
            fill_store(world.store(tmp_path), world.directory, world.encoder, Workers(1, 0))
    finally:
        stop.set()
        thread.join()
