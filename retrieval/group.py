"""RetrieverGroup: the fleet of retriever actors, and the client that other processes search it with."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ragr1_actors.config import RetrievalSettings
from ragr1_actors.errors import FleetError, RetrievalError
from retrieval.actor import RetrieverActor, to_passages
from retrieval.base import Passage, Retriever
from retrieval.batching import QueryBatcher
from retrieval.index import Manifest
from retrieval.retriever import LocalRetriever

START_TIMEOUT_S = 600.0
"""For all replicas to load; an index of tens of gigabytes is read once from a cold disk."""
_PING_TIMEOUT_S = 5.0


class RetrieverClient:
    """Searches a fleet from any process: batches, routes, retries. Pickles as its arguments."""

    def __init__(self, names: Sequence[str], timeout_s: float, max_retries: int) -> None:
        """Search with the actors of these names; see ``QueryBatcher`` for the other two.

        Names rather than handles: an actor that was given handles cannot be restarted once their owner's node is gone.
        """
        self._arguments = (list(names), timeout_s, max_retries)
        self._batcher = QueryBatcher(
            [_RemoteReplica(ray.get_actor(name)) for name in names], timeout_s=timeout_s, max_retries=max_retries
        )

    def __reduce__(self) -> tuple[type[RetrieverClient], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor: what is in flight stays here."""
        return RetrieverClient, self._arguments

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query: ``[len(queries)][<= k]``.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: every attempt failed; the message has their number and the last cause.
        """
        return await self._batcher.search(queries, k)


class RetrieverGroup:
    """A fleet of ``RetrieverActor`` over one index directory, which every node of the fleet must see.

    Ray restarts a replica that dies; clients leave it out until it answers again.
    """

    def __init__(
        self, index_dir: Path, settings: RetrievalSettings, num_threads: int, handles: dict[str, ActorHandle[Any]]
    ) -> None:
        """Hold actors that run, by name; use ``create``."""
        self._index_dir = index_dir
        self._settings = settings
        self._num_threads = num_threads
        self._handles = handles

    @property
    def handles(self) -> list[ActorHandle[Any]]:
        """The actors that were started and not stopped."""
        return list(self._handles.values())

    @classmethod
    def create(cls, index_dir: str | Path, settings: RetrievalSettings, num_threads: int = 0) -> Self:
        """Start ``settings.num_retrievers`` actors; ``wait_until_ready`` waits for them.

        Args:
            index_dir: made by ``build_index``.
            settings: the recipe's ``retrieval`` section. With 0 retrievers no actor is started.
            num_threads: of one replica; 0 takes ``num_cpus_per_retriever``, rounded up.

        Raises:
            DataError: no index in ``index_dir``.
        """
        index_dir = Path(index_dir).resolve()
        Manifest.read(index_dir)  # one sentence here, rather than a traceback from an actor
        num_threads = num_threads or max(1, math.ceil(settings.num_cpus_per_retriever))
        if settings.num_retrievers == 0:
            return cls(index_dir, settings, num_threads, {})
        actor_class: Any = ray.remote(RetrieverActor)
        fleet = uuid.uuid4().hex[:12]
        handles = {
            name: actor_class.options(
                name=name,
                num_cpus=settings.num_cpus_per_retriever,
                num_gpus=settings.num_gpus_per_retriever,
                max_restarts=-1,
                max_task_retries=0,  # the client retries, on another replica
            ).remote(str(index_dir), num_threads)
            for name in (f"retriever-{fleet}-{index}" for index in range(settings.num_retrievers))
        }
        return cls(index_dir, settings, num_threads, handles)

    def wait_until_ready(self) -> None:
        """Return once every replica has answered a ping: its index is loaded and a search has been run.

        Raises:
            FleetError: a replica did not start; all are stopped.
        """
        if not self.handles:
            return
        try:
            ray.get([handle.ping.remote() for handle in self.handles], timeout=START_TIMEOUT_S)
        except RayError as error:
            self.stop()
            raise FleetError(f"a retriever did not start over {self._index_dir}: {_last_line(error)}") from error

    def retriever(self) -> Retriever:
        """Return what to search with: a client of the fleet, or, with 0 retrievers, the index in this process.

        Either one pickles, so it can be handed to any actor.
        """
        if self.handles:
            return RetrieverClient(list(self._handles), self._settings.timeout_s, self._settings.max_retries)
        return LocalRetriever(self._index_dir, self._num_threads)

    @property
    def num_healthy(self) -> int:
        """Replicas that answer a ping within 5 seconds. Blocks for as long as they are busy."""
        if not self.handles:
            return 0
        pings: list[Any] = [handle.ping.remote() for handle in self.handles]
        answered, _ = ray.wait(pings, num_returns=len(pings), timeout=_PING_TIMEOUT_S)
        num_healthy = 0
        for ping in answered:
            try:
                ray.get(ping)
            except RayError:
                continue
            num_healthy += 1
        return num_healthy

    def stop(self) -> None:
        """End all actors, without a restart. Searches in flight fail."""
        for handle in self.handles:
            ray.kill(handle, no_restart=True)
        self._handles = {}


class _RemoteReplica:
    """``Replica`` over an actor handle: Ray's errors become the one that the batcher knows."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def search_batch(self, queries: list[str], k: int) -> list[list[Passage]]:
        try:
            rows = await self._handle.search_batch.remote(queries, k)
        except RayError as error:
            raise RetrievalError(_last_line(error)) from error
        return [to_passages(passages) for passages in rows]

    async def ping(self) -> None:
        try:
            await self._handle.ping.remote()
        except RayError as error:
            raise RetrievalError(_last_line(error)) from error


def _last_line(error: RayError) -> str:
    """Return the error's kind and the line that says why: Ray puts whole remote tracebacks before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
