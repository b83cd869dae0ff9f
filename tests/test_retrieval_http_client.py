"""The parts that HTTP retrievers share: retries, the rate limit, and the queries that servers take."""

from __future__ import annotations

import asyncio
import time

import pytest

from ragr1_actors.core.errors import RetrievalError
from retrieval.http.client import RateLimit, TryAgainError, clean_query, retry


class Attempts:
    """Raises the errors in turn, then returns their number."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    async def __call__(self) -> int:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.num_calls


async def test_only_failures_that_may_pass_are_retried() -> None:
    passing = Attempts(TryAgainError("one"), TryAgainError("two"))
    assert await retry(passing, attempts=3, longest_pause_s=0.01) == 3
    failing = Attempts(TryAgainError("one"), TryAgainError("two"))
    with pytest.raises(TryAgainError, match="two"):
        await retry(failing, attempts=2, longest_pause_s=0.01)
    refused = Attempts(RetrievalError("refused"))
    with pytest.raises(RetrievalError, match="refused"):
        await retry(refused, attempts=9, longest_pause_s=0.01)
    assert (failing.num_calls, refused.num_calls) == (2, 1)


async def test_a_pause_is_as_long_as_the_server_asks_but_bounded() -> None:
    pauses: list[tuple[float | None, float]] = []
    attempts = Attempts(TryAgainError.busy("busy", 0.3), TryAgainError.busy("busy", 3600), TryAgainError("other"))
    started = time.monotonic()
    await retry(
        attempts,
        attempts=4,
        longest_pause_s=0.4,
        before_pause=lambda error, pause_s: pauses.append((error.busy_s, pause_s)),
    )
    assert pauses == [(0.3, 0.3), (3600, 0.4), (None, 0.4)]
    assert time.monotonic() - started >= 0.3 + 0.4 + 0.4 - 0.01


async def test_a_cancelled_retry_sends_nothing_more() -> None:
    attempts = Attempts(TryAgainError.busy("busy", 60), TryAgainError("never raised"))
    paused = asyncio.Event()
    retrying = asyncio.create_task(
        retry(attempts, attempts=3, longest_pause_s=60, before_pause=lambda error, pause_s: paused.set())
    )
    await paused.wait()
    retrying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retrying
    assert attempts.num_calls == 1


async def test_a_hold_also_delays_callers_that_wait_already() -> None:
    limit = RateLimit(100)
    await limit.wait()
    waiting = [asyncio.create_task(limit.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    started = time.monotonic()
    limit.hold(0.1)
    await asyncio.gather(*waiting)
    assert time.monotonic() - started >= 0.1 + 2 * 0.01 - 0.001


def test_queries_lose_what_servers_refuse() -> None:
    assert clean_query(" a\x00b\x1b[31m \ud800 東京\n") == "a b [31m 東京"
