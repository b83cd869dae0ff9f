"""Queries per second of the HTTP server and of its client over loopback, with a retriever that finds at once.

    python -m benchmarks.retrieval.http_door [SECONDS] [REPEATS]

The server runs in a second process. ``server`` lines send prepared bodies through aiohttp, so the server is the
bottleneck; ``client`` lines search through ``HttpRetriever``. Each line is the median and the range of the repeats,
with the CPU time per query of both processes, which other work on the machine hardly changes.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any

import aiohttp
import psutil

from retrieval.base import Hits, Passage

TOKEN_VARIABLE, TOKEN = "HTTP_DOOR_TOKEN", "benchmark-token"
TEXT = "some words of a passage " * 25


class Instant:
    """Finds three passages of 600 characters for every query, without a search."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        found = [Passage(str(rank), f"Title {rank}", TEXT, 1.0 - rank / 10) for rank in range(k)]
        return [Hits(found, index_version="v1") for _ in queries]


async def load(
    ask: Callable[[list[str]], Awaitable[Any]], callers: int, queries: int, seconds: float
) -> tuple[int, float]:
    """Return the queries answered to ``callers`` that each ask ``queries`` new ones at a time, and the seconds."""
    end = time.monotonic() + seconds
    answered = 0

    async def call(caller: int) -> None:
        nonlocal answered
        turn = 0
        while time.monotonic() < end:
            turn += 1
            await ask([f"question {caller} {turn} {number}" for number in range(queries)])
            answered += queries

    started = time.monotonic()
    await asyncio.gather(*[call(caller) for caller in range(callers)])
    return answered, time.monotonic() - started


@dataclass(frozen=True, slots=True)
class Rates:
    """One repeat of one line."""

    queries_per_s: float
    server_cpu_us: float
    """Per query."""
    client_cpu_us: float
    """Per query."""


async def measure(url: str, server: psutil.Process, seconds: float, repeats: int) -> dict[str, list[Rates]]:
    """Return what each line measured, per repeat."""
    from retrieval.http.retriever import HttpRetriever

    headers = {"Authorization": f"Bearer {TOKEN}"}
    retriever = HttpRetriever({"url": url, "token_env": TOKEN_VARIABLE, "cache_size": 0})
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def post(queries: list[str]) -> None:
            async with session.post(url, json={"queries": queries, "topk": 3, "return_scores": True}) as response:
                assert response.status == 200, await response.text()
                await response.read()

        async def search(queries: list[str]) -> None:
            assert len(await retriever.search(queries, 3)) == len(queries)

        found: dict[str, list[Rates]] = {}
        for _ in range(repeats):
            for side, ask in (("server", post), ("client", search)):
                for callers, queries in ((64, 1), (8, 64)):
                    name = f"{side}, {callers} callers of {queries}"
                    before = _cpu_s(server), time.process_time()
                    answered, wall_s = await load(ask, callers, queries, seconds)
                    server_s, client_s = _cpu_s(server) - before[0], time.process_time() - before[1]
                    rates = Rates(answered / wall_s, 1e6 * server_s / answered, 1e6 * client_s / answered)
                    found.setdefault(name, []).append(rates)
        return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    """Print one JSON object per line."""
    if sys.argv[1:] == ["serve"]:
        from retrieval.http.server import run_server

        run_server(Instant(), port=0, token=TOKEN)
        return
    os.environ[TOKEN_VARIABLE] = TOKEN
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    command = [sys.executable, "-m", "benchmarks.retrieval.http_door", "serve"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = server.stderr.readline().split()[0]
        for name, rates in asyncio.run(measure(url, psutil.Process(server.pid), seconds, repeats)).items():
            line: dict[str, Any] = {"line": name}
            for field in fields(Rates):
                values = [getattr(repeat, field.name) for repeat in rates]
                line[field.name] = [round(v, 1) for v in (statistics.median(values), min(values), max(values))]
            print(json.dumps(line))
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main()
