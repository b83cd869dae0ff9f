"""The parts that HTTP retrievers share: retries, the rate limit, and the queries that servers take."""

from __future__ import annotations

import asyncio
import time

import pytest

from ragr1_actors.core.errors import RetrievalError
from retrieval.http.retriever import StatusError, clean_query, retry
from retrieval.http.web import RateLimit


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


def may_pass(error: BaseException) -> bool:
    return isinstance(error, StatusError) and not error.is_refusal


async def test_only_failures_that_may_pass_are_retried() -> None:
    three, two, nine = (retry(may_pass, attempts=attempts, longest_pause_s=0.01) for attempts in (3, 2, 9))
    passing = Attempts(StatusError("one", 500), StatusError("two", 408))
    assert await three(passing) == 3
    failing = Attempts(StatusError("one", 500), StatusError("two", 502))
    with pytest.raises(StatusError, match="two"):
        await two(failing)
    refused, other = Attempts(StatusError("refused", 401)), Attempts(RetrievalError("other"))
    with pytest.raises(RetrievalError, match="refused"):
        await nine(refused)
    with pytest.raises(RetrievalError, match="other"):
        await nine(other)
    assert (failing.num_calls, refused.num_calls, other.num_calls) == (2, 1, 1)


async def test_a_pause_is_as_long_as_the_server_asks_but_bounded() -> None:
    pauses: list[float] = []
    attempts = Attempts(StatusError("busy", 429, 0.3), StatusError("busy", 503, 3600), StatusError("other", 500, 3600))
    started = time.monotonic()
    retrying = retry(
        may_pass, attempts=4, longest_pause_s=0.4, before_pause=lambda state: pauses.append(state.upcoming_sleep)
    )
    await retrying(attempts)
    assert pauses == [0.3, 0.4, 0.4]
    assert time.monotonic() - started >= 0.3 + 0.4 + 0.4 - 0.01


async def test_a_cancelled_retry_sends_nothing_more() -> None:
    attempts = Attempts(StatusError("busy", 429, 60), StatusError("never raised", 500))
    paused = asyncio.Event()
    retrying = asyncio.create_task(
        retry(may_pass, attempts=3, longest_pause_s=60, before_pause=lambda state: paused.set())(attempts)
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
