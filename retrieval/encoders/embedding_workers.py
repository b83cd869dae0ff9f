"""Encodes a corpus: in this process, or by Ray actors that are handed one shard of the store after the other.

::

    fill_store ──► missing shards ──► EmbeddingActor ──► shard-000007.npy      every node sees corpus and store
         ▲                                  │
         └── an actor died: its shard goes to another, and a new one starts

Vectors do not pass through this process. Two actors on one GPU (``num_gpus_per_actor=0.5``) keep it busy while one of
them turns texts into tokens.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragr1_actors.core.errors import DataError, FleetError, RagR1Error
from ragr1_actors.core.files import is_no_room
from retrieval.corpora.corpus import Corpus
from retrieval.encoders.embedding_store import EmbeddingStore

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder

START_TIMEOUT_S = 600.0
"""For the first actor; a cluster may have to grow."""
MAX_DEATHS_IN_A_ROW = 5
"""Of actors, without one shard written in between."""
_BLOCK_ROWS = 1024


@dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """What an actor that encodes a corpus is made with."""

    store_dir: str
    corpus_dir: str
    encoder_name: str
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    dtype: str = "auto"
    """See ``Encoder.load``."""
    num_threads: int = 1


class EmbeddingActor:
    """What ``ray.remote`` makes an actor of."""

    def __init__(self, settings: EmbeddingSettings) -> None:
        """Load nothing yet: an error of a constructor reaches the caller as text only."""
        self._settings = settings
        self._open: tuple[EmbeddingStore, Corpus, Encoder] | None = None

    def ping(self) -> None:
        """Answer: the actor has started."""

    def fill(self, number: int) -> None:
        """Encode and write a shard.

        Raises:
            DataError: no usable corpus, store or encoder on this node.
        """
        if self._open is None:
            self._open = self._load()
        fill_shard(*self._open, number)

    def _load(self) -> tuple[EmbeddingStore, Corpus, Encoder]:
        settings = self._settings
        # Tokens are made by the threads that then wait for a GPU.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if settings.num_threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(settings.num_threads)
        from retrieval.encoders.encoder import Encoder, set_encoder_threads

        set_encoder_threads(settings.num_threads)
        encoder = Encoder.load(settings.encoder_name, device=settings.device, dtype=settings.dtype)
        return EmbeddingStore.open(settings.store_dir), Corpus.open(settings.corpus_dir), encoder


def fill_shard(
    store: EmbeddingStore,
    corpus: Corpus,
    encoder: Encoder,
    number: int,
    advance: Callable[[int], None] = lambda num_rows: None,
) -> None:
    """Encode the passages of a shard and write it; ``advance`` is told how many rows were encoded.

    Raises:
        DataError: another encoder than the store's, or a vector that holds NaN.
        OSError: the shard cannot be written.
    """
    if encoder.fingerprint != store.header.encoder_fingerprint:
        raise DataError(
            f"encoder {encoder.name!r} has fingerprint {encoder.fingerprint[:12]}, but the vectors so far are of "
            f"{store.header.encoder_fingerprint[:12]}; its files differ or changed, so make them the same everywhere"
        )
    rows = store.rows(number)
    vectors = np.empty((len(rows), store.header.dimension), np.float32)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        vectors[start : start + len(block)] = encoder.encode_passages(corpus[block.start : block.stop])
        advance(len(block))
    store.write(number, vectors)


def fill_store(
    store: EmbeddingStore,
    corpus_dir: str | Path,
    encoder_name: str,
    num_actors: int = 0,
    *,
    num_cpus_per_actor: float = 1.0,
    num_gpus_per_actor: float = 0.0,
    device: str = "cpu",
    dtype: str = "auto",
    encoder: Encoder | None = None,
    advance: Callable[[int], None] = lambda num_rows: None,
) -> None:
    """Encode the passages of all shards that the store lacks. Interrupted, the shards written so far stay.

    Args:
        store: made by ``EmbeddingStore.create``.
        corpus_dir: with ``corpus.arrow`` and ``corpus.ids``.
        encoder_name: a folder or hub name, the same on every node.
        num_actors: of the Ray session of this process; 0 encodes here.
        num_cpus_per_actor: also its threads, rounded down, at least one.
        num_gpus_per_actor: a fraction shares a GPU.
        device: ``cpu`` or ``cuda``.
        dtype: of the encoder's weights.
        encoder: the same one, loaded already; used where no actors are asked for.
        advance: called with the number of rows that were encoded since its last call.

    Raises:
        DataError: an encoder that cannot be loaded or is not the store's, or a vector that holds NaN.
        FleetError: no actor starts, or they die again and again.
        OSError: a shard cannot be written.
    """
    missing = store.missing()
    if num_actors and missing:
        settings = EmbeddingSettings(
            str(store.directory.absolute()),
            str(Path(corpus_dir).absolute()),
            encoder_name,
            device,
            dtype,
            max(1, int(num_cpus_per_actor)),
        )
        _Fleet(settings, num_actors, num_cpus_per_actor, num_gpus_per_actor).fill(store, missing, advance)
    elif missing:
        from retrieval.encoders.encoder import Encoder  # torch and sentence-transformers take seconds

        encoder = encoder or Encoder.load(encoder_name, device=device, dtype=dtype)
        corpus = Corpus.open(corpus_dir)
        for number in missing:
            fill_shard(store, corpus, encoder, number, advance)


class _Fleet:
    """Actors, each busy with one shard."""

    def __init__(self, settings: EmbeddingSettings, num_actors: int, num_cpus: float, num_gpus: float) -> None:
        self._settings = settings
        self._num_actors = num_actors
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._busy: dict[Any, tuple[Any, int]] = {}

    def fill(self, store: EmbeddingStore, missing: list[int], advance: Callable[[int], None]) -> None:
        import ray

        waiting = deque(missing)
        actors: list[Any] = []
        num_deaths = 0
        try:
            for _ in range(min(self._num_actors, len(missing))):
                actors.append(self._start())
            self._wait_for_one(actors)
            for actor in actors:
                self._hand_out(actor, waiting)
            while self._busy:
                done, _ = ray.wait(list(self._busy), num_returns=1)
                actor, number = self._busy.pop(done[0])
                try:
                    ray.get(done[0])
                except ray.exceptions.RayError as error:
                    num_deaths += 1
                    self._check_death(error, num_deaths)
                    waiting.appendleft(number)
                    actors.remove(actor)
                    ray.kill(actor, no_restart=True)  # it may merely be out of reach
                    actor = self._start()
                    actors.append(actor)
                else:
                    num_deaths = 0
                    advance(len(store.rows(number)))
                if waiting:
                    self._hand_out(actor, waiting)
        finally:  # also on Ctrl-C: a shard that is being written has not got its name yet
            for actor in actors:
                ray.kill(actor, no_restart=True)

    def _start(self) -> Any:
        import ray

        return ray.remote(EmbeddingActor).options(max_restarts=0, **self._resources).remote(self._settings)

    def _hand_out(self, actor: Any, waiting: deque[int]) -> None:
        number = waiting.popleft()
        self._busy[actor.fill.remote(number)] = (actor, number)

    def _wait_for_one(self, actors: list[Any]) -> None:
        import ray

        started, _ = ray.wait([actor.ping.remote() for actor in actors], num_returns=1, timeout=START_TIMEOUT_S)
        if not started:
            wanted = ", ".join(f"{name}={number:g}" for name, number in self._resources.items())
            raise FleetError(
                f"no actor with {wanted} started within {START_TIMEOUT_S:g} s to encode the corpus; ask for less, or "
                "give the cluster more"
            )

    def _check_death(self, error: Exception, num_deaths: int) -> None:
        """Raise what an actor raised, or that too many of them died; return where one simply died."""
        import ray

        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            if isinstance(cause, RagR1Error) or is_no_room(cause):
                raise cause from None
            raise FleetError(f"encoding the corpus failed in an actor: {cause!r}") from error
        if num_deaths > MAX_DEATHS_IN_A_ROW:
            first_line = str(error).strip().splitlines()[0]
            raise FleetError(
                f"{num_deaths} actors that encode the corpus died one after the other: {first_line}"
            ) from error
