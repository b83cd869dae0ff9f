"""BackgroundRetriever: a retriever that blocks, for an event loop that must not. Concurrent searches become batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ragr1_actors.core.errors import RetrievalError
from retrieval.base import BatchRetriever, Hits, Passage
from retrieval.fleet.pooled import PooledRetriever, PoolSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundRetriever:
    """Searches in one thread of its own, with all that waits by then in one batch."""

    def __init__(self, retriever: BatchRetriever, settings: PoolSettings | None = None) -> None:
        """Search ``retriever``, which nobody else may use meanwhile.

        Args:
            retriever: blocks while it searches.
            settings: of the pool of which it is the only replica; one retry and no cache by default.
        """
        self._replica = _ThreadReplica(retriever)
        self._pool = PooledRetriever({"thread": self._replica}, settings or PoolSettings(max_retries=1))

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, each a ``Hits``: ``[len(queries)][<= k]``.

        Raises:
            ValueError: ``k`` is less than 1.
            RetrievalError: the search failed, whatever the reason.
        """
        return await self._pool.search(queries, k)

    async def wait_for_room(self) -> None:
        """Return once fewer queries wait than one thread should have before it."""
        await self._pool.wait_for_room()

    def close(self) -> None:
        """Let the thread end behind the batch it is at."""
        self._replica.close()


class _ThreadReplica:
    """``Replica`` over the thread."""

    def __init__(self, retriever: BatchRetriever) -> None:
        self._retriever = retriever
        self._version = str(retriever.info().get("version", ""))
        # one thread: neither an index nor a model need stand two at a time
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="search")

    async def answer_batch(self, queries: list[str], k: int) -> list[Hits]:
        try:
            found = await self._call(lambda: self._retriever.search_batch(queries, k))
        except RetrievalError:
            raise
        except Exception as error:  # of a thread that serves strangers: the next batch may be a better one
            logger.exception("a search failed")
            raise RetrievalError(f"{type(error).__name__}: {error}") from error
        return [Hits(passages, index_version=self._version) for passages in found]

    async def ping(self) -> None:
        await self._call(lambda: None)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
