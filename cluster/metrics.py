"""A run's metrics for Prometheus: Ray's agent on every node exports them as ``ray_ragr1_*``.

::

    driver   metrics of an iteration ──► gauges: "env_runners/load" is ray_ragr1_env_runners_load
    actors   observe, count           ──► histograms of latency and batch size, counters of tokens and queries

The driver's gauges have the values of ``metrics.jsonl``, once per iteration. Actors record values that change within an
iteration once per batch, search or group, never per token: a record takes up to 3 microseconds.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # Ray is loaded with the first record: `ragr1 ask` has none
    from ray.util.metrics import Counter, Gauge, Histogram

PREFIX = "ragr1_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_REPEAT_S = 5.0
"""Seconds between two exports: half of Ray's default report interval, ``metrics_report_interval_ms``."""
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Recorded(NamedTuple):
    """Metric that actors record."""

    meaning: str
    tags: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()
    """Boundaries of a histogram's buckets; a counter has none."""


RECORDED = {
    "batch_seconds": Recorded("one batch of queries in a retriever or encoder actor", ("fleet",), SECONDS),
    "batch_queries": Recorded("queries of such a batch", ("fleet",), COUNTS),
    "search_seconds": Recorded("one turn's search, as the environment sees it: cache, queue and replica", (), SECONDS),
    "queries": Recorded("queries of env runners", ()),
    "cached_queries": Recorded("those that the runner's cache answered", ()),
    "failed_attempts": Recorded("batches that a replica did not answer", ()),
    "group_seconds": Recorded("sampling of one trajectory group", (), SECONDS),
    "trajectories": Recorded("trajectories that ended; failed is true or false", ("failed",)),
    "tokens": Recorded("tokens that engines sampled", ()),
    "scaling_decisions": Recorded("new sizes of a fleet; direction is up or down", ("fleet", "direction")),
}
"""Metrics by name, without ``ray_ragr1_``. Prometheus adds ``_bucket``, ``_sum`` and ``_count``, or ``_total``."""


def observe(name: str, value: float, **tags: str) -> None:
    """Add a value to a histogram of ``RECORDED``."""
    _histogram(name).observe(value, tags)


def count(name: str, number: float, **tags: str) -> None:
    """Add to a counter of ``RECORDED``; if ``number`` is 0, do nothing."""
    if number:
        _counter(name).inc(number, tags)


class GaugeExport:
    """Exports the newest metrics of a run as gauges, with the label ``run``, until ``close``; does nothing without Ray.

    Ray's agent drops a gauge that was not reported for two intervals. An iteration may take longer, so a thread sets
    the gauges repeatedly.
    """

    def __init__(self, run: str) -> None:
        """Start the thread, in a process that is connected to Ray."""
        import ray

        self._run = run
        self._newest: dict[str, float] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="gauges", daemon=True)
        if ray.is_initialized():
            self._thread.start()

    def __call__(self, metrics: Mapping[str, float]) -> None:
        """Export these metrics from now on; other names keep their values."""
        self._newest = self._newest | {name: value for name, value in metrics.items() if math.isfinite(value)}

    def close(self) -> None:
        """Set the gauges once more and end the export."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _repeat(self) -> None:
        is_closed = False
        while not is_closed:
            is_closed = self._is_closed.wait(_REPEAT_S)
            for name, value in self._newest.items():
                _gauge(name).set(value, {"run": self._run})


@cache
def _histogram(name: str) -> Histogram:
    from ray.util.metrics import Histogram

    recorded = RECORDED[name]
    return Histogram(PREFIX + name, recorded.meaning, list(recorded.boundaries), recorded.tags)


@cache
def _counter(name: str) -> Counter:
    from ray.util.metrics import Counter

    return Counter(PREFIX + name, RECORDED[name].meaning, RECORDED[name].tags)


@cache
def _gauge(metric: str) -> Gauge:
    from ray.util.metrics import Gauge

    name = re.sub(r"\W", "_", metric, flags=re.ASCII)
    return Gauge(PREFIX + name, f"{metric} of metrics.jsonl", ("run",))
