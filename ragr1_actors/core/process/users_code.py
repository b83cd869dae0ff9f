"""Calls of users' code: each exception that it raises becomes an error of its trajectory, and the run continues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

_threads = ThreadPoolExecutor(32, "users-code")
"""Threads of plain functions. asyncio's are for the project: functions that hang would hold all of them."""


def carried(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function for a thread: errors that no future carries, or that end it, become ``RuntimeError``."""

    def call(*arguments: Any, **named: Any) -> T:
        try:
            return function(*arguments, **named)
        except StopIteration as error:
            raise RuntimeError("StopIteration: next() without a default found nothing").with_traceback(
                error.__traceback__
            ) from error
        except KeyboardInterrupt as error:  # not Ctrl-C, which only the main thread gets
            raise RuntimeError("KeyboardInterrupt: it raised one").with_traceback(error.__traceback__) from error

    return call


async def in_thread(function: Callable[..., T], /, *arguments: Any, **named: Any) -> T:
    """Call a plain function in a thread, as ``carried``; at most 32 run at a time in a process."""
    call = partial(copy_context().run, carried(function), *arguments, **named)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


def in_daemon_thread(function: Callable[..., T], /, *arguments: Any) -> asyncio.Future[T]:
    """Call a plain function as ``carried``, in a new thread; the process does not wait for it at its end."""
    result: Future[T] = Future()

    def call() -> None:
        result.set_running_or_notify_cancel()
        try:
            result.set_result(carried(function)(*arguments))
        except BaseException as error:  # like an executor's thread; the awaiter decides
            result.set_exception(error)

    Thread(target=call, name="users-code", daemon=True).start()
    return asyncio.wrap_future(result)


async def contained(awaited: Awaitable[T]) -> T:
    """Await users' code; ``sys.exit``, a cancellation by the code and the like become an ``Exception``.

    Ctrl-C stays a ``KeyboardInterrupt``.
    """
    try:
        return await awaited
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError("CancelledError: it awaited what was cancelled").with_traceback(
            error.__traceback__
        ) from error
    except BaseException as error:
        if isinstance(error, Exception | KeyboardInterrupt | GeneratorExit):
            raise
        said = f"it called sys.exit({error.code})" if isinstance(error, SystemExit) else str(error)
        raise RuntimeError(f"{type(error).__name__}: {said}").with_traceback(error.__traceback__) from error
