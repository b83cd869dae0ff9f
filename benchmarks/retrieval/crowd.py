"""``ragr1 bench crowd``: many callers with one query each, over a million passages, and a replica that dies meanwhile.

======================= ============================================================ =====
metric                  ratio                                                        goal
======================= ============================================================ =====
door_50, _100, _200     failed ÷ asked queries of so many callers of the HTTP door   0
door_mean_s             mean seconds of a query, of 200 callers ÷ of 50
door_memory             peak bytes of the server and its replicas ÷ of the index
fleet_50, _100, _200    as door_50, of callers of the fleet's client in one process  0
======================= ============================================================ =====

The shape is that of axon-rl/gem issue 36, whose server without batching failed 85, 84 and 53 % of the queries of 50,
100 and 200 callers on one node. Here the door is ``ragr1 index serve INDEX --retrievers 2`` in another process, over an
exact index of 384 dimensions, and two cores do everything. Each caller asks its next query when the one before is
answered. After half of the time one of the two replicas is killed with SIGKILL. A query has failed if its status is not
200, if it takes longer than a minute, or if it has not as many passages as were asked for.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import IO

import aiohttp
import psutil

from benchmarks.measurement import LOWER, Goal, Measurement, Repeats, Sample, choose, log, measure, quotient
from benchmarks.retrieval import evidence, sides
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import RetrievalError

# Read by DeepSpeed, which transformers imports; it would say on stdout what it found.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

CALLERS = (50, 100, 200)
NONE_FAILS = Goal(0.0, at_least=False)
GOALS = {
    **{f"door_{count}": NONE_FAILS for count in CALLERS},
    "door_mean_s": LOWER,
    "door_memory": LOWER,
    **{f"fleet_{count}": NONE_FAILS for count in CALLERS},
}
METRICS = tuple(GOALS)
UNITS = {"door_mean_s": "s", "door_memory": "bytes"}
NUM_PASSAGES, NUM_PASSAGES_QUICK = 1_000_000, 5_000
LOAD_S, LOAD_QUICK_S = 40.0, 6.0
TIMEOUT_S = 60.0
MEMORY_INTERVAL_S = 0.5
_ADDRESS = re.compile(r"(http://\S+) answers")


@dataclass(frozen=True, slots=True)
class Crowd:
    """What the callers saw."""

    num_asked: int
    num_failed: int
    mean_s: float
    """Mean seconds of an answered query; NaN if none was answered."""

    def __str__(self) -> str:
        return f"{self.num_failed} of {self.num_asked} failed, {self.mean_s:.2f} s in the mean"


def describe() -> str:
    """The workload, in one line."""
    return f"crowd: {', '.join(map(str, CALLERS))} callers of one query each, a million passages, one replica is killed"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted = choose(only, METRICS)
    counts = CALLERS[:1] if quick else CALLERS
    samples: dict[str, list[Sample]] = {metric: [] for metric in METRICS}
    with tempfile.TemporaryDirectory(prefix="ragr1-crowd-") as directory:
        folder = Path(directory)
        num_passages = NUM_PASSAGES_QUICK if quick else NUM_PASSAGES
        index_dir = evidence.make_index(folder, evidence.make_encoder(folder), "flat", num_passages)
        for _ in Repeats(repeats or 1):
            for name, side in (("door", _door), ("fleet", _fleet)):
                if any(metric.startswith(name) for metric in wanted):
                    for metric, sample in side(index_dir, counts, LOAD_QUICK_S if quick else LOAD_S).items():
                        samples[metric].append(sample)
    for metric, found in samples.items():
        if found and metric in wanted:
            yield measure(metric, found, UNITS.get(metric, "queries"), GOALS[metric])


def _door(index_dir: Path, counts: tuple[int, ...], load_s: float) -> dict[str, Sample]:
    with served(index_dir) as (url, server):
        peak = PeakMemory(server)
        found = {count: asyncio.run(_ask_door(url, server, count, load_s)) for count in counts}
        num_bytes = peak.stop()
    for count, crowd in found.items():
        log(f"door, {count} callers: {crowd}")
    index_bytes = sum(path.stat().st_size for path in index_dir.rglob("*") if path.is_file())
    return {
        **{f"door_{count}": _failed(crowd) for count, crowd in found.items()},
        "door_mean_s": quotient(found[counts[-1]].mean_s, found[counts[0]].mean_s),
        "door_memory": quotient(num_bytes, index_bytes),
    }


async def _ask_door(url: str, server: psutil.Process, num_callers: int, load_s: float) -> Crowd:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def ask(query: str) -> bool:
            try:
                async with session.post(url, json={"queries": [query], "topk": sides.TOP_K}) as reply:
                    return reply.status == 200 and len((await reply.json())["result"][0]) == sides.TOP_K
            except (aiohttp.ClientError, TimeoutError):
                return False

        while len(replicas := _replicas(server)) < 2:  # the one that was killed comes back
            await asyncio.sleep(0.1)
        return await crowd(ask, num_callers, load_s, replicas[0].kill)


def _fleet(index_dir: Path, counts: tuple[int, ...], load_s: float) -> dict[str, Sample]:
    settings = RetrievalSettings(
        num_retrievers=2, num_cpus_per_retriever=1, requests={"cache_size": 0, "timeout_s": TIMEOUT_S}
    )
    found = {}
    with sides.local_ray(), sides.fleet(index_dir, settings) as group:
        client = group.retriever()

        async def ask(query: str) -> bool:
            try:
                (passages,) = await client.search([query], sides.TOP_K)
            except RetrievalError:
                return False
            return len(passages) == sides.TOP_K

        async def load(num_callers: int) -> Crowd:
            pid = int(await group.handles[0].__ray_call__.remote(lambda _: os.getpid()))
            return await crowd(ask, num_callers, load_s, lambda: os.kill(pid, signal.SIGKILL))

        for count in counts:
            group.wait_until_ready()
            found[count] = asyncio.run(load(count))
            log(f"fleet, {count} callers: {found[count]}")
    return {f"fleet_{count}": _failed(one) for count, one in found.items()}


def _failed(crowd: Crowd) -> Sample:
    return quotient(float(crowd.num_failed), float(crowd.num_asked))


async def crowd(
    ask: Callable[[str], Awaitable[bool]], num_callers: int, load_s: float, kill: Callable[[], None]
) -> Crowd:
    """Let callers ask one query after another for ``load_s``, ``kill`` in the middle; all last answers are awaited."""
    known = iter(evidence.queries(500_000, seed=num_callers))
    seconds: list[float] = []
    num_failed = 0
    end = time.perf_counter() + load_s

    async def caller() -> None:
        nonlocal num_failed
        while time.perf_counter() < end:
            started = time.perf_counter()
            if await ask(next(known)):
                seconds.append(time.perf_counter() - started)
            else:
                num_failed += 1

    callers = asyncio.gather(*[caller() for _ in range(num_callers)])
    await asyncio.sleep(load_s / 2)
    kill()
    await callers
    return Crowd(len(seconds) + num_failed, num_failed, fmean(seconds) if seconds else math.nan)


@contextmanager
def served(index_dir: Path) -> Iterator[tuple[str, psutil.Process]]:
    """``ragr1 index serve`` in a process; yields its address and the process once it answers."""
    command = [
        sys.executable,
        "-m",
        "ragr1_actors",
        "index",
        "serve",
        str(index_dir),
        "--retrievers",
        "2",
        "--port",
        "0",
    ]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stderr=errors, stdout=subprocess.DEVNULL)
        try:
            while not (found := _ADDRESS.search(_content(errors))):
                if process.poll() is not None:
                    raise RuntimeError(
                        f"{' '.join(command)} ended with {process.returncode}: {_content(errors)[-2000:]}"
                    )
                time.sleep(0.1)
            yield found[1], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _replicas(server: psutil.Process) -> list[psutil.Process]:
    return [one for one in server.children(recursive=True) if one.name().startswith("ray::Retr")]


class PeakMemory:
    """Peak of the proportional set sizes of a process and its replicas, looked at twice a second by a thread.

    A page of the index that both replicas map counts once.
    """

    def __init__(self, server: psutil.Process) -> None:
        self._server, self._peak, self._ended = server, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(MEMORY_INTERVAL_S):
            total = 0.0
            for one in [self._server, *_replicas(self._server)]:
                with suppress(psutil.Error):  # it was killed
                    total += one.memory_full_info().pss
            self._peak = max(self._peak, total)

    def stop(self) -> float:
        """Return the peak in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak
