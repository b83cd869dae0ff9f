"""``ragr1 bench retrieval``: the fleet against the usual HTTP server, and against its own limits.

===================== ================================================================= =======
metric                ratio                                                             goal
===================== ================================================================= =======
vs_http_exact         queries/s ÷ HTTP server's; 64 callers, one query each, exact      >= 10
vs_http_exact_p50     median latency ÷ the HTTP server's under that load                <= 0.1
vs_http_compressed    the same load over ``pq`` ÷ the HTTP server's over the exact one  >= 16
vs_http_lists         64 callers with three queries each, exact                         >= 6
recall_at_3           recall@3 of ``pq`` against the exact index                        >= 0.99
recall_at_10          the same at 10                                                    >= 0.98
vector_bytes          bytes per vector of ``pq`` ÷ of float32                           <= 1/3
text_private_bytes    private bytes per passage of a process that reads the corpus      <= 5
transport_64          a batch of 64 through the client ÷ over HTTP, nothing searched    <= 1/3
router_p50            median latency of the client ÷ of a bare call of Ray's            <= 1.3
scaling_retrievers    queries/s of 8 replicas of 10 ms per query ÷ 8 times one's        >= 0.95
kill_lost             wrong or missing answers after ``kill -9`` of one of two          0
kill_p99              p99 in the 5 s after the kill ÷ before                            <= 2
second_replica_s      seconds until a second replica is searched                        <= 5
index_build           passages/s of `index build` ÷ the encoder's model on ready tokens >= 0.8
===================== ================================================================= =======

``evidence.py`` says what is searched, ``http_server.py`` what the other side is. Caches are off: no query comes twice.
Both sides get both cores; the callers share them. The sides follow each other within a repeat; a first, small load of
each does not count.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from benchmarks.measurement import Goal, Measurement, Repeats, Sample, choose, log, measure, quotient
from benchmarks.retrieval import sides

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read by DeepSpeed, which transformers imports; it would say on stdout what it found.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

GOALS: dict[str, Goal] = {
    "vs_http_exact": Goal(10, at_least=True),
    "vs_http_exact_p50": Goal(0.1, at_least=False),
    "vs_http_compressed": Goal(16, at_least=True),
    "vs_http_lists": Goal(6, at_least=True),
    "recall_at_3": Goal(0.99, at_least=True),
    "recall_at_10": Goal(0.98, at_least=True),
    "vector_bytes": Goal(1 / 3, at_least=False),
    "text_private_bytes": Goal(5, at_least=False),
    "transport_64": Goal(1 / 3, at_least=False),
    "router_p50": Goal(1.3, at_least=False),
    "scaling_retrievers": Goal(0.95, at_least=True),
    "kill_lost": Goal(0, at_least=False),
    "kill_p99": Goal(2, at_least=False),
    "second_replica_s": Goal(5, at_least=False),
    "index_build": Goal(0.8, at_least=True),
}
UNITS = {
    "vs_http_exact": "queries/s",
    "vs_http_exact_p50": "s",
    "vs_http_compressed": "queries/s",
    "vs_http_lists": "queries/s",
    "recall_at_3": "recall",
    "recall_at_10": "recall",
    "vector_bytes": "bytes",
    "text_private_bytes": "bytes/passage",
    "transport_64": "s",
    "router_p50": "s",
    "scaling_retrievers": "queries/s",
    "kill_lost": "queries, of",
    "kill_p99": "s",
    "second_replica_s": "s",
    "index_build": "passages/s",
}
METRICS = tuple(GOALS)
_HTTP = {"vs_http_exact", "vs_http_exact_p50", "vs_http_compressed", "vs_http_lists"}
_FLEET = {"kill_lost", "kill_p99", "second_replica_s"}
_FILES = {"recall_at_3", "recall_at_10", "vector_bytes", "text_private_bytes"}
_STUBS = {"transport_64", "router_p50", "scaling_retrievers"}

Samples = dict[str, list[Sample]]


def describe() -> str:
    """The workload, in one line."""
    return "retrieval: 200,000 passages of 100 words, 384 dimensions, a MiniLM-shaped encoder, two cores"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted, times = choose(only, METRICS), Repeats(repeats or (1 if quick else None))
    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory, sides.local_ray():
        bench = Bench(Path(directory), wanted, quick)
        for part in (bench.files, bench.stubs, bench.http, bench.fleet, bench.build):
            for metric, samples in part(times).items():
                if samples and metric in wanted:
                    yield measure(metric, samples, UNITS[metric], GOALS[metric])


class Bench:
    """The parts of the benchmark, each with its own start."""

    def __init__(self, directory: Path, wanted: Collection[str], quick: bool) -> None:
        self._wanted = set(wanted)
        self._quick = quick
        self._world = sides.World(directory, quick)

    def files(self, repeats: Repeats) -> Samples:
        """What lies on disk: compressed against exact, and the passages in memory."""
        if not self._wanted & _FILES:
            return {}
        found: Samples = {}
        if self._wanted & {"recall_at_3", "recall_at_10"}:
            recall = sides.recall(self._world.index("flat"), self._world.index("pq"), (3, 10))
            found |= {f"recall_at_{k}": [Sample(value, value, 1.0)] for k, value in recall.items()}
        if "vector_bytes" in self._wanted:
            found["vector_bytes"] = [sides.vector_bytes(self._world.index("flat"), self._world.index("pq"))]
        if "text_private_bytes" in self._wanted:
            found["text_private_bytes"] = [sides.text_private_bytes(self._world.index("flat"))]
        return found

    def stubs(self, repeats: Repeats) -> Samples:
        """The transport to the actors: nothing is searched."""
        if not self._wanted & _STUBS:
            return {}
        found: Samples = {metric: [] for metric in sorted(_STUBS)}
        stub_index = self._world.stub_index()
        for _ in repeats:
            if "transport_64" in self._wanted:
                found["transport_64"].append(asyncio.run(sides.transport(stub_index, 64, self._quick)))
            if "router_p50" in self._wanted:
                found["router_p50"].append(asyncio.run(sides.router(stub_index, self._quick)))
            if "scaling_retrievers" in self._wanted:
                found["scaling_retrievers"].append(asyncio.run(sides.scaling(stub_index, 8, self._quick)))
        return found

    def http(self, repeats: Repeats) -> Samples:
        """The fleet and the server under the same callers."""
        if not self._wanted & _HTTP:
            return {}
        found: Samples = {metric: [] for metric in sorted(_HTTP)}
        flat = self._world.index("flat")
        for repeat in repeats:
            single = sides.run_http(flat, 1, self._quick, repeat)
            ours = sides.run_fleet(flat, 1, self._quick, repeat)
            log(f"one query: HTTP {single}; ours {ours}")
            found["vs_http_exact"].append(quotient(ours.queries_per_s, single.queries_per_s))
            found["vs_http_exact_p50"].append(quotient(ours.p50_s, single.p50_s))
            if "vs_http_compressed" in self._wanted:
                compressed = sides.run_fleet(self._world.index("pq"), 1, self._quick, repeat)
                log(f"compressed: ours {compressed}")
                found["vs_http_compressed"].append(quotient(compressed.queries_per_s, single.queries_per_s))
            if "vs_http_lists" in self._wanted:
                lists = sides.run_http(flat, 3, self._quick, repeat)
                ours = sides.run_fleet(flat, 3, self._quick, repeat)
                log(f"three queries: HTTP {lists}; ours {ours}")
                found["vs_http_lists"].append(quotient(ours.queries_per_s, lists.queries_per_s))
        return found

    def fleet(self, repeats: Repeats) -> Samples:
        """Replicas that die and replicas that come."""
        if not self._wanted & _FLEET:
            return {}
        found: Samples = {metric: [] for metric in sorted(_FLEET)}
        index_dir = self._world.index("pq")
        for _ in repeats:
            if self._wanted & {"kill_lost", "kill_p99"}:
                lost, p99 = asyncio.run(sides.kill(index_dir, self._quick))
                log(
                    f"kill: lost {lost.ours:.0f} of {lost.theirs:.0f}; "
                    f"p99 {p99.theirs:.3f} s, after it {p99.ours:.3f} s"
                )
                found["kill_lost"].append(lost)
                found["kill_p99"].append(p99)
            if "second_replica_s" in self._wanted:
                found["second_replica_s"].append(asyncio.run(sides.second_replica(index_dir)))
        return found

    def build(self, repeats: Repeats) -> Samples:
        """A whole `index build`, against the encoder that it waits for."""
        if "index_build" not in self._wanted:
            return {}
        return {"index_build": [self._world.index_build(number) for number in repeats]}
