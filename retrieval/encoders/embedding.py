"""The vectors of a corpus while its index is built: a store on disk, and the Ray actors that fill it.

::

    embeddings/
      store.json           StoreHeader: of which corpus, by which encoder
      shard-000000.npy     rows 0 to rows_per_shard - 1, float32 or float16 [rows, dimension]
      shard-000001.npy     ...; the last shard may be shorter

    fill_store ──► missing shards ──► EmbeddingActor ──► shard-000007.npy      every node sees corpus and store

A shard gets its name by a rename once it is on disk whole. An interrupted build therefore continues with the missing
shards, and several processes can fill one store. Vectors do not pass through the driver. Two actors per GPU
(``num_gpus_per_actor=0.5``) keep it busy while one of them tokenizes.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ragr1_actors.core.errors import DataError, FleetError, RagR1Error, first_problem, one_line
from ragr1_actors.core.files import WRITING, is_no_room, sync, sync_tree, write_file
from retrieval.corpora.corpus import Corpus

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder

HEADER_FILE = "store.json"
START_TIMEOUT_S = 600.0
"""Seconds that the first actor may take to start; a cluster may have to grow."""
MAX_DEATHS_IN_A_ROW = 5
"""Deaths of actors without one shard written in between."""
_BLOCK_ROWS = 1024


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StoreHeader:
    """What the vectors of a store are."""

    corpus_fingerprint: str
    """``fingerprint_file`` of the corpus."""
    encoder_fingerprint: str
    dimension: int
    count: int
    """Rows of the corpus."""
    dtype: str = "float32"
    """``float32`` or ``float16``, on disk."""
    rows_per_shard: int = 4096
    """The work that one interrupted process loses."""


@plain_dataclass(frozen=True)
class StoredVectors:
    """The vectors of consecutive rows, to be iterated over any number of times: float32 ``[n, dimension]`` each."""

    store: EmbeddingStore
    start: int
    stop: int

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors shard by shard, in row order. Raises ``DataError``: a shard is missing or damaged."""
        rows_per_shard = self.store.header.rows_per_shard
        for number in range(self.start // rows_per_shard, -(-self.stop // rows_per_shard)):
            rows = self.store.rows(number)
            block = self.store.read(number)[max(self.start - rows.start, 0) : self.stop - rows.start]
            yield np.asarray(block, np.float32)


class EmbeddingStore:
    """A directory with the vectors of a corpus, complete or incomplete."""

    def __init__(self, directory: Path, header: StoreHeader) -> None:
        """Wrap a directory; use ``create`` or ``open``."""
        self.directory = directory
        self.header = header

    @classmethod
    def create(cls, directory: str | Path, header: StoreHeader) -> Self:
        """Create a store, or open the existing one. No other process may be writing to it.

        Raises:
            DataError: the existing store is of another corpus or encoder.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{WRITING}*"):
            leftover.unlink()
        if (directory / HEADER_FILE).is_file():
            store = cls.open(directory)
            if store.header != header:
                kept, wanted = asdict(store.header), asdict(header)
                differing = ", ".join(f"{name} {kept[name]!r}" for name in kept if kept[name] != wanted[name])
                raise DataError(
                    f"{directory} holds vectors of another corpus or encoder ({differing} differs); remove it to "
                    "encode again"
                )
            return store
        content = json.dumps(asdict(header), indent=2) + "\n"
        write_file(directory / HEADER_FILE, lambda writing: writing.write_text(content, encoding="utf-8"))
        return cls(directory, header)

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Open an existing store. Raises ``DataError``: the directory holds no store, or its header is damaged."""
        path = Path(directory) / HEADER_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: no readable header of stored vectors ({error}); remove the directory") from error
        try:
            return cls(Path(directory), TypeAdapter(StoreHeader).validate_python(content))
        except ValidationError as error:
            key, _, problem = first_problem(error)
            raise DataError(f"{path}: damaged header ({key}: {problem}); remove the directory") from error

    @property
    def num_shards(self) -> int:
        """Shards of a complete store."""
        return -(-self.header.count // self.header.rows_per_shard)

    def rows(self, number: int) -> range:
        """Return the corpus rows of a shard."""
        start = number * self.header.rows_per_shard
        return range(start, min(start + self.header.rows_per_shard, self.header.count))

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are missing or not whole."""
        return [number for number in range(self.num_shards) if self._map(number) is None]

    def write(self, number: int, vectors: NDArray[np.float32]) -> None:
        """Write a shard: float32 ``[len(rows(number)), dimension]``.

        Raises:
            DataError: NaN or infinity.
            OSError: it cannot be written; ``ENOSPC`` where there is no room. No partial file remains.
        """
        rows = self.rows(number)
        if vectors.shape != (len(rows), self.header.dimension):
            raise ValueError(f"got vectors of shape {vectors.shape}, expected {(len(rows), self.header.dimension)}")
        is_finite = np.isfinite(vectors).all(axis=1)
        if not is_finite.all():
            row = rows[int(np.argmin(is_finite))]
            raise DataError(f"the vector of row {row} holds NaN or infinity; the encoder is broken, so check its files")
        stored = vectors.astype(self.header.dtype)
        write_file(self._path(number), lambda writing: np.save(writing, stored))

    def read(self, number: int) -> NDArray[Any]:
        """Map a shard: ``[len(rows(number)), dimension]`` of the store's dtype.

        Raises:
            DataError: it is missing or damaged.
        """
        shard = self._map(number)
        if shard is None:
            raise DataError(f"{self._path(number)} is missing or damaged; run the build again, which fills it")
        return shard

    def blocks(self, start: int = 0, stop: int | None = None) -> StoredVectors:
        """Return the vectors of the rows ``start`` to ``stop - 1``, by default of all."""
        return StoredVectors(self, start, self.header.count if stop is None else stop)

    def _path(self, number: int) -> Path:
        return self.directory / f"shard-{number:06d}.npy"

    def _map(self, number: int) -> NDArray[Any] | None:
        try:
            shard: NDArray[Any] = np.load(self._path(number), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        is_whole = shard.shape == (len(self.rows(number)), self.header.dimension) and shard.dtype == self.header.dtype
        return shard if is_whole else None


def publish(partial: Path, final: Path) -> None:
    """Rename a file or a folder to its final name once it is on disk whole."""
    sync_tree(partial)
    partial.replace(final)
    sync(final.parent)


@plain_dataclass(frozen=True, slots=True)
class EmbeddingSettings:
    """The arguments of an actor that encodes a corpus."""

    store_dir: str
    corpus_dir: str
    encoder_name: str
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    dtype: str = "auto"
    """See ``Encoder.load``."""
    num_threads: int = 1


class EmbeddingActor:
    """Encodes shards; ``fill_store`` starts it with ``ray.remote``."""

    def __init__(self, settings: EmbeddingSettings) -> None:
        """Load nothing yet: Ray reports an error of a constructor as text only."""
        self._settings = settings
        self._open: tuple[EmbeddingStore, Corpus, Encoder] | None = None

    def ping(self) -> None:
        """Return once the actor has started."""

    def fill(self, number: int) -> None:
        """Encode and write a shard. Raises ``DataError``: no usable corpus, store or encoder on this node."""
        if self._open is None:
            self._open = self._load()
        fill_shard(*self._open, number)

    def _load(self) -> tuple[EmbeddingStore, Corpus, Encoder]:
        settings = self._settings
        # The threads that tokenize are the threads that then wait for a GPU.
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
    """Encode the passages of a shard and write it; ``advance`` gets the number of encoded rows.

    Raises ``DataError`` if the encoder is not the store's, and what ``EmbeddingStore.write`` raises.
    """
    if encoder.fingerprint != store.header.encoder_fingerprint:
        raise DataError(
            f"encoder {encoder.name!r} has fingerprint {encoder.fingerprint[:12]}, but the vectors so far are of "
            f"{store.header.encoder_fingerprint[:12]}; its files differ or changed, so copy the same files to all nodes"
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
    """Encode the passages of all missing shards. Shards written before an interruption remain.

    Args:
        store: the store to fill.
        corpus_dir: with ``corpus.arrow`` and ``corpus.ids``.
        encoder_name: a folder or hub name, the same on every node.
        num_actors: actors in the Ray session of this process; 0 encodes in this process.
        num_cpus_per_actor: also the number of threads, rounded down, at least 1.
        num_gpus_per_actor: a fraction shares a GPU.
        device: ``cpu`` or ``cuda``.
        dtype: of the encoder's weights.
        encoder: the same encoder, already loaded; used with ``num_actors=0``.
        advance: called with the number of rows that were encoded since its last call.

    Raises:
        DataError: the encoder cannot be loaded or is not the store's, or a vector holds NaN.
        FleetError: no actor starts, or more than ``MAX_DEATHS_IN_A_ROW`` of them die in a row.
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
    """Actors, each busy with one shard. A dead actor is replaced, and its shard goes to the next free actor.

    ``ray.util.ActorPool`` cannot replace an actor; see ``docs/decisions/retrieval-libraries.md``.
    """

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
                    ray.kill(actor, no_restart=True)  # it may only be out of reach
                    actor = self._start()
                    actors.append(actor)
                else:
                    num_deaths = 0
                    advance(len(store.rows(number)))
                if waiting:
                    self._hand_out(actor, waiting)
        finally:  # also on Ctrl-C: a shard that is being written has no name yet
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
        """Raise the error of an actor, or that too many died in a row; return if this one may be replaced."""
        import ray

        if isinstance(error, ray.exceptions.RayTaskError):
            cause = error.cause
            if isinstance(cause, RagR1Error) or is_no_room(cause):
                raise cause from None
            raise FleetError(f"encoding the corpus failed in an actor: {cause!r}") from error
        if num_deaths > MAX_DEATHS_IN_A_ROW:
            raise FleetError(
                f"{num_deaths} actors that encode the corpus died one after the other ({one_line(error)}); give each "
                "actor more memory, then run the build again"
            ) from error
