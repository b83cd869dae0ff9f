"""DriverLoop: the event loop of the driver. It runs only while the driver waits for something in it.

``asyncio.Runner`` keeps a loop between its runs, too; this one also runs what looks after the fleets beside each work,
lets begun tasks go on after an interrupt, and works in a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Event
from typing import Any, TypeVar, cast

T = TypeVar("T")


class DriverLoop:
    """Runs coroutines in the caller's thread; begun tasks go on in each ``run``, and wait in between.

    So code outside ``run`` and code in the loop never run at the same time, and need no locks.
    """

    def __init__(self) -> None:
        """Make the loop when it is used first; ``close`` ends it."""
        self._beside: list[Callable[[], Coroutine[Any, Any, None]]] = []

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def run_beside(self, look_after: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``look_after()``, which never returns, beside the work of every later ``run``; its error ends that."""
        self._beside.append(look_after)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task, and return at once."""
        task = self._loop.create_task(work)
        task.add_done_callback(note_error)
        return task

    def run(self, work: Coroutine[Any, Any, T], *, is_alone: bool = False) -> T:
        """Return the result of ``work``, without ``run_beside`` if ``is_alone``. An interrupt cancels ``work`` only."""
        whole = self._loop.create_task(work if is_alone else self._with_beside(work))
        whole.add_done_callback(note_error)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._finish(whole)
        may_begin = Event()
        with ThreadPoolExecutor(1, "driver loop") as thread:  # in a notebook, whose own loop holds this thread
            try:
                result = thread.submit(lambda: may_begin.wait() and self._finish(whole))
                may_begin.set()
                return cast("T", result.result())
            except BaseException:  # also in the middle of ``submit``
                self._loop.call_soon_threadsafe(whole.cancel)
                may_begin.set()
                raise

    def _finish(self, whole: asyncio.Task[T]) -> T:
        try:
            return self._loop.run_until_complete(whole)
        except BaseException:
            if whole.cancel():
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(whole)
            raise

    async def _with_beside(self, work: Coroutine[Any, Any, T]) -> T:
        main = asyncio.create_task(work)
        tasks: list[asyncio.Task[Any]] = [main]
        try:
            await asyncio.sleep(0)  # what looks after the fleets sees the load that ``work`` begins with
            tasks += [asyncio.create_task(look_after()) for look_after in self._beside]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {main}:
                task.result()  # raises
            return main.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel all begun tasks, run ``last``, and close the loop."""
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if last is not None:
            self._loop.run_until_complete(last)
        if left:  # awaited, else asyncio prints a message for each
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines in their order; the first error is raised, and cancels the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def note_error(task: asyncio.Task[Any]) -> None:
    """Read a task's error, so that asyncio does not print it; code that awaits the task gets it too."""
    if not task.cancelled():
        task.exception()
