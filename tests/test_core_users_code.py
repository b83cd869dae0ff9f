"""Plain functions of users run in threads that the project does not need."""

from __future__ import annotations

import asyncio
import os
import threading

from ragr1_actors.core.process.users_code import in_thread


async def test_functions_that_hang_leave_the_threads_of_asyncio_alone() -> None:
    goes_on = threading.Event()
    of_asyncio = min(32, (os.cpu_count() or 1) + 4)
    hanging = [asyncio.create_task(in_thread(goes_on.wait)) for _ in range(of_asyncio)]
    await asyncio.sleep(0)  # all of them have begun
    try:
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(threading.current_thread) is not threading.main_thread()
    finally:
        goes_on.set()
    assert await asyncio.gather(*hanging) == [True] * of_asyncio
