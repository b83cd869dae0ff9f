"""The vectors of a corpus while its index is built: a store on disk, and the Ray actors that fill it.

::

    embeddings/
      store.json           StoreHeader: of which corpus, by which encoder
      shard-000000.npy     rows 0 to rows_per_shard - 1, float32 or float16 [rows, dimension]
      shard-000001.npy     ...; the last shard may be shorter

    fill_store ──► missing shards ──► EmbeddingActor ──► shard-000007.npy      every node sees corpus and store

A shard gets its name by a rename once it is on disk whole. An interrupted build therefore continues with the missing
shards, and several processes can fill one store. Vectors do not pass through the driver.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from cluster.supervision.fleet import Fleet, Member, Process, Pulse, last_line
from cluster.supervision.watchdog import HANG_TIMEOUT_S
from ragr1_actors.core.disk.files import WRITING, is_no_room, write_file
from ragr1_actors.core.disk.json_files import read_json_as, write_json
from ragr1_actors.core.errors import DataError, FleetError, RagR1Error
from retrieval.corpora.corpus import Corpus

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder

T = TypeVar("T")

logger = logging.getLogger(__name__)

HEADER_FILE = "store.json"
START_TIMEOUT_S = 600.0
"""Limit for the start of the first actor, in seconds; a cluster may have to grow."""
SHARDS_PER_ACTOR = 2
"""Shards under way per actor: one in the model, the other being read, tokenized or written."""
MAX_DEATHS_IN_A_ROW = 5
"""Limit of deaths of actors without a written shard in between."""
_BLOCK_ROWS = 1024
_HEALTH = "health"
"""Ray's concurrency group for the calls of the watchdog."""


@plain_dataclass(frozen=True)
class Workers:
    """Processes that encode the passages of an index."""

    num_actors: int = 0
    """Number of actors in the Ray session of this process; 0 encodes in this process."""
    num_cpus: float = 1.0
    """CPUs of an actor; also the number of its threads, rounded down, at least 1."""
    num_gpus: float | None = None
    """GPUs of an actor; None means 1 if ``device`` is a GPU, else 0."""
    device: str = "cpu"
    """Device of the encoder: ``cpu`` or ``cuda``."""
    dtype: str = "auto"
    """Type of the encoder's weights; see ``Encoder.load``."""

    @property
    def resources(self) -> dict[str, float]:
        """Resources that an actor asks of Ray."""
        num_gpus = float(self.device.startswith("cuda")) if self.num_gpus is None else self.num_gpus
        return {"num_cpus": self.num_cpus, "num_gpus": num_gpus}


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StoreHeader:
    """Identity and layout of the vectors in a store."""

    corpus_fingerprint: str
    """Fingerprint of the corpus file, by ``fingerprint_file``."""
    encoder_fingerprint: str
    dimension: int
    count: int
    """Number of rows of the corpus."""
    dtype: str = "float32"
    """Type of the numbers on disk: ``float32`` or ``float16``."""
    rows_per_shard: int = 4096
    """Rows of a shard; an interruption loses at most the work of one shard per process."""


@plain_dataclass(frozen=True)
class StoredVectors:
    """Vectors of consecutive rows in blocks of float32 ``[n, dimension]``; they can be iterated over repeatedly."""

    store: EmbeddingStore
    start: int
    stop: int

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors shard by shard, in row order; raises ``DataError`` if a shard is missing or damaged."""
        rows_per_shard = self.store.header.rows_per_shard
        for number in range(self.start // rows_per_shard, -(-self.stop // rows_per_shard)):
            rows, shard = self.store.rows(number), self.store.read(number)
            if shard is None:
                raise DataError(
                    f"shard {number} of {self.store.directory} is missing or damaged; run the build again, which "
                    "fills it"
                )
            yield np.asarray(shard[max(self.start - rows.start, 0) : self.stop - rows.start], np.float32)


@plain_dataclass(frozen=True)
class EmbeddingStore:
    """Directory with the vectors of a corpus, complete or incomplete; ``create`` makes it."""

    directory: Path
    header: StoreHeader

    @classmethod
    def create(cls, directory: Path, header: StoreHeader) -> Self:
        """Create a store, or open the existing one, to which no other process may be writing.

        Raises:
            DataError: the existing store is damaged, or has another corpus or encoder.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{WRITING}*"):
            leftover.unlink()
        path = directory / HEADER_FILE
        if not path.is_file():
            write_file(path, lambda writing: write_json(writing, asdict(header)))
            return cls(directory, header)
        kept, wanted = asdict(read_json_as(StoreHeader, path, "remove the directory")), asdict(header)
        differing = ", ".join(f"{name} {kept[name]!r}" for name in kept if kept[name] != wanted[name])
        if differing:
            raise DataError(
                f"{directory} holds vectors of another corpus or encoder ({differing} differs); remove it to encode "
                "again"
            )
        return cls(directory, header)

    def rows(self, number: int) -> range:
        """Return the corpus rows of a shard."""
        start = number * self.header.rows_per_shard
        return range(start, min(start + self.header.rows_per_shard, self.header.count))

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are missing or not whole."""
        num_shards = -(-self.header.count // self.header.rows_per_shard)
        return [number for number in range(num_shards) if self.read(number) is None]

    def write(self, number: int, vectors: NDArray[np.float32]) -> None:
        """Write a shard whole or, at ``OSError``, not at all: finite float32 ``[len(rows(number)), dimension]``."""
        stored = vectors.astype(self.header.dtype)
        write_file(self._path(number), lambda writing: np.save(writing, stored))

    def read(self, number: int) -> NDArray[Any] | None:
        """Map a shard, ``[len(rows(number)), dimension]`` of the store's dtype; None if it is missing or damaged."""
        try:
            shard: NDArray[Any] = np.load(self._path(number), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return None
        is_whole = shard.shape == (len(self.rows(number)), self.header.dimension) and shard.dtype == self.header.dtype
        return shard if is_whole else None

    def _path(self, number: int) -> Path:
        return self.directory / f"shard-{number:06d}.npy"


class EmbeddingActor:
    """Encodes shards; ``fill_store`` starts it with ``ray.remote``."""

    def __init__(self, store: EmbeddingStore, corpus_dir: Path, encoder_name: str, workers: Workers) -> None:
        """Load nothing yet, since Ray reports an error of a constructor as text only."""
        self._loading = Lock()
        self._store = store
        self._corpus_dir = corpus_dir
        self._encoder_name = encoder_name
        self._workers = workers

    def pulse(self) -> Pulse:
        """Answer, so that the watchdog knows that the process runs."""
        return Pulse(Process.current())

    def fill(self, number: int) -> None:
        """Encode and write a shard; raises ``DataError`` if this node has no usable corpus or encoder.

        ``SHARDS_PER_ACTOR`` threads call it: while one uses the model, the other one reads, tokenizes and writes.
        """
        with self._loading:
            corpus, encoder = self._loaded
        fill_shards(self._store, corpus, encoder, [number])

    @cached_property
    def _loaded(self) -> tuple[Corpus, Encoder]:
        num_threads = max(1, int(self._workers.num_cpus))
        # The threads that tokenize are the threads that then wait for a GPU.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(num_threads)
        import torch

        from retrieval.encoders.encoder import Encoder

        torch.set_num_threads(num_threads)
        encoder = Encoder.load(self._encoder_name, device=self._workers.device, dtype=self._workers.dtype)
        return Corpus.open(self._corpus_dir), encoder


def fill_shards(
    store: EmbeddingStore,
    corpus: Corpus,
    encoder: Encoder,
    numbers: Sequence[int],
    advance: Callable[[int], None] = lambda num_rows: None,
) -> None:
    """Encode and write shards; ``advance`` gets the number of encoded rows. ``DataError`` if the encoder differs.

    While the model encodes a block of rows, a thread reads and tokenizes the next one.
    """
    if encoder.fingerprint != store.header.encoder_fingerprint:
        raise DataError(
            f"encoder {encoder.name!r} has fingerprint {encoder.fingerprint[:12]}, but the vectors so far are of "
            f"{store.header.encoder_fingerprint[:12]}; its files differ or changed, so copy the same files to all nodes"
        )
    blocks = [
        (number, rows[start : start + _BLOCK_ROWS])
        for number, rows in ((number, store.rows(number)) for number in numbers)
        for start in range(0, len(rows), _BLOCK_ROWS)
    ]
    tokens = computed_ahead(encoder.tokenize_passages(corpus[block.start : block.stop]) for _, block in blocks)
    done: list[NDArray[np.float32]] = []
    for (number, block), block_tokens in zip(blocks, tokens, strict=True):
        done.append(encoder.embed(block_tokens))
        advance(len(block))
        if block.stop == store.rows(number).stop:
            store.write(number, np.concatenate(done))
            done = []


def computed_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield the items; a thread computes the next one while the caller uses the present one."""
    remaining, end = iter(items), object()
    with ThreadPoolExecutor(1) as thread:
        ahead: Future[Any] = thread.submit(next, remaining, end)
        while (item := ahead.result()) is not end:
            ahead = thread.submit(next, remaining, end)
            yield item


def fill_store(
    store: EmbeddingStore,
    corpus_dir: Path,
    encoder: Encoder,
    workers: Workers,
    advance: Callable[[int], None] = lambda num_rows: None,
) -> None:
    """Encode the passages of all missing shards. Shards written before an interruption remain.

    ``encoder`` encodes in this process; actors load the encoder of the same name. Every node must see it, the store and
    the corpus under the same path. ``advance`` is called with the number of rows encoded since its last call.

    Raises:
        DataError: the encoder cannot be loaded or is not the store's, or a vector holds NaN.
        FleetError: no actor starts, or more than ``MAX_DEATHS_IN_A_ROW`` of them die in a row.
        OSError: a shard cannot be written.
    """
    missing = store.missing()
    if workers.num_actors and missing:
        _fill_with_actors(store, corpus_dir, encoder.name, workers, missing, advance)
    elif missing:
        fill_shards(store, Corpus.open(corpus_dir), encoder, missing, advance)


def _fill_with_actors(
    store: EmbeddingStore,
    corpus_dir: Path,
    encoder_name: str,
    workers: Workers,
    missing: list[int],
    advance: Callable[[int], None],
) -> None:
    """Keep each actor busy with ``SHARDS_PER_ACTOR`` shards. A dead actor is replaced; others encode its shards.

    ``ray.util.ActorPool`` cannot replace an actor; see ``docs/decisions/retrieval-libraries.md``.
    """
    import ray

    actor_class: Any = ray.remote(  # type: ignore[call-overload]  # which lacks concurrency_groups
        max_restarts=0, max_concurrency=SHARDS_PER_ACTOR, concurrency_groups={_HEALTH: 1}, **workers.resources
    )(EmbeddingActor)
    fleet = Fleet[Pulse](
        "encoder of the corpus",
        lambda index: [actor_class.remote(store, corpus_dir, encoder_name, workers)],
        lambda actor: actor.pulse.options(concurrency_group=_HEALTH).remote(),
        HANG_TIMEOUT_S,
    )
    waiting, num_actors = deque(missing), min(workers.num_actors, len(missing))
    busy: dict[Any, tuple[Member[Pulse], int]] = {}
    num_deaths = 0
    try:
        fleet.scale_to(num_actors)
        free = fleet.members * SHARDS_PER_ACTOR
        while waiting or busy:
            while waiting and free:
                member, number = free.pop(), waiting.popleft()
                busy[member.actors[0].fill.remote(number)] = (member, number)
            done, _ = ray.wait(list(busy), timeout=START_TIMEOUT_S)  # the fleet ends one that hangs, and so its calls
            if not done:
                _check_room(fleet, workers)
                continue
            member, number = busy.pop(done[0])
            try:
                ray.get(done[0])
            except ray.exceptions.RayError as error:
                waiting.appendleft(number)
                if member not in fleet.members:  # its other shard failed before and the actor is replaced
                    continue
                num_deaths += 1
                _check_death(error, num_deaths)
                fleet.end(member)  # it may only be out of reach
                fleet.scale_to(num_actors)
                free = [other for other in free if other is not member] + SHARDS_PER_ACTOR * fleet.members[-1:]
            else:
                num_deaths = 0
                advance(len(store.rows(number)))
                free.append(member)
    finally:  # also on Ctrl-C: a shard that is being written has no name yet
        fleet.stop()


def _check_room(fleet: Fleet[Pulse], workers: Workers) -> None:
    """Raise ``FleetError`` if no actor runs."""
    if not fleet.serving:
        wanted = ", ".join(f"{name}={number:g}" for name, number in workers.resources.items())
        raise FleetError(
            f"no actor with {wanted} started within {START_TIMEOUT_S:g} s to encode the corpus; ask for less, or give "
            "the cluster more"
        )


def _check_death(error: Exception, num_deaths: int) -> None:
    """Raise the error of an actor, or that too many died in a row; return if the actor may be replaced."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, RagR1Error) or is_no_room(cause):
            raise cause from None
        raise FleetError(f"encoding the corpus failed in an actor: {cause!r}") from error
    if num_deaths > MAX_DEATHS_IN_A_ROW:
        raise FleetError(
            f"{num_deaths} actors that encode the corpus died one after the other ({last_line(error)}); give each "
            "actor more memory, then run the build again"
        ) from error
