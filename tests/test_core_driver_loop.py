"""The driver's event loop: tasks that go on only while something is waited for, errors beside it, and interrupts."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator

import pytest

from ragr1_actors.core.process.driver_loop import DriverLoop, gather_or_cancel


async def fail(after: int = 0) -> None:
    for _ in range(after):
        await asyncio.sleep(0)
    raise ValueError("a flaw")


async def interrupt() -> None:
    await asyncio.sleep(0)
    raise KeyboardInterrupt


async def forever() -> None:
    await asyncio.Event().wait()


async def forever_or_note(ended: list[bool]) -> None:
    """Wait until it is cancelled, and note that."""
    try:
        await forever()
    finally:
        ended.append(True)


@pytest.fixture(autouse=True)
def nothing_is_printed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Asyncio prints errors that were never read and tasks that were never awaited."""
    yield
    gc.collect()
    assert not caplog.text


def test_a_begun_task_goes_on_only_in_a_run(loop: DriverLoop) -> None:
    seen: list[int] = []

    async def count() -> str:
        for number in range(20):
            seen.append(number)
            await asyncio.sleep(0)
        return "done"

    async def result(task: asyncio.Task[str]) -> str:
        return await task

    begun = loop.begin(count())
    assert seen == []
    loop.run(asyncio.sleep(0))
    assert 0 < len(seen) < 20
    assert loop.run(result(begun)) == "done"
    assert seen == list(range(20))


def test_what_runs_beside_begins_anew_in_each_run_and_ends_with_it(loop: DriverLoop) -> None:
    began: list[bool] = []
    ended: list[bool] = []

    async def beside() -> None:
        began.append(True)
        try:
            await forever()
        finally:
            ended.append(True)

    loop.run_beside(beside)
    for number in (1, 2):
        loop.run(asyncio.sleep(0.001))
        assert (len(began), len(ended)) == (number, number)


@pytest.mark.parametrize("after", [0, 3])
def test_an_error_beside_ends_the_work(loop: DriverLoop, after: int) -> None:
    loop.run_beside(lambda: fail(after))
    ended: list[bool] = []
    with pytest.raises(ValueError, match="a flaw"):
        loop.run(forever_or_note(ended))
    assert ended == [True]


def test_the_error_of_the_work_is_raised_and_begun_tasks_go_on(loop: DriverLoop) -> None:
    begun = loop.begin(asyncio.sleep(0.001, "slept"))
    with pytest.raises(ValueError, match="a flaw"):
        loop.run(fail(2))

    async def result() -> str:
        return await begun

    assert loop.run(result()) == "slept"


@pytest.mark.parametrize("where", ["work", "task", "beside"])
def test_an_interrupt_cancels_the_work_and_the_loop_can_be_used_again(loop: DriverLoop, where: str) -> None:
    cancelled: list[bool] = []

    async def work() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    if where == "task":
        loop.begin(interrupt())
    if where == "beside":
        loop.run_beside(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop.run(interrupt() if where == "work" else work())
    assert cancelled == [True] * (where != "work")
    if where != "beside":
        assert loop.run(asyncio.sleep(0, "again")) == "again"


async def test_it_runs_beside_the_loop_of_a_notebook() -> None:
    driver = DriverLoop()
    assert driver.run(asyncio.sleep(0.001, "slept")) == "slept"
    with pytest.raises(ValueError, match="a flaw"):
        driver.run(fail(2))
    await asyncio.to_thread(driver.close)


async def test_an_interrupt_there_cancels_the_work() -> None:
    driver, cancelled = DriverLoop(), list[bool]()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # which the main thread gets
        try:
            await forever()
        finally:
            cancelled.append(True)

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            driver.run(work())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert cancelled == [True]
    await asyncio.to_thread(driver.close)


def test_a_begun_task_that_fails_and_is_never_awaited_is_not_printed(loop: DriverLoop) -> None:
    loop.begin(fail())
    loop.run(asyncio.sleep(0.001))


def test_closing_cancels_begun_tasks_and_runs_the_last_work() -> None:
    driver, ended = DriverLoop(), list[str]()

    async def begun() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append("begun")

    async def last() -> None:
        ended.append("last")

    driver.begin(begun())
    driver.run(asyncio.sleep(0))
    driver.close(last())
    assert sorted(ended) == ["begun", "last"]


def test_the_first_error_cancels_the_others(loop: DriverLoop) -> None:
    ended: list[bool] = []
    with pytest.raises(ValueError, match="a flaw"):
        loop.run(gather_or_cancel([forever_or_note(ended), fail(2), forever_or_note(ended)]))
    assert ended == [True, True]
    assert loop.run(gather_or_cancel([asyncio.sleep(0, number) for number in range(3)])) == [0, 1, 2]
